"""Changes to the workspace that no code made: back to an older version, and what callers write from outside.

Each fills a fresh stage, and goes on from there like any run: verified, journalled, published. Of an older version
come back files, directories and symbolic links, with their modes and targets. What does not is named (`unmade`):
FIFOs, sockets, and what a journal of an earlier build tells too little of. Times are new, and a file that had several
names comes back as several files.
"""

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from holdfast import durable
from holdfast.blobs.local import LocalBlobs, copy_as
from holdfast.errors import CkptUnknown, FileUnknown, InvalidSetting
from holdfast.paths import to_bytes, to_text
from holdfast.records import Change, FileEntry
from holdfast.resources import descent, entries
from holdfast.resources.descent import Cursor, Owner, Parts, Tree, kind_of, look, owner_of, parts_of
from holdfast.resources.entries import Entry

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
    """What leads from one set of files to another; `plan_back` knows of modes, links and directories too."""
    now = {path: entries.of_file(entry) for path, entry in current.items() if target.get(path) is not entry}
    wanted = {path: entries.of_file(entry) for path, entry in target.items() if current.get(path) is not entry}
    return entries.all_leading(wanted, now)


def plan_back(later: Iterable[Sequence[Change]]) -> tuple[list[Change], list[str]]:
    """What leads back over these runs' changes, the latest first; and what of that cannot be made again."""
    was, now, gone = dict[str, Entry](), dict[str, Entry](), list[str]()
    for path, (then, here) in entries.back_over(later).items():
        if then and not then.can_be_made and entries.differ(then, here):
            gone.append(path)
            if then.kind is None and entries.kind_of(here) != "file":  # it was no file, and may be what it was
                continue
        elif then:
            was[path] = then
        if here:
            now[path] = here
    return entries.all_leading(was, now), sorted(gone)


def put_again(entry: FileEntry, mode: int | None) -> Change:
    """What brings a committed file back that somebody has changed on the host."""
    committed = msgspec.structs.replace(entries.of_file(entry), mode=mode)
    return entries.leading(entry.path, to=committed, now=committed)


def not_kept(changes: Sequence[Change], blobs: LocalBlobs) -> list[str]:
    """The files that changes put and whose content is in no blob: somebody changed them on the host before it could be
    kept, or it is too old. What changes only the mode has it in place."""
    put = [change for change in changes if change.action != "removed" and change.kind == "file"]
    return [change.path for change in put if change.sha256 != change.before and not blobs.has(change.sha256)]


def hold_others(changes: Sequence[Change], files: Path | Tree) -> list[str]:
    """Directories that are to go and hold something that no version has: somebody put it there on the host."""
    going, stay = {parts_of(change) for change in changes if change.action == "removed"}, dict[Parts, str]()
    with Cursor(files) as committed:
        for change in sorted(changes, key=parts_of, reverse=True):  # what is in a directory comes before it
            parts = parts_of(change)
            if (change.action, change.kind) != ("removed", "directory") or not committed.go(parts):
                continue
            inside = {(*parts, os.fsencode(name)) for name in os.listdir(committed.fd)}
            if inside - going or not inside.isdisjoint(stay):
                stay[parts] = change.path
    return sorted(stay.values())


def fill_stage(
    stage: Path, changes: Sequence[Change], blobs: LocalBlobs, *, owner: Owner | None, files: Path | Tree
) -> None:
    """Make what changes put in a fresh stage: files from blobs, or, where only their mode changes, from what is
    committed. `prepare` makes them durable."""
    with Cursor(stage) as staged, Cursor(files) as committed:
        for change in sorted(changes, key=parts_of):
            if change.action == "removed" or change.kind == change.before_kind == "directory":
                continue
            *parent, name = parts_of(change)
            _make_parents(staged, parent, None, owner=owner)
            if change.kind == "directory":
                descent.make_directory(name, dir_fd=staged.fd, mode=change.mode, owner=owner)
            elif change.kind == "symlink":
                durable.symlink(to_bytes(change.target), name, dir_fd=staged.fd)
                descent.own(name, owner, dir_fd=staged.fd)
            elif change.sha256 == change.before and not blobs.has(change.sha256):
                _copy_committed(change, committed, staged.fd, owner=owner)
            else:
                blobs.copy_to(change.sha256, staged.fd, name, mode=change.mode, owner=owner)


def _copy_committed(change: Change, committed: Cursor, staged: int, *, owner: Owner | None) -> None:
    *parent, name = parts_of(change)
    with suppress(FileNotFoundError):
        if committed.go(parent):
            with os.fdopen(descent.open_regular(name, dir_fd=committed.fd), "rb") as source:
                if copy_as(name, source, change.sha256, dir_fd=staged, mode=change.mode, owner=owner):
                    return
    raise CkptUnknown(
        f"{change.path} was changed on the host, past Holdfast, in this very moment",
        hint="restore again: it is left as it is then",
    )


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
        found = {parts: entries.found_at(name, old, dir_fd=committed.fd)}
        if stat.S_ISDIR(old.st_mode):
            committed.enter(name)
            for below, status in committed.walk():
                found[(*parts, *below)] = entries.found_at(below[-1], status, dir_fd=committed.fd)
    named = ((to_text(b"/".join(each[1:])), found[each]) for each in sorted(found))
    return [entries.leading(path, to=None, now=_with_content(entry, known.get(path))) for path, entry in named]


def _with_content(found: Entry, known: FileEntry | None) -> Entry:
    if known is None or found.kind != "file":
        return found
    return msgspec.structs.replace(entries.of_file(known), mode=found.mode)


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
