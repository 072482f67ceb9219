"""SHA-256 of files, without reading what is not there.

A hole costs the hashing of its zeros and no disk. Large files are hashed by two threads beside the one that walks
(hashlib lets go of the GIL), small ones at once: handing them over would cost more.
"""

import errno
import hashlib
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

_CHUNK = 1 << 20
_ZEROS = memoryview(bytes(_CHUNK))
_SMALL_BYTES = 256 << 10
_THREADS = 2
_OPEN_FILES = 32
"""So many wait for a thread at once, with their descriptors."""

Digest = tuple[str, int]
"""SHA-256 and bytes."""


class TooSlow(Exception):
    """There is more to hash than there is time."""


def digest(file: int, *, until: float = math.inf) -> Digest:
    """Of an open regular file. Raises TooSlow when `until` (`time.monotonic`) is over.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     _ = os.write(file.fileno(), b"abc")
    ...     digest(file.fileno())
    ('ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad', 3)
    """
    size = os.fstat(file).st_size
    sha256 = hashlib.sha256()
    buffer = memoryview(bytearray(min(size, _CHUNK)))
    at = 0
    while at < size:
        first, end = _next_data(file, at, size)
        _update_zeros(sha256.update, first - at, until)
        at = first
        while at < end:
            _refuse_if_over(until)
            count = os.preadv(file, [buffer[: end - at]], at)
            if count == 0:
                raise OSError(errno.EIO, "a file became shorter while it was read")
            sha256.update(buffer[:count])
            at += count
    return sha256.hexdigest(), size


def _next_data(file: int, at: int, size: int) -> tuple[int, int]:
    """The next stretch that is on disk; an empty one at the end if there is none."""
    try:
        first = min(os.lseek(file, at, os.SEEK_DATA), size)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return size, size
    return first, min(os.lseek(file, first, os.SEEK_HOLE), size) if first < size else size


def _update_zeros(update: Callable[[memoryview], object], count: int, until: float) -> None:
    while count > 0:
        _refuse_if_over(until)
        update(_ZEROS[:count])
        count -= _CHUNK


def _refuse_if_over(until: float) -> None:
    if time.monotonic() >= until:
        raise TooSlow


class Hasher:
    """Hashes files on the side; `results` are in the order in which they were given. Each raises TooSlow when `until`
    (`time.monotonic`) is over."""

    def __init__(self, *, until: float = math.inf) -> None:
        self._until = until
        self._pool: ThreadPoolExecutor | None = None
        self._results: list[Digest | Future[Digest]] = []
        self._waiting: list[tuple[Future[Digest], int]] = []

    def add(self, file: int) -> None:
        """Takes the descriptor over."""
        if os.fstat(file).st_size <= _SMALL_BYTES:
            self._results.append(_digest_and_close(file, self._until))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="hashing")
        if len(self._waiting) >= _OPEN_FILES:
            self._waiting.pop(0)[0].exception()  # wait; whatever came of it, `results` will say
        self._results.append(future := self._pool.submit(_digest_and_close, file, self._until))
        self._waiting.append((future, file))

    def results(self) -> list[Digest]:
        return [each.result() if isinstance(each, Future) else each for each in self._results]

    def attempts(self) -> list[Digest | None]:
        """The same, with None for a file that could not be read to its end."""
        return [_attempt(each) if isinstance(each, Future) else each for each in self._results]

    def __enter__(self) -> "Hasher":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for future, file in self._waiting:
            if future.cancel():  # nobody wants it any more
                os.close(file)
        if self._pool is not None:
            self._pool.shutdown()


def _attempt(future: "Future[Digest]") -> Digest | None:
    try:
        return future.result()
    except OSError:
        return None


def _digest_and_close(file: int, until: float) -> Digest:
    try:
        return digest(file, until=until)
    finally:
        os.close(file)
