"""Frozen copies of this kernel: taking them, and what has to be mended in a copy that is woken.

Memory comes back by itself, to the last byte. What lies in Linux does not: the offsets of open files are shared with
the kernel that died, so they are written down before and set again after; shared memory, sockets and pipes are as the
run that failed left them, and are named (`outside`).
"""

import os
import socket
import stat
from contextlib import suppress

from holdfast.guest import outside
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
        self._own = {outside.identity(fd) for fd in (wake.fileno(), *own_fds)}

    def disregard(self, *fds: int) -> None:
        """Our own channels: not the user's, and in order after a wake."""
        self._own |= {outside.identity(fd) for fd in fds}

    def take(self) -> wire.Snapped | wire.Woken:
        """In the original: whether there is a copy now. In the copy, much later: that it is awake."""
        try:
            offsets, shared = _offsets(), outside.note()
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
        return wire.Woken(pid=os.getpid(), not_restored=self._mend_the_rest(shared))

    def _mend_the_rest(self, shared: outside.Shared) -> list[str]:
        try:
            outside.take_back(shared)
            return outside.named(self._own)
        except Exception as error:  # a cell may have shut /dev/shm, or taken every descriptor: the rest is in order
            return [f"what lies outside memory: {type(error).__name__}: {error}"]

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


def share_memory() -> str | None:
    """In the zygote: let kernels share what is in memory now, also once they wrote to it and it is as it was again.

    None, or why they will not.
    """
    if _snapshot is None:
        return "Holdfast was installed without the C part that does it"
    try:
        _snapshot.make_image(wire.IMAGE_NAME)
    except OSError as error:
        return str(error)
    return None


def give_back() -> None:
    """Drop the pages that are as they were in the zygote. The snapshots that learn what cells write to do it again."""
    if _snapshot is not None:
        with suppress(OSError):  # a courtesy to the machine
            _snapshot.give_back()


def _offsets() -> dict[int, int]:
    offsets = {}
    for fd, status in outside.open_files():
        if stat.S_ISREG(status.st_mode):
            with suppress(OSError):
                offsets[fd] = os.lseek(fd, 0, os.SEEK_CUR)
    return offsets
