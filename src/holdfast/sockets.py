"""Unix sockets at paths of any length, and TCP connections that notice when the other machine is gone.

The kernel takes 107 bytes of address, and a path may have more. A longer one is named through a descriptor of its
directory, which is a short path to the same place.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
]
"""Of TCP at both ends. No answer has a deadline, for a run may be silent for hours; but a machine that is gone must be
noticed. What listens hands them on to each connection."""
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
