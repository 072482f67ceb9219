"""Holdfast beside ipykernel, in one run: start, round trip, memory, and a thousand sessions at once.

A run of ours is a transaction, which a kernel of theirs does not have. So there are two sets of figures, and each says
which it is: the kernel by itself (`alone`), like beside like; and whole runs, as a caller gets them.

    python -m bench.kernels [--quick] [--json FILE]

Times are taken in turns (one of ours, one of theirs, …), so that whatever else the machine does disturbs both
alike; medians are compared. Nothing here fails because something was slow: a goal is met, or the table says that
it is not. What does fail is a session that leaves something behind.
"""

import argparse
import asyncio
import resource
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import mean

import msgspec
from rich.console import Console

from bench import alone, crowd, machine, report
from bench.jupyter import JupyterKernel, bytecode_is_compiled
from bench.report import Figure, Report, timing
from holdfast import AsyncSession, Session, engine

IMPORT_PANDAS = "import pandas as pd; pd.__version__"
GROUPBY = (
    "import pandas as pd\n"
    "frame = pd.DataFrame({'kind': list('abcd') * 250, 'value': range(1000)})\n"
    "frame.groupby('kind')['value'].agg(['sum', 'mean']).shape"
)
MIB = 1 << 20
_THINKING_S = 0.02
"""Before each round trip, for both sides: no agent asks again in the same millisecond. Ours takes its snapshot then;
`bench.snapshots` has what it costs who does not think."""
_SETTLE_S = 0.2
"""Before each start: the kernel before it is still being taken down, and that is nobody's start."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How often, how many."""

    starts: int = 15
    trips: int = 500
    block: int = 25
    """Round trips are taken in blocks of this many per side, so that each side's caches stay its own."""
    kernels: int = 20
    sessions: int = 1000


QUICK = Plan(starts=5, trips=100, kernels=5, sessions=100)


def main() -> None:
    options = _options()
    plan = QUICK if options.quick else Plan()
    console = Console(width=None if sys.stdout.isatty() else 120)
    raise_descriptor_limit()
    try:
        result = measure(plan, " ".join(["python -m bench.kernels", *sys.argv[1:]]), console.log)
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started is ended")
        sys.exit(130)
    finally:
        engine.shut_down()
    report.show(result, console)
    if options.json:
        report.save(result, options.json)
    if result.leaks:
        console.print("[red]closed sessions left something behind:[/]", result.leaks)
        sys.exit(1)


def measure(plan: Plan, command: str, progress: Callable[[str], None]) -> Report:
    result = Report(command=command, machine=machine.describe())
    with Session() as session:  # the home is opened, the environment built, the zygote warm: once per process
        session.run("1+1")
    measure_starts(plan, result)
    progress("starts measured")
    measure_round_trips(plan, result)
    progress("round trips measured")
    measure_memory(plan, result)
    progress("memory measured")
    record_crowd(crowd.gather(plan.sessions, cell=GROUPBY, progress=progress), result)
    return result


def measure_starts(plan: Plan, result: Report) -> None:
    """From nothing to the version of pandas, which thereby is imported."""
    kinds = {"holdfast": _start_ours, "jupyter": _start_theirs, "jupyter, bare": _start_theirs_bare}
    samples: dict[str, list[float]] = {kind: [] for kind in kinds}
    for round_number in range(plan.starts + 1):
        for kind, start in kinds.items():
            time.sleep(_SETTLE_S)
            taken = start()
            if round_number:  # the first fills the caches: files, and bytecode
                samples[kind].append(taken)
    result.facts["ipykernel's packages are compiled to bytecode"] = bytecode_is_compiled()
    ours, theirs, bare = samples.values()
    result.samples_ms |= {f"start, {kind}": times for kind, times in samples.items()}
    result.figures += [
        timing("start → first result with pandas imported", ours, theirs, goal=40, note=_spread(ours, theirs)),
        timing(
            "the same without wait_for_ready",
            ours,
            bare,
            note="the cell is sent at once and its reply awaited, outputs unheard",
        ),
    ]


def _start_ours() -> float:
    started = time.perf_counter()
    with Session() as session:
        _expect(session.run(IMPORT_PANDAS).text)
        return _ms_since(started)


def _start_theirs() -> float:
    started = time.perf_counter()
    with closing(JupyterKernel()) as kernel:
        _expect(kernel.start().run(IMPORT_PANDAS))
        return _ms_since(started)


def _start_theirs_bare() -> float:
    started = time.perf_counter()
    with closing(JupyterKernel()) as kernel:
        kernel.launch().run_unheard(IMPORT_PANDAS)
        return _ms_since(started)


def measure_round_trips(plan: Plan, result: Report) -> None:
    """`1+1` on a kernel that has run before: the kernel by itself, its turns, and whole transactions."""
    with (
        Session() as session,
        Session() as bare,
        Session() as turns,
        closing(JupyterKernel()) as kernel,
        asyncio.Runner(loop_factory=asyncio.new_event_loop) as loop,
    ):
        asynchronous = loop.run(AsyncSession().open())
        for each in (session, bare, turns):
            each.run("1")
        alone.wake(bare)
        try:
            kernel.start()
            kinds: dict[str, Callable[[], list[float]]] = {
                "the kernel by itself": _trips(lambda code: alone.ask_kernel(bare, code), plan),
                "the kernel with snapshots": _trips(lambda code: alone.execute(turns, code), plan),
                "Session": _trips(session.run, plan),
                "jupyter": _trips(kernel.run, plan),
                "AsyncSession": lambda: loop.run(_async_trips(asynchronous, plan.block)),
            }
            samples: dict[str, list[float]] = {kind: [] for kind in kinds}
            for round_number in range(plan.trips // plan.block + 1):
                for kind, take in kinds.items():
                    samples[kind] += take() if round_number else take()[:0]
        finally:
            loop.run(asynchronous.close())
    result.samples_ms |= {f"1+1, {kind}": times for kind, times in samples.items()}
    _record_round_trips(samples, result)


_ROUND_TRIPS = {
    "the kernel by itself": (4, "Execute sent, Finished read; awake, no snapshot, no journal"),
    "the kernel with snapshots": (
        3,
        "thawed, run under its limits; snapshot and frozen while you think; no journal",
    ),
    "Session": (2, "a whole transaction: planned, executed, verified, journalled, receipt signed; snapshot"),
    "AsyncSession": (2, "the same, from an event loop of the caller's"),
}


def _record_round_trips(samples: dict[str, list[float]], result: Report) -> None:
    theirs = samples["jupyter"]
    for kind, (goal, note) in _ROUND_TRIPS.items():
        ours = samples[kind]
        result.figures += [
            timing(f"1+1 round trip, {kind}", ours, theirs, goal=goal, note=note),
            Figure(
                name=f"1+1 round trip, {kind}, 95th percentile", unit="ms",
                holdfast=report.p95(ours), jupyter=report.p95(theirs),
            ),
        ]  # fmt: skip


def _trips(run: Callable[[str], object], plan: Plan) -> Callable[[], list[float]]:
    return lambda: [_trip(run) for _ in range(plan.block)]


def _trip(run: Callable[[str], object]) -> float:
    time.sleep(_THINKING_S)
    started = time.perf_counter()
    run("1+1")
    return _ms_since(started)


async def _async_trips(session: AsyncSession, count: int) -> list[float]:
    samples = []
    for _ in range(count):
        await asyncio.sleep(_THINKING_S)
        started = time.perf_counter()
        await session.run("1+1")
        samples.append(_ms_since(started))
    return samples


def measure_memory(plan: Plan, result: Report) -> None:
    """PSS of live kernels: what a process has alone, and its share of what it shares."""
    with crowd.crowd(plan.kernels) as (sessions, _):
        fresh = mean(crowd.memory_of(session) for session in sessions)
        ours = _memory_of_ours(sessions, IMPORT_PANDAS)
        alone.drop_snapshots(sessions)
        ours_alone = mean(crowd.memory_of(session) for session in sessions)
        ours_busy = _memory_of_ours(sessions, GROUPBY)
        alone.drop_snapshots(sessions)
        ours_busy_alone = mean(crowd.memory_of(session) for session in sessions)
        supervision = crowd.supervision_of(sessions[0])
        fixed = sum(machine.pss_bytes(pid) for pid in (supervision.keeper, *supervision.zygotes))
    fixed_alone = sum(machine.pss_bytes(pid) for pid in (supervision.keeper, *supervision.zygotes))
    with ExitStack() as ending:
        kernels = [ending.enter_context(closing(JupyterKernel())) for _ in range(plan.kernels)]
        for kernel in kernels:
            kernel.start()
        theirs = _memory_of_theirs(kernels, IMPORT_PANDAS)
        theirs_busy = _memory_of_theirs(kernels, GROUPBY)
    note = f"PSS, {plan.kernels} live of each kind"
    shared_out = ours + fixed / plan.kernels
    result.figures += [
        _size("memory per kernel, pandas imported, nothing run yet", fresh, theirs, goal=8, note=note),
        _size("the same after a first cell, without a snapshot", ours_alone, theirs, goal=8, note="it was dropped"),
        _size("the same with its snapshot, as it is between two runs", ours, theirs),
        _size("the same, keeper and zygote shared out", shared_out, theirs),
        _size("memory per kernel after a groupby, without a snapshot", ours_busy_alone, theirs_busy),
        _size("the same with its snapshot", ours_busy, theirs_busy),
    ]
    result.facts["keeper and zygote, once per host, no session alive (MiB)"] = fixed_alone / MIB


def _memory_of_ours(sessions: list[Session], cell: str) -> float:
    for session in sessions:
        _expect(session.run(cell).text)
    time.sleep(1)  # the last snapshots are being taken
    return mean(crowd.memory_of(session) for session in sessions)


def _memory_of_theirs(kernels: list[JupyterKernel], cell: str) -> float:
    for kernel in kernels:
        _expect(kernel.run(cell))
    return mean(machine.pss_bytes(kernel.pid) for kernel in kernels)


def _size(name: str, holdfast: float, jupyter: float, *, goal: float | None = None, note: str = "") -> Figure:
    return Figure(name=name, unit="MiB", holdfast=holdfast / MIB, jupyter=jupyter / MIB, goal=goal, note=note)


def record_crowd(found: crowd.Crowd, result: Report) -> None:
    many = f"{found.sessions:,} live sessions"
    result.facts |= {
        f"{many}: created in (s)": found.created_s,
        f"{many}: a groupby in each, all together (s)": found.ran_s,
        f"{many}: memory each, idle, PSS (MiB)": found.idle_pss_bytes / MIB,
        f"{many}: memory each, after the groupby, PSS (MiB)": found.used_pss_bytes / MIB,
        f"{many}: memory each, after the groupby, private (MiB)": found.used_private_bytes / MIB,
        f"{many}: taken from the machine, each (MiB)": found.taken_from_machine_bytes / MIB,
        f"{many}: descriptors in the host, each": found.host_fds / found.sessions,
        f"{many}: closed in (s)": found.closed_s,
        f"{many}: left after closing": _counted(found.left),
    }
    result.leaks = {kind: names[:10] for kind, names in found.left.items()}


def raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _expect(text: str | None) -> None:
    if not text:
        raise RuntimeError("a kernel gave no result")


def _counted(left: dict[str, list[str]]) -> str:
    return ", ".join(f"{len(names)} × {kind}" for kind, names in left.items()) or "nothing"


def _spread(ours: list[float], theirs: list[float]) -> str:
    return f"{len(ours)} each; fastest {min(ours):.1f} and {min(theirs):.1f}, median of both sides shown"


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description="Holdfast beside ipykernel.")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, 100 sessions instead of 1,000")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure and sample there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
