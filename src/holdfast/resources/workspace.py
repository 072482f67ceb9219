"""A session's disk: `/mnt/data`, `/tmp` and `$HOME`, as three directories side by side.

All in it is the guest's: names, depth, links, modes. The host walks it without following a link and without
recursion, and only while it must.
"""

import os
import secrets
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.sandbox.mounts import DIRECTORIES

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOVED = ".holdfast-remove-"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    files: int


class Workspace:
    """The three directories of one session."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "log"

    def create(self, *, owner: int | None) -> None:
        """Make the directories; `owner` is the guest's host uid where the host may give files away."""
        self.path.mkdir(mode=0o700)
        self.logs.mkdir(mode=0o700)
        for name in DIRECTORIES:
            directory = self.path / name
            directory.mkdir(mode=0o700)
            directory.chmod(0o1777 if name == "tmp" else 0o700)
            if owner is not None:
                os.chown(directory, owner, owner)

    def usage(self, pids: Iterable[int] = ()) -> Usage:
        """What the directories hold, and what the session's processes hold of files that are in none any more."""
        found = measure(self.path / name for name in DIRECTORIES)
        return msgspec.structs.replace(found, size_bytes=found.size_bytes + unlinked_bytes(pids))

    def remove(self) -> None:
        remove_tree(self.path)


def measure(roots: Iterable[Path]) -> Usage:
    """Blocks and entries below some directories, hard links counted once."""
    size, files = 0, 0
    seen: set[tuple[int, int]] = set()
    for root in roots:
        for status in _walk(root):
            files += 1
            if (status.st_dev, status.st_ino) not in seen:
                size += status.st_blocks * 512
            if status.st_nlink > 1:
                seen.add((status.st_dev, status.st_ino))
    return Usage(size_bytes=size, files=files)


def _walk(root: Path) -> Iterator[os.stat_result]:
    """Everything below a directory, by one descriptor that goes down by name and up by "..": a guest can nest deeper
    than a path, the stack or the number of descriptors reach."""
    here = _enter(os.fspath(root))
    try:
        ahead: list[list[str]] = []
        while True:
            ahead.append([])
            for name, status in _entries(here):
                yield status
                if stat.S_ISDIR(status.st_mode):
                    ahead[-1].append(name)
            while not (below := _descend(here, ahead[-1])):
                ahead.pop()
                if not ahead:
                    return
                here = _replace(here, os.open("..", _DIRECTORY, dir_fd=here))
            here = _replace(here, below)
    finally:
        os.close(here)


def _descend(here: int, names: list[str]) -> int | None:
    """The next subdirectory that can still be opened."""
    while names:
        name = names.pop()
        with suppress(OSError):
            return _enter(name, here)
    return None


def _enter(name: str, parent: int | None = None) -> int:
    """Open a directory, whatever its mode: what a guest hides from itself is not hidden from the limit."""
    try:
        directory = os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:  # ours to open, as the files' owner
        os.chmod(name, 0o700, dir_fd=parent)
        directory = os.open(name, _DIRECTORY, dir_fd=parent)
    if os.geteuid() != 0 and os.fstat(directory).st_mode & 0o700 != 0o700:
        os.fchmod(directory, 0o700)  # readable, but not to be walked through
    return directory


def _replace(old: int, new: int) -> int:
    os.close(old)
    return new


def _entries(directory: int) -> list[tuple[str, os.stat_result]]:
    entries = []
    with os.scandir(directory) as found:
        for entry in found:
            with suppress(FileNotFoundError):
                entries.append((entry.name, entry.stat(follow_symlinks=False)))
    return entries


def unlinked_bytes(pids: Iterable[int]) -> int:
    """Disk held by files that were deleted while open or mapped: in no directory, and still there."""
    held: dict[int, int] = {}
    for pid in pids:
        held |= _mapped_and_deleted(pid) | _open_and_deleted(pid)
    return sum(held.values())


def _open_and_deleted(pid: int) -> dict[int, int]:
    held = {}
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                status = os.stat(f"/proc/{pid}/fd/{fd}")
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    held[status.st_ino] = status.st_blocks * 512
    return held


def _mapped_and_deleted(pid: int) -> dict[int, int]:
    """By the length of the mapping, which may be more than is on disk."""
    held: dict[int, int] = {}
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            span, _, _, _, inode, *name = line.split(maxsplit=5)
            if name and name[0].endswith(" (deleted)") and name[0].startswith(tuple(DIRECTORIES.values())):
                first, last = (int(number, 16) for number in span.split("-"))
                held[int(inode)] = held.get(int(inode), 0) + last - first
    return held


def remove_tree(path: Path) -> None:
    """Remove a tree, however deep and however its modes.

    Every subdirectory is first moved to the top, so that no path is ever longer than two names: a guest can nest
    deeper than recursion, PATH_MAX or the number of descriptors reach.
    """
    try:
        top = os.open(path, _DIRECTORY)
    except FileNotFoundError:
        return
    try:
        # Left by a removal that was cut short: theirs are the first to be emptied, ours get names of their own.
        queue = deque(name for name in os.listdir(top) if name.startswith(_MOVED))
        queue.extend(_empty(top, top))
        while queue:
            name = queue.popleft()
            os.chmod(name, 0o700, dir_fd=top)
            directory = os.open(name, _DIRECTORY, dir_fd=top)
            try:
                queue.extend(_empty(directory, top))
            finally:
                os.close(directory)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def _empty(directory: int, top: int) -> list[str]:
    """Unlink the files of a directory and move its subdirectories to the top; returns their names there."""
    moved = []
    for name in os.listdir(directory):
        if directory == top and name.startswith(_MOVED):
            continue
        if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=directory)
            continue
        # Moving a directory changes its "..": that takes write permission on itself.
        os.chmod(name, 0o700, dir_fd=directory)
        moved.append(_MOVED + secrets.token_hex(8))
        os.rename(name, moved[-1], src_dir_fd=directory, dst_dir_fd=top)
    return moved
