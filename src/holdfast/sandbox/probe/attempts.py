"""Trying something in a child, as the process that it would be in earnest, and hearing how it went."""

import errno
import json
import os
import signal
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

from holdfast.sandbox import namespaces

PATIENCE_S = 20


def tried(body: Callable[[], str], meanwhile: Callable[[int], None] = lambda pid: None) -> str:
    """Run `body` in a child and return what it says; its OSError is raised here. `meanwhile` gets the child's pid."""
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        _answer(body, there)
    there.close()
    try:
        meanwhile(pid)
        said = b"".join(iter(lambda: here.recv(65536), b""))
    finally:
        here.close()
        status = os.waitpid(pid, 0)[1]
    if not said:
        raise OSError(errno.EINTR, f"the probe ended with status {os.waitstatus_to_exitcode(status)}")
    number, text = json.loads(said)
    if number is not None:
        raise OSError(number, text)
    return str(text)


def _answer(body: Callable[[], str], there: socket.socket) -> None:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE_S)
        answer: tuple[int | None, str] = None, body()
    except OSError as error:
        answer = error.errno or 0, error.strerror or str(error)
    except BaseException as error:  # a process edge: whatever it was, it must end here and be told
        answer = 0, "".join(traceback.format_exception_only(error)).strip()
    there.sendall(json.dumps(answer).encode())
    os._exit(0)


def outcome(body: Callable[[], str]) -> tuple[bool, str, OSError | None]:
    """Whether `body` succeeded in a child, what is to be told of it, and its error."""
    try:
        return True, tried(body), None
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "")
        return False, f"{error.strerror} ({code})" if code else str(error.strerror), error


def inside(body: Callable[[], str]) -> Callable[[], str]:
    """`body` as pid 1 of the keeper's layer."""

    def entered() -> str:
        namespaces.enter_outer(as_root=is_root())
        return tried(body)

    return entered


def is_root() -> bool:
    """Asked outside: inside a namespace everybody is."""
    return os.geteuid() == 0


def own_status(field: str) -> str:
    """A field of /proc/self/status; empty where the kernel does not know it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{field}:")), "")
