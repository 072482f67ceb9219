"""What Linux says of a process in /proc, where its own words stand among Linux's.

A process chooses its name and those of its files. Of what could end a line Linux escapes the newline, and nothing else:
a form feed or a carriage return stays as it is, and so do bytes that are no text. So these files are read as bytes,
cut at newlines alone, and a line that is not as Linux writes it counts for nothing.
"""

import re

_SIZE = re.compile(rb"(\w+):\s+(\d{1,18}) kB")
_GONE = (FileNotFoundError, ProcessLookupError)


def lines(path: str) -> list[bytes]:
    """None if the process is gone. PermissionError where it is not ours to ask."""
    try:
        with open(path, "rb") as file:
            return file.read().split(b"\n")
    except _GONE:
        return []


def status(pid: int, field: bytes) -> list[bytes]:
    """The words of one line of `status`; none if the process is gone, or Linux does not know the field."""
    head = field + b":"
    return next((line.split()[1:] for line in lines(f"/proc/{pid}/status") if line.startswith(head)), [])


def sizes_bytes(path: str, *fields: bytes) -> int:
    """The sum of some lines `field: number kB`."""
    found = (_SIZE.fullmatch(line) for line in lines(path))
    return sum(int(size[2]) << 10 for size in found if size and size[1] in fields)
