"""The process that reads large texts: host end here, and what the process itself does.

One process serves all sessions of a host, one text at a time, and a session has one text in the queue. It is started
with the first large text and ends when it has had nothing to do for a minute, or when the host is gone. It can read and
write its two pipes and ask for memory, and nothing else (`_confine`). It is killed with a text that takes too long, and
gives way to everything else that wants a processor (`_NICENESS`).
"""

import atexit
import os
import resource
import select
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress

import anyio
import anyio.to_thread
import msgspec
from anyio.lowlevel import RunVar

from holdfast.preflight.reading import Reading, read
from holdfast.preflight.steps import ASIDE, Steps, TooManySteps
from holdfast.sandbox import linux, seccomp

MOST_S = 5.0
"""For one text, from when it waits for its turn."""
_MOST_CPU_S = 3
_MOST_MEMORY_BYTES = 512 << 20
_MOST_ANSWER_BYTES = 16 << 20
_IDLE_S = 60.0
_NICENESS = 5
_RECURSION = 3_000
_LENGTH = struct.Struct("!I")
_CALLS = (
    "read", "write", "poll", "ppoll", "mmap", "munmap", "mremap", "madvise", "mprotect", "brk", "futex",
    "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "clock_gettime", "getrusage", "prlimit64",
    "setrlimit", "getrlimit", "prctl", "sched_yield", "getpid", "gettid", "exit", "exit_group", "restart_syscall",
)  # fmt: skip
_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
_TOO_LONG = Reading(unread="reading it takes too long")
_WARM_UP = 'é = "\\N{DIGIT ONE}"\nprint(f"{é}")\n!ls\n'
"""Has Python import what it needs for such texts."""


async def read_aside(code: str, turn: anyio.Lock, *, timeout_s: float) -> Reading:
    """The reading of a large text. `turn` is its session's: a session has one text in the queue of all."""
    ends = time.monotonic() + min(timeout_s, MOST_S)
    with anyio.move_on_after(ends - time.monotonic()):
        async with turn, _queue():
            # Not abandoned by a cancellation: the thread ends by itself in time, and the process is in order then.
            with anyio.CancelScope(shield=True):
                return await anyio.to_thread.run_sync(lambda: _process.ask(code, ends=ends))
    return _TOO_LONG


def _queue() -> anyio.Lock:
    try:
        return _queues.get()
    except LookupError:
        _queues.set(queue := anyio.Lock())
        return queue


_queues: RunVar[anyio.Lock] = RunVar("texts to be read aside")


class _Process:
    """Guards the process, as its host sees it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a process may have more than one event loop
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False
        """The last one had ended by itself."""

    def ask(self, code: str, *, ends: float) -> Reading:
        """What it says of a text; without an answer in time it is killed, and the next text gets another."""
        if not self._lock.acquire(timeout=max(0.0, ends - time.monotonic())):
            return _TOO_LONG
        try:
            answer = self._answer(code, ends)
            if answer is None and self._is_over:  # it had nothing to do for long, and ended as the text came
                answer = self._answer(code, ends)
            return answer or _TOO_LONG
        finally:
            self._lock.release()

    def _answer(self, code: str, ends: float) -> Reading | None:
        try:
            return self._asked(code, ends)
        except (OSError, EOFError, msgspec.MsgspecError):
            self.kill()
            return None

    def _asked(self, code: str, ends: float) -> Reading:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        text = code.encode(errors="surrogatepass")
        _write_whole(process.stdin.fileno(), _LENGTH.pack(len(text)) + text)  # it reads all before it does anything
        pipe = process.stdout.fileno()
        (length,) = _LENGTH.unpack(_read_whole(pipe, _LENGTH.size, ends))
        if length > _MOST_ANSWER_BYTES:
            raise EOFError
        return msgspec.msgpack.decode(_read_whole(pipe, length, ends), type=Reading)

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.kill()
        self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import main; main()"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, cwd="/",
                start_new_session=True,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            )  # fmt: skip
        return self._process

    def kill(self) -> None:
        process, self._process = self._process, None
        self._is_over = False
        if process is not None:
            process.kill()
            process.communicate()
            self._is_over = process.returncode == 0


def _read_whole(pipe: int, size: int, ends: float) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(pipe, size - len(data)) if _has_more(pipe, ends - time.monotonic()) else b""
        if not piece:
            raise EOFError
        data += piece
    return data


def _has_more(pipe: int, wait_s: float) -> bool:
    """Not by `select`: a host may have more than a thousand descriptors."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(max(0.0, wait_s) * 1000))


def _write_whole(pipe: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(pipe, left) :]


_process = _Process()
atexit.register(_process.kill)


def _forget() -> None:
    """A forked child has no such process."""
    global _process
    _process = _Process()


os.register_at_fork(after_in_child=_forget)


# -- the process ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Read texts from stdin, answer on stdout, until nothing comes."""
    sys.setrecursionlimit(_RECURSION)
    os.nice(_NICENESS)
    read(_WARM_UP, Steps())
    _confine()
    with suppress(EOFError):
        while True:
            (length,) = _LENGTH.unpack(_read_whole(0, _LENGTH.size, time.monotonic() + _IDLE_S))
            code = _read_whole(0, length, time.monotonic() + _IDLE_S).decode(errors="surrogatepass")
            answer = msgspec.msgpack.encode(_read(code))
            _write_whole(1, _LENGTH.pack(len(answer)) + answer)


def _read(code: str) -> Reading:
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent_s = int(used.ru_utime + used.ru_stime) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (_least(spent_s + _MOST_CPU_S, hard), hard))
    try:
        return read(code, Steps(ASIDE))
    except TooManySteps:
        return Reading(unread="too many steps are needed to follow it")
    except RecursionError:
        return Reading(unread="it is nested too deeply")
    except MemoryError:
        return Reading(unread="reading it takes too much memory")


def _confine() -> None:
    most = _least(_MOST_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1])
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(seccomp.compile_allow_list(_CALLS))


def _least(most: int, hard: int) -> int:
    """The host may have a lower limit of its own."""
    return most if hard == resource.RLIM_INFINITY else min(most, hard)
