"""Bytes by digest, in a directory: `<aa>/<sha256>`, each mode 0400 and the host's own.

1. Under a digest are the bytes of that digest or nothing: a file gets its name only when it is whole and durable.
2. No name that a guest can write through leads to a blob, but for one moment: a committed file that is about to be
   replaced is linked here before it loses its own name (`adopt`), which saves the copy.
3. What is copied out is hashed on the way. Bytes that are not what their digest says go nowhere.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Container, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Protocol

from holdfast import durable
from holdfast.durable import closing_fd
from holdfast.errors import SessionHalted

_CHUNK = 1 << 20
_ZEROS = bytes(_CHUNK)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# No second name can be given: too many there already, another file system, or not ours to link.
_NO_LINK = (errno.EMLINK, errno.EXDEV, errno.EPERM)


class Source(Protocol):
    """Where bytes come from: a file, or whatever reads one piece by piece."""

    def read(self, size: int, /) -> bytes: ...


class LocalBlobs:
    """The blobs of one session."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._adopted: set[Path] = set()

    # -- getting ---------------------------------------------------------------------------------------------

    def has(self, sha256: str) -> bool:
        return self._place(sha256).exists()

    def open(self, sha256: str) -> BinaryIO:
        """Its bytes, unchecked."""
        try:
            return self._place(sha256).open("rb")
        except FileNotFoundError:
            raise _halted(f"blob {sha256} is missing") from None

    def copy_to(self, sha256: str, dir_fd: int, name: str | bytes, *, mode: int, owner: tuple[int, int] | None) -> None:
        """A new file of these bytes, in place of whatever file had the name. Whole and checked, but not yet synced."""
        with self.open(sha256) as source:
            if not copy_as(name, source, sha256, dir_fd=dir_fd, mode=mode, owner=owner):
                raise _halted(f"blob {sha256} holds other bytes")

    # -- putting ---------------------------------------------------------------------------------------------

    def put_bytes(self, data: bytes) -> str:
        """Durable when it returns; so is `put_stream`."""
        return self.put_stream(BytesIO(data))[0]

    def put_stream(self, source: Source) -> tuple[str, int]:
        """Digest and number of bytes."""
        sha256, size = self._put(source, expected=None)
        self._sync(self._place(sha256).parent)
        return sha256, size

    def adopt(self, dir_fd: int, name: str | bytes, sha256: str, *, sync: bool = True) -> None:
        """Keep a committed file that is about to lose its name. Its mode and owner become a blob's at once.

        With `sync=False` it is durable only after `sync()`, which does many at one go.
        """
        if not self.has(sha256) and not self._link(dir_fd, name, sha256):
            with os.fdopen(os.open(name, _READ, dir_fd=dir_fd), "rb") as source:
                self._put(source, expected=sha256)
        self._adopted.add(self._place(sha256).parent)
        if sync:
            self.sync()

    def sync(self) -> None:
        """Make durable what was adopted."""
        adopted, self._adopted = self._adopted, set()
        if adopted:
            self._sync(*adopted)

    def _sync(self, *directories: Path) -> None:
        durable.sync_files(directories, root=self._path)

    def _put(self, source: Source, *, expected: str | None) -> tuple[str, int]:
        """A file under its digest, durable but for its name."""
        with closing_fd(os.open(self._path, _DIRECTORY)) as here, durable.temporary(here, mode=0o400) as (file, name):
            sha256, size = _copy(source, file)
            if expected not in (None, sha256):
                raise _halted(f"a committed file should be {expected} and is {sha256}")
            durable.sync_file(file)
            self._name(name, sha256, src_dir=here)
        return sha256, size

    def _name(self, source: str | bytes, sha256: str, *, src_dir: int, linked: bool = False) -> None:
        give = durable.link if linked else durable.rename
        with closing_fd(os.open(self._path, _DIRECTORY)) as here:
            with suppress(FileExistsError):
                durable.mkdir(sha256[:2], dir_fd=here)
            give(source, f"{sha256[:2]}/{sha256}", src_dir=src_dir, dst_dir=here)

    def _link(self, dir_fd: int, name: str | bytes, sha256: str) -> bool:
        """Whether it could be had without a copy."""
        with closing_fd(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)) as file:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("only regular files become blobs")
            if status.st_nlink > 1:  # its other names stay the guest's
                return False
            try:
                # Before the link: a crash between the two must not leave a blob that is not ours.
                _take_over(file, status)
                self._name(name, sha256, src_dir=dir_fd, linked=True)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                return False
        return True

    # -- keeping house ---------------------------------------------------------------------------------------

    def digests(self) -> set[str]:
        return {entry.name for entry in self._entries()}

    def size_bytes(self) -> int:
        """On disk: the holes of sparse files cost nothing."""
        return sum(_size(entry) for entry in self._entries())

    def forget(self, keep: Container[str]) -> int:
        """Remove all others; how many bytes that freed."""
        freed = 0
        for entry in self._entries():
            if entry.name not in keep:
                freed += _size(entry)
                os.unlink(entry.path)
        return freed

    def sweep(self) -> None:
        """Remove what a crash left unfinished. Only before anything is put."""
        durable.sweep(self._path)

    def _entries(self) -> Iterator["os.DirEntry[str]"]:
        for directory in sorted(self._path.glob("[0-9a-f][0-9a-f]")):
            with os.scandir(directory) as entries:
                yield from entries

    def _place(self, sha256: str) -> Path:
        if not _DIGEST.fullmatch(sha256):
            raise ValueError(f"{sha256!r} is no SHA-256")
        return self._path / sha256[:2] / sha256


def copy_as(
    name: str | bytes, source: Source, sha256: str, *, dir_fd: int, mode: int, owner: tuple[int, int] | None
) -> bool:
    """A new file of a source's bytes, in place of whatever file had the name, not yet synced. False: these are not the
    bytes, and nothing was made."""
    with durable.temporary(dir_fd) as (file, temporary):
        if _copy(source, file)[0] != sha256:
            return False
        if owner is not None:
            os.fchown(file, *owner)
        os.fchmod(file, mode)  # after the owner: a change of that one clears bits
        durable.rename(temporary, name, src_dir=dir_fd, dst_dir=dir_fd)
        return True


def _take_over(file: int, status: os.stat_result) -> None:
    """Ours, and read-only. By way of /proc: it works without opening the file, which its mode may forbid."""
    path = f"/proc/self/fd/{file}"
    if status.st_uid != os.geteuid():
        os.chown(path, os.geteuid(), os.getegid())
    os.chmod(path, 0o400)


def _copy(source: Source, target: int) -> tuple[str, int]:
    """Digest and size of what was copied. Holes stay holes: a sparse file must not fill the disk."""
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if chunk == _ZEROS:
            os.lseek(target, len(chunk), os.SEEK_CUR)
        else:
            durable.write_all(target, chunk)
        size += len(chunk)
    os.ftruncate(target, size)
    return digest.hexdigest(), size


def _size(entry: "os.DirEntry[str]") -> int:
    return entry.stat(follow_symlinks=False).st_blocks * 512


def _halted(what: str) -> SessionHalted:
    return SessionHalted(what, hint="nothing was changed; run `holdfast verify` to see what still holds")
