"""`holdfast repl` at a real terminal: a pty whose other end draws the screen and answers as terminals do."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyte
import pytest

from holdfast.cli import ending, homes, ps

pytestmark = pytest.mark.timeout(300)
COMMAND = [sys.executable, "-m", "holdfast.cli.main", "repl"]
ROWS, COLUMNS = 80, 240  # wide enough for any temporary directory
PATIENCE_S = 60
SIT_DOWN = 'exec "$@" <>"$TTY" >&0 2>&1'
"""Whoever leads a session of processes and opens a terminal is its master: Ctrl-C is for him."""
UP, CTRL_C, CTRL_D = "\x1b[A", "\x03", "\x04"


class Screen(pyte.Screen):
    """Tells where its cursor is when it is asked."""

    master: int

    def write_process_input(self, data: str) -> None:
        os.write(self.master, data.encode())


class Terminal:
    """A person at a terminal: types, and reads until something is there."""

    def __init__(self, *arguments: str, home: Path, directory: Path) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.screen = Screen(COLUMNS, ROWS)
        self.screen.master = self.master
        self._stream = pyte.ByteStream(self.screen)
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", SIT_DOWN, "sh", *COMMAND, *arguments], start_new_session=True, cwd=directory,
            env=os.environ | {
                "HOLDFAST_HOME": str(home), "TERM": "xterm", "TMPDIR": str(directory), "TTY": os.ttyname(slave),
            },
        )  # fmt: skip
        self._slave = slave

    def wait_prompt(self) -> None:
        """The first. It has opened the terminal itself by now, so that its end will be the end."""
        self.until(r"^v\d+ · .* ›")
        os.close(self._slave)

    def shown(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display if line.strip())

    def until(self, pattern: str) -> "re.Match[str]":
        """Read until it is on the screen."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self.shown(), re.MULTILINE)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in\n{self.shown()}"
            assert self._read(), f"it ended without {pattern!r}:\n{self.shown()}"
        return found

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def run(self, text: str, version: int) -> None:
        """Type a cell, and wait for the prompt of the version that it leads to."""
        self.type(text)
        self.until(rf"^v{version} · \S+ ›$")

    def end(self) -> int:
        while self._read():
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        ready, _, _ = select.select([self.master], [], [], 0.5)
        if not ready:
            return True
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:  # how Linux says that nobody has the other end any more
            return False
        self._stream.feed(data)
        return bool(data)


Sit = Callable[..., Terminal]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("repl") / "home"
    home.mkdir()
    (home / "envs").symlink_to(Path(os.environ["HOLDFAST_HOME"]) / "envs")
    yield home
    end_server(home)


def end_server(home: Path) -> None:
    """The one that the first repl started; it would end by itself after a while."""
    if (owner := homes.owner(home)) is None:
        return
    server = os.pidfd_open(int(owner.split()[1]))
    signal.pidfd_send_signal(server, signal.SIGTERM)
    assert select.select([server], [], [], PATIENCE_S)[0]
    os.close(server)


def sessions_in(home: Path) -> dict[str, str]:
    return {listed.id: listed.state for listed in ps.read(home)[0]}


@pytest.fixture
def sit_down(home: Path, tmp_path: Path) -> Iterator[Sit]:
    sat: list[Terminal] = []

    def sit(*arguments: str) -> Terminal:
        sat.append(Terminal(*arguments, home=home, directory=tmp_path))
        sat[-1].wait_prompt()
        return sat[-1]

    yield sit
    for terminal in sat:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


def test_a_person_works_in_it(sit_down: Sit, home: Path, tmp_path: Path) -> None:
    person = sit_down("--memory", "256M")
    assert re.search(r"^v0 · [\d.]+M/256M ›", person.shown(), re.MULTILINE)
    session = person.until(r"CKPT-(\w+)-g1-v0-\w+ · generation 1 · notebook")[1]
    assert sessions_in(home)[session] == "ready", "others may use the home meanwhile"

    person.type("def twice(x):\r")
    person.type("return x * 2\r")
    person.run("\r", version=1)
    person.run("twice(21)\r", version=2)
    person.until("^42$")
    person.type("print('a menu'); who = input('who? ')\r")
    person.until(r"^a menu\nwho\?")
    person.run("Ada\r", version=3)
    person.type("who.upp\t")
    person.until(r"who\.upper")
    person.run("()\r", version=4)
    person.until("^'ADA'$")
    person.run("!echo from a $((1 + 1))nd shell\r", version=5)
    person.until("^from a 2nd shell$")
    person.run("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()\r", version=6)
    image = Path(person.until(r"saved as (\S+)\]")[1])
    assert image.read_bytes().startswith(b"\x89PNG")
    assert image.is_relative_to(tmp_path)
    person.type(CTRL_D)

    assert person.end() == 0
    assert session not in sessions_in(home)
    assert (home / "repl-history").stat().st_mode & 0o077 == 0


def test_ctrl_c_ends_the_cell_and_not_the_session(sit_down: Sit, home: Path) -> None:
    person = sit_down()
    session = person.until(r"CKPT-(\w+)-g1-v0-")[1]
    person.run("kept = 1\r", version=1)
    person.type("import time; print('ready'); time.sleep(100)\r")
    person.until("^ready$")
    person.type(CTRL_C)
    person.until("KeyboardInterrupt")
    person.run("", version=2)
    person.type("half a thou" + CTRL_C)
    person.until(r"half a thou\nv2 · \S+ ›$")
    person.type("line = input('never ')\r")
    person.until("^never")
    person.run(CTRL_C, version=3)
    person.run("kept + 41\r", version=4)

    person.until("^42$")
    ending.end(session, home=home, keep=True, sure=True, as_json=True)
    person.type("kept\r")
    person.until("was ended elsewhere, and is kept")
    assert person.end() == 3, "it was ended by somebody else"


def test_after_a_death_it_says_what_is_there_and_goes_on(sit_down: Sit, home: Path) -> None:
    person = sit_down("--memory", "128M", "--keep")
    person.run("kept = 1\r", version=1)
    person.type("x = []\rwhile True: x.append(bytearray(1 << 22))\r")
    person.until("^Cause: .* cap is 128 MiB")
    person.until("^Memory: as it was before the run")
    person.run("kept + 41\r", version=3)
    person.until("^42$")
    person.run("open('a.txt', 'w').write('one')\r", version=4)
    person.run("open('a.txt', 'w').write('another')\r", version=5)
    person.type(":files\r")
    person.until(r"^\w{12} +7  a\.txt\nv5 · \S+ ›$")
    person.type(":restore CKPT-\t")
    person.until(r":restore CKPT-\w+-g1-v")
    person.type(CTRL_C + ":history\r")
    ckpt = person.until(r"committed +v4 +(CKPT-\S+) .*\n.*\nv5 · \S+ ›$")[1]
    person.run(f":restore {ckpt}\r", version=6)
    person.until(rf"^files are those of {ckpt}: version 6, ")
    person.type(":histori\r")
    person.until(r"did you mean :history\?\nv6 · \S+ ›$")
    person.type(CTRL_D)
    session = person.until(r"kept; go on with holdfast repl --session (\w+)")[1]
    assert person.end() == 0

    again = sit_down("--session", session[:6])
    again.until("^Cause: the host was restarted")
    again.type(UP)
    again.until("histori")
    again.type(CTRL_C + "open('a.txt').read()\r")
    again.until("^'one'$")
    while sessions_in(home)[session] == "running":  # its answer is printed before it is committed
        time.sleep(0.1)
    assert sessions_in(home)[session] == "ready"
    again.process.send_signal(signal.SIGTERM)
    assert again.end() == 128 + signal.SIGTERM


def test_exit_ends_it(sit_down: Sit, home: Path) -> None:
    typist = sit_down()
    typist.type("exit\r")
    assert typist.end() == 0
    done = subprocess.run(
        COMMAND, input="x = 6\n\nquit()\n\nx * 7\n", capture_output=True, text=True, timeout=100, check=False,
        env=os.environ | {"HOLDFAST_HOME": str(home)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")


def test_cells_from_a_pipe_run_up_to_the_first_that_fails(home: Path) -> None:
    cells = "x = 6\n\ndef f(y):\n    z = x * y\n\n    return z\n\nf(7)\n\n:files\n\n{}['key']\n\nprint('never')\n"
    done, told = (
        subprocess.run(
            [*COMMAND, *options], input=cells, capture_output=True, text=True, timeout=100, check=False,
            env=os.environ | {"HOLDFAST_HOME": str(home)},
        )
        for options in ([], ["--json", "--strict"])
    )  # fmt: skip
    runs = [json.loads(line) for line in told.stdout.splitlines()]

    assert (done.returncode, done.stdout) == (1, "42\n")
    assert "KeyError: 'key'" in done.stderr
    assert told.returncode == 1
    assert [run["status"] for run in runs] == ["committed", "committed", "committed", "rolled_back"]


def test_what_is_no_text_in_a_pipe_is_told(home: Path) -> None:
    done = subprocess.run(
        COMMAND, input=b"x = 1\n\n\xff\n", capture_output=True, timeout=100, check=False,
        env=os.environ | {"HOLDFAST_HOME": str(home), "PYTHONIOENCODING": "utf-8:strict"},
    )  # fmt: skip

    assert done.returncode == 3
    assert b"what came from the pipe is no text" in done.stderr
    assert b"Traceback" not in done.stderr
