"""Opening the file, and what SQLite's failures mean.

The owner opens it for writing, with every commit synced. Others open it beside him for reading only, also where they
may write nothing at all.
"""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast import durable
from holdfast.errors import (
    DiskFailed,
    DiskFull,
    DiskReadOnly,
    HoldfastError,
    InvalidSetting,
    JournalLost,
    SessionHalted,
    disk_failed,
)
from holdfast.store import accidents, queries

_SYNC_FAILED = (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_UNUSABLE = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
_LOG_BYTES = 32 + 1_100 * (24 + 4096)
"""As far as the WAL grows before SQLite, at 1,000 pages, folds it into the file and begins it anew."""
_PLENTY = 16
"""How many times that must be free: what little room there is belongs to what has to be settled."""


class SyncFailed(DiskFailed):
    """What the kernel still holds of the file may not be what is on the disk: a commit that ends with this is there
    when the file is opened anew, or is not."""


class JournalGone(JournalLost, SyncFailed):
    """The journal was deleted or replaced under us. A commit that ends with this is there when the journal is opened
    anew, or is not."""


def open_writable(path: Path) -> sqlite3.Connection:
    """Make the file if need be. Every commit is durable when it returns."""
    accidents.refuse_if_gone(path)
    _create(path)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    with _closed_on_failure(db), failures_told(path):
        accidents.refuse_if_truncated(path, db)
        db.execute("pragma journal_mode = wal")
        # FULL, not the usual NORMAL: in WAL mode NORMAL may lose the last commits on power loss, and a lost
        # `Verified` would undo a published run.
        db.execute("pragma synchronous = full")
        db.execute("pragma journal_size_limit = 67108864")  # a WAL that one large commit blew up shrinks again
        if _format(db) == 0:
            db.executescript(f"begin immediate; {queries.SCHEMA} pragma user_version = {queries.FORMAT}; commit;")
        _check_format(db, path)
    _lengthen(path.with_name(path.name + "-wal"))
    return db


def _lengthen(log: Path) -> None:
    """Zeros behind its end, in which SQLite reads nothing. A sync of what lies in blocks that the file has already is a
    third faster: the file system's own books do not change. Nothing is to last here, and where there is not room in
    plenty for it SQLite finds the room that it needs, or says so."""
    with suppress(OSError), durable.closing_fd(os.open(log, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)) as file:
        room, end = os.fstatvfs(file), os.fstat(file).st_size
        if room.f_bavail * room.f_frsize < _PLENTY * _LOG_BYTES:
            return
        try:
            while (size := os.fstat(file).st_size) < _LOG_BYTES:
                os.pwrite(file, bytes(min(_LOG_BYTES - size, 1 << 20)), size)
        except OSError:
            os.ftruncate(file, end)


def _create(path: Path) -> None:
    """By us and not by SQLite, which would let others read it."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise disk_failed("opening the journal", error) from error
    durable.sync_directory(path.resolve().parent)


def open_read_only(path: Path) -> sqlite3.Connection:
    if not path.exists():
        accidents.refuse_if_gone(path)
        raise InvalidSetting(f"{path} does not exist", hint="name a home that has been used: HOLDFAST_HOME or home=")
    with failures_told(path):
        try:
            return _open_read_only(path, "mode=ro")
        except sqlite3.OperationalError:
            # Reading a WAL takes a file for its index beside it. Where we may not make one, the file can be read
            # alone if there is no WAL: then nobody has it open, and nothing is missing from it.
            if path.with_name(path.name + "-wal").exists():
                raise
            return _open_read_only(path, "mode=ro&immutable=1")


def _open_read_only(path: Path, options: str) -> sqlite3.Connection:
    address = f"{path.absolute().as_uri()}?{options}"
    db = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)
    with _closed_on_failure(db):
        db.execute("pragma query_only = on")
        _check_format(db, path)  # reads, and so opens the file: connecting alone does not
    return db


@contextmanager
def _closed_on_failure(db: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        db.close()
        raise


def _format(db: sqlite3.Connection) -> int:
    (found,) = db.execute("pragma user_version").fetchone()
    return int(found)


def _check_format(db: sqlite3.Connection, path: Path) -> None:
    if (found := _format(db)) != queries.FORMAT:
        raise InvalidSetting(
            f"{path} has format {found}, this version of Holdfast reads {queries.FORMAT}",
            hint="open it with the version that wrote it, or use another home",
        )


@contextmanager
def failures_told(path: Path) -> Iterator[None]:
    """SQLite's errors as ours: a disk that fails, a file that is damaged. Any other is a fault of this package."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if failure := _failure(path, error):
            raise failure from error
        raise


def _failure(path: Path, error: sqlite3.DatabaseError) -> HoldfastError | None:
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    if code & 0xFF in _DAMAGED:
        return damaged(path, str(error))
    if code & 0xFF == sqlite3.SQLITE_FULL:
        return DiskFull("the disk is full (journal)", hint="free space where the home is, then run it again")
    if code == sqlite3.SQLITE_READONLY or (code == sqlite3.SQLITE_IOERR_WRITE and _is_read_only(path.parent)):
        return DiskReadOnly(
            f"the journal is read-only: {error}", hint="make the home's disk writable, then run it again"
        )
    if code & 0xFF in _UNUSABLE:
        if code in _SYNC_FAILED:
            return SyncFailed(
                f"the journal failed: {error}",
                hint="look at the disk (dmesg), then open the session again: its history says what was committed",
            )
        return DiskFailed(f"the journal failed: {error}", hint="look at the disk (dmesg) and at the modes of the home")
    return None


def _is_read_only(directory: Path) -> bool:
    """By trying it: a file system that went read-only after an error need not be mounted so."""
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as error:
        return error.errno == errno.EROFS
    return False


def damaged(path: Path, what: str) -> SessionHalted:
    return SessionHalted(
        f"{path.name} is damaged: {what}",
        hint="keep a copy of the home as it is; `holdfast verify` says what still holds",
    )
