"""Something to lose, and four ways to lose it: memory and files come back together each time."""

import json
import time

import msgspec
from rich.markup import escape

from holdfast.blocking import Session
from holdfast.cli.demo.sandbox import MEMORY_MIB
from holdfast.cli.demo.show import Show
from holdfast.config import Limits
from holdfast.model import Run

WORK = """\
import itertools, threading, time, numpy as np, pandas as pd

minutes = pd.date_range("2020-01-01", periods=500_000, freq="min")
tides = pd.DataFrame({"at": minutes, "level": np.sin(np.arange(500_000) / 118.7)})
tides.tail(1000).to_csv("tides.csv")

def buoys():
    for n in itertools.count(): yield f"buoy {n}"
buoy = buoys(); next(buoy); next(buoy)    # a generator half-way: no pickle can save it

ticks = itertools.count()
def tick():
    while True: next(ticks); time.sleep(0.005)
threading.Thread(target=tick, name="clock", daemon=True).start()   # nor a thread"""

LOOK = """\
import hashlib, json, pathlib
_was = (next(ticks), time.sleep(0.1))[0]
print(json.dumps({
    "columns": list(tides), "checksum": f"{pd.util.hash_pandas_object(tides).sum():x}",
    "buoy": buoy.gi_frame.f_locals["n"], "ticking": next(ticks) - _was > 1, "flood": "flood" in globals(),
    "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:8] for path in pathlib.Path().iterdir()},
}))"""

EXCEPTION = """\
open("tides.csv", "w").write("at,lev")    # half of a file over a good one,
open("report.csv", "w").write("tot")      # half of a new one,
tides["level"] *= -1                      # the table upside down,
total = sum(levels)                       # and then a name that nobody defined"""

RUNAWAY = """\
open("tides.csv", "a").write("and more")  # first spoil the file
tides["level"] = 0.0                      # and the table,
flood = []
while True:
    flood.append(bytearray(8 << 20))      # then take 8 MiB more, and more, and more"""

SEGFAULT = """\
import ctypes, os
os.remove("tides.csv")                    # first throw it all away,
del tides, buoy, tick
ctypes.string_at(0)                       # then read from address 0"""

LOOP = """\
buoy.close(); tides = None
while True: pass"""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a cell came to grief, and what was there afterwards."""

    run: Run
    back_ms: float
    """From the end of the cell to the answer, with memory and files rolled back."""
    found: str


def work(show: Show, session: Session) -> str:
    show.chapter("Something to lose")
    show.code(WORK)
    session.run(WORK)
    before = _look(session)
    show.say(f"as of now: {escape(before)}")
    return before


def exception(show: Show, session: Session, before: str) -> None:
    """Memory and files: a run that fails leaves neither."""
    ending = _ruin(show, session, "A run that fails", EXCEPTION, before=before)
    run, listed = ending.run, [entry.path for entry in session.files()]
    _promise_memory(show, session, ending, before, words="a run that fails changed no variable and no file")
    show.promise(
        "  and its receipt says so",
        f"receipt {run.receipt.number if run.receipt else '-'}: {run.status}; files: {', '.join(listed)}",
        run.receipt is not None
        and run.receipt.facts().status == "rolled_back"
        and not run.receipt.facts().changes
        and listed == ["tides.csv"],
    )


def runaway(show: Show, session: Session, before: str) -> None:
    ending = _ruin(show, session, "A runaway cell", RUNAWAY, before=before)
    code, peak = _code(ending.run), ending.run.peak_memory_bytes
    # The cap is the kernel's own; the reserve is for what its snapshot holds of pages that the cell rewrote.
    within = (peak or 0) <= (MEMORY_MIB << 20) + Limits(memory_bytes=MEMORY_MIB << 20).snapshot_reserve_bytes
    seen = code if peak is None else f"{code}; {peak / (1 << 20):.0f} MiB at most, its snapshot included"
    show.promise("a runaway cell ends at its memory cap", seen, code == "out_of_memory" and within)
    _promise_memory(show, session, ending, before)


def segfault(show: Show, session: Session, before: str) -> None:
    ending = _ruin(show, session, "A segfault, and what the caller is told", SEGFAULT, before=before)
    told = ending.run.recovery
    named = told is not None and "SIGSEGV" in told.cause
    show.promise("a crash is named", f"{_code(ending.run)}: signal 11 (SIGSEGV)" if named else "not named", named)
    _promise_memory(show, session, ending, before)
    steps = [step.action for step in told.steps] if told else []
    show.promise(
        "  with the state, and the next step as data",
        f"{told.ckpt if told else 'no recovery'}; next: {', '.join(steps)}",
        told is not None and told.run == ending.run.id and told.ckpt == ending.run.ckpt and bool(steps),
    )


def deadline(show: Show, session: Session, before: str) -> None:
    ending = _ruin(show, session, "A deadline", LOOP, before=before, timeout=1)
    code, seconds = _code(ending.run), ending.run.duration_s
    show.promise("a deadline ends a cell", f"{code} after {seconds:.2f} s of 1 s", code == "timeout" and seconds < 4)
    _promise_memory(show, session, ending, before)


def _ruin(show: Show, session: Session, title: str, code: str, *, before: str, timeout: float = 20) -> Ending:
    """Run a cell that spoils everything and then fails; look what is left."""
    show.chapter(title)
    show.code(code)
    session.names()  # by now the snapshot is taken, as it would be after any moment of thought
    began = time.monotonic()
    run = session.run(code, timeout=timeout)
    ending = Ending(run=run, back_ms=1000 * (time.monotonic() - began - run.duration_s), found=_look(session))
    show.say(f"[bold red]{escape(_code(run))}[/bold red] after {run.duration_s * 1000:.0f} ms")
    if run.recovery is not None:
        show.quote(run.recovery.text)
    verdict = "[bold green]all of it is back[/bold green]" if ending.found == before else "[bold red]changed[/bold red]"
    show.say(f"{verdict} after [bold]{ending.back_ms:.0f} ms[/bold]: {escape(ending.found)}")
    return ending


def _promise_memory(
    show: Show, session: Session, ending: Ending, before: str, *, words: str = "  and every variable and file is back"
) -> None:
    run = ending.run
    show.promise(
        words,
        f"{run.status}; memory {run.memory} in {ending.back_ms:.0f} ms, generation {session.generation}",
        ending.found == before
        and (run.status, run.memory, session.generation) == ("rolled_back", "restored", 1)
        and run.outputs == [],
    )


def _look(session: Session) -> str:
    """The state of what there is to lose, as one line: equal lines, equal state."""
    run = session.run(LOOK)
    if run.error is not None:
        return f"{run.error.name}: {run.error.message}"
    seen = json.loads(run.stdout)
    table = f"the table ({', '.join(seen['columns'])}) has checksum {seen['checksum']}"
    thread = f"the thread {'ticks' if seen['ticking'] else 'HAS STOPPED'}"
    files = ", ".join(f"{name} {digest}" for name, digest in sorted(seen["files"].items()))
    flood = ", and THE FLOOD STAYED" if seen["flood"] else ""
    return f"{table}, the generator is at {seen['buoy']}, {thread}, files: {files}{flood}"


def _code(run: Run) -> str:
    return run.error.code if run.error else "nothing"
