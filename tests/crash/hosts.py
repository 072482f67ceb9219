"""A process that owns a home, and may die of it."""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import msgspec

PROGRAM = Path(__file__).with_name("host.py")


class Told(msgspec.Struct, frozen=True):
    """What a host says of a session."""

    session: str
    version: int
    generation: int
    ckpt: str
    files: dict[str, str]
    live: list[str]
    labels: dict[str, str]
    cause: str
    stage: str
    pids: list[int]
    passed: list[str]
    """The crash points that it came by."""
    run: str = ""
    replayed: bool = False
    receipt: str = ""
    sent: list[str] = []
    """As the receipt has it."""
    may_have_happened: list[str] = []


class Nursery:
    """The process that hosts are forked from. (This one has threads, which a fork would lose.)"""

    def __init__(self) -> None:
        self._line, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            command = [sys.executable, "-W", "error", PROGRAM, str(there.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[there.fileno()], start_new_session=True)
        self._line.settimeout(60)

    def fork(self, home: Path, fds: list[int], *, crash_at: str) -> int:
        """A host's pid."""
        socket.send_fds(self._line, [json.dumps({"home": str(home), "crash_at": crash_at}).encode()], fds)
        return int(self._line.recv(16))

    def wait(self, pid: int) -> int:
        """How a host ended."""
        self._line.send(json.dumps({"wait": pid}).encode())
        return int(self._line.recv(16))

    def end(self) -> None:
        self._line.close()
        self._process.wait(30)


@cache
def nursery() -> Nursery:
    started = Nursery()
    atexit.register(started.end)
    return started


class Host:
    """A process that owns a home."""

    living: ClassVar[set["Host"]] = set()

    def __init__(self, home: Path, *, crash_at: str = "") -> None:
        self.home = home
        self._errors = home.with_name("host.stderr")
        commands, to_host = os.pipe()
        from_host, answers = os.pipe()
        with self._errors.open("wb") as errors:
            self._pid = nursery().fork(home, [commands, answers, errors.fileno()], crash_at=crash_at)
        os.close(commands)
        os.close(answers)
        self._commands, self._answers = open(to_host, "wb"), open(from_host, "rb")  # noqa: SIM115 (`end` closes them)
        self._code: int | None = None
        self.pids: set[int] = set()
        self.living.add(self)

    def ask(self, do: str, **arguments: object) -> Told:
        answer = self._answer(do, arguments)
        assert answer, f"the host ended: {self.end()} {self._errors.read_text()}"
        told = msgspec.json.decode(answer, type=Told)
        self.pids |= set(told.pids)
        return told

    def refuses(self, session: str) -> str:
        """Why it does not go on with a session."""
        answer = self._answer("refuse", {"session": session})
        assert answer, f"the host ended: {self.end()} {self._errors.read_text()}"
        return msgspec.json.decode(answer, type=dict[str, str])["message"]

    def dies(self, do: str, **arguments: object) -> None:
        """Ask, and get no answer."""
        answer = self._answer(do, arguments)
        assert not answer, f"the host came by alive: {arguments}"
        assert self.end() == -signal.SIGKILL, self._errors.read_text()

    def kill(self) -> None:
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)
        self.end()

    def close(self, session: str, *, keep: bool) -> list[str]:
        """The crash points that it came by."""
        answer = self._answer("close", {"session": session, "keep": keep})
        assert answer, self._errors.read_text()
        return msgspec.json.decode(answer, type=dict[str, list[str]])["passed"]

    def end(self) -> int:
        """Its exit code, or minus the signal that it died of."""
        if self._code is None:
            with suppress(BrokenPipeError):  # a command that it did not live to read
                self._commands.close()
            self._code = nursery().wait(self._pid)
            self._answers.close()
            self.living.discard(self)
        return self._code

    def _answer(self, do: str, arguments: dict[str, Any]) -> bytes:
        self._commands.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._commands.flush()
        return self._answers.readline()


def wait_until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
