"""pid 1 in Python, for machines without a C compiler. `pid1.c` says what it does and why it exists."""

import errno
import os
import signal
import socket
import struct
import time
from pathlib import Path

EXECUTABLE = Path(__file__).with_name("pid1")
_NO_MEMORY = (errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.005


def run(host_fd: int) -> None:
    """Become pid 1's loop; never returns."""
    if EXECUTABLE.exists():
        os.set_inheritable(host_fd, True)
        os.execve(EXECUTABLE, [EXECUTABLE.name, str(host_fd)], {})
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    host = socket.socket(fileno=host_fd)
    _tell(host, 0, 0)
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            os._exit(0)
        _tell(host, pid, status)


def _tell(host: socket.socket, pid: int, status: int) -> None:
    while True:
        try:
            host.send(struct.pack("ii", pid, status))
            return
        except OSError as error:
            if error.errno not in _NO_MEMORY:
                os._exit(0)
            time.sleep(_PAUSE_S)
