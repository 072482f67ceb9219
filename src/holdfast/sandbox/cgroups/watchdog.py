"""The weaker mode, for machines without usable cgroups: nobody gets it who did not ask for it.

A session is its first process and all descendants; orphans fall to the session's pid 1, so nobody
leaves the tree. Memory is sampled, so a fast allocation overshoots the cap until the next sample, and
tmpfs files that no process maps are not seen. Processes are limited by RLIMIT_NPROC elsewhere.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from holdfast.sandbox import procfs
from holdfast.sandbox.cgroups.contract import DEATH_S, Cgroup, Limits, Tree, check_name, send_signal

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_GONE = (FileNotFoundError, ProcessLookupError)
# Each round meets only what was forked during the one before; a bomb that outruns us is killed anyway.
_ROUNDS = 20

# Fields of /proc/<pid>/stat, counted from the state.
_PARENT = 1
_OWN_AND_REAPED = slice(11, 15)
_STOPPED = "Tt"
_DEAD = "ZX"


class WatchdogTree(Tree):
    kind = "watchdog"

    def create(self, name: str, limits: Limits) -> "WatchdogCgroup":
        if check_name(name) in self._live:
            raise FileExistsError(name)
        self._live.add(name)
        return WatchdogCgroup(name, limits, self)

    def existing(self) -> list[str]:
        return []  # nothing outlives a host here but processes, and those die with their keeper

    def sweep(self) -> None: ...

    def remove(self) -> None: ...


class WatchdogCgroup(Cgroup):
    def __init__(self, name: str, limits: Limits, tree: WatchdogTree) -> None:
        self.name = name
        self._tree = tree
        self._cap_bytes = limits.memory_bytes
        self._pid1 = 0
        self._pid1_fd = -1
        self._peak_bytes = 0
        self._oom_kills = 0

    def join_fds(self) -> list[int]:
        return []

    def attach(self, pid1: int) -> None:
        self._pid1_fd = os.pidfd_open(pid1)
        self._pid1 = pid1

    def pids(self) -> list[int]:
        # Unlike a cgroup's list this one is not of one moment: a process may move to pid 1 behind
        # our back. Two equal looks in a row are as good as it gets.
        before: list[int] = []
        for _ in range(_ROUNDS):
            if (now := self._look()) == before:
                break
            before = now
        return now

    def _look(self) -> list[int]:
        if self._pid1_fd < 0 or not send_signal(self._pid1_fd, 0):
            return []
        return [pid for pid in _family(self._pid1) if _state(pid) not in _DEAD]

    def kill_all(self, *, deadline_s: float = DEATH_S) -> None:
        # The others first: in a pid namespace they would die with pid 1 anyway, but without one
        # they would be orphans that nobody finds again.
        self._kill(self.pids, {self._pid1}, deadline_s)
        self._kill(self.pids, (), deadline_s)

    def freeze(self) -> None:
        """Pid 1 goes on: it has to reap, and it runs nothing of the user's."""
        for _ in range(_ROUNDS):
            if not (moving := self._moving()):
                return
            _signal_all(moving, signal.SIGSTOP)

    def thaw(self) -> None:
        _signal_all(self._all_but_pid1(), signal.SIGCONT)

    def wait_frozen(self, timeout_s: float) -> bool:
        give_up_at = time.monotonic() + timeout_s
        while self._moving():
            if time.monotonic() > give_up_at:
                return False
            time.sleep(0.001)
        return True

    def _moving(self) -> list[int]:
        return [pid for pid in self._all_but_pid1() if _state(pid) not in _STOPPED + _DEAD]

    def _all_but_pid1(self) -> list[int]:
        return [pid for pid in self.pids() if pid != self._pid1]

    def memory_now_bytes(self) -> int:
        now = sum(_private_and_shared_part(pid) for pid in self.pids())
        self._peak_bytes = max(self._peak_bytes, now)
        return now

    def memory_peak_bytes(self) -> int:
        return max(self._peak_bytes, self.memory_now_bytes())

    def reset_peak(self) -> bool:
        self._peak_bytes = 0
        return False  # only samples, ever

    def over_cap(self) -> bool:
        # Counting shared pages in full is cheap and never too little; the exact sum takes the kernel
        # milliseconds per gigabyte, so it is asked for only when it decides.
        if sum(_resident(pid) for pid in self.pids()) <= self._cap_bytes:
            return False
        return self.memory_now_bytes() > self._cap_bytes

    def oom_kill(self, pid: int) -> None:
        """What the kernel's OOM killer does for a real cgroup. The host chooses whom."""
        handle = os.pidfd_open(pid)
        try:
            # Looked up after the handle exists, so that it cannot mean a stranger by now.
            if pid in self.pids() and send_signal(handle, signal.SIGKILL):
                self._oom_kills += 1
        finally:
            os.close(handle)

    def oom_kills(self) -> int:
        return self._oom_kills

    def cpu_seconds(self) -> float:
        return sum(map(_cpu_ticks, self.pids())) / _TICKS_PER_S

    def set_memory(self, memory_bytes: int) -> None:
        self._cap_bytes = memory_bytes

    def close(self) -> None:
        if self._pid1_fd >= 0:
            os.close(self._pid1_fd)
            self._pid1_fd = -1

    def remove(self) -> None:
        self.close()
        self._tree.forget(self.name)


def _family(pid1: int) -> list[int]:
    """A process and its descendants, from one pass over /proc: not every kernel has `children` files."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            children.setdefault(int(fields[_PARENT]), []).append(int(name))
    family = [pid1]
    for pid in family:
        family.extend(sorted(children.get(pid, ())))
    return family


def _stat(pid: int) -> list[str]:
    """/proc/<pid>/stat from the state on; empty if it has gone. The name before it may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except _GONE:
        return []


def _state(pid: int) -> str:
    return (_stat(pid) or ["X"])[0]


def _cpu_ticks(pid: int) -> int:
    """Its own and that of the children it has reaped."""
    return sum(map(int, _stat(pid)[_OWN_AND_REAPED]))


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _resident(pid: int) -> int:
    return procfs.sizes_bytes(f"/proc/{pid}/status", b"RssAnon", b"RssShmem")


def _private_and_shared_part(pid: int) -> int:
    """What it alone holds, and its part of what it shares: sums to the truth over a session."""
    try:
        return procfs.sizes_bytes(f"/proc/{pid}/smaps_rollup", b"Pss_Anon", b"Pss_Shmem")
    except PermissionError:
        # Not dumpable, and we are not root. Counted in full: too much rather than too little.
        return _resident(pid)
