"""Moves what a run staged down into the committed tree. It is a redo: done again, from wherever it was cut short, it
ends in the same tree.

1. Before `Verified`, what is staged is durable (`prepare`).
2. Before any name changes, the old contents that are about to lose theirs are durable in `blobs`. What somebody has
   put in the place of one is not that content, and belongs to no version: it is not kept.
3. A staged file leaves the stage by the one rename that puts it in its place. So a file that is still staged has its
   old content in place, and one that is not has arrived, which its digest must prove.
4. All is removed first and then put, parents before what is in them. A directory goes by one rename into the stage,
   with all that it holds: its files were kept by then. One of the user's goes last, and only if it is empty.
5. The stage is discarded when the tree is durable, and not before.

Modes and owners are set again at each redo; so the one thing that a cut may cost is the time of a directory.

In a directory of the user's (`descent.Tree.shared`) others may write as well. What is found there is copied and not
adopted: its owner, its mode and its other names are none of ours. What is neither what the run found nor what it left
is the user's, who has changed it since it was verified: it stays, with all that is in a directory that was to go, and
nothing halts. Where a file was to replace a directory that holds more than the run found, the directory stays as it
is. The caller is told; the next look at the directory takes it in (`census`). A name that was free is taken only if it
still is; what somebody writes to a file between the last look at it and the rename over it is lost.
"""

import errno
import os
import secrets
import stat
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from itertools import compress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from holdfast import durable
from holdfast.blobs.local import LocalBlobs
from holdfast.errors import SessionHalted
from holdfast.faults import crashpoint
from holdfast.paths import to_text
from holdfast.records import Change
from holdfast.resources import descent, theirs
from holdfast.resources.descent import Cursor, Parts, Tree, kind_of, look, owner_of, parts_of
from holdfast.resources.handles import copy_content
from holdfast.resources.hashing import digest
from holdfast.resources.intact import Intact
from holdfast.resources.workspace import remove_tree

_REMOVED = "removed-"
_MADE = b"made-"
_NEW_DIRECTORY_MODE = 0o755


def prepare(stage: Path, changes: Sequence[Change]) -> None:
    """Make durable what is staged, and where."""
    put = sorted(parts_of(change) for change in changes if change.action != "removed")
    if len(put) > durable.MANY:
        durable.sync_filesystem(stage)
    elif put:
        with Cursor(stage) as cursor:
            for parts in put:
                _sync_file(cursor, parts)
            _sync_directories(cursor, {parts[:depth] for parts in put for depth in range(len(parts) + 1)})
        durable.sync_directory(stage.parent)
    crashpoint("publish.prepared")


def publish(
    stage: Path,
    files: Path | Tree,
    changes: Sequence[Change],
    blobs: LocalBlobs,
    *,
    redo: bool,
    intact: Intact | None = None,
    keep_old: bool = True,
    same_inode: Container[Parts] = (),
) -> list[str]:
    """Make `files` what the changes say; durable when it returns, and the stage is gone. Returns what was left to the
    user, who had changed it.

    Files in `same_inode` that have no other name are written into, where they are, instead of being replaced (see
    `handles`). Until that is durable they stay in the stage as well, so that a redo knows no difference.

    What `intact` does not know as committed is hashed before it is kept.

    `redo` says that it may have been begun before: then whatever is published is hashed again. Raises SessionHalted if
    something is not what the changes say.
    """
    stage.mkdir(mode=0o700, exist_ok=True)  # gone if all but the last step was done
    tree = files if isinstance(files, Tree) else Tree(files)
    with _Publishing(stage, tree, redo=redo, same_inode=same_inode) as publishing:
        ordered = publishing.leave_what_holds_more(sorted(changes, key=parts_of))
        removed = [change for change in ordered if change.action == "removed"]
        put = [change for change in ordered if change.action != "removed"]
        if keep_old:
            publishing.keep_old(ordered, blobs, intact)
        for change in removed if tree.shared is None else reversed(removed):
            publishing.remove(change)
        for change in put:
            publishing.put(change)
        publishing.sync(tree.root)
    crashpoint("publish.synced")
    discard(stage)
    crashpoint("publish.discarded")
    return publishing.theirs


def discard(stage: Path) -> None:
    """Remove a stage and its work directory, as far as they are there."""
    remove_tree(stage)
    remove_tree(stage.with_name(f"{stage.name}.work"))


class _Publishing:
    """Two places that move together: what is staged, and where it belongs."""

    def __init__(self, stage: Path, files: Tree, *, redo: bool, same_inode: Container[Parts]) -> None:
        self._redo = redo
        self._shared = files.shared is not None
        self.theirs: list[str] = []
        """What the user has changed since the run found or left it."""
        self._same_inode = same_inode
        self._trash = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._staged = Cursor(stage)
        self._place = Cursor(files)
        self._touched: dict[Parts, tuple[int, int] | None] = {}
        """Directories whose names change, and the times that the guest saw on them."""

    def leave_what_holds_more(self, changes: list[Change]) -> list[Change]:
        """The changes, less those of directories of the user's that files were to replace and that hold something else
        than what is to go: to take that away, and then find that the rest is in the way, would leave neither."""
        if not self._shared:
            return changes
        going = {parts_of(change): change for change in changes if change.action == "removed"}
        put = [parts_of(change) for change in changes if change.action != "removed" and change.kind != "directory"]
        stay = {parts for parts in put if theirs.holds_more(parts, going, self._place)}
        if not stay:
            return changes
        goes_on = [stay.isdisjoint(_with_above(parts_of(change))) for change in changes]
        self.theirs += [change.path for change, goes in zip(changes, goes_on, strict=True) if not goes]
        return list(compress(changes, goes_on))

    def keep_old(self, changes: Iterable[Change], blobs: LocalBlobs, intact: Intact | None) -> None:
        for change in changes:
            if not change.before or change.before == change.sha256 or not self._is_old_in_place(change):
                continue
            if self._shared or blobs.has(change.before) or self._is_as_committed(change, intact):
                self._adopt(parts_of(change), change.before, blobs)
                crashpoint("publish.kept")
        blobs.sync()

    def remove(self, change: Change) -> None:
        *parent, name = parts_of(change)
        old = look(name, dir_fd=self._place.fd) if self._place.go(parent) else None
        if old is None or kind_of(old) != change.kind:  # done before; something else may be there now
            return
        if self._shared and stat.S_ISREG(old.st_mode) and theirs.digest_of(name, self._place.fd) != change.before:
            return self.theirs.append(change.path)
        if self._shared and stat.S_ISLNK(old.st_mode) and theirs.is_relinked(change, name, place=self._place.fd):
            return self.theirs.append(change.path)
        self._touch(tuple(parent))
        self._clear(name)
        crashpoint("publish.removed")

    def put(self, change: Change) -> None:
        *parent, name = parts_of(change)
        staged = look(name, dir_fd=self._staged.fd) if self._staged.go(parent) else None
        if not self._go_to_place(parent):
            return self.theirs.append(change.path)
        self._touch(tuple(parent))
        if self._shared and theirs.has_arrived(change, name, place=self._place.fd):
            return None
        if self._shared and theirs.is_changed(change, name, place=self._place.fd, staged=self._staged.fd):
            return self.theirs.append(change.path)
        if change.kind == "directory":
            self._put_directory(change, name, staged)
        elif staged is not None and kind_of(staged) == change.kind:
            self._put_leaf(change, name)
        elif not self._shared:
            _confirm(change, name, dir_fd=self._place.fd)

    def sync(self, files: Path) -> None:
        """Only now: each name that is put or removed changes its directory's time."""
        for parts, times in sorted(self._touched.items()):
            if times and self._place.go(parts):
                with suppress(PermissionError):  # a directory of somebody else's who lets us write there
                    os.utime(self._place.fd, ns=times)
        if len(self._touched) > durable.MANY:
            durable.sync_filesystem(files)
        else:
            _sync_directories(self._place, self._touched)

    # -- the single steps ----------------------------------------------------------------------------------------

    def _is_old_in_place(self, change: Change) -> bool:
        """By rule 3; what a directory replaces has no staged file to tell it, but is none itself."""
        *parent, name = parts_of(change)
        old = look(name, dir_fd=self._place.fd) if self._place.go(parent) else None
        if old is None or not stat.S_ISREG(old.st_mode):
            return False
        if change.action == "removed" or change.kind == "directory":
            return True
        return self._staged.go(parent) and look(name, dir_fd=self._staged.fd) is not None

    def _is_as_committed(self, change: Change, intact: Intact | None) -> bool:
        """Nobody else is to write here; but under a digest are the bytes of that digest or nothing."""
        name = parts_of(change)[-1]
        status = look(name, dir_fd=self._place.fd)
        if intact is not None and status is not None and intact.knows(change.path, status):
            return True
        with durable.closing_fd(descent.open_regular(name, dir_fd=self._place.fd)) as file:
            return digest(file)[0] == change.before

    def _adopt(self, parts: Parts, sha256: str, blobs: LocalBlobs) -> None:
        name = parts[-1]
        try:
            if parts not in self._same_inode and not self._shared:
                return blobs.adopt(self._place.fd, name, sha256, sync=False)
        except PermissionError:  # to be copied, and closed to its owner
            pass
        if not blobs.has(sha256):
            with os.fdopen(descent.open_regular(name, dir_fd=self._place.fd), "rb") as file:
                blobs.put_stream(file)

    def _put_directory(self, change: Change, name: bytes, staged: os.stat_result | None) -> None:
        old = look(name, dir_fd=self._place.fd)
        if old is None or not stat.S_ISDIR(old.st_mode):
            if staged is None and self._shared:
                return
            if staged is None:
                _halt(change, expected="a directory", found=kind_of(old) if old else None)
            self._clear(name)
            durable.mkdir(name, dir_fd=self._place.fd)
        if staged is not None:
            descent.own(name, owner_of(staged), dir_fd=self._place.fd)
        descent.chmod(name, change.mode, dir_fd=self._place.fd)
        self._touch(parts_of(change))
        crashpoint("publish.made")

    def _put_leaf(self, change: Change, name: bytes) -> None:
        if self._redo:  # before it replaces anything
            _confirm(change, name, dir_fd=self._staged.fd)
        old = look(name, dir_fd=self._place.fd)
        if old is not None and stat.S_ISDIR(old.st_mode) and not self._clear(name):
            return self.theirs.append(change.path)
        if old is not None and self._keeps_inode(change, old):
            return self._write_into(name)
        try:
            move = durable.rename_new if self._shared and change.action == "added" else durable.rename
            move(name, name, src_dir=self._staged.fd, dst_dir=self._place.fd)
        except FileExistsError:  # it came in this very moment
            return self.theirs.append(change.path)
        crashpoint("publish.renamed")

    def _keeps_inode(self, change: Change, old: os.stat_result) -> bool:
        """Not where the file has another name: what that one shows stays as it is. Who opened such a file for writing
        saw the inode of his layer and never this one, and so goes on with the one that the rename puts here."""
        return stat.S_ISREG(old.st_mode) and old.st_nlink == 1 and parts_of(change) in self._same_inode

    def _write_into(self, name: bytes) -> None:
        with durable.closing_fd(descent.open_regular(name, dir_fd=self._staged.fd)) as source:
            status = os.fstat(source)
            target = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._place.fd)
            with durable.closing_fd(target):
                os.ftruncate(target, 0)
                crashpoint("publish.emptied")
                copy_content(source, target, status.st_size)
                os.fchmod(target, stat.S_IMODE(status.st_mode))
                os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
                durable.sync_file(target)
        crashpoint("publish.written")
        durable.unlink(name, dir_fd=self._staged.fd)

    def _clear(self, name: bytes) -> bool:
        """Make a name free. False: it is a directory of the user's, and somebody has put something there."""
        old = look(name, dir_fd=self._place.fd)
        if old is None:
            return True
        if not stat.S_ISDIR(old.st_mode):
            durable.unlink(name, dir_fd=self._place.fd)
        elif self._shared:
            return _remove_empty(name, dir_fd=self._place.fd)
        else:
            # Moving a directory changes its "..": that takes write permission on itself.
            descent.chmod(name, 0o700, dir_fd=self._place.fd)
            durable.rename(name, _REMOVED + secrets.token_hex(8), src_dir=self._place.fd, dst_dir=self._trash)
        return True

    def _go_to_place(self, parent: list[bytes]) -> bool:
        """Directories that no change names are made as they are staged (`restoring.fill_stage`). False: something of
        the user's is in the way."""
        if self._place.go(parent):
            return True
        while (at := self._place.at) != tuple(parent):
            name = parent[len(at)]
            if self._shared and look(name, dir_fd=self._place.fd) is not None:
                return False
            staged = look(name, dir_fd=self._staged.fd) if self._staged.go(at) else None
            self._touch(at)
            self._clear(name)
            self._make_directory(name, like=staged)
            self._place.enter(name)
        self._staged.go(parent)
        return True

    def _make_directory(self, name: bytes, *, like: os.stat_result | None) -> None:
        """Whole, by one rename: no change says what it is to be, and so no redo could set its mode and its owner."""
        made = _MADE + secrets.token_hex(8).encode()
        mode, owner = (stat.S_IMODE(like.st_mode), owner_of(like)) if like else (_NEW_DIRECTORY_MODE, None)
        descent.make_directory(made, dir_fd=self._trash, mode=mode, owner=owner)
        durable.rename_new(made, name, src_dir=self._trash, dst_dir=self._place.fd)

    def _touch(self, directory: Parts) -> None:
        if directory not in self._touched:
            status = os.fstat(self._staged.fd) if self._staged.go(directory) else None
            self._touched[directory] = (status.st_atime_ns, status.st_mtime_ns) if status else None

    def __enter__(self) -> "_Publishing":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._staged.close()
        self._place.close()
        os.close(self._trash)


def _with_above(parts: Parts) -> list[Parts]:
    return [parts[: depth + 1] for depth in range(len(parts))]


def _remove_empty(name: bytes, *, dir_fd: int) -> bool:
    try:
        os.rmdir(name, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _confirm(change: Change, name: bytes, *, dir_fd: int) -> None:
    """Halt unless this is what the change says."""
    status = look(name, dir_fd=dir_fd)
    found: str | None = kind_of(status) if status else None
    if found != change.kind:
        _halt(change, expected=f"a {change.kind}", found=found)
    if change.kind == "symlink":
        target = to_text(os.readlink(name, dir_fd=dir_fd))
        if target != change.target:
            _halt(change, expected=f"a link to {change.target}", found=target)
    elif change.sha256:
        with durable.closing_fd(descent.open_regular(name, dir_fd=dir_fd)) as file:
            sha256, _ = digest(file)
        if sha256 != change.sha256:
            _halt(change, expected=change.sha256, found=sha256)


def _halt(change: Change, *, expected: str, found: str | None) -> NoReturn:
    raise SessionHalted(
        f"{change.area}/{change.path} is not what was verified: expected {expected}, found {found or 'nothing'}",
        hint="something outside of Holdfast changed the session's files; `holdfast verify` says what still holds",
    )


def _sync_file(cursor: Cursor, parts: Parts) -> None:
    """What is no regular file is durable with its directory."""
    status = look(parts[-1], dir_fd=cursor.fd) if cursor.go(parts[:-1]) else None
    if status is not None and stat.S_ISREG(status.st_mode):
        with durable.closing_fd(descent.open_regular(parts[-1], dir_fd=cursor.fd)) as file:
            durable.sync_file(file)


def _sync_directories(cursor: Cursor, directories: Iterable[Parts]) -> None:
    for parts in sorted(directories):
        if cursor.go(parts):
            durable.sync_directory(cursor.fd)
