"""The attacker's tools. Every attack here runs for real, inside a session, against the real sandbox.

A guest-side prelude gives attacks two verbs whose answers cannot be mistaken: `call("mount", …)` makes a raw
system call and `tries(function, …)` a Python call; both answer `"SUCCESS …"` or the name of the errno.
Whatever was tried, the session must still work afterwards: the fixtures check it when a test ends.
"""

import json
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any, TypeVar

import pytest

from holdfast import Session
from holdfast.config import default_home
from holdfast.model import Run
from holdfast.sandbox.syscalls import NUMBERS

T = TypeVar("T")
Attack = Callable[..., str]
OpenSession = Callable[..., Session]

AS_ROOT = os.geteuid() == 0

PRELUDE = f"""
import ctypes as _ctypes, errno as _errno, json as _json, os, socket, sys
_libc = _ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = _ctypes.c_long
_numbers = _json.loads({json.dumps(json.dumps(NUMBERS[platform.machine()]))})

def call(name, *args):
    number = _numbers[name] if isinstance(name, str) else name
    wide = [a if a is None or isinstance(a, bytes) else _ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    _ctypes.set_errno(0)
    result = _libc.syscall(_ctypes.c_long(number), *wide)
    return f"SUCCESS {{result}}" if result >= 0 else _errno.errorcode[_ctypes.get_errno()]

def tries(function, *args, **named):
    try:
        return f"SUCCESS {{function(*args, **named)!r}}"
    except OSError as error:
        return _errno.errorcode.get(error.errno, repr(error))

def reads(path, size=100_000):
    with open(path, "rb") as file:
        return file.read(size)

def writes(path, data=b"1"):
    fd = os.open(path, os.O_WRONLY)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)

def control():
    "A second handle on the socket that leads to the host."
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink("/proc/self/fd/" + name).startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if (found.family, found.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            return found
    raise RuntimeError("no way to the host")

def forge(message):
    from holdfast.kernel import framing
    gate = control()
    for packet in framing.packets(message):
        gate.send(packet)
"""


def try_in(session: Session, code: str, **options: Any) -> str:
    """Run an attack; what it printed. The attack's own code must not fail: it reports, it does not raise."""
    run = session.run(PRELUDE + dedent(code), **options)
    assert run.error is None, f"the attack itself broke: {run.error}\n{run.stderr}"
    return run.stdout.strip()


def storm(session: Session, code: str, **options: Any) -> Run:
    """Run an attack that the guest's kernel may not survive; how the run ended. Only its own mistakes fail the test."""
    run = session.run(PRELUDE + dedent(code), **options)
    assert run.error is None or run.error.code != "exception", f"the attack itself broke: {run.error}"
    return run


def assert_works(session: Session) -> None:
    """The session, or the kernel that replaced it, does honest work: it computes, prints, writes, starts processes."""
    run = session.run("print('alive'); open('/mnt/data/.works', 'w').write('x'); 6 * 7")
    assert (run.error, run.stdout, run.text) == (None, "alive\n", "42")
    assert session.shell("echo $((6 * 7))").stdout == "42\n"


@contextmanager
def surviving(session: Session) -> Iterator[Session]:
    with session:
        yield session
        assert_works(session)


@pytest.fixture
def session() -> Iterator[Session]:
    """One sandbox, checked to be working when the attack is over."""
    with surviving(Session(memory="512M", timeout=30)) as session:
        yield session


@pytest.fixture(scope="module")
def target() -> Iterator[Session]:
    """One sandbox for a whole module of attacks that leave nothing behind."""
    with surviving(Session(memory="512M", timeout=30)) as session:
        yield session


@pytest.fixture
def open_session() -> Iterator[OpenSession]:
    """More sandboxes, with limits of their own."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(surviving(Session(**{"timeout": 30, **settings})))


@pytest.fixture
def doomed() -> Iterator[OpenSession]:
    """Sandboxes that the attack may end for good."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(Session(**{"timeout": 30, **settings}))


@pytest.fixture
def attack(session: Session) -> Attack:
    return lambda code, **options: try_in(session, code, **options)


@pytest.fixture(scope="module")
def probe(target: Session) -> Attack:
    """`attack` on the shared sandbox, which must work after each."""

    def run(code: str, **options: Any) -> str:
        printed = try_in(target, code, **options)
        assert target.run("6 * 7").text == "42"
        return printed

    return run


# -- what the host knows of a session. The only place that looks behind the public face. ------------------------


def home() -> Path:
    return default_home()


def live(session: Session) -> Any:
    return session._session._transport._session


def directory_of(session: Session) -> Path:
    """Where the host keeps the session's files."""
    path: Path = live(session).workspace.path
    return path


def used_bytes(session: Session) -> int:
    """What the host believes that the session's disk holds."""
    size: int = live(session).workspace.usage().size_bytes
    return size


def really_used_bytes(session: Session) -> int:
    """What it does hold, by a walk that cannot be fooled: by descriptor, as root where that is what we are."""
    return sum(blocks_below(directory_of(session) / name) for name in ("files", "stages"))


def blocks_below(path: Path) -> int:
    total = 0
    for _, directories, files, fd in os.fwalk(path, follow_symlinks=False):
        total += sum(os.stat(n, dir_fd=fd, follow_symlinks=False).st_blocks for n in (*directories, *files))
    return total * 512


def inside(session: Session) -> Path:
    """Where the host sees what the session sees: the root of its kernel."""
    return Path(f"/proc/{host_end(session).pid}/root")


def memory_of(session: Session) -> int:
    """What the session's cgroup is charged for now."""
    now: int = live(session).computer.now.cgroup.memory_now_bytes()
    return now


def resident_bytes() -> int:
    """What the host itself holds: the sessions of a test are its own."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def host_pids(session: Session) -> list[int]:
    pids: list[int] = live(session).computer.now.cgroup.pids()
    return pids


def host_end(session: Session) -> Any:
    """The host's end of the kernel's channel."""
    return live(session).computer.now.kernel


def within(seconds: float, verb: Callable[[], T], *, rescue: Callable[[], object]) -> T:
    """The verb's result; a host that hangs is a failed test, not a hanging one. `rescue` frees it."""
    results: list[T] = []
    errors: list[BaseException] = []

    def carry_out() -> None:
        try:
            results.append(verb())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=carry_out, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        rescue()
        thread.join(30)
        pytest.fail(f"the host was still stuck after {seconds} s")
    if errors:
        raise errors[0]
    return results[0]


@pytest.fixture
def tools() -> Any:
    """The functions above: pytest's importlib mode gives test modules no other way to a neighbour."""
    import sys

    return sys.modules[__name__]
