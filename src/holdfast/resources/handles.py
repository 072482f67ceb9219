"""Staged files that are still open for writing when a run ends.

A staged file becomes a committed one by a rename: it stays the same inode, and whoever holds it open could go on
writing into it, past its digest and its receipt. A thread does, in the moment before the guest has opened its files
anew; and a descriptor that is under way through a socket is opened anew by nobody. So before it is made durable such a
file gets an inode of its own, and what is held is a copy that belongs to nobody. Linux knows who holds a file, however
well hidden: it grants a read lease on none that is open for writing.

A SQLite database is the exception. SQLite refuses to write to one whose inode is another than when it was opened, so
it keeps its inode (`databases`): the first commit renames it, a later one writes into the committed file, unless that
has other names. That nobody holds it once the guest has opened its files anew is looked at then (`still_held`).
"""

import errno
import fcntl
import os
import stat
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

from holdfast import durable
from holdfast.paths import to_text
from holdfast.records import Change
from holdfast.resources.descent import Cursor, Parts, Tree, look, open_regular, parts_of

_PIECE_BYTES = 1 << 20
_BLOCK_BYTES = 4096
_DATABASE = b"SQLite format 3\0"
_NO_RANGES = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def databases(stage: Path, changes: Sequence[Change]) -> frozenset[Parts]:
    """SQLite databases that somebody in the session, which is frozen, has open for writing."""
    with Cursor(stage) as cursor:
        held = _held(cursor, _put(changes))
        return frozenset(parts for parts in held if _is_database(cursor, parts))


def staged_databases(stage: Path, changes: Sequence[Change]) -> frozenset[Parts]:
    """SQLite databases in a stage that nobody has open yet: a memory that comes back may hold them."""
    with Cursor(stage) as cursor:
        return frozenset(parts for parts in _put(changes) if _is_database(cursor, parts))


def let_go(stage: Path, changes: Sequence[Change], *, but: Container[Parts] = ()) -> list[str]:
    """Give each staged file that somebody holds open for writing an inode of its own; returns which. All is frozen."""
    staged = [parts for parts in _put(changes) if parts not in but]
    with Cursor(stage) as cursor:
        inodes = {_inode(cursor, parts) for parts in _held(cursor, staged)}
        # A file with several names has all of them here: each would be written to by way of any other.
        shared = [parts for parts in staged if _inode(cursor, parts) in inodes] if inodes else []
        for parts in shared:
            _replace(cursor, parts)
    return [to_text(b"/".join(parts[1:])) for parts in shared]


def still_held(files: Path | Tree, committed: Iterable[Parts]) -> list[str]:
    """Committed files that somebody holds open for writing: not by way of the overlay, but themselves."""
    with Cursor(files) as cursor:
        return [to_text(b"/".join(parts[1:])) for parts in _held(cursor, committed)]


def _put(changes: Sequence[Change]) -> list[Parts]:
    return [parts_of(change) for change in changes if change.kind == "file" and change.action != "removed"]


def _held(cursor: Cursor, files: Iterable[Parts]) -> list[Parts]:
    return [parts for parts in files if cursor.go(parts[:-1]) and _is_held(cursor.fd, parts[-1])]


def _is_held(directory: int, name: bytes) -> bool:
    try:
        file = open_regular(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    with durable.closing_fd(file):
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)  # falls with the descriptor
        except OSError:  # EAGAIN; or a file system without leases, where nobody knows
            return True
    return False


def _is_database(cursor: Cursor, parts: Parts) -> bool:
    if not cursor.go(parts[:-1]):
        return False
    try:
        with durable.closing_fd(open_regular(parts[-1], dir_fd=cursor.fd)) as file:
            return is_database(file)
    except FileNotFoundError:
        return False


def is_database(file: int) -> bool:
    return os.pread(file, len(_DATABASE), 0) == _DATABASE


def _inode(cursor: Cursor, parts: Parts) -> int:
    status = look(parts[-1], dir_fd=cursor.fd) if cursor.go(parts[:-1]) else None
    return status.st_ino if status else 0


def _replace(cursor: Cursor, parts: Parts) -> None:
    """By a copy that looks the same."""
    if not cursor.go(parts[:-1]):
        return
    source = open_regular(parts[-1], dir_fd=cursor.fd)
    told = durable.failures_told("copy")  # there may be no room for it
    with durable.closing_fd(source), told, durable.temporary(cursor.fd) as (target, name):
        status = os.fstat(source)
        copy_content(source, target, status.st_size)
        for mark in (mark for mark in os.listxattr(source) if not mark.startswith("trusted.")):
            os.setxattr(target, mark, os.getxattr(source, mark))
        if os.geteuid() == 0:
            os.fchown(target, status.st_uid, status.st_gid)
        os.fchmod(target, stat.S_IMODE(status.st_mode))  # after the owner: a change of that one clears bits
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
        durable.rename(name, parts[-1], src_dir=cursor.fd, dst_dir=cursor.fd)


def copy_content(source: int, target: int, size: int) -> None:
    """Into a file that is empty. Holes stay holes."""
    os.ftruncate(target, size)
    end = 0
    while end < size:
        try:
            start = os.lseek(source, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return
            raise
        end = os.lseek(source, start, os.SEEK_HOLE)
        _copy_range(source, target, start, end)


def is_copied_in_part(source: int, target: int) -> bool:
    """Whether a file is what `copy_content` leaves of it where it is cut short: nothing, or all of its length, and in
    each block what is copied and then zeros."""
    size, found = os.fstat(source).st_size, os.fstat(target).st_size
    return found == 0 or (
        found == size
        and all(
            os.pread(source, _BLOCK_BYTES, at).startswith(os.pread(target, _BLOCK_BYTES, at).rstrip(b"\0"))
            for at in range(0, size, _BLOCK_BYTES)
        )
    )


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        try:
            copied = os.copy_file_range(source, target, end - start, start, start)
        except OSError as error:
            if error.errno not in _NO_RANGES:
                raise
            copied = os.pwrite(target, os.pread(source, min(_PIECE_BYTES, end - start), start), start)
        if copied == 0:
            return
        start += copied
