"""What a session's disk holds: walked while its guest may be at work there, who chooses names, depth, modes and links,
moves things meanwhile, and would rather not be counted.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.resources.descent import Identity, chmod, identity_of
from holdfast.sandbox import procfs
from holdfast.sandbox.mounts import DIRECTORIES

# Each step takes all it can and gives nothing back: a kernel has a thousand mappings, and Linux pads each with spaces.
_DELETED = re.compile(rb"([0-9a-f]++)-([0-9a-f]++) \S++ \S++ (\S++) (\d++) ++(.*) \(deleted\)", re.DOTALL)
_MOST_LISTED = 256 << 20
"""Of all mappings of a session's processes: hundreds of ordinary ones have less."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_APART = 32
_DIGEST_BYTES = 67
"""What stands in a manifest beside a path: the digest in hexadecimal, two spaces, the end of the line."""


class Restless(Exception):
    """A directory was moved away while it was measured."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What some directories hold, hard links counted once."""

    size_bytes: int
    """The larger of the blocks and the apparent size, file by file: the host hashes and copies holes as well."""
    files: int
    """Files and directories."""
    written_bytes: int = 0
    """The blocks alone."""
    list_bytes: int = 0
    """The length of a list of all of them: what a manifest, a receipt and the journal have of each."""


def plus(one: Usage, other: Usage) -> Usage:
    return Usage(
        size_bytes=one.size_bytes + other.size_bytes,
        files=one.files + other.files,
        written_bytes=one.written_bytes + other.written_bytes,
        list_bytes=one.list_bytes + other.list_bytes,
    )


def measure(roots: Iterable[Path]) -> Usage:
    """Everything below some directories. Raises Restless."""
    size, written, files, listed = 0, 0, 0, 0
    seen: set[tuple[int, int]] = set()
    for root in roots:
        for status, path_bytes in _walk(root):
            files += 1
            listed += path_bytes + _DIGEST_BYTES
            if (status.st_dev, status.st_ino) not in seen:
                blocks = status.st_blocks * 512
                written += blocks
                size += max(blocks, status.st_size) if stat.S_ISREG(status.st_mode) else blocks
            if status.st_nlink > 1:
                seen.add((status.st_dev, status.st_ino))
    return Usage(size_bytes=size, files=files, written_bytes=written, list_bytes=listed)


def _walk(root: Path) -> Iterator[tuple[os.stat_result, int]]:
    """Everything below a directory, with the length of its path there; by one descriptor that goes down by name and up
    by "..": a guest can nest deeper than a path, the stack or the number of descriptors reach. Who moves a directory
    away while we are in it does not lead us elsewhere: there the walk ends, and counts for nothing (`Restless`)."""
    here, mode = _enter(os.fspath(root))
    shut = [_Shut(here, mode)]
    """Modes to put back on the way up: they are part of what a run changed."""
    way: list[Identity] = []
    """Each directory above."""
    lengths = [0]
    """Of the paths of this directory and of each above, with the "/" behind them."""
    try:
        ahead: list[list[str]] = []
        while True:
            ahead.append([])
            for name, status in _entries(here):
                yield status, lengths[-1] + len(os.fsencode(name))
                if stat.S_ISDIR(status.st_mode):
                    ahead[-1].append(name)
            while not (found := _descend(here, ahead[-1])):
                ahead.pop()
                lengths.pop()
                above = os.open("..", _DIRECTORY, dir_fd=here) if ahead else None
                shut.pop().again(here)
                if above is None:
                    return
                here = _replace(here, above)
                if identity_of(os.fstat(here)) != way.pop():
                    raise Restless
            name, directory, mode = found
            lengths.append(lengths[-1] + len(os.fsencode(name)) + 1)
            way.append(identity_of(os.fstat(here)))
            here = _replace(here, directory)
            shut.append(_Shut(directory, mode, apart=len(shut) < _APART))
    finally:
        for left in reversed(shut):  # where the way up led elsewhere
            left.again()
        os.close(here)


def _descend(here: int, names: list[str]) -> tuple[str, int, int | None] | None:
    """The next subdirectory that can still be opened."""
    while names:
        name = names.pop()
        with suppress(OSError):
            return name, *_enter(name, here)
    return None


def _enter(name: str, parent: int | None = None) -> tuple[int, int | None]:
    """Open a directory, whatever its mode: what a guest hides from itself is not hidden from the limit.

    Returns its mode too, if that had to be changed.
    """
    if os.geteuid() == 0:
        return _open(name, parent), None
    mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    if not stat.S_ISDIR(mode) or mode & 0o700 == 0o700:
        return _open(name, parent), None
    chmod(name, 0o700, dir_fd=parent)  # ours to open, as the files' owner
    return _open(name, parent), stat.S_IMODE(mode)


class _Shut:
    """A directory whose mode may have to be put back. A few of them are held on to, so that it can be done from
    anywhere: who nests hundreds that are shut, and moves some while they are measured, has changed them himself."""

    def __init__(self, directory: int, mode: int | None, *, apart: bool = True) -> None:
        self._mode = mode
        self._own = os.dup(directory) if mode is not None and apart else None

    def again(self, directory: int | None = None) -> None:
        """`directory`: the walk is there."""
        where = self._own if directory is None else directory
        if self._mode is not None and where is not None:
            os.fchmod(where, self._mode)
        if self._own is not None:
            os.close(self._own)


def _open(name: str, parent: int | None) -> int:
    """Without a trace, where Linux lets us: by a directory's time of access a guest would see how far we are."""
    try:
        return os.open(name, _DIRECTORY | os.O_NOATIME, dir_fd=parent)
    except PermissionError:  # not ours
        return os.open(name, _DIRECTORY, dir_fd=parent)


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


def unlinked_bytes(pids: Iterable[int], *, device: int) -> int:
    """Disk held by files that were deleted while open or mapped: in no directory, and still there. Raises
    `procfs.TooLong`."""
    held: dict[int, int] = {}
    left = _MOST_LISTED
    for pid in pids:
        with suppress(PermissionError):
            mappings = procfs.lines(f"/proc/{pid}/maps", most_bytes=min(left, procfs.MOST_READ))
            left -= sum(map(len, mappings))
            held |= _mapped_and_deleted(mappings, device)
        held |= _open_and_deleted(pid)
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


def _mapped_and_deleted(mappings: Iterable[bytes], device: int) -> dict[int, int]:
    """By the length of the mapping, which may be more than is on disk.

    On a stage that has been replaced, paths lack their beginning: what is on the workspace's device is known by that.
    """
    held: dict[int, int] = {}
    places = tuple(place.encode() for place in DIRECTORIES.values())
    own = f"{os.major(device):02x}:{os.minor(device):02x}".encode()
    deleted = (line for line in mappings if line.endswith(b" (deleted)"))
    for area in filter(None, map(_DELETED.fullmatch, deleted)):
        first, last, number, inode, name = area.groups()
        if number == own or name.startswith(places):
            held[int(inode)] = held.get(int(inode), 0) + int(last, 16) - int(first, 16)
    return held
