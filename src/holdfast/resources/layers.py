"""What a run changed, read from the overlay's upper layer: that layer, and nothing that code says, is the truth.

    a file, symlink, FIFO, socket   is there now, whole
    a directory                     is merged with the committed one, unless it is *opaque*: then that one is hidden
    a whiteout                      hides what is committed under its name: a character device 0:0, or in a directory
                                    that is marked for it an empty file with a mark

1. Each path has at most one `Change`, parents first. Where the kind changed (a directory in place of a file), it is one
   "changed" of the new kind, and all that the old directory held is "removed".
2. What was copied up and is as it was (content, mode, time) is no change.
3. Marks count only where guests cannot write them: `trusted.*` if root mounts the overlay, and else `user.*`, which the
   overlay then keeps for itself. The other set is the guest's own, and means nothing.
4. Reading costs no more than `limit_bytes` of hashing, ends in time, and leads to a bounded number of changes with a
   bounded text of paths, whatever a guest has built.

Outside of `data` nothing is hashed, and of a removed directory only the directory itself is named. Where `data` is a
directory of the user's (`descent.Tree`), that directory itself stays as it is, and nothing is changed in what
Holdfast keeps in it or in what is mounted in it.
"""

import errno
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.paths import to_text
from holdfast.records import Area, Change, FileEntry, Kind
from holdfast.resources.descent import (
    HIDDEN,
    Cursor,
    Parts,
    Tree,
    entries,
    kind_of,
    look,
    open_regular,
    parts_of,
    published_mode,
)
from holdfast.resources.hashing import Hasher, TooSlow

AREAS: tuple[Area, ...] = ("data", "tmp", "home")
LIMIT_BYTES = 32 << 30
LIMIT_PATHS_BYTES = 16 << 20
LIMIT_CHANGES = 100_000
"""Of one run. The journal takes them in one commit, and until that is written every other session waits for it."""
LONGEST_PATH_BYTES = 4096
"""As Linux has it for the paths that programs name; a guest can nest deeper, and what it puts there is not kept."""

_INITIAL_USER_NAMESPACE = "user:[4026531837]"


class Unreadable(ValueError):
    """A stage that cannot be committed. The message says why, in words for whoever wrote the code."""


class TooLarge(Unreadable):
    """There is more to hash, or to write down, than a run may leave; `path` is where the limit was passed."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path[:200]}: {message}")
        self.path = path


def has_changes(stage: Path, *, shared: bool = False) -> bool:
    """Whether anything was written. Most cells write nothing, and pay one look at a directory."""
    if not shared:
        return not set(AREAS).isdisjoint(os.listdir(stage))
    with Cursor(stage) as cursor:  # the guest may have closed it to itself, and so to us
        return cursor.go([b"data"]) and bool(os.listdir(cursor.fd))


def touched_last(stage: Path) -> dict[int, int]:
    """Inode -> ctime of the files in a stage that a guest has just opened its files on: what is open for writing is
    there already. No guest can set a ctime back, so what still has it in `read_changes` was not written to since."""
    with Cursor(stage) as cursor:
        return {status.st_ino: status.st_ctime_ns for _, status in cursor.walk() if stat.S_ISREG(status.st_mode)}


def read_changes(
    stage: Path,
    files: Path | Tree,
    known: Mapping[str, FileEntry],
    *,
    untouched: Mapping[int, int] | None = None,
    limit_bytes: int = LIMIT_BYTES,
    until: float = math.inf,
    marks: Literal["trusted", "user"] | None = None,
) -> list[Change]:
    """What a stage changes in `files`, whose files in `data` are `known`. The session is frozen.

    Files that are as `untouched` has them need not be read. Nothing is hashed after `until` (`time.monotonic`). `marks`
    is where the overlay keeps its own; by default where it does on this host. Raises Unreadable.
    """
    with _readable(), Cursor(stage) as upper, Cursor(files) as lower, Hasher(until=until) as hasher:
        reading = _Reading(
            upper, lower, hasher, known=known, untouched=untouched or {}, limit_bytes=limit_bytes,
            marks=marks or _marks(), shared=files.shared if isinstance(files, Tree) else None,
        )  # fmt: skip
        for area in AREAS:
            if look(os.fsencode(area), dir_fd=upper.fd) is not None:
                reading.read(area)
        return sorted(reading.results(), key=lambda change: (AREAS.index(change.area), parts_of(change)))


@contextmanager
def _readable() -> Iterator[None]:
    """Whoever moves a directory of the user's away, or puts another in its place, ends the reading; so does time."""
    try:
        yield
    except TooSlow as error:
        raise Unreadable(
            "what this run wrote, holes included, could not be hashed before its deadline: give it a longer timeout, "
            "or have it write less"
        ) from error
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise Unreadable(error.strerror) from error
        raise


def _marks() -> Literal["trusted", "user"]:
    mounted_by_root = os.geteuid() == 0 and os.readlink("/proc/self/ns/user") == _INITIAL_USER_NAMESPACE
    return "trusted" if mounted_by_root else "user"


class _Level(msgspec.Struct):
    """A directory that is being read."""

    merged: bool
    """The lower cursor is at the committed directory of the same path."""
    hidden: bool = False
    """Of which nothing shows through."""
    marked: bool = False
    """It may hold files that are whiteouts."""
    ahead: list[bytes] = []


class _Reading:
    """Goes down both layers side by side. The lower cursor stays behind where nothing is committed."""

    def __init__(
        self,
        upper: Cursor,
        lower: Cursor,
        hasher: Hasher,
        *,
        known: Mapping[str, FileEntry],
        untouched: Mapping[int, int],
        limit_bytes: int,
        marks: str,
        shared: Path | None,
    ) -> None:
        self._device = None if shared is None else shared.stat().st_dev
        self._untouched = untouched
        self._upper, self._lower, self._hasher, self._known = upper, lower, hasher, known
        self._left_bytes, self._left_paths_bytes = limit_bytes, LIMIT_PATHS_BYTES
        self._left_changes = LIMIT_CHANGES
        self._mark = f"{marks}.overlay."
        self._area: Area = "data"
        self._changes: list[Change] = []
        self._hashed: list[tuple[Change, bool]] = []
        """Changes whose digest is on its way, and whether an equal digest makes them none."""
        self._inodes: dict[int, int] = {}
        """Of files with several names: which of `_hashed` has the digest."""
        self._same: list[tuple[Change, bool, int]] = []

    def read(self, area: Area) -> None:
        self._area = area
        levels = [_Level(merged=True)]
        levels.append(self._enter(os.fsencode(area), levels[0]))
        while len(levels) > 1:
            if levels[-1].ahead:
                levels.append(self._enter(levels[-1].ahead.pop(), levels[-1]))
            else:
                self._leave(levels.pop())

    def results(self) -> list[Change]:
        digests = self._hasher.results()
        hashed = [(*each, index) for index, each in enumerate(self._hashed)] + self._same
        for change, unless_equal, index in hashed:
            sha256, size = digests[index]
            if not (unless_equal and sha256 == change.before):
                self._changes.append(msgspec.structs.replace(change, sha256=sha256, bytes=size))
        return self._changes

    # -- directories ---------------------------------------------------------------------------------------------

    def _enter(self, name: bytes, above: _Level) -> _Level:
        status, old = os.stat(name, dir_fd=self._upper.fd, follow_symlinks=False), self._committed(name, above)
        merged = old is not None and stat.S_ISDIR(old.st_mode)
        is_shared = self._device is not None and not self._upper.at
        if not is_shared and (not merged or (old and stat.S_IMODE(old.st_mode) != stat.S_IMODE(status.st_mode))):
            self._add(self._change((*self._upper.at, name), status, old))
        self._upper.enter(name)
        if merged:
            self._lower.enter(name)
        level = self._level(merged=merged, hidden=above.hidden)
        self._read_entries(level)
        return level

    def _leave(self, level: _Level) -> None:
        self._upper.leave()
        if level.merged:
            self._lower.leave()

    def _level(self, *, merged: bool, hidden: bool) -> _Level:
        found = os.listxattr(self._upper.fd)
        if self._mark + "redirect" in found:
            raise Unreadable(f"{_text(self._upper.at)}: a directory that was moved in a way this program does not use")
        opaque = os.getxattr(self._upper.fd, self._mark + "opaque") if self._mark + "opaque" in found else b""
        return _Level(merged=merged, hidden=hidden or opaque == b"y", marked=opaque == b"x", ahead=[])

    def _read_entries(self, level: _Level) -> None:
        found = entries(self._upper.fd)
        for name, status in found.items():
            if self._is_whiteout(name, status, level):
                self._remove(name, self._committed(name, level))
            elif stat.S_ISDIR(status.st_mode):
                level.ahead.append(name)
            else:
                self._read_leaf(name, status, self._committed(name, level))
        if level.merged and level.hidden:
            for name, old in entries(self._lower.fd).items():
                if name not in found:
                    self._remove(name, old)

    # -- what is in them -----------------------------------------------------------------------------------------

    def _read_leaf(self, name: bytes, status: os.stat_result, old: os.stat_result | None) -> None:
        path = (*self._upper.at, name)
        change = self._change(path, status, old)
        if old is not None and stat.S_ISDIR(old.st_mode):
            self._remove_below(name)
        alike = old is not None and _alike(status, old)
        if alike and self._untouched.get(status.st_ino) == status.st_ctime_ns:
            return
        if change.kind == "file" and self._area == "data":
            self._hash(name, status, change, unless_equal=alike)
        elif change.kind == "symlink":
            target = os.readlink(name, dir_fd=self._upper.fd)
            if not (alike and target == os.readlink(name, dir_fd=self._lower.fd)):
                self._add(msgspec.structs.replace(change, target=to_text(target), mode=0))
        elif not alike or change.kind == "file":
            self._add(change)

    def _hash(self, name: bytes, status: os.stat_result, change: Change, *, unless_equal: bool) -> None:
        self._count(change)
        if status.st_nlink > 1 and status.st_ino in self._inodes:
            self._same.append((change, unless_equal, self._inodes[status.st_ino]))
            return
        self._left_bytes -= status.st_size
        if self._left_bytes < 0:
            raise TooLarge(change.path, "the files that this run wrote are too large to be hashed, holes included")
        if status.st_nlink > 1:
            self._inodes[status.st_ino] = len(self._hashed)
        self._hashed.append((change, unless_equal))
        self._hasher.add(open_regular(name, dir_fd=self._upper.fd))

    def _remove(self, name: bytes, old: os.stat_result | None) -> None:
        """A whiteout over nothing is left by what a run made and removed again."""
        if old is None:
            return
        change = self._change((*self._upper.at, name), old, old)
        self._add(msgspec.structs.replace(change, action="removed", mode=0, bytes=0))
        if stat.S_ISDIR(old.st_mode):
            self._remove_below(name)

    def _remove_below(self, name: bytes) -> None:
        if self._area != "data":
            return
        self._lower.enter(name)
        for below, old in self._lower.walk():
            change = self._change((*self._upper.at, name, *below), old, old)
            self._add(msgspec.structs.replace(change, action="removed", mode=0, bytes=0))
        self._lower.leave()

    def _committed(self, name: bytes, level: _Level) -> os.stat_result | None:
        return look(name, dir_fd=self._lower.fd) if level.merged else None

    def _is_whiteout(self, name: bytes, status: os.stat_result, level: _Level) -> bool:
        if stat.S_ISCHR(status.st_mode):
            return status.st_rdev == 0
        if not level.marked or not stat.S_ISREG(status.st_mode) or status.st_size:
            return False
        file = open_regular(name, dir_fd=self._upper.fd)
        try:
            return self._mark + "whiteout" in os.listxattr(file)
        finally:
            os.close(file)

    # -- changes -------------------------------------------------------------------------------------------------

    def _change(self, parts: Parts, status: os.stat_result, old: os.stat_result | None) -> Change:
        path = _text(parts)
        kind = kind_of(status)
        if (length := sum(len(name) + 1 for name in parts)) > LONGEST_PATH_BYTES:
            raise Unreadable(f"{path[:100]}…: a path of {length:,} bytes, and at most {LONGEST_PATH_BYTES:,} are kept")
        if kind is None:
            raise Unreadable(f"{path}: a device")
        if self._device is not None:
            self._refuse_foreign(parts, old)
        before = self._replaced(path, old)
        before_kind, before_mode, before_target = self._form_before(parts[-1], old, before)
        return Change(
            path=path,
            action="changed" if old or before else "added",
            area=self._area,
            kind=kind,
            bytes=status.st_size if kind == "file" else 0,
            mode=stat.S_IMODE(status.st_mode) if self._device is None else published_mode(status),
            before=before.sha256 if before else "",
            before_bytes=before.bytes if before else 0,
            before_mode=before_mode,
            before_kind=before_kind,
            before_target=before_target,
        )

    def _form_before(
        self, name: bytes, old: os.stat_result | None, before: FileEntry | None
    ) -> tuple[Kind | None, int | None, str]:
        """Kind, mode and target of what was committed there, for whoever goes back to it. A directory of the user's
        has no versions to go back to."""
        if old is None or self._area != "data" or self._device is not None:
            return None, None, ""
        if stat.S_ISREG(old.st_mode):
            return None, stat.S_IMODE(old.st_mode) if before else None, ""
        if before:  # somebody has put something else in its place: what was committed is a file
            return None, None, ""
        if stat.S_ISLNK(old.st_mode):
            return "symlink", None, to_text(os.readlink(name, dir_fd=self._lower.fd))
        return kind_of(old), stat.S_IMODE(old.st_mode), ""

    def _replaced(self, path: str, old: os.stat_result | None) -> FileEntry | None:
        """What was committed there, also where somebody has removed it since. In a directory of the user's, that is
        his to do: `census` has seen it."""
        if self._area != "data" or (self._device is not None and not (old and stat.S_ISREG(old.st_mode))):
            return None
        return self._known.get(path)

    def _refuse_foreign(self, parts: Parts, old: os.stat_result | None) -> None:
        if HIDDEN in parts:
            raise Unreadable(f"{_text(parts)}: {os.fsdecode(HIDDEN)} is where Holdfast keeps its own")
        if old is not None and old.st_dev != self._device:
            raise Unreadable(f"{_text(parts)}: another file system is mounted there")

    def _add(self, change: Change) -> None:
        self._count(change)
        self._changes.append(change)

    def _count(self, change: Change) -> None:
        self._left_changes -= 1
        if self._left_changes < 0:
            raise TooLarge(
                change.path, f"a run may change {LIMIT_CHANGES:,} files and directories, and this one changed more"
            )
        self._left_paths_bytes -= len(change.path) + len(change.target) + len(change.before_target)
        if self._left_paths_bytes < 0:
            raise TooLarge(
                change.path, "the names of what this run changed are too many or too long to be written down"
            )


def _alike(status: os.stat_result, old: os.stat_result) -> bool:
    """As far as can be told without reading."""
    return (status.st_mode, status.st_mtime_ns) == (old.st_mode, old.st_mtime_ns) and (
        status.st_size == old.st_size or not stat.S_ISREG(status.st_mode)
    )


def _text(parts: Parts) -> str:
    return to_text(b"/".join(parts[1:])) or "."
