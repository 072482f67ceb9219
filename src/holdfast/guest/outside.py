"""What a copy of the kernel does not carry, because it lies in Linux: shared memory, pipes, sockets, processes.

When a snapshot is taken, the shared memory that has a name is written down. In the copy that wakes, what was made since
is removed: the run that is taken back leaves none behind, and what it held is free again. What was there before still
is, but as that run left it, so it is named. So are handles on processes, which end with the run that started them.
"""

import re
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from os import O_CLOEXEC, O_RDONLY, close, fsdecode, fsencode, fstat, listdir, read, readlink, stat_result, unlink
from os import open as open_file
from os import stat as status_of
from typing import Any, NamedTuple

from holdfast.guest.display import text
from holdfast.sandbox import linux

_SHARED = "/dev/shm"  # noqa: S108 (the guest's own)
_MAX_NAMED = 100
_MAX_NAME = 200
_READ_BYTES = 1 << 16
_MAPPING = re.compile(rb"[0-9a-f]+-[0-9a-f]+ [r-]w[x-]s \S+ \S+ \d+ +(/.*)", re.S)
_BEFORE_OFFSET = 40
"""Two addresses and the permissions take no more of a line."""
_ANONYMOUS = re.compile(r"anon_inode:\[?([\w-]+)")
_HANDLES = (
    ("subprocess", "Popen"),
    ("asyncio.subprocess", "Process"),
    ("multiprocessing.process", "BaseProcess"),
    ("multiprocessing.pool", "Pool"),
    ("concurrent.futures.process", "ProcessPoolExecutor"),
)

Identity = tuple[int, int]


class Shared(NamedTuple):
    """The shared memory that was there at some time, as far as it has a name or a number."""

    files: frozenset[str]
    ipc: dict[str, frozenset[int]]


def note() -> Shared:
    return Shared(frozenset(listdir(_SHARED)), {kind: _ipc_ids(kind) for kind in linux.IPC_KINDS})


def take_back(before: Shared) -> None:
    """Remove what has been made since. What cannot be removed is left."""
    for name in frozenset(listdir(_SHARED)) - before.files:
        _remove(f"{_SHARED}/{name}")
    for kind, ids in before.ipc.items():
        for number in _ipc_ids(kind) - ids:
            with suppress(OSError):
                linux.remove_ipc(kind, number)


def named(own: set[Identity]) -> list[str]:
    """In words, what is as the run that was taken back left it. `own`: what is in order, being ours."""
    found = [*_open_things(own), *(f"shared memory {_SHARED}/{name}" for name in listdir(_SHARED)), *_mapped()]
    return [text(words[:_MAX_NAME]) for words in dict.fromkeys(found)][:_MAX_NAMED]


def handles(namespace: dict[str, Any]) -> list[str]:
    """Variables that stand for a process which was still running at the end of its run, and so was killed."""
    kinds = tuple(_loaded(*place) for place in _HANDLES)
    lost = [
        f"{type(value).__name__} {name}: its process is gone"
        for name, value in list(namespace.items())
        if isinstance(name, str) and not name.startswith("_") and issubclass(type(value), kinds) and not _ended(value)
    ]
    return [text(words[:_MAX_NAME]) for words in lost[:_MAX_NAMED]]


def own_memory_bytes() -> int:
    """What this process has in memory that is no file's; 0 where Linux does not say."""
    with suppress(OSError):
        found = re.findall(rb"^Rss(?:Anon|Shmem):\s+(\d+) kB", _read("/proc/self/status"), re.M)
        return sum(int(size) << 10 for size in found)
    return 0


def open_files() -> list[tuple[int, stat_result]]:
    found = []
    for name in listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append((int(name), fstat(int(name))))
    return found


def identity(fd: int) -> Identity:
    status = fstat(fd)
    return status.st_dev, status.st_ino


def _open_things(own: set[Identity]) -> Iterator[str]:
    memory = status_of(_SHARED).st_dev
    for fd, status in open_files():
        if (status.st_dev, status.st_ino) not in own and (kind := _kind(fd, status, memory)):
            yield f"{kind} (descriptor {fd})"


def _kind(fd: int, status: stat_result, memory: int) -> str | None:
    if stat.S_ISSOCK(status.st_mode):
        return "socket"
    if stat.S_ISFIFO(status.st_mode):
        return "pipe"
    if stat.S_ISREG(status.st_mode):
        in_memory = status.st_dev == memory or (status.st_nlink == 0 and _link(fd).startswith("/memfd:"))
        return "shared memory" if in_memory else None
    if stat.S_IFMT(status.st_mode) == 0 and (anonymous := _ANONYMOUS.match(_link(fd))):
        return anonymous[1].replace("eventpoll", "epoll")
    return None


def _mapped() -> Iterator[str]:
    """Shared memory that is mapped; such as has no descriptor may be had by no other way."""
    for line in _read("/proc/self/maps").split(b"\n"):
        if line.find(b"s ", 0, _BEFORE_OFFSET) >= 0 and (area := _MAPPING.fullmatch(line)):
            path = fsdecode(area[1].removesuffix(b" (deleted)"))
            if not path.startswith(_SHARED):
                yield f"shared memory, mapped ({path})"


def _link(fd: int) -> str:
    with suppress(OSError):
        return readlink(f"/proc/self/fd/{fd}")
    return ""


def _ipc_ids(kind: str) -> frozenset[int]:
    """The second column of a table with a headline; all but always there is nothing below it."""
    try:
        table = _read(f"/proc/sysvipc/{kind}")
    except FileNotFoundError:  # Linux can be built without
        return frozenset()
    return frozenset(int(line.split()[1]) for line in table.splitlines()[1:])


def _read(path: str) -> bytes:
    """By plain calls: it is done at every snapshot, and `open` takes longer than all the rest."""
    fd = open_file(path, O_RDONLY | O_CLOEXEC)
    try:
        return b"".join(iter(lambda: read(fd, _READ_BYTES), b""))
    finally:
        close(fd)


def _remove(path: str) -> None:
    try:
        unlink(fsencode(path))
    except IsADirectoryError:
        shutil.rmtree(fsencode(path), ignore_errors=True)
    except OSError:
        pass


def _loaded(module: str, name: str) -> type:
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else _Nothing


def _ended(handle: Any) -> bool:
    """Read where the handle keeps it: to ask would look for a process that is another's by now."""
    inner = vars(handle).get("_popen")
    return any(vars(kept).get("returncode") is not None for kept in (handle, inner) if hasattr(kept, "__dict__"))


class _Nothing:
    """Of which there are no values."""
