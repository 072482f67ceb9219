"""Many sessions at one server over HTTP: every answer right, none lost, how long they take, what the server holds.

    python -m bench.served [--sessions 200] [--runs 5000] [--json FILE]

Each session counts: run n must answer n, so that a run that was lost, doubled, or answered by another session is seen.
Bounded in count; loopback only.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import Progress

from bench import machine
from bench.figures import show
from bench.serving import own_home, server
from holdfast import AsyncSession, engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    found = machine.describe()
    try:
        with own_home() as home, server(home) as (url, token):
            figures = asyncio.run(crowd(url, token, home, options.sessions, options.runs, console))
    finally:
        engine.shut_down()
    for line in found.lines():
        console.print(line, style="dim", highlight=False)
    show(f"{options.sessions} sessions over HTTP, {options.runs:,} runs", figures, console)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


async def crowd(url: str, token: str, home: Path, sessions: int, runs: int, console: Console) -> dict[str, float]:
    owner, each = _owner_of(home), runs // sessions
    times: list[float] = []
    halfway_mb: list[float] = []
    with Progress(console=console, disable=not console.is_terminal) as progress:
        opening = progress.add_task("opening", total=sessions)
        gate = asyncio.Semaphore(8)

        async def opened() -> AsyncSession:
            async with gate:
                session = await AsyncSession(url=url, token=token, memory="128M", timeout=120).open()
                await session.run("n = 0")
            progress.advance(opening)
            return session

        began = time.perf_counter()
        live = await asyncio.gather(*(opened() for _ in range(sessions)))
        opened_s = time.perf_counter() - began
        before_mb = owner.memory_info().rss / 1e6
        running = progress.add_task("running", total=sessions * each)

        async def count(session: AsyncSession) -> None:
            for number in range(1, each + 1):
                started = time.perf_counter()
                run = await session.run("n += 1\nn")
                times.append((time.perf_counter() - started) * 1e3)
                assert (run.text, run.status, run.version) == (str(number), "committed", number + 1), run
                progress.advance(running)
                if len(times) == sessions * each // 2:
                    halfway_mb.append(owner.memory_info().rss / 1e6)

        began = time.perf_counter()
        await asyncio.gather(*(count(session) for session in live))
        ran_s = time.perf_counter() - began
        after_mb = owner.memory_info().rss / 1e6
        await asyncio.gather(*(session.close() for session in live))
    ranks = statistics.quantiles(times, n=100)
    return {
        "right answers": float(len(times)),
        "opening all of them (s)": opened_s,
        "running (s)": ran_s,
        "runs a second": len(times) / ran_s,
        "latency, median (ms)": ranks[49],
        "latency, 90 % (ms)": ranks[89],
        "latency, 99 % (ms)": ranks[98],
        "the server's memory before the runs (MB)": before_mb,
        "the server's memory half-way (MB)": halfway_mb[0],
        "the server's memory after the runs (MB)": after_mb,
    }


def _owner_of(home: Path) -> psutil.Process:
    return psutil.Process(int(home.joinpath("lock").read_text().split()[-1]))


if __name__ == "__main__":
    main()
