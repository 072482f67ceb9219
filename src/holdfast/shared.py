"""A home that several processes use at once: one of them owns and serves it, at `socket` in the home.

    find      where the home is served, if it is
    ensure    the same, and a server is started if there is none: `holdfast serve --on-demand`, which ends by itself
              when nobody has used it for a while

1. Only the holder of `starting.lock` starts one, so that several who come at once get the same.
2. It is nobody's child and has nothing of its starter's: not the terminal, not the files, not the working directory.
   What it says is in `logs/server.log`.
3. Whether another process owns the home is not looked at first: the server finds out by taking the home's lock.
"""

import fcntl
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread

from holdfast.errors import HoldfastError, HomeBusy, InvalidSetting, ServerUnreachable, by_code
from holdfast.home import SOCKET
from holdfast.sockets import address_of

LOG = "logs/server.log"
START_S = 60.0
IDLE = "30s"
"""How long a server that we started goes on without anybody."""
_ENDING_S = 15.0
_LOOK_AGAIN_S = 0.02
_LOG_BYTES = 1 << 20
_TOLD_BYTES = 2_000
_TOLD = re.compile(r"^holdfast: (?P<message>.*) \[(?P<code>\w+)\]\nhint: (?P<hint>.*)\Z", re.M)
"""How a command that fails says so (`cli.telling`)."""
_DETACH = '"$@" </dev/null >>"$0" 2>&1 & echo $!'
"""A shell that is gone at once: the server is then nobody's child, and no one has to wait for its end."""


async def find(home: Path) -> Path | None:
    """Where the home is served, if it is."""
    return home / SOCKET if await anyio.to_thread.run_sync(_answers, home) else None


async def ensure(home: Path) -> Path:
    """Where the home is served, from now on at the latest."""
    if not await anyio.to_thread.run_sync(_answers, home):
        await anyio.to_thread.run_sync(_start, home, abandon_on_cancel=True)
    return home / SOCKET


def _answers(home: Path) -> bool:
    try:
        with address_of(home / SOCKET) as address, socket.socket(socket.AF_UNIX) as probe:
            probe.connect(address)
    except OSError:
        return False
    return True


def _start(home: Path) -> None:
    give_up_at = time.monotonic() + _ENDING_S
    with _only_starter(home):
        while not _answers(home):
            try:
                return _start_one(home)
            except HomeBusy:
                # A server that is ending owns the home until its sessions have ended, and so long its socket is there.
                if not (home / SOCKET).exists() or time.monotonic() > give_up_at:
                    raise


def _start_one(home: Path) -> None:
    log = home / LOG
    if log.exists() and log.stat().st_size > _LOG_BYTES:
        log.unlink()
    said_before = log.stat().st_size if log.exists() else 0
    server = _spawn(home, log)
    try:
        if not _comes_up(home, server):
            raise _failed(home, log, _said(log, said_before))
    finally:
        os.close(server)


@contextmanager
def _only_starter(home: Path) -> Iterator[None]:
    try:
        (home / LOG).parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        lock = os.open(home / "starting.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidSetting(
            f"{home} cannot be a home: {error.strerror}", hint="name another: HOLDFAST_HOME or home="
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _spawn(home: Path, log: Path) -> int:
    """A descriptor of the server's process: it tells when it ends."""
    command = [sys.executable, "-m", "holdfast.cli.main", "serve", "--on-demand", "--idle", IDLE, "--home", str(home)]
    shell = subprocess.run(
        ["/bin/sh", "-c", _DETACH, log, *command], cwd="/", check=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        return os.pidfd_open(int(shell.stdout))
    except ProcessLookupError:
        return os.open("/dev/null", os.O_RDONLY)  # gone already, and as readable as the descriptor of a dead one


def _comes_up(home: Path, server: int) -> bool:
    give_up_at = time.monotonic() + START_S
    while time.monotonic() < give_up_at:
        if _answers(home):
            return True
        if select.select([server], [], [], _LOOK_AGAIN_S)[0]:
            return _answers(home)  # somebody else began to serve it at the same moment
    return False


def _said(log: Path, before: int) -> str:
    with log.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace").strip()


def _failed(home: Path, log: Path, said: str) -> HoldfastError:
    if HomeBusy.code in said:
        return HomeBusy(
            f"{home} is in use by a process that does not serve it",
            hint="end that process, or use another home: HOLDFAST_HOME=… or home=…",
        )
    if (told := _TOLD.search(said)) and (kind := by_code().get(told["code"])):  # what it could not be opened for
        return kind(told["message"], hint=told["hint"])
    return ServerUnreachable(
        f"the server of {home} did not come up: {said[-_TOLD_BYTES:] or 'it said nothing'}",
        hint=f"`holdfast serve --home {home}` shows it; its log is {log}",
    )
