"""A session's walls: what a guest has, what it sees, and what it cannot do."""

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

from rich.markup import escape

from holdfast.blocking import Session
from holdfast.cli.demo.show import Show
from holdfast.cli.progress import rich_report

MEMORY_MIB = 256
_NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts")
_PNG = b"\x89PNG\r\n\x1a\n"

LOOK_AROUND = """\
import json, os
seen = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("user", "mnt", "pid", "net", "ipc", "uts")}
seen |= {line.split(":")[0]: line.split(":")[1].strip() for line in open("/proc/self/status")}
seen["uid_map"] = open("/proc/self/uid_map").read().split()[1]
print(json.dumps(seen))"""

FIRST = """\
import sys
warm = "pandas" in sys.modules
import pandas as pd
warm, int(pd.Series([20, 22]).sum())"""

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
attempt("read the key that signs receipts", lambda: open(KEY).read())
attempt("reach the internet", lambda: socket.create_connection(("1.1.1.1", 443), 2))
attempt("reach a server on the host", lambda: socket.create_connection(("127.0.0.1", PORT), 2))
attempt("read the memory of pid 1", lambda: open("/proc/1/mem", "rb"))
attempt("become root", lambda: __import__("os").setuid(0))"""

STRAY = """\
import subprocess, threading, time
subprocess.Popen(["sleep", "1000"]);      # "I'll keep working in the background"
threading.Thread(target=time.sleep, args=(1000,), name="sleeper", daemon=True).start()\
"""

STILL_THERE = "import glob; sum(b'sleep' in open(path, 'rb').read() for path in glob.glob('/proc/[0-9]*/cmdline'))"


@contextmanager
def first(show: Show, settings: dict[str, Any]) -> Iterator[Session]:
    """Warms the zygote that all later sessions are forked from."""
    show.chapter("A kernel, confined and warm")
    began = time.monotonic()
    with rich_report() as report:
        session = Session(**settings, report=report)
    with session:
        show.say(
            f"the first session waits [bold]{time.monotonic() - began:.1f} s[/bold] for a Python that has imported "
            "numpy, pandas and matplotlib"
        )
        yield session


@contextmanager
def second(show: Show, settings: dict[str, Any]) -> Iterator[Session]:
    began = time.monotonic()
    with Session(**settings) as session:
        opened_ms = 1000 * (time.monotonic() - began)
        run = session.run(FIRST)
        answered_ms = 1000 * (time.monotonic() - began)
        show.say(
            f"each later one is forked from it: ready in [bold]{opened_ms:.0f} ms[/bold], "
            f"the first answer from pandas after [bold]{answered_ms:.0f} ms[/bold]"
        )
        seen = f"pandas was imported already: {answered_ms:.0f} ms to its first answer"  # the clock is no promise
        show.promise("a session starts with all imported", seen, run.text == "(True, 42)")
        yield session


def isolation(show: Show, session: Session) -> None:
    run = session.run(LOOK_AROUND)
    inside: dict[str, str] = json.loads(run.stdout) if run.error is None else {}
    own = [name for name in _NAMESPACES if inside.get(name) not in (None, os.readlink(f"/proc/self/ns/{name}"))]
    bare = int(inside.get("CapEff", "1"), 16) == int(inside.get("CapBnd", "1"), 16) == 0
    locked = inside.get("NoNewPrivs") == "1" and inside.get("Seccomp") == "2"
    host_uid = inside.get("uid_map", "?") if os.geteuid() == 0 else str(os.geteuid())
    show.facts(
        {
            "uid": f"{inside.get('Uid', '?').split()[0]} inside, {host_uid} on the host",
            "namespaces": f"{' '.join(own)}: not the host's",
            "capabilities": "none, and none to be had" if bare else "SOME",
            "system calls": "an allow-list (seccomp), no new privileges" if locked else "NOT FILTERED",
            "memory": f"{MEMORY_MIB} MiB, kept by: {run.memory_cap}",
        }
    )
    show.promise("six namespaces of its own", " ".join(own), len(own) == len(_NAMESPACES))
    show.promise(
        "no capability, a system call filter",
        f"CapEff {inside.get('CapEff')}, seccomp mode {inside.get('Seccomp')}",
        bare and locked,
    )


def plot(show: Show, session: Session, directory: Path | None) -> None:
    show.chapter("A plot")
    show.code(PLOT)
    run = session.run(PLOT)
    images = [data for shown in run.displays if isinstance(data := shown.data.get("image/png"), bytes)]
    if not images:
        show.quote(run.error.traceback if run.error else run.stderr)
        show.promise("plots come back as images", "none came", False)
        return
    show.say(f"{run.duration_s * 1000:.0f} ms; {len(images[0]):,} bytes of PNG: {_keep(images[0], directory)}")
    show.promise("plots come back as images", f"{len(images[0]):,} bytes of PNG", images[0].startswith(_PNG))


def _keep(image: bytes, directory: Path | None) -> str:
    if directory is None:
        return "[bold]--save DIR[/bold] keeps it"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "tides.png"
    path.write_bytes(image)
    return f"[bold]{escape(str(path))}[/bold]"


def attacks(show: Show, session: Session, home: Path) -> None:
    show.chapter("What the guest can see, and what it cannot")
    listing = session.shell("ls -m /")
    show.say("[bold]ls /[/bold]")
    show.quote(listing.stdout)
    with tempfile.NamedTemporaryFile("w", suffix=".secret") as secret, socket.create_server(("127.0.0.1", 0)) as server:
        secret.write(token := secrets.token_hex(8))
        secret.flush()
        facts = f"SECRET, PORT, KEY = {secret.name!r}, {server.getsockname()[1]}, {str(home / 'keys/ed25519.pem')!r}\n"
        run = session.run(facts + ATTACKS)
    show.say("[bold]some attempts[/bold] (the secret, the key and the server exist)")
    show.quote(run.stdout)
    tried = run.stdout.splitlines()
    refused = [line for line in tried if " got " not in line]
    expected = ATTACKS.count("attempt(") - 1
    alive = session.run("'alive'").text == "'alive'"
    show.promise(
        "no host files, no network, no way to be root", f"{len(refused)} of {expected} attempts refused",
        len(refused) == len(tried) == expected and token not in run.stdout and alive,
    )  # fmt: skip


def stray(show: Show, session: Session) -> None:
    show.chapter("No background work")
    show.code(STRAY)
    run = session.run(STRAY)
    names = [f"{stray.name} ({stray.outcome})" for stray in run.strays]
    left = session.run(STILL_THERE).text
    show.say(f"left behind by the cell: [bold]{escape(', '.join(names)) or 'nothing'}[/bold]")
    kept = names == ["sleep 1000 (killed)", "sleeper (frozen)"] and left == "0"
    show.promise("nothing runs in the background", f"{', '.join(names)}", kept)
