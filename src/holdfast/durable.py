"""Every step that makes something last: no other module syncs, publishes by rename, or links. The journal's own syncs
are SQLite's (`store.connection`).

1. A sync that failed is never tried again. The kernel reports a lost page once, and a second fsync succeeds over it:
   whoever gets `DiskFailed` must take the data as lost and stop.
2. A name is durable when its directory is synced, and its bytes when its file is: neither implies the other.
   Steps on names (`rename`, `link`, `unlink`, `mkdir`…) do not sync; their caller syncs each directory once, after all.
3. No link is ever followed below a directory that the caller opened or named.

Around each step are the crash points `durable.<step>.before` and `durable.<step>.after`.
"""

import ctypes
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.errors import DISK, disk_failed, of_disk
from holdfast.faults import crashpoint

Name = str | bytes

TEMPORARY = ".holdfast-tmp-"
"""How the name of a file begins that is not finished. One that is found after a crash may be removed."""
MANY = 16
"""From more files than this, one sync of the whole file system is faster than one for each of them."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_RENAME_NOREPLACE = 1
_libc = ctypes.CDLL(None, use_errno=True)


# -- whole files -------------------------------------------------------------------------------------------------


def write_file(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace or make a file: after a crash it is the old one or the new one, and afterwards it is the new one."""
    directory = os.open(path.parent, _DIRECTORY)
    try:
        with temporary(directory, mode=mode) as (file, name):
            write_all(file, data)
            sync_file(file)
            rename(name, path.name, src_dir=directory, dst_dir=directory)
        sync_directory(directory)
    finally:
        os.close(directory)


@contextmanager
def temporary(directory: int, *, mode: int = 0o600) -> Iterator[tuple[int, str]]:
    """A new file in a directory, open for writing, and its name; it is gone at the end unless it was renamed."""
    name = TEMPORARY + secrets.token_hex(8)
    with _step("create"):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        os.fchmod(file, mode)  # exactly this mode, whatever the umask
        yield file, name
    finally:
        os.close(file)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)


def sweep(directory: Path) -> None:
    """Remove what a crash left unfinished in a directory. Only while nobody writes there."""
    for left in directory.glob(f"{TEMPORARY}*"):
        left.unlink()


def write_all(file: int, data: bytes | memoryview) -> None:
    """All of it: a single write may take only a part."""
    rest = memoryview(data)
    with _step("write"):
        while rest:
            rest = rest[os.write(file, rest) :]


# -- syncs -------------------------------------------------------------------------------------------------------


def sync_file(file: int) -> None:
    """The bytes, size, mode and times of an open file."""
    with _step("sync_file", fatal=True):
        os.fsync(file)


def sync_directory(directory: int | Path) -> None:
    """The names in a directory."""
    if isinstance(directory, Path):
        directory = os.open(directory, _DIRECTORY | os.O_NOFOLLOW)
        with closing_fd(directory):
            return sync_directory(directory)
    with _step("sync_directory", fatal=True):
        os.fsync(directory)


def sync_filesystem(path: Path) -> None:
    """All that was written so far to the file system that holds a directory."""
    directory = os.open(path, _DIRECTORY)
    with closing_fd(directory), _step("sync_filesystem", fatal=True):
        if _libc.syncfs(directory) != 0:
            raise OSError(code := ctypes.get_errno(), os.strerror(code))


def sync_files(paths: Sequence[Path], *, root: Path) -> None:
    """Files, and all directories from them up to `root`. Anything may be at the paths, or nothing any more: what is
    no regular file is durable with its directory."""
    if len(paths) > MANY:
        return sync_filesystem(root)
    below = [path.relative_to(root) if path.is_absolute() else path for path in paths]
    try:
        for each in sorted({up for path in below for up in (path, *path.parents)}, reverse=True):
            _sync_below(root, each)
    except PermissionError:  # a mode that shuts out even its owner: there is a way that opens no file
        sync_filesystem(root)


def _sync_below(root: Path, path: Path) -> None:
    with suppress(FileNotFoundError, NotADirectoryError), closing_fd(_descend(root, path.parts[:-1])) as parent:
        name = path.name or "."
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            return
        # Not blocking: should a FIFO have taken its place, it opens, and cannot be synced.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        with closing_fd(file):
            sync_directory(file) if stat.S_ISDIR(mode) else sync_file(file)


def _descend(root: Path, parts: Sequence[str]) -> int:
    """Open a directory name by name, so that no link is followed and no path is too long."""
    if ".." in parts:
        raise ValueError("a path that leaves its root")
    here = os.open(root, _DIRECTORY)
    for part in parts:
        with closing_fd(here):
            here = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
    return here


# -- names -------------------------------------------------------------------------------------------------------
# They fail as their system calls do (callers look at EXDEV, EMLINK, ENOENT…), but for a disk that is full or broken.


def rename(src: Name, dst: Name, *, src_dir: int, dst_dir: int) -> None:
    """Move, over whatever file is there."""
    with _step("rename"):
        os.rename(src, dst, src_dir_fd=src_dir, dst_dir_fd=dst_dir)


def rename_new(src: Name, dst: Name, *, src_dir: int, dst_dir: int) -> None:
    """Move to a name that is free; FileExistsError: it is not. Where the file system has no such call, over a file
    that came in between."""
    with _step("rename"):
        if _libc.renameat2(src_dir, os.fsencode(src), dst_dir, os.fsencode(dst), _RENAME_NOREPLACE) == 0:
            return
        if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), dst)
        os.rename(src, dst, src_dir_fd=src_dir, dst_dir_fd=dst_dir)


def link(src: Name, dst: Name, *, src_dir: int, dst_dir: int) -> None:
    """A second name for a file (for a symlink itself, not for what it points to)."""
    with _step("link"):
        os.link(src, dst, src_dir_fd=src_dir, dst_dir_fd=dst_dir, follow_symlinks=False)


def symlink(target: Name, name: Name, *, dir_fd: int) -> None:
    with _step("symlink"):
        os.symlink(target, name, dir_fd=dir_fd)


def unlink(name: Name, *, dir_fd: int) -> None:
    with _step("unlink"):
        os.unlink(name, dir_fd=dir_fd)


def mkdir(name: Name, *, dir_fd: int, mode: int = 0o700) -> None:
    """The mode is subject to the umask, as ever."""
    with _step("mkdir"):
        os.mkdir(name, mode, dir_fd=dir_fd)


# -- what every step has -----------------------------------------------------------------------------------------


@contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _step(name: str, *, fatal: bool = False) -> Iterator[None]:
    """Crash points around a system call, and its failure told."""
    crashpoint(f"durable.{name}.before")
    with failures_told(name, fatal=fatal):
        yield
    crashpoint(f"durable.{name}.after")


@contextmanager
def failures_told(step: str, *, fatal: bool = False) -> Iterator[None]:
    """A failure of the disk (for a sync: any failure) becomes `DiskFailed`."""
    try:
        yield
    except OSError as error:
        if fatal or error.errno in DISK:
            raise disk_failed(step, error, in_doubt=fatal) from error
        raise


@contextmanager
def ours(step: str) -> Iterator[None]:
    """Tells of every failure of a step on the home's own files as `DiskFailed`: callers expect no `OSError` from it.
    What fails on sockets and processes is no disk's failure, and stays what it is."""
    try:
        yield
    except OSError as error:
        if failure := of_disk(error, step=step):
            raise failure from error
        raise
