"""What it costs that memory survives: taking a snapshot, waking it, and writing while one sleeps.

    python -m bench.snapshots [--quick] [--json FILE]

Goals: awake within 10 ms after the death is seen, whatever the size; `1+1` at least three times as fast as ipykernel
with a snapshot before each. Nothing here fails because something was slow.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import alone, machine
from bench.figures import ok, show, timed
from bench.jupyter import JupyterKernel
from holdfast import Session, engine

SIZES_MB = {"10 MB": 10, "1 GB": 1000, "4 GB": 4000}
THINKING_S = 0.05
"""Between two runs a caller reads, thinks, asks a model: this long at least."""


class Stopwatch:
    """Times the calls of one method of an object, and lets them through."""

    def __init__(self, owner: Any, method: str) -> None:
        self.samples_ms: list[float] = []
        original: Callable[..., Any] = getattr(owner, method)

        async def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return await original(*args)
            finally:
                self.samples_ms.append((time.perf_counter() - started) * 1e3)

        setattr(owner, method, timed)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, and no 4 GB")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    repetitions = 5 if options.quick else 15
    figures: dict[str, float] = {}
    found = machine.describe()
    try:
        for name, size_mb in list(SIZES_MB.items())[: 2 if options.quick else 3]:
            figures |= measure_wakes(name, size_mb, repetitions)
        figures |= measure_rewriting(repetitions)
        figures |= measure_round_trips(repetitions * 10)
    finally:
        engine.shut_down()
    for line in found.lines():
        console.print(line, style="dim", highlight=False)
    show("What it costs that memory survives", figures, console)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure_wakes(name: str, size_mb: int, repetitions: int) -> dict[str, float]:
    """A kernel with that much state, killed by itself, again and again."""
    with Session(memory=f"{2 * size_mb + 500}M", timeout=120) as session:
        ok(session.run(f"import numpy as np, os, signal; state = np.ones({size_mb} * 125000)"))
        live = session._session._transport._session
        assert live.computer.now is not None
        kernel = live.computer.now.kernel
        snapshots, wakes = Stopwatch(kernel, "take_snapshot"), Stopwatch(kernel, "wake_snapshot")
        rollbacks = Stopwatch(live.computer.protection, "roll_back")
        for _ in range(repetitions):
            time.sleep(THINKING_S)
            assert session.run("os.kill(os.getpid(), signal.SIGKILL)").memory == "restored"
        time.sleep(THINKING_S)
        ok(session.run("assert state.sum() == state.size"))
    return {
        f"{name} of state: snapshot, in the caller's thinking time (ms)": snapshots.median_ms,
        f"{name} of state: awake after the death is seen (ms)": wakes.median_ms,
        f"{name} of state: the whole rollback, left-overs killed (ms)": rollbacks.median_ms,
    }


def measure_rewriting(repetitions: int) -> dict[str, float]:
    """One gigabyte, every page of it, in place."""
    rewrite = "import time; t = time.perf_counter(); a += 1; time.perf_counter() - t"
    with Session(memory="3G", timeout=120) as session:
        make = "import numpy as np; a = np.ones(125_000_000)\n"
        bare = [float(ok(session.run(make + rewrite))) for _ in range(max(2, repetitions // 5))]
        with_snapshot = []
        for _ in range(max(2, repetitions // 5)):
            time.sleep(4 * THINKING_S)
            with_snapshot.append(float(ok(session.run(rewrite))))
    return {
        "rewriting 1 GB in place, no snapshot (ms)": statistics.median(bare) * 1e3,
        "rewriting 1 GB in place while a snapshot sleeps (ms)": statistics.median(with_snapshot) * 1e3,
    }


def measure_round_trips(repetitions: int) -> dict[str, float]:
    """`1+1` in turns, a pause before each, so that the snapshot falls into it: the kernel with its snapshots alone, and
    whole runs, which are transactions besides (`bench.transactions`)."""
    with Session() as session, Session() as turns, closing(JupyterKernel()) as kernel:
        kernel.start()
        ok(turns.run("1"))
        samples: dict[str, list[float]] = {"kernel": [], "jupyter": [], "run": [], "at once": []}
        for _ in range(repetitions):
            time.sleep(THINKING_S)
            samples["kernel"].append(timed(lambda: alone.execute(turns, "1+1")))
            time.sleep(THINKING_S)
            samples["jupyter"].append(timed(lambda: kernel.run("1+1")))
            time.sleep(THINKING_S)
            samples["run"].append(timed(lambda: session.run("1+1")))
            samples["at once"].append(timed(lambda: session.run("1+1")))
    medians = {kind: statistics.median(times) for kind, times in samples.items()}
    return {
        "1+1 in the kernel with a snapshot before each (ms)": medians["kernel"],
        "1+1 in ipykernel (ms)": medians["jupyter"],
        "ratio (goal: 3 or more)": medians["jupyter"] / medians["kernel"],
        "1+1 as a whole run (ms)": medians["run"],
        "1+1 as a whole run, sent before the snapshot is done (ms)": medians["at once"],
    }


if __name__ == "__main__":
    main()
