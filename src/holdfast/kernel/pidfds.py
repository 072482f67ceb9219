"""Processes that the host holds on to: a number may be another's by the time we use it, a pidfd never is."""

import errno
import os
import select
import signal
from contextlib import suppress

_PIDFD_SIGNAL_THREAD = 1


class Pidfds:
    """The processes of one session that we have met."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}

    def __contains__(self, pid: int) -> bool:
        return pid in self._of

    def __getitem__(self, pid: int) -> int:
        return self._of[pid]

    def meet(self, pid: int) -> int:
        """Hold on to a process, if it is still there; returns its number."""
        if not self.lives(pid):
            self.part_from(pid)
            with suppress(ProcessLookupError):
                self._of[pid] = os.pidfd_open(pid)
        return pid

    def part_from(self, pid: int) -> None:
        if (handle := self._of.pop(pid, None)) is not None:
            os.close(handle)

    def lives(self, pid: int) -> bool:
        if pid not in self._of:
            return False
        ended = select.poll()
        ended.register(self._of[pid], select.POLLIN)
        return not ended.poll(0)

    def signal(self, pid: int, number: int) -> None:
        if pid in self._of:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._of[pid], number)

    def signal_main_thread(self, pid: int, number: int) -> None:
        """Not whichever thread Linux chooses: the cell runs in this one, and its line is what is asked for."""
        if pid not in self._of:
            return
        try:
            signal.pidfd_send_signal(self._of[pid], number, None, _PIDFD_SIGNAL_THREAD)
        except ProcessLookupError:
            pass
        except OSError as error:
            if error.errno != errno.EINVAL:  # before Linux 6.9
                raise
            self.signal(pid, number)

    def close(self) -> None:
        for handle in self._of.values():
            os.close(handle)
        self._of.clear()
