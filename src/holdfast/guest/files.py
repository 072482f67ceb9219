"""The kernel's open files, when its workspace is mounted anew under it.

At a commit and at a rollback the host mounts a fresh overlay in place of the one that was there. What the kernel has
open then lies on the old one, over layers that are nobody's any more. So its working directory is entered again by
path, and each regular file and each directory is opened again: same path, same descriptor, same flags, same offset.

1. A mount is known by its number. An open file keeps its mount in existence, and no two that exist share a number.
2. On a mount that is detached, Linux tells a file's path from the mount's root on, which is the area's.
3. A copy of the kernel that is woken goes by the paths that were noted when it was made: the run that is taken back
   may have renamed or removed them.
4. What has no path any more, or leads to another kind of file, stays as it is and is named.

Locks are not carried over, and neither are mappings.
"""

import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import F_GETFD, F_GETFL, F_SETFL, FD_CLOEXEC, fcntl
from os import SEEK_CUR, SEEK_SET, chdir, close, dup2, fstat, listdir, lseek, readlink
from typing import NamedTuple

from holdfast.guest.display import text
from holdfast.sandbox import linux
from holdfast.sandbox.mounts import DIRECTORIES, WORKSPACE

_AREAS = [os.fsencode(path) for path in DIRECTORIES.values()]
_KEPT_FLAGS = (
    os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_SYNC | os.O_DSYNC | os.O_DIRECT | os.O_NOATIME | os.O_DIRECTORY
)
_WORKING_DIRECTORY = -100  # AT_FDCWD
_MAX_NAMED = 100


class OpenFile(NamedTuple):
    """A descriptor of a file or directory in the workspace."""

    fd: int
    path: bytes
    status: os.stat_result
    flags: int
    offset: int


class Noted(NamedTuple):
    """What was open in the workspace at some time."""

    directory: bytes | None
    """The working directory; None: it is elsewhere."""
    files: list[OpenFile]


class OpenFiles:
    """Knows on which mounts the workspace has been."""

    def __init__(self) -> None:
        self._now = _area_mounts()
        self._known = dict(self._now)

    def note(self) -> Noted:
        attached = dict.fromkeys(_area_mounts(), b"")  # there, paths are told in full
        with _room_for_descriptors():
            return _note({**self._known, **attached})

    def follow(self, noted: Noted | None = None) -> list[str]:
        """Move what is open, or was when it was noted, to where the workspace is mounted now.

        Returns what could not be moved, in words.
        """
        now = _area_mounts()
        if now == self._now:
            return []
        past = {number: area for number, area in self._known.items() if number not in now}
        self._now, self._known = now, {**past, **now}
        with _room_for_descriptors():
            directory, files = noted or _note(past)
            left = [*_follow_directory(directory), *_reopen_all(files)]
        return [text(words) for words in left[:_MAX_NAMED]]


def _area_mounts() -> dict[int, bytes]:
    return {linux.mount_id(os.fsdecode(area)): area for area in _AREAS}


@contextmanager
def _room_for_descriptors() -> Iterator[None]:
    """User code may have opened all that it may: a few more are kept for this (`sandbox.privileges`)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _note(mounts: dict[int, bytes]) -> Noted:
    """What is open on these mounts, each of which has a beginning that its paths lack."""
    area = mounts.get(linux.mount_id(_WORKING_DIRECTORY))
    directory = None if area is None else _below(area, readlink(b"/proc/self/cwd"))
    return Noted(directory, [file for name in listdir("/proc/self/fd") if (file := _look_at(int(name), mounts))])


def _look_at(fd: int, mounts: dict[int, bytes]) -> OpenFile | None:
    with suppress(OSError):  # the listing's own descriptor is closed by now
        status = fstat(fd)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            return None
        if (area := mounts.get(linux.mount_id(fd))) is not None:
            path = _below(area, readlink(os.fsencode(f"/proc/self/fd/{fd}")))
            flags = fcntl(fd, F_GETFL)
            return OpenFile(fd, path, status, flags, -1 if flags & os.O_PATH else lseek(fd, 0, SEEK_CUR))
    return None


def _below(area: bytes, path: bytes) -> bytes:
    return area + path if path != b"/" else area


def _follow_directory(path: bytes | None) -> Iterator[str]:
    if path is None:
        return
    try:
        chdir(path)
    except OSError as error:
        yield f"the working directory {os.fsdecode(path)}: {error.strerror}; it is {_nearest_directory(path)} now"


def _nearest_directory(path: bytes) -> str:
    for place in (os.path.dirname(path), os.fsencode(WORKSPACE), b"/"):
        with suppress(OSError):
            chdir(place)
            return os.fsdecode(place)
    return "nowhere"


def _reopen_all(files: list[OpenFile]) -> Iterator[str]:
    for family in _families(files):
        try:
            _reopen(family)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else error.strerror
            for file in family:
                yield f"{os.fsdecode(file.path)} (descriptor {file.fd}): {why}"


def _families(files: list[OpenFile]) -> list[list[OpenFile]]:
    """Descriptors that were copied from one another share an offset, and are to go on sharing it."""
    alike: dict[tuple[int, ...], list[OpenFile]] = {}
    for file in files:
        alike.setdefault((file.status.st_dev, file.status.st_ino, file.flags, file.offset), []).append(file)
    families: list[list[OpenFile]] = []
    for group in alike.values():
        may_share = len(group) > 1 and group[0].offset >= 0 and stat.S_ISREG(group[0].status.st_mode)
        families += _sharing(group) if may_share else [[file] for file in group]
    return families


def _sharing(group: list[OpenFile]) -> list[list[OpenFile]]:
    """Each is moved to a place of its own: whoever is not there any more was moved along with a later one."""
    for place, file in enumerate(group):
        lseek(file.fd, place, SEEK_SET)
    together: dict[int, list[OpenFile]] = {}
    for file in group:
        together.setdefault(lseek(file.fd, 0, SEEK_CUR), []).append(file)
    for file in group:
        lseek(file.fd, file.offset, SEEK_SET)
    return list(together.values())


def _reopen(family: list[OpenFile]) -> None:
    file = family[0]
    # Without a link alone it may be a file that was committed: the host leaves us a copy of that which has none.
    if file.status.st_nlink == 0 and file.path.endswith(b" (deleted)"):
        raise OSError(0, "it was deleted while it was open")
    new = _open(file)
    try:
        for member in family:
            dup2(new, member.fd, inheritable=not fcntl(member.fd, F_GETFD) & FD_CLOEXEC)
    finally:
        close(new)


def _open(file: OpenFile) -> int:
    if file.flags & os.O_PATH:
        return _of_same_kind(linux.open_without_links(file.path, os.O_PATH), file)
    flags = file.flags & _KEPT_FLAGS
    # Without waiting: a FIFO may be there now.
    new = _of_same_kind(linux.open_without_links(file.path, flags | os.O_NONBLOCK), file)
    fcntl(new, F_SETFL, flags)
    with suppress(OSError):  # a directory's offset means nothing to another overlay
        lseek(new, file.offset, SEEK_SET)
    return new


def _of_same_kind(fd: int, file: OpenFile) -> int:
    if stat.S_IFMT(fstat(fd).st_mode) == stat.S_IFMT(file.status.st_mode):
        return fd
    close(fd)
    raise OSError(0, "another kind of file is there now")
