"""A session's disk: what is committed of `/mnt/data`, `/tmp` and `$HOME`, and the stages on which runs change them.

    files/{data,tmp,home}    committed: the lower layer
    stages/<stage>[.work]    one run's changes: the upper layer, and the overlay's own directory
    view/                    empty; `sandbox.overlay` builds on it what the guest sees of a shared directory
    blobs/ manifests/ log/   the host's

All in the first two is the guest's: names, depth, links, modes. The host walks it without following a link and without
recursion, and only while it must.

A directory of the user's may stand for `data` (`shared`): what is committed is then that directory itself, `files/data`
stays empty, and /tmp and $HOME begin and end with a stage.
"""

import os
import re
import secrets
import shlex
import stat
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from holdfast import durable
from holdfast.errors import FilesLost, InvalidSetting, SessionHalted
from holdfast.faults import crashpoint
from holdfast.records import Change
from holdfast.resources.census import Census
from holdfast.resources.descent import (
    Cursor,
    Identity,
    Owner,
    Parts,
    Tree,
    chmod,
    identity_of,
    look,
    owner_of,
    parts_of,
)
from holdfast.resources.intact import Intact
from holdfast.resources.measuring import Usage, measure, plus, unlinked_bytes
from holdfast.sandbox.mounts import DIRECTORIES

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_STAGE = re.compile(r"[0-9a-f]{8}")
MOVED = ".holdfast-remove-"
"""How the name begins of what is being removed."""


class Workspace:
    """The directories of one session."""

    def __init__(self, path: Path, *, shared: Path | None = None, identity: Identity | None = None) -> None:
        """`identity` is that of the directory that is `shared`."""
        self.path = path
        self.shared = shared
        self.files = Tree(path / "files", shared, identity)
        self.census: Census | None = None
        """The shared directory as it was when the run began; None: nobody has looked since it was published to."""
        self.intact = Intact(self.files)
        self._places: list[Identity | None] = []
        """Of the areas, since `prepare`."""
        self._guest: int | None = None
        """Whose the stages are, where the host may give files away."""
        self.blobs = path / "blobs"
        self.manifests = path / "manifests"
        self.logs = path / "log"
        self._stages = path / "stages"

    @durable.ours("making the session's directories")
    def create(self, *, owner: int | None) -> None:
        """Make the directories; `owner` is the guest's host uid where the host may give files away."""
        self.path.mkdir(mode=0o700)
        for own in self._own():
            own.mkdir(mode=0o700)
        for name in DIRECTORIES:
            _make_area(self.files.root / name, name, owner)
        self._guest = owner

    @durable.ours("making the session's directories durable")
    def sync(self) -> None:
        """Make the directories last. Before the journal knows of the session: one whose directory is not there was
        deleted (`is_gone`)."""
        for changed in (self.files.root, self.path):
            durable.sync_directory(changed)
        with durable.closing_fd(self._open_parent()) as sessions:
            durable.sync_directory(sessions)

    def _open_parent(self) -> int:
        """It may be a link of the home's owner, to a larger disk."""
        return os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def is_gone(self) -> bool:
        """Whether the session was deleted; not that its directory cannot be reached now."""
        try:
            self.path.lstat()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return False

    def _own(self) -> list[Path]:
        return [self.files.root, self._stages, self.path / "view", self.blobs, self.manifests, self.logs]

    def refuse_foreign(self) -> None:
        """In a directory of the user's, what is ours may have been exchanged: a link would lead us anywhere. Raises
        InvalidSetting: it can be put right, and nothing was done by it. The directory of manifests may be gone: `mend`
        makes it again, and `repair` what was in it."""
        for own in (self.path, *self._own()) if self.shared is not None else ():
            if own != self.manifests or os.path.lexists(own):
                refuse_foreign(own)

    def try_writing(self) -> None:
        """Write a file and remove it. Raises DiskFailed."""
        with durable.ours("a run's write"):
            durable.write_file(self.path / "try", bytes(1 << 12))
            (self.path / "try").unlink()

    @durable.ours("the session's directories")
    def mend(self) -> None:
        """Make those of our own directories again that somebody removed. Raises FilesLost if the committed files are
        not there, or others are: they come from nowhere else."""
        for own in (self.path, self.files.root, *(self.files.area(name) for name in DIRECTORIES)):
            if not own.is_dir():
                raise _lost(own, self.path.name)
        if self._places and self._places != self._areas():
            raise _lost(self.files.root, self.path.name)
        for own in self._own():
            own.mkdir(mode=0o700, exist_ok=True)

    @durable.ours("making the session's directories")
    def prepare(self, *, owner: int | None) -> None:
        """Make the directories; or, where they are, give the files to whoever the session's guest is now."""
        if not self.path.exists():
            self.create(owner=owner)
        else:
            self.mend()
        if self.shared is None and owner is not None and owner != os.stat(self.files.root / "data").st_uid:
            _give(self.files.root, owner)
        self._guest = owner
        self._places = self._areas()

    def new_stage(self) -> str:
        """Make the directories of a stage; its name. All of them, or none."""
        name = secrets.token_hex(4)
        stage, work = self.stage_path(name), self._stages / f"{name}.work"
        try:
            with durable.ours("stage"):
                self._make_stage(stage, work)
        except BaseException:
            for directory in (stage, work):
                with suppress(OSError):  # a disk that went read-only meanwhile; the next opening removes it
                    remove_tree(directory)
            raise
        return name

    def _make_stage(self, stage: Path, work: Path) -> None:
        self._stages.mkdir(mode=0o700, exist_ok=True)
        for directory in (stage, work):
            directory.mkdir(mode=0o700)
        if self.shared is not None:
            (work / "data").mkdir(mode=0o700)
            _make_area(stage / "data", "data", self._guest, mode=stat.S_IMODE(self.shared.stat().st_mode))
            for area in ("tmp", "home"):
                _make_area(work / area, area, self._guest)

    def hand_over(self, name: str, changes: Iterable[Change]) -> None:
        """Give what the guest has staged to the owner of the directory that it is for: what is the guest's here is
        his there. No file has more rights than its change says (`publication`). All is frozen."""
        if self.shared is None:
            return
        owner = owner_of(self.shared.stat())
        with Cursor(self.stage_path(name)) as cursor:
            for parts, status in cursor.walk():
                if len(parts) == 1:
                    continue
                ids = [to if found == self._guest else -1 for found, to in zip(owner_of(status), owner, strict=True)]
                if ids != [-1, -1]:
                    os.chown(parts[-1], *ids, dir_fd=cursor.fd, follow_symlinks=False)
            for change in changes:
                if change.kind == "file" and change.action != "removed":
                    _take_rights(cursor, parts_of(change), but=change.mode)

    def stage_path(self, name: str) -> Path:
        """The upper layer of a stage."""
        return self._stages / name

    def recorded_stage(self, name: str) -> Path:
        """A stage that a record names: whatever is not the name of one leads nowhere."""
        if not _STAGE.fullmatch(name):
            raise SessionHalted(
                f"the journal names a stage {name!r}", hint="it was damaged or forged; `holdfast verify` says more"
            )
        return self.stage_path(name)

    @property
    def owner(self) -> Owner | None:
        """Whose files put here from outside must be; None where they are our own anyway."""
        return owner_of(self.files.area("data").stat()) if os.geteuid() == 0 else None

    @durable.ours("removing old layers")
    def sweep_stages(self) -> None:
        """Remove every stage. Nothing is mounted on one any more, and no run wants one."""
        for path in self._stages.iterdir():
            remove_tree(path)

    def has_stages(self) -> bool:
        """Whether a host died here: a session that was closed has none."""
        return any(self._stages.iterdir())

    def sweep(self) -> None:
        """Remove what a host left that died: its stages, and files that it had not finished."""
        self.sweep_stages()
        for directory in (self.blobs, self.manifests):
            durable.sweep(directory)

    @durable.ours("measuring the session's files")
    def usage(self, pids: Iterable[int] = ()) -> Usage:
        """What files and stages hold, and what the session's processes hold of files that are in none any more."""
        committed = [] if self.shared is not None else [self.files.area(name) for name in DIRECTORIES]
        found = measure([*committed, self._stages])
        unlinked = self._unlinked_bytes(pids)
        return plus(found, Usage(size_bytes=unlinked, files=0, written_bytes=unlinked))

    def _unlinked_bytes(self, pids: Iterable[int]) -> int:
        return unlinked_bytes(pids, device=self.path.stat().st_dev)

    @durable.ours("removing the session's files")
    def remove(self) -> None:
        """All of it or nothing: one rename takes the directory away. The new name says that the session was deleted. It
        stays, empty, until the journal says it too (`forget_removal`). The next opening finishes what was cut short
        (`opening`). The journal cannot come first: it needs room on a disk which this may be about to free."""
        with durable.closing_fd(self._open_parent()) as sessions, suppress(FileNotFoundError):
            durable.rename(self.path.name, self._removed.name, src_dir=sessions, dst_dir=sessions)
            durable.sync_directory(sessions)
        crashpoint("remove.moved")
        if self._removed.exists():
            empty_tree(self._removed)
        crashpoint("remove.emptied")

    @property
    def _removed(self) -> Path:
        return self.path.with_name(f"{MOVED}{self.path.name}")

    def is_removed(self) -> bool:
        """Whether its directory is gone because the session was deleted."""
        return self.is_gone() and os.path.lexists(self._removed)

    def forget_removal(self) -> None:
        """The journal has it."""
        with suppress(FileNotFoundError):
            os.rmdir(self._removed)

    def has_content(self) -> bool:
        """Whether anything was ever committed here: then it is not removed unless the user says so."""
        kept = [self.files.root / name for name in DIRECTORIES] + [self.blobs, self.manifests]
        return any(os.path.isdir(directory) and os.listdir(directory) for directory in kept)

    def _areas(self) -> list[Identity | None]:
        """Which directories hold what is committed; a shared one is looked at where it is used."""
        found = list[Identity | None]()
        for name in DIRECTORIES:
            try:
                found.append(identity_of(os.stat(self.files.root / name)))
            except OSError:
                found.append(None)
        return found


def _take_rights(cursor: Cursor, parts: Parts, *, but: int) -> None:
    """Of a file with several names, only the rights stay that each of them may have."""
    status = look(parts[-1], dir_fd=cursor.fd) if cursor.go(parts[:-1]) else None
    if status is not None and stat.S_ISREG(status.st_mode) and (mode := stat.S_IMODE(status.st_mode)) & ~but:
        chmod(parts[-1], mode & but, dir_fd=cursor.fd)


def _lost(missing: Path, session: str) -> FilesLost:
    return FilesLost(
        f"the session's files are not there: {missing} was removed, replaced or unmounted",
        hint="put it back (mount the disk, or restore a backup), then run it again; or delete the session, with its "
        f"receipts: holdfast end {session}",
    )


def refuse_foreign(directory: Path) -> None:
    """Who can write there says what was run, and leads whoever trusts it to write anywhere by a link."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        what = "a link" if stat.S_ISLNK(status.st_mode) else "no directory"
        raise InvalidSetting(
            f"{directory} is not used: it is {what}", hint="put back what was there; `holdfast verify` only reads"
        )
    if status.st_uid != os.geteuid():
        raise InvalidSetting(
            f"{directory} is not yours alone: it belongs to user {status.st_uid}, and you are {os.geteuid()}",
            hint="run the job as the user who ran the others there",
        )
    if status.st_mode & 0o022:
        raise InvalidSetting(
            f"{directory} is not yours alone: others can write to it",
            hint=f"if nobody did: chmod -R go-w {shlex.quote(str(directory))}",
        )


def _make_area(directory: Path, name: str, owner: int | None, *, mode: int = 0o700) -> None:
    directory.mkdir(mode=0o700)
    if owner is not None:
        os.chown(directory, owner, owner)
    directory.chmod(0o1777 if name == "tmp" else mode)


def _give(files: Path, owner: int) -> None:
    """With the modes that they have: of a file that it gives away Linux takes the set-id bits."""
    with Cursor(files) as cursor:
        for parts, status in cursor.walk():
            os.chown(parts[-1], owner, owner, dir_fd=cursor.fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and status.st_mode & 0o6000:
                chmod(parts[-1], stat.S_IMODE(status.st_mode), dir_fd=cursor.fd)


def remove_tree(path: Path) -> None:
    """Remove a tree, however deep and however its modes."""
    if os.path.isdir(path):
        empty_tree(path)
        os.rmdir(path)


def empty_tree(path: Path) -> None:
    """Remove all that is in a directory.

    Every subdirectory is first moved to the top, so that no path is ever longer than two names: a guest can nest
    deeper than recursion, PATH_MAX or the number of descriptors reach.
    """
    top = os.open(path, _DIRECTORY)
    try:
        # Left by a removal that was cut short: theirs are the first to be emptied, ours get names of their own.
        queue = deque(name for name in os.listdir(top) if name.startswith(MOVED))
        queue.extend(_empty(top, top))
        while queue:
            name = queue.popleft()
            chmod(name, 0o700, dir_fd=top)
            directory = os.open(name, _DIRECTORY, dir_fd=top)
            try:
                queue.extend(_empty(directory, top))
            finally:
                os.close(directory)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def _empty(directory: int, top: int) -> list[str]:
    """Unlink the files of a directory and move its subdirectories to the top; returns their names there."""
    moved = []
    for name in os.listdir(directory):
        if directory == top and name.startswith(MOVED):
            continue
        if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=directory)
            continue
        # Moving a directory changes its "..": that takes write permission on itself.
        chmod(name, 0o700, dir_fd=directory)
        moved.append(MOVED + secrets.token_hex(8))
        os.rename(name, moved[-1], src_dir_fd=directory, dst_dir_fd=top)
    return moved
