"""What every kind of session cgroup offers: v1, v2, and the watchdog that stands in for them.

A `Tree` belongs to one owner (one home) and holds one `Cgroup` per session. The host creates it,
limits it, freezes it, lists it, kills in it and removes it. A session's first process enters it by
writing "0" to descriptors the host opened.

Killing must beat a program that forks faster than we kill: freeze, list, kill, thaw, until only the
kept processes remain. A process that was killed cannot fork any more, so each round is final for
those it listed.
"""

import os
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["v2", "v1", "watchdog"]

CPU_PERIOD_US = 100_000  # the kernel's default, so we never have to write it
_SMALLEST_QUOTA_US = 1_000  # the kernel refuses less

# A pidfd per victim is open while it is killed; a fork bomb must not use up our descriptors.
_VICTIMS_AT_ONCE = 128
DEATH_S = 30.0
"""How long a process may take to die: with hundreds of sessions at work on two cores it is seconds."""
_FREEZE_PATIENCE_S = 0.2
_DEATH_PATIENCE_S = 0.1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class CgroupUnavailable(Exception):
    """No cgroup on this machine can hold the limits asked for; `remedy` is what would change that."""

    def __init__(self, reason: str, *, remedy: str) -> None:
        super().__init__(f"{reason}; remedy: {remedy}")
        self.reason = reason
        self.remedy = remedy


class Killed(NamedTuple):
    pid: int
    command: str
    """Its command line, or its name in brackets where that is empty, as `ps` shows it."""


class Unkillable(Exception):
    """Processes outlived SIGKILL until the deadline: they hang inside the kernel."""

    def __init__(self, survivors: list[int], killed: list[Killed]) -> None:
        super().__init__(f"still alive after SIGKILL: {survivors}")
        self.survivors = survivors
        self.killed = killed


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    memory_bytes: int
    """Hard cap: memory, page cache, tmpfs and swap together."""
    reserve_bytes: int = 0
    """How far above the cap `allow` may go for a while."""
    pids: int
    cpus: float | None
    """Quota in cores. None or 0: no quota. What was left unused may be used in a burst later."""
    cpu_weight: int = 100
    """Share under contention, on the scale of v2: 1 to 10,000, and 100 is ordinary."""

    @property
    def cpu_quota_us(self) -> int | None:
        """CPU time per period of `CPU_PERIOD_US`."""
        return max(_SMALLEST_QUOTA_US, int(self.cpus * CPU_PERIOD_US)) if self.cpus else None


class MemoryWatch(NamedTuple):
    """A descriptor that becomes ready when memory is short; read it by `acknowledge` to be told again."""

    fd: int
    epoll_events: int
    acknowledge: Callable[[], object]
    resting_bytes: int
    """The level (see `allow`) at which it tells: the cap, or below it where only that level tells."""


class Cgroup(ABC):
    """One session. Not for use by two threads at once, but blocking calls are short."""

    name: str
    _tree: "Tree"

    @abstractmethod
    def join_fds(self) -> list[int]:
        """Descriptors that a process writes "0" to in order to enter. The caller closes them."""

    def attach(self, pid1: int) -> None:  # noqa: B027 (only the watchdog has to be told)
        """Name the session's first process."""

    @abstractmethod
    def pids(self) -> list[int]:
        """Every process of the session, as the host numbers them. Zombies are not listed."""

    @abstractmethod
    def freeze(self) -> None:
        """Ask for all processes to stop; `wait_frozen` says when they have."""

    @abstractmethod
    def thaw(self) -> None: ...

    @abstractmethod
    def wait_frozen(self, timeout_s: float) -> bool: ...

    @abstractmethod
    def memory_now_bytes(self) -> int: ...

    @abstractmethod
    def memory_peak_bytes(self) -> int:
        """Most memory in use since `reset_peak`, or since the start."""

    @abstractmethod
    def reset_peak(self) -> bool:
        """Start a new peak. False if from here on the peak may only be what samples of it saw."""

    @abstractmethod
    def oom_kills(self) -> int: ...

    @abstractmethod
    def cpu_seconds(self) -> float: ...

    @abstractmethod
    def set_memory(self, memory_bytes: int) -> None:
        """Move the cap. Below what is in use v1 refuses (EBUSY) and v2 kills."""

    def memory_pinned_bytes(self) -> int:
        """Memory in use that the kernel could not take back: all but the file cache."""
        return self.memory_now_bytes()

    def allow(self, memory_bytes: int) -> None:
        """Move the level at which processes are held up, between the cap and cap plus reserve."""
        self.set_memory(memory_bytes)

    def watch_memory(self, *, soft_bytes: int, cap_bytes: int) -> "MemoryWatch | None":
        """Be told when the session passes `soft_bytes`, and when it is held up at its cap instead of killed."""
        return None

    def is_held_up(self) -> bool:
        """Whether processes are made to wait because they are at the level set by `allow`."""
        return False

    def over_cap(self) -> bool:
        """Whether the host must kill to keep the cap: never, where the kernel keeps it."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Give up our descriptors; the cgroup and what runs in it stay."""

    def abandon(self) -> None:
        """Leave it as it is, with what does not die in it, to the next `Tree.sweep`."""
        self.close()
        self._tree.forget(self.name)

    @abstractmethod
    def remove(self) -> None:
        """Remove the empty cgroup. Its processes must have been killed before."""

    def kill_one(self, pid: int) -> None:
        """One of its processes, if the number still is one's. Nobody waits for its end."""
        _kill_listed([pid], self.pids, {})

    def kill_except(self, keep: Collection[int], *, deadline_s: float = DEATH_S) -> list[Killed]:
        """Kill every process but these and say what was killed. Leaves the cgroup thawed if it killed."""
        return self._kill(self.pids, keep, deadline_s)

    def kill_all(self, *, deadline_s: float = DEATH_S) -> None:
        self._kill(self.pids, (), deadline_s)

    def _kill(self, listing: Callable[[], list[int]], keep: Collection[int], deadline_s: float) -> list[Killed]:
        give_up_at = time.monotonic() + deadline_s
        killed: dict[int, Killed] = {}
        # The first look needs no freezing: the kernel lists in order of birth, so a listing without
        # strangers means that none was alive when it ended, however they fork.
        while strangers := _without(listing(), keep):
            if time.monotonic() > give_up_at:
                raise Unkillable(strangers, list(killed.values()))
            self.freeze()
            try:
                # Not frozen in time (a process hangs in the kernel): kill all the same, and look again.
                self.wait_frozen(_FREEZE_PATIENCE_S)
                _kill_listed(_without(listing(), keep), listing, killed)
            finally:
                self.thaw()  # v1 delivers the kill only now
            # Frozen again at once, a v1 process would sleep with its death still pending.
            _wait_gone(set(killed), listing)
        return list(killed.values())


def _without(pids: list[int], keep: Collection[int]) -> list[int]:
    return [pid for pid in pids if pid not in keep]


def _kill_listed(victims: list[int], listing: Callable[[], list[int]], killed: dict[int, Killed]) -> None:
    for start in range(0, len(victims), _VICTIMS_AT_ONCE):
        handles = _open_handles(victims[start : start + _VICTIMS_AT_ONCE])
        try:
            # Between listing and opening, a number may have passed to a stranger outside the session.
            # If it is listed still, then the handle is the session's process (or a dead one).
            for pid in handles.keys() & set(listing()):
                killed.setdefault(pid, Killed(pid, command_of(pid)))
                send_signal(handles[pid], signal.SIGKILL)
        finally:
            for handle in handles.values():
                os.close(handle)


def _open_handles(pids: list[int]) -> dict[int, int]:
    handles = {}
    for pid in pids:
        try:
            handles[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
    return handles


def send_signal(handle: int, number: int) -> bool:
    """False if the process has gone. Signal 0 only asks."""
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    return True


def _wait_gone(victims: set[int], listing: Callable[[], list[int]]) -> None:
    give_up_at = time.monotonic() + _DEATH_PATIENCE_S
    pause_s = 0.0002
    while not victims.isdisjoint(listing()) and time.monotonic() < give_up_at:
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.01)


def command_of(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()[:4096]
        if words := line.rstrip(b"\0"):
            return words.replace(b"\0", b" ").decode(errors="replace")
        return f"[{Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()}]"
    except (FileNotFoundError, ProcessLookupError):
        return "[gone]"


class Tree(ABC):
    """The cgroups of one owner."""

    kind: Kind
    asked_of = ""
    """Who made room for it, where somebody had to be asked: ` by your systemd`."""
    freezers: str | None = None
    """The directory of its cgroups' freezers, where a process that is killed has to be thawed to die."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._live: set[str] = set()

    @abstractmethod
    def create(self, name: str, limits: Limits) -> Cgroup:
        """A new, empty, limited cgroup; `FileExistsError` if there is one of that name."""

    def adopt(self, pid: int) -> None:  # noqa: B027 (most kinds allow any place)
        """Put the process that forks sessions (the keeper) where the kernel lets its children join.

        Call it right after the keeper has started, before any session is created.
        """

    @abstractmethod
    def existing(self) -> list[str]:
        """Cgroups below this owner that this object did not create: left over from a crash."""

    @abstractmethod
    def sweep(self) -> None:
        """Kill what runs in the left-over cgroups, and remove them."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the owner's tree, when no session is left."""

    def forget(self, name: str) -> None:
        """Told by a cgroup that has been removed."""
        self._live.discard(name)


def check_name(name: str) -> str:
    """Names become directories and systemd units: nothing that means something there gets through."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"not a usable cgroup name: {name!r}")
    return name


def machine_has_swap() -> bool:
    return len(Path("/proc/swaps").read_text().splitlines()) > 1
