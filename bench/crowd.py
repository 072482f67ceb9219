"""Many live sessions at once: what they cost, that each still works, and that nothing of them is left."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

import msgspec

from bench.machine import memory_kib, private_bytes, pss_bytes
from holdfast import Session
from holdfast.config import default_home
from holdfast.sessions import LiveSession

_AT_ONCE = 4
_SAMPLE = 50
_SPARE_KIB = 2 << 20


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    sessions: int
    created_s: float
    idle_pss_bytes: float
    """Of a session that has not run anything yet; PSS shares out what the zygote gave to all of them."""
    ran_s: float
    used_pss_bytes: float
    used_private_bytes: float
    taken_from_machine_bytes: float
    """Fall of MemAvailable per session: the kernel's own structures and page tables included."""
    host_fds: int
    closed_s: float


class Leftovers(Exception):
    """Something of a closed session is still there."""


def live(session: Session) -> LiveSession:
    return session._session._session


def pids_of(session: Session) -> list[int]:
    """pid 1 and the kernel."""
    incarnation = live(session)._now
    assert incarnation is not None
    return incarnation.cgroup.pids()


def gather(count: int, cell: str, expected: str, progress: Callable[[str], None]) -> Crowd:
    """Create them all, run a cell on each, close them all; raises `Leftovers` if anything stays."""
    available_kib, fds = memory_kib("MemAvailable"), _open_fds()
    with crowd(count) as (sessions, created_s):
        progress(f"{count} sessions created in {created_s:.1f} s")
        sample = sessions[:: max(1, count // _SAMPLE)]
        idle = mean(_size(session, pss_bytes) for session in sample)
        started = time.perf_counter()
        wrong = [run for run in _each(sessions, lambda s: s.run(cell)) if run.text != expected]
        if wrong:
            raise AssertionError(f"{len(wrong)} of {count} runs went wrong, the first: {wrong[0]}")
        ran_s = time.perf_counter() - started
        progress(f"a groupby in each in {ran_s:.1f} s")
        used = mean(_size(session, pss_bytes) for session in sample)
        private = mean(_size(session, private_bytes) for session in sample)
        taken = (available_kib - memory_kib("MemAvailable")) * 1024 / count
        host_fds = _open_fds() - fds
        traces = [trace for session in sessions for trace in _traces(session)]
        started = time.perf_counter()
        _each(sessions, Session.close)
        closed_s = time.perf_counter() - started
    nothing_is_left(traces)
    progress(f"all closed in {closed_s:.1f} s, {len(traces):,} traces looked for and none found")
    return Crowd(
        sessions=count, created_s=created_s, idle_pss_bytes=idle, ran_s=ran_s, used_pss_bytes=used,
        used_private_bytes=private, taken_from_machine_bytes=taken, host_fds=host_fds, closed_s=closed_s,
    )  # fmt: skip


@contextmanager
def crowd(count: int) -> Iterator[tuple[list[Session], float]]:
    """Live sessions and how long it took to make them; closed at the end, also when they could not all be made."""
    sessions: list[Session] = []

    def add(_: int) -> None:
        if memory_kib("MemAvailable") < _SPARE_KIB:
            raise MemoryError(f"less than 2 GiB of RAM is left after {len(sessions)} sessions")
        sessions.append(Session())

    try:
        started = time.perf_counter()
        _each(range(count), add)
        yield sessions, time.perf_counter() - started
    finally:
        _each(sessions, Session.close)


def nothing_is_left(keeper: int, zygotes: list[int]) -> None:
    """No process, mount, cgroup or directory of a session, once all are closed.

    A session's mounts live in a mount namespace of its own, which ends with its last process; so it is enough that
    no process below the keeper remains, and that none of the mounts ever showed up in ours.
    """
    home = default_home()
    left = [f"process {pid}" for pid in children_of(keeper) if pid not in zygotes]
    left += [f"mount {line}" for line in Path("/proc/self/mounts").read_text().splitlines() if str(home) in line]
    left += [f"cgroup {path}" for path in _cgroups_below((home / "id").read_text().strip())]
    left += [f"directory {path}" for path in (home / "sessions").iterdir()]
    if left:
        raise Leftovers(f"{len(left)} things are left of closed sessions: {'; '.join(left[:5])}")


def fixed_costs(session: Session) -> tuple[int, list[int]]:
    """The keeper's pid and its zygotes': what runs once, however many sessions there are."""
    keeper = live(session)._node._keeper
    assert keeper is not None
    sessions = {pid for other in live(session)._node.tree._live for pid in ()}
    return keeper.peer_pid, [pid for pid in children_of(keeper.peer_pid) if pid not in sessions]


def _cgroups_below(owner: str) -> list[str]:
    """Cgroups of sessions, in whatever hierarchy: those below a cgroup that is named after the home."""
    found = []
    for directory, names, _ in os.walk("/sys/fs/cgroup"):
        if os.path.basename(directory) == owner:
            found += [f"{directory}/{name}" for name in names if name != "keeper"]
            names.clear()
    return found


def _size(session: Session, measure: Callable[[int], int]) -> int:
    return sum(measure(pid) for pid in pids_of(session))


def _open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
