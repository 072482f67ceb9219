"""Files of a session that are mapped for shared writing: memory that is also a file.

Whoever holds such a mapping writes into a file after it was hashed, after it was committed, and after a rollback:
neither the overlay nor a snapshot can take it back. So a run must not end with one.

What is writable counts by the file system that it is on, as the kernel numbers it, and not by its path: paths in
/proc/PID/maps are relative to a mount that may be gone, and their names are the guest's to choose. Memory that only
looks like files (memfd, anonymous shared memory, /dev/shm) is no file of the workspace and is left out.

What is not writable now but may be made so (opened for writing, mapped for reading) counts as well. Here paths of the
system are taken at their word, for speed: a file of the workspace can pass for one only once its mount is gone, and
the run that mapped it ended before that, under the true path.
"""

import os
import re
from collections.abc import Iterable
from functools import lru_cache

from holdfast import paths

_MAX_BYTES = 64 << 20
"""Of one process's list. A guest can make it gigabytes long; then it is not read to the end, and that is a finding."""
_MAX_FOUND = 20
_BEFORE_OFFSET = 40
"""Two addresses and the permissions take no more of a line."""
_LINE = re.compile(rb"([0-9a-f]+-[0-9a-f]+) [r-]([w-])[x-][sp] [0-9a-f]+ ([0-9a-f]+:[0-9a-f]+) \d+ *(.*)", re.S)
_SYSTEM = (b"/usr/", b"/lib/", b"/lib64/", b"/etc/")
"""Mounted read-only. The C library maps a cache of its own from there, in every process that ever converted a text."""
_OCTAL = re.compile(rb"\\012")


class _Unreadable(Exception):
    pass


def shared_writable_mappings(pids: Iterable[int]) -> list[str]:
    """The files, and in words what could not be looked into. The processes must be frozen; an ended one has nothing."""
    found: dict[str, None] = {}
    for pid in pids:
        try:
            found.update(dict.fromkeys(_of_process(pid)))
        except (FileNotFoundError, ProcessLookupError):
            continue
        except (OSError, _Unreadable) as error:
            found[f"process {pid}: its mappings cannot be read ({error})"] = None
        if len(found) > _MAX_FOUND:
            break
    return list(found)[:_MAX_FOUND]


def _of_process(pid: int) -> list[str]:
    # All but always there is nothing: then one list is read, and hardly looked at.
    lines = [line for line in _read(pid, "maps").split(b"\n") if line.find(b"s ", 0, _BEFORE_OFFSET) >= 0]
    if not lines:
        return []
    memory = _kernels_memory() | _shared_memory(pid)
    areas = [area for line in lines if (area := _area(line)) and _is_file(area[4]) and _device(area) not in memory]
    asleep = {area[1] for area in areas if area[2] != b"w" and not area[4].startswith(_SYSTEM)}
    awake = _may_write(pid, asleep) if asleep else set()
    return [_shown(area[4]) for area in areas if area[2] == b"w" or area[1] in awake]


def _read(pid: int, listing: str) -> bytes:
    """No name can break a line of it: the kernel writes a newline in one as an escape."""
    with open(f"/proc/{pid}/{listing}", "rb") as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise _Unreadable(f"more than {_MAX_BYTES >> 20} MiB of them")
    return text


def _area(line: bytes) -> "re.Match[bytes]":
    if not (area := _LINE.fullmatch(line)):
        raise _Unreadable("a line that is none of the kernel's")
    return area


@lru_cache
def _kernels_memory() -> frozenset[tuple[int, int]]:
    """Where memfds and anonymous shared memory are: one file system for the whole machine."""
    memory = os.memfd_create("device", os.MFD_CLOEXEC)
    try:
        return frozenset({_numbers(os.fstat(memory).st_dev)})
    finally:
        os.close(memory)


def _shared_memory(pid: int) -> frozenset[tuple[int, int]]:
    try:
        return frozenset({_numbers(os.lstat(f"/proc/{pid}/root/dev/shm").st_dev)})
    except FileNotFoundError:
        return frozenset()


def _may_write(pid: int, places: set[bytes]) -> set[bytes]:
    """Those that a single call would make writable. Only `smaps` tells, which is slow, so it is asked last."""
    found, place = set(), b""
    for line in _read(pid, "smaps").split(b"\n"):
        if area := _LINE.fullmatch(line):
            place = area[1]
        elif line.startswith(b"VmFlags:") and place in places and {b"sh", b"mw"} <= set(line.split()):
            found.add(place)
    return found


def _is_file(path: bytes) -> bool:
    """Not the kernel's own objects, nor the ring of asynchronous I/O."""
    return path.startswith(b"/") and path != b"/[aio] (deleted)"


def _device(area: "re.Match[bytes]") -> tuple[int, int]:
    major, _, minor = area[3].partition(b":")
    return int(major, 16), int(minor, 16)


def _numbers(device: int) -> tuple[int, int]:
    return os.major(device), os.minor(device)


def _shown(path: bytes) -> str:
    return paths.to_text(_OCTAL.sub(b"\n", path.removesuffix(b" (deleted)")))
