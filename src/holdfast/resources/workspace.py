"""A session's disk: `/mnt/data`, `/tmp` and `$HOME`, as three directories side by side.

All in it is the guest's: names, depth, links, modes. The host walks it without following a link and without
recursion, and only while it must.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

import msgspec

from holdfast.sandbox.mounts import DIRECTORIES


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

    def usage(self) -> Usage:
        return measure(self.path / name for name in DIRECTORIES)

    def remove(self) -> None:
        remove_tree(self.path)


def measure(roots: Iterable[Path]) -> Usage:
    """Blocks and entries below some directories, hard links counted once."""
    size, files = 0, 0
    seen: set[tuple[int, int]] = set()
    pending = [os.fspath(root) for root in roots]
    while pending:
        try:
            entries = list(os.scandir(pending.pop()))
        except OSError:  # gone meanwhile, or so deep that its path cannot be said; its parent was counted
            continue
        for entry in entries:
            files += 1
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if (status.st_dev, status.st_ino) not in seen:
                size += status.st_blocks * 512
            if status.st_nlink > 1:
                seen.add((status.st_dev, status.st_ino))
            if stat.S_ISDIR(status.st_mode):
                pending.append(entry.path)
    return Usage(size_bytes=size, files=files)


def unlinked_bytes(pids: Iterable[int]) -> int:
    """Disk held by files that were deleted while open: in no directory, and still there."""
    held: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            fds = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for fd in fds:
            try:
                status = os.stat(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                held[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(held.values())


def remove_tree(path: Path) -> None:
    """Remove a tree, however deep and however its modes.

    Every subdirectory is first moved to the top, so that no path is ever longer than two names: a guest can nest
    deeper than recursion, PATH_MAX or the number of descriptors reach.
    """
    try:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        moved = _empty(top, top, 0)
        number = 0
        while number < moved:
            name = f".remove-{number}"
            os.chmod(name, 0o700, dir_fd=top)
            directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
            try:
                moved = _empty(directory, top, moved)
            finally:
                os.close(directory)
            os.rmdir(name, dir_fd=top)
            number += 1
    finally:
        os.close(top)
    os.rmdir(path)


def _empty(directory: int, top: int, moved: int) -> int:
    """Unlink the files of a directory and move its subdirectories to the top; returns how many were moved so far."""
    for name in os.listdir(directory):
        if directory == top and name.startswith(".remove-"):
            continue
        if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            # Moving a directory changes its "..": that takes write permission on itself.
            os.chmod(name, 0o700, dir_fd=directory)
            os.rename(name, f".remove-{moved}", src_dir_fd=directory, dst_dir_fd=top)
            moved += 1
        else:
            os.unlink(name, dir_fd=directory)
    return moved
