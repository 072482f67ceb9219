"""Unix sockets at paths of any length.

The kernel takes 107 bytes of address, and a path may have more. A longer one is named through a descriptor of its
directory, which is a short path to the same place.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST_BYTES = 107


@contextmanager
def address_of(path: Path) -> Iterator[str]:
    """What to bind or connect to, as long as this lasts."""
    if len(os.fsencode(path)) <= _LONGEST_BYTES:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
