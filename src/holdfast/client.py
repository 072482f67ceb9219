"""The Python API. `AsyncSession` is the real thing; `Session` the same for code without an event loop.

Both speak to the process's engine: one thread with an event loop of its own, in which kernels are watched whatever
the caller's own loop or thread is busy with.
"""

from pathlib import Path
from types import TracebackType
from typing import TypeVar, Unpack

from holdfast import engine, verbs
from holdfast.config import Limits, Settings, default_home, parse_bytes, parse_seconds
from holdfast.environments import Report
from holdfast.errors import InvalidSetting, SessionClosed
from holdfast.model import (
    Completions,
    HistoryEntry,
    MemoryCap,
    Mode,
    Name,
    Preflight,
    Recovery,
    Run,
    ShellResult,
    StreamName,
)
from holdfast.planning import RunRequest
from holdfast.records import FileEntry, RunCard
from holdfast.service import Service
from holdfast.sessions import LiveSession
from holdfast.verbs import RunOptions
from holdfast.watching import OnDisplay, OnText, emitter
from holdfast.workfiles import Written

T = TypeVar("T")


class AsyncSession:
    """A sandboxed kernel with a workspace of its own.

    Sessions of one process share its home, its zygotes and its event loop.
    """

    def __init__(
        self,
        *,
        memory: int | str = "1G",
        timeout: float | str = 60,
        cpus: float = 2.0,
        processes: int = 256,
        disk: int | str = "10G",
        env: str | Path | None = None,
        home: str | Path | None = None,
        memory_cap: MemoryCap = "cgroup",
        mode: Mode = "strict",
        preflight: Preflight = "warn",
        resume: str | None = None,
        report: Report | None = None,
    ) -> None:
        """`resume` is the id of a session that was kept, or whose host died: its files are there, its limits hold."""
        self._limits = _limits(memory=memory, timeout=timeout, cpus=cpus, processes=processes, disk=disk)
        path = default_home() if home is None else Path(home).expanduser().absolute()
        self._settings = Settings(home=path, memory_cap=memory_cap)
        self._env = env
        self._mode: Mode = verbs.one_of(Mode, "mode", mode)
        self._preflight: Preflight = verbs.one_of(Preflight, "preflight", preflight)
        self._resume = resume
        self._report = report
        self._service: Service | None = None
        self._live: LiveSession | None = None

    async def open(self) -> "AsyncSession":
        await engine.run(self._open)
        return self

    async def _open(self) -> None:
        if self._live is None:
            self._service = await engine.service(self._settings)
            self._live = await self._begin(self._service)
            self._live.preflight = self._preflight

    async def _begin(self, service: Service) -> LiveSession:
        if self._resume is not None:
            return await service.resume_session(self._resume, report=self._report)
        return await service.create_session(limits=self._limits, mode=self._mode, env=self._env, report=self._report)

    async def __aenter__(self) -> "AsyncSession":
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def id(self) -> str:
        return self._session.id

    @property
    def generation(self) -> int:
        """Counts kernels whose memory is not a continuation of the one before. Starts at 1."""
        return self._session.generation

    @property
    def version(self) -> int:
        """Counts committed runs."""
        return self._session.books.state.version

    @property
    def ckpt(self) -> str:
        """Names the state that the session is in."""
        return str(self._session.books.state.ckpt())

    async def run(
        self,
        code: str | RunCard,
        *,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        on_display: OnDisplay | None = None,
        **options: Unpack[RunOptions],
    ) -> Run:
        """Execute one cell, or exactly a plan that was made before. Code that fails does not raise: see `run.error`.

        The callbacks see output while the cell runs. They run in the event loop: keep them short.
        """
        emit = emitter(on_stdout, on_stderr, on_display)
        session, request = self._session, self._request(code, options)
        return await engine.run(lambda: verbs.run(session, request, emit=emit))

    async def plan(self, code: str, **options: Unpack[RunOptions]) -> RunCard:
        """The Run Card of a run, without running anything. `run(card)` then executes exactly that."""
        session, request = self._session, self._request(code, options)
        return await engine.run(lambda: verbs.plan(session, request))

    async def shell(
        self,
        command: str,
        *,
        timeout: float | str | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
    ) -> ShellResult:
        """Run a command line in the sandbox."""
        emit = emitter(on_stdout, on_stderr, None)
        session, timeout_s = self._session, self._timeout_s(timeout)
        return await engine.run(lambda: verbs.shell(session, command, timeout_s=timeout_s, emit=emit))

    async def files(self) -> list[FileEntry]:
        """What is committed in /mnt/data."""
        session = self._session
        return await engine.run(lambda: verbs.files(session))

    async def read(self, path: str) -> bytes:
        """A committed file, whole; `download` for one that is large."""
        session = self._session
        return await engine.run(lambda: verbs.read(session, path))

    async def write(self, path: str, data: bytes | str) -> Written:
        """Put a file in /mnt/data. A run like any other: a version, a receipt."""
        session = self._session
        return await engine.run(lambda: verbs.write(session, path, data))

    async def upload(self, source: str | Path, path: str | None = None) -> Written:
        """The same from a file of yours, piece by piece."""
        session = self._session
        return await engine.run(lambda: verbs.upload(session, Path(source), path))

    async def download(self, path: str, target: str | Path) -> Path:
        """A committed file into one of yours, piece by piece; its SHA-256 is checked on the way."""
        session = self._session
        return await engine.run(lambda: verbs.download(session, path, Path(target)))

    async def remove(self, path: str) -> Written:
        """Take a file or directory away. An earlier version still has it."""
        session = self._session
        return await engine.run(lambda: verbs.remove(session, path))

    async def restore(self, ckpt: str) -> Written:
        """Bring the files of an earlier version back, as a new version."""
        session = self._session
        return await engine.run(lambda: verbs.restore(session, ckpt))

    async def recover(self) -> Recovery:
        """Where the session stands after a reset, and what to do next. Asking twice changes nothing."""
        session = self._session
        return await engine.run(lambda: verbs.recover(session))

    async def history(self, limit: int = 1000) -> list[HistoryEntry]:
        """The session's runs, oldest first."""
        session = self._session
        return await engine.run(lambda: verbs.history(session, limit=limit))

    async def code(self, run: str) -> str:
        """The code that a run was asked to execute, as the journal has it."""
        session = self._session
        return await engine.run(lambda: verbs.code(session, run))

    async def names(self) -> dict[str, Name]:
        """The live variables."""
        return await engine.run(self._session.names)

    async def complete(self, code: str, cursor: int | None = None) -> Completions:
        """What could stand at the cursor."""
        session, at = self._session, len(code) if cursor is None else cursor
        return await engine.run(lambda: session.complete(code, at))

    async def inspect(self, code: str, cursor: int | None = None, *, detail: int = 0) -> dict[str, str | bytes]:
        """What is known about the name at the cursor, by MIME type; empty if nothing is."""
        session, at = self._session, len(code) if cursor is None else cursor
        return await engine.run(lambda: session.inspect(code, at, detail))

    async def output(self, run: Run | ShellResult | str, stream: StreamName = "stdout") -> str:
        """All that a run printed, also what its result left out of the middle."""
        run_id = run if isinstance(run, str) else run.id
        session = self._session
        return (await engine.run(lambda: session.output(run_id, stream))).decode(errors="replace")

    def interrupt(self) -> bool:
        """Ask the running cell to end; False if nothing runs."""
        return engine.call(self._session.interrupt)

    async def reset(self) -> None:
        """Purge memory, end processes, wipe the namespace. Files stay."""
        await engine.run(self._session.reset)

    async def close(self, *, keep: bool = False) -> None:
        """End the session and delete its files; `keep=True` leaves them, for `resume=`. Closing twice is fine."""
        if self._live is not None:
            await engine.run(lambda: self._close(keep=keep))

    async def _close(self, *, keep: bool = False) -> None:
        live, self._live = self._live, None
        if live is not None and self._service is not None:
            await self._service.end_session(live, keep=keep)

    @property
    def _session(self) -> LiveSession:
        if self._live is None:
            raise SessionClosed("the session is not open", hint="use `async with`, or `await session.open()`")
        return self._live

    def _request(self, code: str | RunCard, options: RunOptions) -> RunRequest:
        return verbs.request(self._session, code, options, timeout_s=self._timeout_s(options.get("timeout")))

    def _timeout_s(self, timeout: float | str | None) -> float:
        return self._limits.timeout_s if timeout is None else parse_seconds(timeout, name="timeout")


def _limits(*, memory: int | str, timeout: float | str, cpus: float, processes: int, disk: int | str) -> Limits:
    if not cpus > 0:
        raise InvalidSetting(f"cpus={cpus!r} is not a number of cores", hint="write a number above 0, such as 0.5")
    if processes < 8:
        raise InvalidSetting(f"processes={processes!r} is too few", hint="a kernel needs at least 8")
    return Limits(
        memory_bytes=parse_bytes(memory, name="memory"), timeout_s=parse_seconds(timeout, name="timeout"),
        cpus=cpus, processes=processes, disk_bytes=parse_bytes(disk, name="disk"),
    )  # fmt: skip
