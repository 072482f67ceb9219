"""A process that owns a home, and may die of it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


class Host:
    """A process that owns a home."""

    def __init__(self, home: Path, env: Path, *, crash_at: str = "") -> None:
        self.home = home
        self._errors = home.with_name("host.stderr")
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", PROGRAM, home, env],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                env={**os.environ, "HOLDFAST_CRASH_AT": crash_at},
            )  # fmt: skip
        self.pids: set[int] = set()

    def ask(self, do: str, **arguments: object) -> Told:
        answer = self._answer(do, arguments)
        assert answer, f"the host ended: {self.end()} {self._errors.read_text()}"
        told = msgspec.json.decode(answer, type=Told)
        self.pids |= set(told.pids)
        return told

    def dies(self, do: str, **arguments: object) -> None:
        """Ask, and get no answer."""
        answer = self._answer(do, arguments)
        assert not answer, f"the host came by alive: {arguments}"
        assert self.end() == -signal.SIGKILL, self._errors.read_text()

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def close(self, session: str, *, keep: bool) -> list[str]:
        """The crash points that it came by."""
        answer = self._answer("close", {"session": session, "keep": keep})
        assert answer, self._errors.read_text()
        return msgspec.json.decode(answer, type=dict[str, list[str]])["passed"]

    def end(self) -> int:
        """Its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        code = self._process.wait(30)
        self._process.stdout.close()
        return code

    def _answer(self, do: str, arguments: dict[str, Any]) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


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
