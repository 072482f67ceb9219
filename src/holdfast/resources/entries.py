"""What is at a path in one version or another, and the change that leads from the one to the other.

A change tells both: what it put (`after`), and what was there (`before`). Read from the latest run back, the first
tells what a path is now, and the second what it was before the earliest of these runs. Journals of earlier builds do
not tell the modes and links that were there.
"""

import os
import stat
from collections.abc import Iterable, Mapping

import msgspec

from holdfast.paths import to_text
from holdfast.records import Change, FileEntry, Kind, SavedFile
from holdfast.resources import descent
from holdfast.resources.descent import Cursor, Parts, look, parts_of

_NEW_MODES: dict[Kind | None, int] = {"file": 0o644, "directory": 0o755}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Whatever has a name."""

    kind: Kind | None
    """None: nobody wrote it down."""
    sha256: str = ""
    bytes: int = 0
    mode: int | None = None
    """None: nobody wrote it down, or links have none."""
    target: str = ""

    @property
    def can_be_made(self) -> bool:
        return self.kind == "directory" or bool(self.sha256 or self.target)


def of_file(entry: FileEntry) -> Entry:
    mode = entry.mode if isinstance(entry, SavedFile) else None
    return Entry(kind="file", sha256=entry.sha256, bytes=entry.bytes, mode=mode)


def after(change: Change) -> Entry | None:
    """What a change put in its place."""
    if change.action == "removed":
        return None
    mode = None if change.kind == "symlink" else change.mode
    return Entry(kind=change.kind, sha256=change.sha256, bytes=change.bytes, mode=mode, target=change.target)


def before(change: Change) -> Entry | None:
    """What a change found in its place."""
    if change.before:
        return Entry(kind="file", sha256=change.before, bytes=change.before_bytes, mode=change.before_mode)
    if change.action == "added":
        return None
    kind = change.before_kind or (change.kind if change.action == "removed" else None)
    return Entry(kind=kind, mode=change.before_mode, target=change.before_target)


def at(committed: Cursor, parts: Parts) -> Entry | None:
    """What is committed there; of a file not its content."""
    *parent, name = parts
    status = look(name, dir_fd=committed.fd) if committed.go(parent) else None
    return None if status is None else found_at(name, status, dir_fd=committed.fd)


def found_at(name: bytes, status: os.stat_result, *, dir_fd: int) -> Entry:
    if stat.S_ISLNK(status.st_mode):
        return Entry(kind="symlink", target=to_text(os.readlink(name, dir_fd=dir_fd)))
    return Entry(kind=descent.kind_of(status), mode=stat.S_IMODE(status.st_mode))


def kind_of(entry: Entry | None) -> Kind | None:
    return entry.kind if entry else None


def differ(wanted: Entry | None, found: Entry | None) -> bool:
    """A mode that is not known is taken for any."""
    if wanted is None or found is None:
        return wanted is not found
    if wanted.mode is None:
        found = msgspec.structs.replace(found, mode=None)
    return wanted != found


def leading(path: str, *, to: Entry | None, now: Entry | None) -> Change:
    """The change that makes the one of the other."""
    was: Entry = now or Entry(kind=None)
    change = Change(
        path=path,
        action="changed" if now else "added",
        before=was.sha256,
        before_bytes=was.bytes,
        before_mode=was.mode,
        before_kind=None if was.sha256 else was.kind,
        before_target=was.target,
    )
    if to is None:
        return msgspec.structs.replace(change, action="removed", kind=was.kind or "file")
    return msgspec.structs.replace(
        change, kind=to.kind or "file", sha256=to.sha256, bytes=to.bytes, mode=_mode(to, now), target=to.target
    )


def _mode(wanted: Entry, now: Entry | None) -> int:
    """Where it is not known, the present one stays."""
    if wanted.mode is not None:
        return wanted.mode
    if now is not None and now.kind == wanted.kind and now.mode is not None:
        return now.mode
    return _NEW_MODES.get(wanted.kind, 0)


def all_leading(wanted: Mapping[str, Entry], now: Mapping[str, Entry]) -> list[Change]:
    """Parents first."""
    found = ((path, wanted.get(path), now.get(path)) for path in now.keys() | wanted.keys())
    return sorted((leading(path, to=to, now=at) for path, to, at in found if differ(to, at)), key=parts_of)


def back_over(latest_first: Iterable[Iterable[Change]]) -> dict[str, tuple[Entry | None, Entry | None]]:
    """Of each path that these runs changed: what it was before all of them, and what it is now."""
    was, now = dict[str, Entry | None](), dict[str, Entry | None]()
    for changes in latest_first:
        for change in changes:
            if change.area == "data":
                now.setdefault(change.path, after(change))
                was[change.path] = before(change)
    return {path: (was[path], now[path]) for path in was}
