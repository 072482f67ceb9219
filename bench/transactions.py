"""What it costs that every run is a transaction: small ones, large ones, rolling back, and the hundred-thousandth.

    python -m bench.transactions [--quick] [--json FILE]

Goals: a trivial run, journalled and with a receipt, at least twice as fast as in ipykernel without any; a commit at
run 100,000 at most 1.5 times what it was at run 1. Nothing here fails because something was slow.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from bench import machine
from bench.crowd import live
from bench.figures import ok, show, timed
from bench.jupyter import JupyterKernel
from holdfast import Session, engine

THINKING_S = 0.05
"""Between two runs a caller reads, thinks, asks a model: this long at least."""
WRITES = {
    "1 file": "open('one.txt', 'w').write(str(time.time()))",
    "100 files": "for i in range(100): open(f'{i}.txt', 'w').write(str(time.time()))",
    "10,000 files": "for i in range(10_000): open(f'{i}.txt', 'w').write(str(time.time()))",
    "1 GB": "with open('large', 'wb') as file:\n    for _ in range(1000): file.write(os.urandom(1 << 20))",
}
_ASIDE = Console(stderr=True)
ROLLBACKS_MB = {"10 MB": 10, "1 GB": 1000, "4 GB": 4000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, no 4 GB, and a history of 2,000 runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    repetitions = 3 if options.quick else 7
    figures: dict[str, float] = {}
    found = machine.describe()
    try:
        figures |= measure_trivial(repetitions * 20)
        figures |= measure_writes(repetitions)
        for name, size_mb in list(ROLLBACKS_MB.items())[: 2 if options.quick else 3]:
            figures |= measure_rollback(name, size_mb, repetitions)
        figures |= measure_history(2_000 if options.quick else 100_000)
    finally:
        engine.shut_down()
    for line in found.lines():
        console.print(line, style="dim", highlight=False)
    show("What it costs that every run is a transaction", figures, console)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure_trivial(repetitions: int) -> dict[str, float]:
    """`1+1` in turns: ours journalled, verified, with a receipt and a snapshot; theirs without any of it."""
    with Session() as session, closing(JupyterKernel()) as kernel:
        kernel.start()
        ok(session.run("x = 1"))
        samples: dict[str, list[float]] = {"holdfast": [], "jupyter": []}
        for _ in range(repetitions):
            time.sleep(THINKING_S)
            samples["holdfast"].append(timed(lambda: session.run("1+1")))
            time.sleep(THINKING_S)
            samples["jupyter"].append(timed(lambda: kernel.run("1+1")))
    medians = {kind: statistics.median(times) for kind, times in samples.items()}
    return {
        "1+1 as a transaction (ms)": medians["holdfast"],
        "1+1 in ipykernel (ms)": medians["jupyter"],
        "ratio (goal: 2 or more)": medians["jupyter"] / medians["holdfast"],
    }


def measure_writes(repetitions: int) -> dict[str, float]:
    """From the call to the reply: written, hashed, made durable, published, sealed. And what the code alone took."""
    figures = {}
    with Session(timeout=300, disk="40G") as session:
        ok(session.run("import os, time"))
        for name, code in WRITES.items():
            figures |= _measure_run(session, f"a run that writes {name}", code, min(repetitions, 3))
        append = "with open('large', 'ab') as file: file.write(b'.')"
        figures |= _measure_run(session, "a run that appends a byte to a committed 1 GB file", append, 3)
    return figures


def _measure_run(session: Session, name: str, code: str, repetitions: int) -> dict[str, float]:
    whole, alone = [], []
    for _ in range(repetitions):
        time.sleep(4 * THINKING_S)
        started = time.perf_counter()
        run = session.run(code)
        whole.append((time.perf_counter() - started) * 1e3)
        alone.append(run.duration_s * 1e3)
        assert run.status == "committed", run.error
    return {
        f"{name} (ms)": statistics.median(whole),
        f"{name}: the code alone (ms)": statistics.median(alone),
    }


def measure_rollback(name: str, size_mb: int, repetitions: int) -> dict[str, float]:
    """A run that doubles its state in memory and on disk, and then fails: from its end to the reply."""
    with Session(memory=f"{3 * size_mb + 500}M", timeout=300, disk="40G") as session:
        ok(session.run(f"import numpy as np; state = np.ones({size_mb} * 125000)"))
        samples = []
        for _ in range(min(repetitions, 3)):
            time.sleep(4 * THINKING_S)
            started = time.perf_counter()
            run = session.run("state.tofile('state.bin'); more = state + 1; 1 / 0")
            samples.append((time.perf_counter() - started - run.duration_s) * 1e3)
            assert (run.status, run.memory) == ("rolled_back", "restored"), run
    return {f"rolling back {name} of memory and of files (ms)": statistics.median(samples)}


def measure_history(runs: int) -> dict[str, float]:
    """The same small run at the beginning of a session and at the end of a long one.

    What lies between is committed and not executed: planned, verified, signed, chained and journalled as any run, with
    the outcome of a real one in the place of the kernel's. So the history is as long as it says, in minutes.
    """
    with Session() as session:
        ok(session.run("x = 1"))
        first = [_after_thinking(session) for _ in range(100)]
        with _executing_nothing(session):
            for _ in track(range(runs - 201), description=f"committing {runs:,} runs", console=_ASIDE):
                session.run("x")
        last = [_after_thinking(session) for _ in range(100)]
        assert session.version == runs + 1
    return {
        "run 1 to 100, each (ms)": statistics.median(first),
        f"the last 100 of {runs:,}, each (ms)": statistics.median(last),
        "ratio (goal: 1.5 or less)": statistics.median(last) / statistics.median(first),
    }


def _after_thinking(session: Session) -> float:
    time.sleep(THINKING_S)
    return timed(lambda: session.run("x"))


@contextmanager
def _executing_nothing(session: Session) -> Iterator[None]:
    """Every run has the outcome of the one before, and leaves no memory to protect."""
    computer = live(session).computer
    execute, protect = computer.execute, computer.protect
    outcomes: list[Any] = []

    async def note(*arguments: Any, **options: Any) -> Any:
        outcomes.append(await execute(*arguments, **options))
        return outcomes[-1]

    async def repeat(*_: Any, meanwhile: Any, **__: Any) -> Any:
        if (rest := meanwhile()) is not None:
            await rest
        return outcomes[-1]

    async def nothing(*_: Any) -> None:
        pass

    computer.execute = note  # type: ignore[method-assign]
    ok(session.run("x"))
    computer.execute, computer.protect = repeat, nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        computer.execute, computer.protect = execute, protect  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
