"""Notices that the journal was deleted, replaced or set back. No run is acknowledged into a file that nobody finds.

    journal.seen     "<id of the journal> <key of its last record>"

1. While the journal is open, the files at its paths must be those that SQLite opened. Every commit compares them.
2. `journal.seen` is written after a commit is durable, and keys of records only grow. So a journal that is behind it
   has lost commits, and one with another id is not this home's. It needs no sync: an old text only notices less.
3. What the open connection still holds is saved (`rescue`). Nothing that is found in the way is overwritten.
"""

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from holdfast import durable
from holdfast.errors import JournalLost
from holdfast.store import queries

SUFFIXES = ("", "-wal", "-shm")
"""Of the files that SQLite keeps a journal in."""
LOST = "lost+found"
UNCHANGED = ". Nothing was changed"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LONGEST_BYTES = 64

Identity = tuple[int, int]


class Seen:
    """What this home knows of its journal beside the journal itself."""

    def __init__(self, path: Path, db: sqlite3.Connection) -> None:
        """The journal is open for writing. Raises JournalLost if it is not the one that was seen last."""
        self._path, self._db = path, db
        self._id = _id_of(db)
        self._refuse_other()
        self._place = _identity(path.parent)
        self._files = {file: found for file in files_of(path) if (found := _identity(file)) is not None}
        self._file = os.open(seen_path(path), _FLAGS, 0o600)
        self._write()

    def close(self) -> None:
        os.close(self._file)

    def confirm(self) -> str:
        """Call it after a commit. Returns what is wrong with the journal's files, or "" if the commit is in them."""
        for file, opened in self._files.items():
            if (found := _identity(file)) != opened:
                return f"{file} was {'deleted' if found is None else 'replaced'} while it was in use"
        self._write()
        return ""

    def rescue(self) -> str:
        """Save what the open journal holds. Returns what was done, as a sentence."""
        try:
            if _identity(self._path.parent) != self._place:
                return f"its directory {self._path.parent} was moved; the journal is in it"
            if _identity(self._path) == self._files[self._path]:
                return self._fold()
            return self._copy()
        except (OSError, sqlite3.Error) as error:
            return f"what was in it could not be saved: {error}"

    def _fold(self) -> str:
        """Only the WAL or its index is gone: SQLite still has it open, and can write it into the journal itself."""
        _, frames, folded = self._db.execute("pragma wal_checkpoint(full)").fetchone()
        if frames != folded:
            return "a part of it could not be saved yet: end this process in the ordinary way, which tries again"
        return "all of it was saved in the journal"

    def _copy(self) -> str:
        free = not os.path.lexists(self._path)
        target = self._path if free else free_name(self._path.parent / LOST, self._path.name)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        copy = target.with_name(durable.TEMPORARY + target.name)
        with closing(sqlite3.connect(copy)) as saved:
            self._db.backup(saved)
            saved.execute("pragma journal_mode = delete")
        with durable.closing_fd(os.open(copy, os.O_RDONLY | os.O_CLOEXEC)) as file:
            os.fchmod(file, 0o600)
            durable.sync_file(file)
        if free:  # the old WAL belongs to the old file, and would damage the copy
            for file_of_old in files_of(self._path)[1:]:
                file_of_old.unlink(missing_ok=True)
        with durable.closing_fd(os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
            durable.rename_new(copy.name, target.name, src_dir=directory, dst_dir=directory)
            durable.sync_directory(directory)
        return "all of it was put back" if free else f"all of it was saved as {target}"

    def _refuse_other(self) -> None:
        if (found := read_seen(self._path)) is None:
            return
        journal, last = found
        if journal != self._id:
            raise lost(self._path, "it is not the journal that this home had")
        if (behind := last - last_record(self._db)) > 0:
            raise lost(self._path, f"it lacks the last {behind} records that were acknowledged")

    def _write(self) -> None:
        with suppress(OSError):  # an older text notices less, and nothing else
            os.pwrite(self._file, b"%08x %020d\n" % (self._id, last_record(self._db)), 0)


def refuse_if_gone(path: Path) -> None:
    """Before a journal is made: there may have been one."""
    if (not path.exists() or not path.stat().st_size) and (found := read_seen(path)) is not None and found[1]:
        raise lost(path, "it is gone" if not path.exists() else "it is empty")


def refuse_if_truncated(path: Path, db: sqlite3.Connection) -> None:
    """SQLite itself notices it only when it reads what is missing."""
    (pages,), (size,) = (db.execute(f"pragma {name}").fetchone() for name in ("page_count", "page_size"))
    if path.stat().st_size < pages * size and not _has_content(path.with_name(path.name + "-wal")):
        raise lost(path, f"it has {path.stat().st_size:,} of {pages * size:,} bytes")


def lost(path: Path, why: str) -> JournalLost:
    return JournalLost(
        f"the journal {path} is lost: {why}{UNCHANGED}",
        hint=f"put it back (a backup of the whole home, with its -wal). If there is none: `holdfast accept-loss --home "
        f"{path.parent}` goes on with what is there, and keeps the files of all sessions",
    )


def files_of(path: Path) -> list[Path]:
    return [path.with_name(path.name + suffix) for suffix in SUFFIXES]


def seen_path(path: Path) -> Path:
    return path.with_suffix(".seen")


def read_seen(path: Path) -> tuple[int, int] | None:
    """The id and the last record; None: nothing that can be read, as after a power cut."""
    try:
        with durable.closing_fd(os.open(seen_path(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            journal, last = os.read(file, _LONGEST_BYTES).split()
            return int(journal, 16), int(last)
    except (OSError, ValueError):
        return None


def free_name(directory: Path, name: str) -> Path:
    """A path in a directory that nothing has yet."""
    path, number = directory / name, 1
    while os.path.lexists(path):
        path, number = directory / f"{name}.{number}", number + 1
    return path


def last_record(db: sqlite3.Connection) -> int:
    (last,) = db.execute(queries.LAST_RECORD).fetchone()
    return int(last or 0)


def _id_of(db: sqlite3.Connection) -> int:
    """In the header of the file, where builds without this module leave it alone."""
    (found,) = db.execute("pragma application_id").fetchone()
    if found:
        return int(found) & 0xFFFFFFFF
    made = int.from_bytes(os.urandom(4)) >> 1 or 1
    db.execute(f"pragma application_id = {made}")
    return made


def _identity(path: Path) -> Identity | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
