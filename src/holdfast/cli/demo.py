"""`holdfast demo`: promises, and whether they were kept.

Nothing here is told from memory: each figure is measured, and each line of the last table is computed from what
happened a moment ago.
"""

import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.box import ROUNDED, SIMPLE_HEAD
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from holdfast.cli.progress import rich_report
from holdfast.cli.terminal import console, harmless
from holdfast.client import Session
from holdfast.config import Limits, default_home
from holdfast.model import Run

_MEMORY_MIB = 256
_NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts")
_PNG = b"\x89PNG\r\n\x1a\n"

LOOK_AROUND = """\
import json, os
seen = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("user", "mnt", "pid", "net", "ipc", "uts")}
seen |= {line.split(":")[0]: line.split(":")[1].strip() for line in open("/proc/self/status")}
seen["uid_map"] = open("/proc/self/uid_map").read().split()[1]
print(json.dumps(seen))"""

PLOT = """\
import numpy as np, matplotlib.pyplot as plt
t = np.linspace(0, 60, 2000)
for k, tide in enumerate((1.00, 1.03, 0.97)):
    plt.plot(t, np.sin(t * tide) * np.exp(-t / (18 + 6 * k)) + 2.2 * k, lw=1.2)
plt.title("three tides, ebbing"); plt.axis("off"); plt.show()"""

ATTACKS = """\
import socket
def attempt(what, action):
    try:
        print(f"{what:<32} got {action()!r}"[:100])
    except OSError as error:
        print(f"{what:<32} {type(error).__name__}: {error.strerror}")
attempt("read /etc/shadow", lambda: open("/etc/shadow").read())
attempt("read a secret of the host", lambda: open(SECRET).read())
attempt("reach the internet", lambda: socket.create_connection(("1.1.1.1", 443), 2))
attempt("reach a server on the host", lambda: socket.create_connection(("127.0.0.1", PORT), 2))
attempt("read the memory of pid 1", lambda: open("/proc/1/mem", "rb"))
attempt("become root", lambda: __import__("os").setuid(0))"""

WORK = """\
import itertools, threading, time, numpy as np, pandas as pd

minutes = pd.date_range("2020-01-01", periods=500_000, freq="min")
tides = pd.DataFrame({"at": minutes, "level": np.sin(np.arange(500_000) / 118.7)})

def buoys():
    for n in itertools.count(): yield f"buoy {n}"
buoy = buoys(); next(buoy); next(buoy)    # a generator half-way: no pickle can save it

ticks = itertools.count()
def tick():
    while True: next(ticks); time.sleep(0.005)
threading.Thread(target=tick, name="clock", daemon=True).start()   # nor a thread"""

LOOK = """\
import json
_was = (next(ticks), time.sleep(0.1))[0]
print(json.dumps({
    "columns": list(tides), "checksum": f"{pd.util.hash_pandas_object(tides).sum():x}",
    "buoy": buoy.gi_frame.f_locals["n"], "ticking": next(ticks) - _was > 1, "flood": "flood" in globals(),
}))"""

RUNAWAY = """\
open("/mnt/data/notes.txt", "w").write("written before the flood")
tides["level"] = 0.0                      # first spoil the table,
flood = []
while True:
    flood.append(bytearray(8 << 20))      # then take 8 MiB more, and more, and more"""

SEGFAULT = """\
del tides, buoy, tick                     # first throw it all away,
import ctypes
ctypes.string_at(0)                       # then read from address 0"""

LOOP = """\
buoy.close(); tides = None
while True: pass"""

STRAY = """\
import subprocess
subprocess.Popen(["sleep", "1000"]);      # "I'll keep working in the background"\
"""

STILL_THERE = "import glob; sum(b'sleep' in open(path, 'rb').read() for path in glob.glob('/proc/[0-9]*/cmdline'))"


class _Show:
    """The screen, and the list of promises."""

    def __init__(self) -> None:
        self.screen = console()
        self._promises: list[tuple[str, str, bool]] = []
        self._chapter = 0

    def chapter(self, title: str) -> None:
        self._chapter += 1
        self.screen.print()
        self.screen.print(Rule(f"[bold cyan]{self._chapter}[/] [bold]{title}[/]", align="left", style="dim"))

    def code(self, source: str) -> None:
        shown = Syntax(source, "python", theme="ansi_dark", background_color="default")
        self.screen.print(Panel(shown, box=ROUNDED, border_style="dim", expand=False))

    def say(self, text: str) -> None:
        self.screen.print(Padding(text, (0, 0, 0, 2)))

    def quote(self, text: str) -> None:
        """What the guest said: text, whatever is in it."""
        said = Text.from_ansi(harmless(text.rstrip()))
        for line in said.wrap(self.screen, self.screen.width - 6):
            self.screen.print(Text.assemble(("  │ ", "dim"), line))

    def promise(self, words: str, seen: str, kept: bool) -> None:
        self._promises.append((words, seen, bool(kept)))

    def settle(self) -> bool:
        table = Table(box=SIMPLE_HEAD, header_style="dim", pad_edge=False)
        table.add_column("promised")
        table.add_column("")
        table.add_column("checked just now")
        for words, seen, kept in self._promises:
            mark = "[green]✓[/green]" if kept else "[bold red]✗[/bold red]"
            table.add_row(words, mark, escape(harmless(seen)))
        self.screen.print(table)
        return all(kept for _, _, kept in self._promises)


def show(*, home: Path | None, env: str | None, save: Path | None) -> int:
    """Run it; 0 if every promise was kept."""
    started = time.monotonic()
    stage = _Show()
    stage.screen.print("\n[bold]Holdfast[/bold]: untrusted Python, in a real Linux sandbox, on this machine.")
    pictures = save or Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    common: dict[str, Any] = {"env": env, "home": home, "memory": f"{_MEMORY_MIB}M", "timeout": 20}
    with _first(stage, common), _second(stage, common) as session:
        sessions = (default_home() if home is None else home.expanduser().absolute()) / "sessions"
        workspace = sessions / session.id
        _isolation(stage, session)
        _plot(stage, session, pictures)
        _attacks(stage, session)
        before = _work(stage, session)
        _runaway(stage, session, before)
        _segfault(stage, session, before)
        _deadline(stage, session, before)
        _stray(stage, session)
    stage.promise("nothing stays behind", f"the session's disk is gone: {workspace.name}", not workspace.exists())
    stage.chapter("Promised, and checked")
    kept = stage.settle()
    seconds = time.monotonic() - started
    verdict = "[green]every promise was kept[/green]" if kept else "[bold red]a promise was broken[/bold red]"
    stage.screen.print(f"  {verdict}, in {seconds:.1f} s. Your turn: [bold]holdfast exec '6 * 7'[/bold]\n")
    return 0 if kept else 1


# -- chapters ------------------------------------------------------------------------------------------------------


@contextmanager
def _first(stage: _Show, settings: dict[str, Any]) -> Iterator[Session]:
    """Warms the zygote that all later sessions are forked from."""
    stage.chapter("A kernel, confined and warm")
    began = time.monotonic()
    with rich_report() as report:
        first = Session(**settings, report=report)
    with first:
        stage.say(
            f"the first session waits [bold]{time.monotonic() - began:.1f} s[/bold] for a Python that has imported "
            "numpy, pandas and matplotlib"
        )
        yield first


@contextmanager
def _second(stage: _Show, settings: dict[str, Any]) -> Iterator[Session]:
    began = time.monotonic()
    with Session(**settings) as session:
        opened_ms = 1000 * (time.monotonic() - began)
        run = session.run("import pandas as pd; pd.Series([20, 22]).sum()")
        answered_ms = 1000 * (time.monotonic() - began)
        stage.say(
            f"each later one is forked from it: ready in [bold]{opened_ms:.0f} ms[/bold], "
            f"the first answer from pandas after [bold]{answered_ms:.0f} ms[/bold]"
        )
        seen = f"{answered_ms:.0f} ms to the first answer"
        kept = answered_ms < 500 and run.text is not None and "42" in run.text
        stage.promise("a session starts in less than half a second", seen, kept)
        yield session


def _isolation(stage: _Show, session: Session) -> None:
    run = session.run(LOOK_AROUND)
    inside: dict[str, str] = json.loads(run.stdout) if run.error is None else {}
    own = [name for name in _NAMESPACES if inside.get(name) not in (None, os.readlink(f"/proc/self/ns/{name}"))]
    bare = int(inside.get("CapEff", "1"), 16) == int(inside.get("CapBnd", "1"), 16) == 0
    locked = inside.get("NoNewPrivs") == "1" and inside.get("Seccomp") == "2"
    rows = Table(box=None, pad_edge=False, show_header=False)
    rows.add_column(style="dim")
    rows.add_column()
    host_uid = inside.get("uid_map", "?")
    uid = f"{inside.get('Uid', '?').split()[0]} inside, " + (host_uid if os.geteuid() == 0 else str(os.geteuid()))
    rows.add_row("  uid", f"{escape(uid)} on the host")
    rows.add_row("  namespaces", f"{' '.join(own)}: not the host's")
    rows.add_row("  capabilities", "none, and none to be had" if bare else "SOME")
    rows.add_row("  system calls", "an allow-list (seccomp), no new privileges" if locked else "NOT FILTERED")
    rows.add_row("  memory", f"{_MEMORY_MIB} MiB, kept by: {run.memory_cap}")
    stage.screen.print(rows)
    stage.promise("six namespaces of its own", " ".join(own), len(own) == len(_NAMESPACES))
    stage.promise(
        "no capability, a system call filter",
        f"CapEff {inside.get('CapEff')}, seccomp mode {inside.get('Seccomp')}",
        bare and locked,
    )


def _plot(stage: _Show, session: Session, directory: Path) -> None:
    stage.chapter("A plot")
    stage.code(PLOT)
    run = session.run(PLOT)
    images = [data for shown in run.displays if isinstance(data := shown.data.get("image/png"), bytes)]
    if not images:
        stage.quote(run.error.traceback if run.error else run.stderr)
        stage.promise("plots come back as images", "none came", False)
        return
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "tides.png"
    path.write_bytes(images[0])
    stage.say(f"{run.duration_s * 1000:.0f} ms; {len(images[0]):,} bytes of PNG in [bold]{escape(str(path))}[/bold]")
    stage.promise("plots come back as images", f"{path.stat().st_size:,} bytes of PNG", images[0].startswith(_PNG))


def _attacks(stage: _Show, session: Session) -> None:
    stage.chapter("What the guest can see, and what it cannot")
    listing = session.shell("ls -m /")
    stage.say("[bold]ls /[/bold]")
    stage.quote(listing.stdout)
    with tempfile.NamedTemporaryFile("w", suffix=".secret") as secret, socket.create_server(("127.0.0.1", 0)) as server:
        secret.write(token := secrets.token_hex(8))
        secret.flush()
        facts = f"SECRET, PORT = {secret.name!r}, {server.getsockname()[1]}\n"
        run = session.run(facts + ATTACKS)
    stage.say("[bold]some attempts[/bold] (the secret and the server exist: this demo made them)")
    stage.quote(run.stdout)
    tried = run.stdout.splitlines()
    refused = [line for line in tried if " got " not in line]
    expected = ATTACKS.count("attempt(") - 1
    alive = session.run("'alive'").text == "'alive'"
    stage.promise(
        "no host files, no network, no way to be root", f"{len(refused)} of {expected} attempts refused",
        len(refused) == len(tried) == expected and token not in run.stdout and alive,
    )  # fmt: skip


class _Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a cell came to grief, and what was there afterwards."""

    run: Run
    back_ms: float
    """From the end of the cell to the answer, with memory rolled back."""
    found: str


def _work(stage: _Show, session: Session) -> str:
    stage.chapter("Something to lose")
    stage.code(WORK)
    session.run(WORK)
    before = _look(session)
    stage.say(f"as of now: {escape(before)}")
    return before


def _runaway(stage: _Show, session: Session, before: str) -> None:
    ending = _ruin(stage, session, "A runaway cell", RUNAWAY, before=before)
    code, peak = _code(ending.run), ending.run.peak_memory_bytes
    # The cap is the kernel's own; the reserve is for what its snapshot holds of pages that the cell rewrote.
    within = (peak or 0) <= (_MEMORY_MIB << 20) + Limits(memory_bytes=_MEMORY_MIB << 20).snapshot_reserve_bytes
    seen = code if peak is None else f"{code}; {peak / (1 << 20):.0f} MiB at most, its snapshot included"
    stage.promise("a runaway cell ends at its memory cap", seen, code == "out_of_memory" and within)
    _promise_memory(stage, session, ending, before)
    notes = session.run("open('/mnt/data/notes.txt').read()").text
    stage.promise("files stay as the cell left them", f"notes.txt: {notes}", notes == "'written before the flood'")


def _segfault(stage: _Show, session: Session, before: str) -> None:
    ending = _ruin(stage, session, "A segfault", SEGFAULT, before=before)
    error = ending.run.error
    named = error is not None and "SIGSEGV" in error.message
    stage.promise("a crash is named", f"{_code(ending.run)}: signal 11 (SIGSEGV)" if named else "not named", named)
    _promise_memory(stage, session, ending, before)


def _deadline(stage: _Show, session: Session, before: str) -> None:
    ending = _ruin(stage, session, "A deadline", LOOP, before=before, timeout=1)
    code, seconds = _code(ending.run), ending.run.duration_s
    stage.promise("a deadline ends a cell", f"{code} after {seconds:.2f} s of 1 s", code == "timeout" and seconds < 4)
    _promise_memory(stage, session, ending, before)


def _ruin(stage: _Show, session: Session, title: str, code: str, *, before: str, timeout: float = 20) -> _Ending:
    """Run a cell that spoils everything and then fails; look what is left."""
    stage.chapter(title)
    stage.code(code)
    session.names()  # by now the snapshot is taken, as it would be after any moment of thought
    began = time.monotonic()
    run = session.run(code, timeout=timeout)
    ending = _Ending(run=run, back_ms=1000 * (time.monotonic() - began - run.duration_s), found=_look(session))
    stage.say(f"[bold red]{escape(_code(run))}[/bold red] after {run.duration_s * 1000:.0f} ms")
    if run.error is not None:
        stage.quote(f"{run.error.message}\nhint: {run.error.hint}")
    verdict = "[bold green]all of it is back[/bold green]" if ending.found == before else "[bold red]changed[/bold red]"
    stage.say(f"{verdict} after [bold]{ending.back_ms:.0f} ms[/bold]: {escape(ending.found)}")
    return ending


def _promise_memory(stage: _Show, session: Session, ending: _Ending, before: str) -> None:
    stage.promise(
        "  and every variable is still there",
        f"{ending.run.memory} in {ending.back_ms:.0f} ms, generation {session.generation}",
        ending.found == before and ending.run.memory == "restored" and session.generation == 1,
    )


def _look(session: Session) -> str:
    """The state of what there is to lose, as one line: equal lines, equal state."""
    run = session.run(LOOK)
    if run.error is not None:
        return f"{run.error.name}: {run.error.message}"
    seen = json.loads(run.stdout)
    table = f"the table ({', '.join(seen['columns'])}) has checksum {seen['checksum']}"
    thread = f"the thread {'ticks' if seen['ticking'] else 'HAS STOPPED'}"
    flood = ", and THE FLOOD STAYED" if seen["flood"] else ""
    return f"{table}, the generator is at {seen['buoy']}, {thread}{flood}"


def _code(run: Run) -> str:
    return run.error.code if run.error else "nothing"


def _stray(stage: _Show, session: Session) -> None:
    stage.chapter("No background work")
    stage.code(STRAY)
    run = session.run(STRAY)
    names = [f"{stray.name} ({stray.outcome})" for stray in run.strays]
    left = session.run(STILL_THERE).text
    stage.say(f"left behind by the cell: [bold]{escape(', '.join(names)) or 'nothing'}[/bold]")
    kept = names == ["sleep 1000 (killed)", "clock (frozen)"] and left == "0"
    stage.promise("nothing runs in the background", f"{', '.join(names)}", kept)
