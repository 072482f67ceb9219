"""Changes to the workspace that no code made: back to an older version, and what callers write from outside.

Each fills a fresh stage, and goes on from there like any run: verified, journalled, published. Of an older version
come back the files and their bytes, with the mode of new ones; empty directories and links stay as they are now (no
manifest names them), unless a file needs their place.
"""

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from holdfast import durable
from holdfast.blobs.local import LocalBlobs
from holdfast.errors import FileUnknown, InvalidSetting
from holdfast.paths import to_text
from holdfast.records import Change, FileEntry
from holdfast.resources import descent
from holdfast.resources.descent import Cursor, Owner, Tree, kind_of, look, owner_of, parts_of

_AREA = b"data"
_CHUNK = 1 << 20
_FILE_MODE = 0o644
_DIRECTORY_MODE = 0o755


# -- back to an older version ------------------------------------------------------------------------------------


def undo(files: Mapping[str, FileEntry], changes: Sequence[Change]) -> dict[str, FileEntry]:
    """The files before a run's changes. Run by run it leads back from the current version to any other."""
    before = dict(files)
    for change in changes:
        if change.area != "data":
            continue
        before.pop(change.path, None)
        if change.before:
            before[change.path] = FileEntry(path=change.path, sha256=change.before, bytes=change.before_bytes)
    return before


def plan_restore(current: Mapping[str, FileEntry], target: Mapping[str, FileEntry]) -> list[Change]:
    """What leads from one version's files to another's."""
    changes = [_removal(entry) for path, entry in current.items() if path not in target]
    changes += [_put(entry, current.get(path)) for path, entry in target.items() if _differs(entry, current.get(path))]
    return sorted(changes, key=parts_of)


def plan_saved(current: Mapping[str, FileEntry], saved: Sequence[FileEntry]) -> list[Change]:
    """What puts files on top of a version's that were saved, in this order.

    As of a run that did it (`layers`, rule 1), a file where a directory was is "changed", and the directories that were
    in that are removed: in one of the user's nothing else makes way for it.
    """
    changes = plan_restore(current, with_saved(current, saved))
    emptied = {above for change in changes if change.action == "removed" for above in _above(change.path)}
    replaced = {change.path for change in changes} & emptied
    if not replaced:
        return changes
    changes = [msgspec.structs.replace(each, action="changed") if each.path in replaced else each for each in changes]
    inner = [path for path in emptied if not replaced.isdisjoint(_above(path))]
    changes += [Change(path=path, action="removed", kind="directory") for path in inner]
    return sorted(changes, key=parts_of)


def with_saved(files: Mapping[str, FileEntry], saved: Sequence[FileEntry]) -> dict[str, FileEntry]:
    """The files of a version with those on top that were saved, in this order. No name is a file and a directory at
    once: what was saved later stays, and of the version only what has a place beside all that stays."""
    later, last = _Places(), dict[str, FileEntry]()
    for entry in reversed(saved):
        if entry.path not in last and not later.collide(entry.path):
            last[entry.path] = entry
        later.take(entry.path)
    stays = _Places()
    for path in last:
        stays.take(path)
    return {path: entry for path, entry in files.items() if not stays.collide(path)} | last


class _Places:
    """Names that files have, and the directories that these need."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._directories: set[str] = set()

    def take(self, path: str) -> None:
        self._files.add(path)
        self._directories.update(_above(path))

    def collide(self, path: str) -> bool:
        """Whether a file cannot be there beside them, unless as one of them."""
        return path in self._directories or any(above in self._files for above in _above(path))


def _above(path: str) -> list[str]:
    """The directories that a file is in, but for the area's own."""
    return [path[:at] for at, letter in enumerate(path) if letter == "/"]


def put_again(entry: FileEntry) -> Change:
    """What brings a committed file back that somebody has changed on the host."""
    return _put(entry, entry)


def not_kept(changes: Sequence[Change], blobs: LocalBlobs) -> list[str]:
    """The files that changes put and whose content is in no blob: somebody changed them on the host before it could be
    kept, or it is too old."""
    put = [change for change in changes if change.action != "removed" and change.kind == "file"]
    return [change.path for change in put if not blobs.has(change.sha256)]


def fill_stage(stage: Path, changes: Sequence[Change], blobs: LocalBlobs, *, owner: Owner | None) -> None:
    """Write the files that changes put from blobs into a fresh stage. `prepare` makes them durable."""
    with Cursor(stage) as staged:
        for change in sorted(changes, key=parts_of):
            if change.action == "removed" or change.kind != "file":
                continue
            *parent, name = parts_of(change)
            _make_parents(staged, parent, None, owner=owner)
            blobs.copy_to(change.sha256, staged.fd, name, mode=change.mode or _FILE_MODE, owner=owner)


def _differs(entry: FileEntry, now: FileEntry | None) -> bool:
    return now is None or now.sha256 != entry.sha256


def _put(entry: FileEntry, now: FileEntry | None) -> Change:
    return Change(
        path=entry.path,
        action="changed" if now else "added",
        sha256=entry.sha256,
        bytes=entry.bytes,
        mode=_FILE_MODE,
        before=now.sha256 if now else "",
        before_bytes=now.bytes if now else 0,
    )


def _removal(entry: FileEntry) -> Change:
    return Change(path=entry.path, action="removed", before=entry.sha256, before_bytes=entry.bytes)


# -- written from outside ----------------------------------------------------------------------------------------


def put_file(
    stage: Path, path_text: str, source: BinaryIO, *, owner: Owner | None, files: Path | Tree, mode: int = _FILE_MODE
) -> FileEntry:
    """Write a file into a fresh stage, in place of any file or link that is committed there.

    Directories on the way are as they are in `files` (the session's), or new. `layers.read_changes` then says what
    changed.
    """
    *parent, name = (_AREA, *descent.split(path_text))
    with Cursor(stage) as staged, Cursor(files) as committed:
        _make_parents(staged, parent, committed, owner=owner)
        old = look(name, dir_fd=committed.fd) if committed.go(parent) else None
        if old is not None and stat.S_ISDIR(old.st_mode):
            raise InvalidSetting(f"{path_text} is a directory", hint="give the path of a file")
        with durable.temporary(staged.fd) as (file, temporary):
            sha256, size = _copy(source, file)
            if owner is not None:
                os.fchown(file, *owner)
            os.fchmod(file, mode)  # after the owner: a change of that one clears bits
            durable.rename(temporary, name, src_dir=staged.fd, dst_dir=staged.fd)
    return FileEntry(path=to_text(b"/".join((*parent[1:], name))), sha256=sha256, bytes=size)


def plan_removal(path_text: str, *, files: Path | Tree, known: Mapping[str, FileEntry]) -> list[Change]:
    """What removes a file, or a directory with all in it. Nothing need be staged for it."""
    *parent, name = parts = (_AREA, *descent.split(path_text))
    with Cursor(files) as committed:
        old = look(name, dir_fd=committed.fd) if committed.go(parent) else None
        if old is None:
            raise FileUnknown(f"no file {path_text} in the workspace", hint="files() lists what is there")
        found = [(parts, old)]
        if stat.S_ISDIR(old.st_mode):
            committed.enter(name)
            found += [((*parts, *below), status) for below, status in committed.walk()]
    return [_removed(to_text(b"/".join(each[1:])), status, known) for each, status in sorted(found, key=_parts)]


def _parts(found: tuple[descent.Parts, os.stat_result]) -> descent.Parts:
    return found[0]


def _removed(path: str, status: os.stat_result, known: Mapping[str, FileEntry]) -> Change:
    if path in known and stat.S_ISREG(status.st_mode):
        return _removal(known[path])
    return Change(path=path, action="removed", kind=kind_of(status) or "file")


def _make_parents(staged: Cursor, parent: Sequence[bytes], committed: Cursor | None, *, owner: Owner | None) -> None:
    """Go to a directory of the stage, and make what is not there: like the committed one, if there is one."""
    for depth in range(len(parent)):
        if staged.go(parent[: depth + 1]):
            continue
        above, name = parent[:depth], parent[depth]
        old = look(name, dir_fd=committed.fd) if committed and committed.go(above) else None
        if old is not None and not stat.S_ISDIR(old.st_mode):
            where = to_text(b"/".join(parent[1 : depth + 1]))
            raise InvalidSetting(f"{where} is a {kind_of(old)}, not a directory", hint="choose another path")
        mode = stat.S_IMODE(old.st_mode) if old else _DIRECTORY_MODE
        descent.make_directory(name, dir_fd=staged.fd, mode=mode, owner=owner_of(old) if old else owner)
        staged.enter(name)


def _copy(source: BinaryIO, target: int) -> tuple[str, int]:
    sha256, size = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK):
        sha256.update(chunk)
        size += len(chunk)
        durable.write_all(target, chunk)
    return sha256.hexdigest(), size
