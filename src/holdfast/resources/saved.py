"""Files that a run saved on its way and that outlive it: what puts them in their place.

All but the surroundings (`in_full`) goes by what was written down when they were saved, so that it is the same however
often a crash has it done again.
"""

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast.paths import to_text
from holdfast.records import Change, FileEntry, SavedFile
from holdfast.resources import descent, entries
from holdfast.resources.descent import Cursor, Parts, Tree, look, parts_of
from holdfast.resources.entries import Entry

_AREA = b"data"


def plan_saved(current: Mapping[str, FileEntry], saved: Sequence[SavedFile]) -> list[Change]:
    """What puts files on top of a version's that were saved, in this order.

    As of a run that did it (`layers`, rule 1), a file where a directory was is "changed", and what was in that is
    removed: in a directory of the user's nothing else makes way for it.
    """
    if not saved:
        return []
    last = _last(saved)
    now = {path: entries.of_file(current[path]) for path in _in_the_way(current, last)}
    now |= {path: found for path, entry in last.items() if (found := _found_by(entry, current.get(path)))}
    changes = entries.all_leading({path: entries.of_file(entry) for path, entry in last.items()}, now)
    told = {change.path: change for entry in last.values() for change in entry.way}
    return sorted((told | {change.path: change for change in changes}).values(), key=parts_of)


def replacing(saved: SavedFile, files: Tree, *, since_ns: int | None = None) -> SavedFile:
    """With what is committed in its place, and on the way to it. In a directory of the user's, a link or a pipe that is
    newer than `since_ns` came while the run went on: it is the user's, and stays."""
    parts = (_AREA, *descent.split(saved.path))
    with Cursor(files) as committed:
        way = [_to_directory(parts[:depth], committed, since_ns) for depth in range(2, len(parts))]
        found = _found_at(parts, committed, since_ns)
        inside = _inside(parts, committed, since_ns) if found is not None and found.kind == "directory" else []
    saved = msgspec.structs.replace(saved, way=[*filter(None, way), *inside])
    if found is None:
        return saved
    kind = None if found.kind == "file" else found.kind
    return msgspec.structs.replace(saved, before_kind=kind, before_mode=found.mode, before_target=found.target)


def _found_at(parts: Parts, committed: Cursor, since_ns: int | None) -> Entry | None:
    *parent, name = parts
    status = look(name, dir_fd=committed.fd) if committed.go(parent) else None
    if status is None or (not stat.S_ISDIR(status.st_mode) and _is_newer(status, since_ns)):
        return None  # a directory that was there is newer as soon as something is put into it
    return entries.found_at(name, status, dir_fd=committed.fd)


def _is_newer(status: os.stat_result, since_ns: int | None) -> bool:
    """Not asked of files: these are compared by their content (`theirs`)."""
    return since_ns is not None and not stat.S_ISREG(status.st_mode) and status.st_ctime_ns > since_ns


def _to_directory(parts: Parts, committed: Cursor, since_ns: int | None) -> Change | None:
    """What makes a directory of a link or a pipe. A regular file is known to be in the way (`_in_the_way`)."""
    found = _found_at(parts, committed, since_ns)
    if found is None or found.kind in ("file", "directory"):
        return None
    return entries.leading(to_text(b"/".join(parts[1:])), to=Entry(kind="directory"), now=found)


def _inside(parts: Parts, committed: Cursor, since_ns: int | None) -> list[Change]:
    """What takes away all that is in a directory, but for the files that its version knows."""
    if not committed.go(parts):
        return []
    gone = []
    for below, status in committed.walk(into=lambda *_: True):
        if not stat.S_ISREG(status.st_mode) and not _is_newer(status, since_ns):
            found = entries.found_at(below[-1], status, dir_fd=committed.fd)
            gone.append(entries.leading(to_text(b"/".join((*parts[1:], *below))), to=None, now=found))
    return gone


def _found_by(saved: SavedFile, known: FileEntry | None) -> Entry | None:
    """What was committed in its place when a file was saved: nothing else is, as long as its run goes on."""
    if known is not None:
        return msgspec.structs.replace(entries.of_file(known), mode=saved.before_mode)
    if saved.before_kind is None:
        return None
    return Entry(kind=saved.before_kind, mode=saved.before_mode, target=saved.before_target)


def _last(saved: Sequence[SavedFile]) -> dict[str, SavedFile]:
    """No name is a file and a directory at once: what was saved later stays."""
    later, last = _Places(), dict[str, SavedFile]()
    for entry in reversed(saved):
        if entry.path not in last and not later.collide(entry.path):
            last[entry.path] = entry
        later.take(entry.path)
    return last


def _in_the_way(files: Iterable[str], saved: Iterable[str]) -> list[str]:
    """The files of a version that have no place beside all that was saved."""
    taken = _Places()
    for path in saved:
        taken.take(path)
    return [path for path in files if taken.collide(path)]


class _Places:
    """Names that files have, and the directories that these need."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._lengths: set[int] = set()
        """Of the files' paths: a deep path has few beginnings of these lengths."""
        self._directories: set[str] = set()

    def take(self, path: str) -> None:
        self._files.add(path)
        self._lengths.add(len(path))
        end = path.rfind("/")
        while end > 0 and path[:end] not in self._directories:
            self._directories.add(path[:end])
            end = path.rfind("/", 0, end)

    def collide(self, path: str) -> bool:
        """Whether a file cannot be there beside them, unless as one of them."""
        return path in self._directories or any(
            path.startswith("/", length) and path[:length] in self._files for length in self._lengths
        )


def _above(path: str) -> list[str]:
    """The directories that a file is in, but for the area's own."""
    return [path[:at] for at, letter in enumerate(path) if letter == "/"]


def in_full(changes: Sequence[Change], files: Path | Tree) -> list[Change]:
    """What puts saved files, with all that one needs to go back over it: the modes of what makes way, and the
    directories that are made or take a link's place.

    Publishing that a crash has cut short leaves less to be found: who goes back over it then gets the modes of new
    files, and keeps empty directories.
    """
    with Cursor(files) as committed:
        told = {parts_of(change): _with_mode(change, committed) for change in changes}
        for parts in [parts_of(change) for change in changes if change.action != "removed"]:
            for depth in range(2, len(parts)):
                found = entries.at(committed, parts[:depth])
                if parts[:depth] not in told and entries.kind_of(found) != "directory":
                    path = to_text(b"/".join(parts[1:depth]))
                    told[parts[:depth]] = entries.leading(path, to=Entry(kind="directory"), now=found)
    return [told[parts] for parts in sorted(told)]


def _with_mode(change: Change, committed: Cursor) -> Change:
    found = entries.at(committed, parts_of(change)) if change.action == "removed" else None
    if found is None or found.kind != change.kind:
        return change
    return msgspec.structs.replace(change, before_mode=found.mode)
