"""What Linux says of a process in /proc, where its own words stand among Linux's.

A process chooses its name and those of its files. Of what could end a line Linux escapes the newline, and nothing else:
a form feed or a carriage return stays as it is, and so do bytes that are no text. So these files are read as bytes,
cut at newlines alone, and a line that is not as Linux writes it counts for nothing.
"""

import os
import re
import signal
import sys
from contextlib import suppress

_SIZE = re.compile(rb"(\w+):\s+(\d{1,18}) kB")
_GONE = (FileNotFoundError, ProcessLookupError)
_AREA_OF_A_FILE = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) ...p [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ [1-9]\d* .*", re.S)
"""Mapped privately. Of files that are shared a fork has no page before it touches one."""
MOST_READ = 16 << 20
"""Of one file: more than twice what the mappings of an ordinary process, as many as Linux allows it, take."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_HIGHEST = 7 if sys.byteorder == "little" else 0
_ALONE_IN_FILE = 0xA1
"""The highest byte of an entry in `pagemap`: present, of a file, mapped by this process alone."""
_MOST_LOOKED_AT = 1 << 21
"""Pages, of which most are not there. A guest can map as much as it likes."""
_AT_ONCE = 1 << 16


_MASK = re.compile(rb"^(\w{6}):\t([0-9a-f]{16})$", re.M)
_KILL = 1 << signal.SIGKILL - 1
_CORE = sum(
    1 << number - 1
    for number in (
        signal.SIGQUIT, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV,
        signal.SIGXCPU, signal.SIGXFSZ, signal.SIGSYS,
    )
)  # fmt: skip
"""Signals that dump core. Every other one that ends a process Linux turns into SIGKILL at once."""


class TooLong(Exception):
    """A list that a process made longer than anybody wants to read: names of files can be a megabyte each."""


def lines(path: str, *, most_bytes: int = MOST_READ) -> list[bytes]:
    """None if the process is gone. PermissionError where it is not ours to ask."""
    try:
        with open(path, "rb") as file:
            read = file.read(most_bytes + 1)
    except _GONE:
        return []
    if len(read) > most_bytes:
        raise TooLong(path)
    return read.split(b"\n")


def status(pid: int, field: bytes) -> list[bytes]:
    """The words of one line of `status`; none if the process is gone, or Linux does not know the field."""
    head = field + b":"
    return next((line.split()[1:] for line in lines(f"/proc/{pid}/status") if line.startswith(head)), [])


def is_to_die(pid: int) -> bool:
    """Whether a signal waits for a process that ends it for sure as soon as it runs again."""
    masks = {name: int(mask, 16) for name, mask in _MASK.findall(b"\n".join(lines(f"/proc/{pid}/status")))}
    waiting = masks.get(b"SigPnd", 0) | masks.get(b"ShdPnd", 0)
    minded = masks.get(b"SigBlk", 0) | masks.get(b"SigIgn", 0) | masks.get(b"SigCgt", 0)
    return bool(waiting & (_KILL | _CORE & ~minded))


def sizes_bytes(path: str, *fields: bytes) -> int:
    """The sum of some lines `field: number kB`."""
    found = (_SIZE.fullmatch(line) for line in lines(path))
    return sum(int(size[2]) << 10 for size in found if size and size[1] in fields)


def alone_in_file_bytes(pid: int) -> int | None:
    """The pages of files, also of files in memory, that this process alone maps; its own copies of such pages do not
    count. None: it maps too many files to say."""
    try:
        areas = [area for line in lines(f"/proc/{pid}/maps") if (area := _AREA_OF_A_FILE.fullmatch(line))]
    except TooLong:
        return None
    found, left = 0, _MOST_LOOKED_AT
    with suppress(*_GONE), open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        for area in areas:
            page, end = int(area[1], 16) // _PAGE_BYTES, int(area[2], 16) // _PAGE_BYTES
            left -= end - page
            if left < 0:
                return None
            for start in range(page, end, _AT_ONCE):
                entries = os.pread(pagemap.fileno(), (min(end, start + _AT_ONCE) - start) * 8, start * 8)
                found += entries[_HIGHEST::8].count(_ALONE_IN_FILE)
    return found * _PAGE_BYTES
