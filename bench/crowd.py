"""Many live sessions at once: what they cost, that each still works, and that nothing of them is left."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import TypeVar

import msgspec

from bench.machine import children_of, descendants_of, memory_kib, private_bytes, pss_bytes
from holdfast import Session, engine
from holdfast.config import default_home
from holdfast.sessions import LiveSession

_AT_ONCE = 4
_SAMPLE = 50
_SPARE_KIB = 2 << 20
T = TypeVar("T")
R = TypeVar("R")


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    sessions: int
    created_s: float
    idle_pss_bytes: float
    """Of a session that has not run anything yet; PSS shares out what the zygote gave to all of them."""
    ran_s: float
    used_pss_bytes: float
    used_private_bytes: float
    taken_from_machine_bytes: float
    """Fall of MemAvailable per session: page tables and the kernel's own structures included."""
    host_fds: int
    closed_s: float
    left: dict[str, list[str]]
    """What is still there after closing, by kind. It is to be empty."""


class Supervision(msgspec.Struct, frozen=True, kw_only=True):
    """What runs once, however many sessions there are."""

    keeper: int
    zygotes: list[int]


def live(session: Session) -> LiveSession:
    return session._session._transport._session


def pids_of(session: Session) -> list[int]:
    """pid 1 and the kernel."""
    incarnation = live(session).computer.now
    assert incarnation is not None
    return incarnation.cgroup.pids()


def supervision_of(session: Session) -> Supervision:
    keeper = live(session).computer._node._keeper
    assert keeper is not None
    return Supervision(keeper=keeper.peer_pid, zygotes=children_of(keeper.peer_pid))


def gather(count: int, *, cell: str, progress: Callable[[str], None]) -> Crowd:
    """Create them all, run a cell on each, close them all, and look for what stays."""
    available_kib, fds = memory_kib("MemAvailable"), _open_fds()
    with crowd(count) as (sessions, created_s):
        progress(f"{count:,} sessions created in {created_s:.1f} s")
        supervision = supervision_of(sessions[0])
        sample = sessions[:: max(1, count // _SAMPLE)]
        idle = mean(memory_of(session) for session in sample)
        started = time.perf_counter()
        failed = [run for run in each(sessions, lambda session: session.run(cell)) if run.error]
        ran_s = time.perf_counter() - started
        if failed:
            raise RuntimeError(f"{len(failed)} of {count} runs failed, the first with: {failed[0].error}")
        progress(f"a cell run in each of them in {ran_s:.1f} s")
        used, private = (mean(memory_of(s, kind) for s in sample) for kind in (pss_bytes, private_bytes))
        taken = (available_kib - memory_kib("MemAvailable")) * 1024 / count
        host_fds = _open_fds() - fds
        started = time.perf_counter()
        each(sessions, Session.close)
        closed_s = time.perf_counter() - started
    progress(f"all closed in {closed_s:.1f} s")
    return Crowd(
        sessions=count, created_s=created_s, idle_pss_bytes=idle, ran_s=ran_s, used_pss_bytes=used,
        used_private_bytes=private, taken_from_machine_bytes=taken, host_fds=host_fds, closed_s=closed_s,
        left=_leftovers_without_spares(supervision),
    )  # fmt: skip


@contextmanager
def crowd(count: int) -> Iterator[tuple[list[Session], float]]:
    """Live sessions and how long it took to make them; closed at the end, also if they could not all be made."""
    sessions: list[Session] = []

    def add(_: int) -> None:
        if memory_kib("MemAvailable") < _SPARE_KIB:
            raise MemoryError(f"less than 2 GiB of RAM is left after {len(sessions)} sessions")
        sessions.append(Session())

    try:
        started = time.perf_counter()
        each(range(count), add)
        yield sessions, time.perf_counter() - started
    finally:
        each(sessions, Session.close)


def each(items: Iterable[T], do: Callable[[T], R]) -> list[R]:
    """A few at a time. After a Ctrl-C or a failure those that wait are not begun."""
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        return list(pool.map(do, items))
    finally:
        pool.shutdown(cancel_futures=True)


def memory_of(session: Session, kind: Callable[[int], int] = pss_bytes) -> int:
    return sum(kind(pid) for pid in pids_of(session))


def _leftovers_without_spares(supervision: Supervision) -> dict[str, list[str]]:
    """The session that is kept ready for whoever comes next is no left-over."""
    time.sleep(1)
    running = engine._running()
    for _, service in running._services.values():
        engine.wait(service.end_spares)
    return leftovers(supervision)


def leftovers(supervision: Supervision) -> dict[str, list[str]]:
    """Processes, mounts, cgroups and directories of sessions, once all are closed.

    A session's mounts are in a mount namespace of its own and end with its last process: so it is enough that no
    process is left below the keeper, and that none of those mounts is in our own table.
    """
    home = default_home()
    processes = [pid for pid in descendants_of(supervision.keeper) if pid not in supervision.zygotes]
    found = {
        "process": [f"{pid} ({_state(pid)})" for pid in processes],
        "mount": [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(home) in line],
        "cgroup": _cgroups_below((home / "id").read_text().strip()),
        "directory": [str(path) for path in (home / "sessions").iterdir()],
    }
    return {kind: names for kind, names in found.items() if names}


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text().partition("State:")[2].split("\n")[0].strip()
    except OSError:
        return "gone just now"


def _cgroups_below(owner: str) -> list[str]:
    """Cgroups of sessions, in whatever hierarchy: those below a cgroup that is named after the home."""
    found = []
    for directory, names, _ in os.walk("/sys/fs/cgroup"):
        if os.path.basename(directory) == owner:
            found += [f"{directory}/{name}" for name in names if name != "keeper"]
            names.clear()
    return found


def _open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
