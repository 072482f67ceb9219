"""Frozen copies of this kernel: taking them, and what has to be mended in a copy that is woken.

Memory comes back by itself, to the last byte. What lies in Linux does not: the offsets of open files are shared with
the kernel that died, so they are written down before and set again after; sockets and pipes cannot be mended and are
named.
"""

import os
import socket
import stat
from contextlib import suppress

from holdfast.kernel import wire

try:
    from holdfast import _snapshot
except ImportError:  # built without a C compiler
    _snapshot = None


class Snapshots:
    """Takes copies that wake when the host writes to `wake`."""

    def __init__(self, wake: socket.socket, *own_fds: int) -> None:
        self.warm = False
        """The pages that cells write to are the kernel's own again, as far as they are known."""
        self._wake = wake
        self._own = {_identity(fd) for fd in (wake.fileno(), *own_fds)}

    def disregard(self, *fds: int) -> None:
        """Our own channels: not the user's, and in order after a wake."""
        self._own |= {_identity(fd) for fd in fds}

    def take(self) -> wire.Snapped | wire.Woken:
        """In the original: whether there is a copy now. In the copy, much later: that it is awake."""
        try:
            offsets = _offsets()
            pid, threads = self._fork()
        except OSError as error:
            return wire.Snapped(reason=str(error.strerror or error))
        except Exception as error:  # a cell may have patched `os`: that costs protection, and not the kernel
            return wire.Snapped(reason=f"{type(error).__name__}: {error}")
        if pid:
            return wire.Snapped(pid=pid, threads=threads)
        for fd, offset in offsets.items():
            with suppress(OSError):
                os.lseek(fd, offset, os.SEEK_SET)
        return wire.Woken(pid=os.getpid(), not_restored=self._not_restored())

    def _fork(self) -> tuple[int, int]:
        if _snapshot is not None:
            pid, threads, _, pages = _snapshot.take(self._wake.fileno())
            self.warm = pages > 0
            return pid, threads
        if len(os.listdir("/proc/self/task")) > 1:
            raise OSError("this kernel has threads, and Holdfast was installed without the C part that keeps them")
        pid = os.fork()
        if pid == 0 and self._sleep() != b"wake":
            os._exit(0)
        return pid, 0

    def _sleep(self) -> bytes:
        """On the socket that all copies are born on; or on one that the host gives us, while others are born."""
        self._wake.send(b"asleep")
        word, beds, _, _ = socket.recv_fds(self._wake, 64, 1)
        if not beds:
            return word
        with socket.socket(fileno=beds[0]) as bed:
            bed.send(b"asleep")
            return bed.recv(64)

    def _not_restored(self) -> list[str]:
        return [
            f"{kind} (descriptor {fd})"
            for fd, status in _open_files()
            if (kind := _outside_memory(status)) and (status.st_dev, status.st_ino) not in self._own
        ][:100]


def _offsets() -> dict[int, int]:
    offsets = {}
    for fd, status in _open_files():
        if stat.S_ISREG(status.st_mode):
            with suppress(OSError):
                offsets[fd] = os.lseek(fd, 0, os.SEEK_CUR)
    return offsets


def _open_files() -> list[tuple[int, os.stat_result]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append((int(name), os.fstat(int(name))))
    return found


def _outside_memory(status: os.stat_result) -> str | None:
    if stat.S_ISSOCK(status.st_mode):
        return "socket"
    return "pipe" if stat.S_ISFIFO(status.st_mode) else None


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
