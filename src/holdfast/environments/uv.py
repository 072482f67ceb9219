"""Running uv: to its end or ours, with the user's own settings, and with advice when it fails."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

from holdfast.errors import EnvironmentBuildFailed

_TICK_S = 0.5
_MAX_LINE_BYTES = 64 * 1024


async def _no_tick() -> None:
    """Nothing to look at while this command runs."""


async def run(
    arguments: Sequence[str],
    *,
    held: int,
    hear: Callable[[str], None] = lambda line: None,
    tick: Callable[[], Awaitable[None]] = _no_tick,
) -> None:
    """Run uv to its end: `hear` gets each line that it prints, `tick` runs when it is silent."""
    tail: deque[str] = deque(maxlen=12)
    async with _started([find_binary(), "--color", "never", *arguments], held=held) as process:
        async for line in _lines(process, tick):
            tail.append(line)
            hear(line)
        status = await process.wait()
    if status != 0:
        said = "\n".join(tail)
        raise EnvironmentBuildFailed(f"uv {arguments[0]} ended with status {status}:\n{said}", hint=hint_for(said))


@contextlib.asynccontextmanager
async def _started(command: Sequence[str], *, held: int) -> AsyncIterator[anyio.abc.Process]:
    process = await anyio.open_process(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=clean_environ(os.environ),
        cwd="/",  # no project's configuration is to be found there, the user's own still counts
        umask=0o022,  # guests have another uid and must be able to read it all
        start_new_session=True,  # so that uv's own workers can be ended with it
        # uv keeps the build lock even if we are killed: nobody sweeps a directory that it still writes to.
        pass_fds=[held],
    )
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _end(process: anyio.abc.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with anyio.move_on_after(3):
                await process.wait()
    await process.aclose()


async def _lines(process: anyio.abc.Process, tick: Callable[[], Awaitable[None]]) -> AsyncIterator[str]:
    assert process.stderr is not None
    stream = BufferedByteReceiveStream(process.stderr)
    while True:
        line: bytes | None = None
        try:
            with anyio.move_on_after(_TICK_S):
                line = await stream.receive_until(b"\n", _MAX_LINE_BYTES)
        except (anyio.IncompleteRead, anyio.DelimiterNotFound):
            return
        if line is None:
            await tick()
        else:
            yield line.decode(errors="replace").rstrip()


def find_binary() -> str:
    """The uv that was installed with us, else the one on PATH."""
    try:
        from uv import find_uv_bin  # here: warm starts never need it

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
    if found is None:
        raise EnvironmentBuildFailed(
            "uv is neither installed beside holdfast nor on PATH",
            hint="pip install uv, or choose an environment that exists already",
        )
    return found


_KEPT = {"HOME", "PATH", "TMPDIR", "USER", "LOGNAME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "NETRC"}
# What would change the content or the place of what we build; indexes and caches stay the user's.
_OVERRULED = {
    *("UV_NO_VERIFY_HASHES", "UV_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE", "UV_NO_BINARY", "UV_VENV_SEED"),
    *("UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_PROJECT", "UV_WORKING_DIR", "UV_NO_PROGRESS"),
}


def clean_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's uv settings, proxies and certificates, and nothing else that he did not mean for uv."""
    return {
        name: value
        for name, value in environ.items()
        if (name in _KEPT or name.startswith(("UV_", "SSL_", "XDG_")) or name.lower().endswith("_proxy"))
        and name not in _OVERRULED
    }


_HINTS = (
    (r"No space left|os error 28|Disk quota", "free about 2 GB there, or set HOLDFAST_HOME to another disk"),
    (
        r"Hash mismatch",
        "the index serves other files than the lock names; if it is a mirror, ask who runs it",
    ),
    (
        r"Failed to fetch|error sending request|dns error|network (was|is) disabled",
        "check the network; uv follows HTTPS_PROXY, SSL_CERT_FILE and UV_DEFAULT_INDEX",
    ),
    (r"Permission denied|Read-only file system", "set HOLDFAST_HOME to a directory that you may write to"),
    (
        r"no wheels|No solution found|unsatisfiable",
        "the index lacks a locked wheel: use CPython 3.11 to 3.14, or set UV_DEFAULT_INDEX to another",
    ),
)


def hint_for(said: str) -> str:
    """Advice for a failure, from what was said when it happened."""
    found = (hint for pattern, hint in _HINTS if re.search(pattern, said, re.IGNORECASE))
    return next(found, "run again; if it fails again, choose an environment that exists already")
