"""Going about in trees that hostile code wrote: names, depth, links and modes are all its own.

1. No link is followed: every directory is opened by one name, relative to the one that it is in.
2. Depth costs nothing: one descriptor goes down by name and up by "..". A guest can nest deeper than a path, the
   stack or the number of descriptors reach.
3. Nothing is opened that could block: only directories and regular files are.
4. Modes shut nobody out but other users. Where the host is not root it opens what the guest closed to itself, and
   puts the mode back when it leaves.
5. The way up leads where the way down came from, or nowhere: whoever moves a directory away while somebody is in it
   does not lead him astray.

The session is frozen meanwhile: what was looked at is still there when it is opened. In a directory of the user's
others may be at work (`Tree.shared`): there, 1 and 5 are all that holds.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import msgspec

from holdfast import durable
from holdfast.errors import FileUnknown, InvalidSetting
from holdfast.paths import to_bytes
from holdfast.records import Change, Kind

Parts = tuple[bytes, ...]
"""A path, name by name."""
Into = Callable[[Parts, os.stat_result], bool]
Owner = tuple[int, int]
"""User and group."""
Identity = tuple[int, int]
"""Device and inode."""
HIDDEN = b".holdfast"
"""What Holdfast keeps in a directory of the user's: no part of it."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS: dict[int, Kind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}


class Tree(msgspec.Struct, frozen=True):
    """A session's committed files, by area."""

    root: Path
    shared: Path | None = None
    """A directory of the user's that is the area `data`, in place of the one below `root`."""
    identity: Identity | None = None
    """Which directory that is; whoever puts another in its place does not have us write there."""

    def area(self, name: str) -> Path:
        return self.shared if self.shared is not None and name == "data" else self.root / name


class Cursor:
    """A place in a tree. Its descriptor is `fd`, good until the next move."""

    def __init__(self, root: Path | Tree, *, open_shut: bool = True) -> None:
        """`open_shut=False`: what the caller may not read stays shut."""
        self._tree = root if isinstance(root, Tree) else Tree(root)
        self._enter = _enter if open_shut else _enter_as_is
        self.fd, self._root_mode = self._enter(os.fsencode(self._tree.root), None)
        self._names: list[bytes] = []
        self._modes: list[int | None] = []
        self._above: list[Identity] = []

    @property
    def at(self) -> Parts:
        return tuple(self._names)

    def enter(self, name: bytes) -> None:
        elsewhere = self._tree.shared if not self._names and name == b"data" else None
        below, mode = self._enter(name, self.fd) if elsewhere is None else self._enter_shared(elsewhere)
        self._above.append(_identity(self.fd))
        os.close(self.fd)
        self.fd = below
        self._names.append(name)
        self._modes.append(mode)

    def _enter_shared(self, directory: Path) -> tuple[int, int | None]:
        below, mode = self._enter(os.fsencode(directory), None)
        if self._tree.identity not in (None, _identity(below)):
            _close(below, mode)
            raise OSError(errno.ESTALE, "the workspace is another directory than it was")
        return below, mode

    def leave(self) -> None:
        from_shared = len(self._names) == 1 and self._tree.shared is not None and self._names[0] == b"data"
        above = os.open(self._tree.root if from_shared else "..", _DIRECTORY, dir_fd=None if from_shared else self.fd)
        if _identity(above) != self._above[-1]:
            os.close(above)
            raise OSError(errno.ESTALE, "a directory was moved away while somebody was in it")
        _close(self.fd, self._modes.pop())
        self.fd = above
        self._names.pop()
        self._above.pop()

    def go(self, parts: Sequence[bytes]) -> bool:
        """To a directory, by the way that is common with the present one; False: it is not there."""
        same = 0
        for here, there in zip(self._names, parts, strict=False):
            if here != there:
                break
            same += 1
        while len(self._names) > same:
            self.leave()
        try:
            for name in parts[same:]:
                self.enter(name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def walk(self, into: Into | None = None) -> Iterator[tuple[Parts, os.stat_result]]:
        """Everything below this place, parents first; the cursor moves along and comes back.

        `into` says which directories to go into. With it, those that cannot be entered are passed over.
        """
        depth = len(self._names)
        ahead: list[list[bytes]] = []
        while True:
            ahead.append([])
            for name, status in entries(self.fd).items():
                yield (*self._names[depth:], name), status
                if stat.S_ISDIR(status.st_mode) and (into is None or into((*self._names[depth:], name), status)):
                    ahead[-1].append(name)
            while not self._enter_next(ahead[-1], passing=into is not None):
                ahead.pop()
                if not ahead:
                    return
                self.leave()

    def _enter_next(self, names: list[bytes], *, passing: bool) -> bool:
        while names:
            try:
                self.enter(names.pop())
            except (PermissionError, FileNotFoundError, NotADirectoryError):
                if not passing:
                    raise
            else:
                return True
        return False

    def close(self) -> None:
        """Up to the root again, so that every mode is put back."""
        try:
            while self._names:
                self.leave()
        finally:
            _close(self.fd, None if self._names else self._root_mode)

    def __enter__(self) -> "Cursor":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _enter(name: bytes, parent: int | None) -> tuple[int, int | None]:
    """Open a directory, whatever its mode; returns the mode to put back, if it had to be changed."""
    try:
        directory = os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:
        before = stat.S_IMODE(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
        chmod(name, before | 0o700, dir_fd=parent)
        return os.open(name, _DIRECTORY, dir_fd=parent), before
    mode = stat.S_IMODE(os.fstat(directory).st_mode)
    if os.geteuid() == 0 or mode & 0o700 == 0o700:
        return directory, None
    try:
        os.fchmod(directory, mode | 0o700)  # readable, but not to be walked through or written to
    except PermissionError:  # another user's, as it may be in a directory that is shared
        return directory, None
    return directory, mode


def _enter_as_is(name: bytes, parent: int | None) -> tuple[int, int | None]:
    return os.open(name, _DIRECTORY, dir_fd=parent), None


def _close(directory: int, mode: int | None) -> None:
    if mode is not None:
        os.fchmod(directory, mode)
    os.close(directory)


def _identity(directory: int) -> Identity:
    return identity_of(os.fstat(directory))


def identity_of(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def entries(directory: int) -> dict[bytes, os.stat_result]:
    """What is in an open directory, in the order of the names."""
    listed = {}
    with os.scandir(directory) as found:
        for each in sorted(found, key=_name):
            with suppress(FileNotFoundError):  # in a directory that is shared, somebody removed it just now
                listed[os.fsencode(each.name)] = each.stat(follow_symlinks=False)
    return listed


def _name(entry: os.DirEntry[str]) -> bytes:
    return os.fsencode(entry.name)


def look(name: bytes, *, dir_fd: int) -> os.stat_result | None:
    """What is at a name; never what a link points to."""
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def kind_of(status: os.stat_result) -> Kind | None:
    """None: a device."""
    return _KINDS.get(stat.S_IFMT(status.st_mode))


def published_mode(status: os.stat_result) -> int:
    """What a guest's mode comes to in a directory of the user's: no file is set-uid or set-gid there, because it would
    run as that user and no longer as a guest. On a directory the bits give nobody anything."""
    mode = stat.S_IMODE(status.st_mode)
    return mode & ~0o6000 if stat.S_ISREG(status.st_mode) else mode


def chmod(name: str | bytes, mode: int, *, dir_fd: int | None) -> None:
    """As chmod(2), but never of what a link points to."""
    file = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    with durable.closing_fd(file):
        os.chmod(f"/proc/self/fd/{file}", mode)


def open_regular(name: bytes, *, dir_fd: int) -> int:
    """Open a regular file to read, whatever its mode. FileNotFoundError: there is none."""
    status = look(name, dir_fd=dir_fd)
    if status is None or not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(name)
    try:
        return os.open(name, _FILE, dir_fd=dir_fd)
    except PermissionError:
        mode = stat.S_IMODE(status.st_mode)
        chmod(name, mode | 0o400, dir_fd=dir_fd)
        try:
            return os.open(name, _FILE, dir_fd=dir_fd)
        finally:
            chmod(name, mode, dir_fd=dir_fd)


def make_directory(name: bytes, *, dir_fd: int, mode: int, owner: Owner | None) -> None:
    """A directory of exactly this mode, whatever the umask."""
    durable.mkdir(name, dir_fd=dir_fd)
    own(name, owner, dir_fd=dir_fd)
    chmod(name, mode, dir_fd=dir_fd)


def own(name: bytes, owner: Owner | None, *, dir_fd: int) -> None:
    """Give to a user; None, where the host can give nothing away."""
    if owner is not None and os.geteuid() == 0:
        os.chown(name, *owner, dir_fd=dir_fd, follow_symlinks=False)


def owner_of(status: os.stat_result) -> Owner:
    return status.st_uid, status.st_gid


def parts_of(change: Change) -> Parts:
    """Where a change is, from the root of the layer on; "." is the area itself."""
    area = os.fsencode(change.area)
    return (area,) if change.path == "." else (area, *split(change.path))


def split(path_text: str) -> Parts:
    """The names of a path relative to an area. Nothing leads out of it."""
    try:
        parts = tuple(to_bytes(path_text).split(b"/"))
    except ValueError:  # text that is no path's
        parts = ()
    if not parts or any(part in (b"", b".", b"..") or b"\0" in part or len(part) > 255 for part in parts):
        raise InvalidSetting(f"{path_text!r} is no path of a file", hint="give it relative to /mnt/data, without ..")
    return parts


def open_file(root: Path, path_text: str) -> int:
    """A descriptor to read a committed file by; `root` is the directory of its area."""
    try:
        parts = split(path_text)
    except InvalidSetting as error:
        raise _unknown(path_text) from error
    with Cursor(root) as cursor, suppress(FileNotFoundError):
        if cursor.go(parts[:-1]):
            return open_regular(parts[-1], dir_fd=cursor.fd)
    raise _unknown(path_text)


def _unknown(path_text: str) -> FileUnknown:
    return FileUnknown(f"no file {path_text} in the workspace", hint="files() lists what is there")
