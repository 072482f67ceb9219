"""The Python API. `AsyncSession` is the real thing; `Session` the same for code without an event loop.

Both speak to the process's engine: one thread with an event loop of its own, in which kernels are watched whatever
the caller's own loop or thread is busy with. There, a `Transport` carries each verb to the session: one of this
process, or with `url=` one at a server.
"""

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TypeVar, Unpack

from holdfast import engine, shared, verbs
from holdfast.api import CreateSession, SessionInfo
from holdfast.config import Settings, home_path, parse_cap, parse_limits, parse_path
from holdfast.egress.allowed import AllowList
from holdfast.environments import Report
from holdfast.errors import HomeBusy, InvalidSetting, ServerStopping, ServerUnreachable, SessionClosed
from holdfast.kernel.conduct import Ask
from holdfast.model import (
    Completions,
    Event,
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
from holdfast.records import FileEntry, RunCard
from holdfast.service import Service
from holdfast.transfers import as_stream, download, read_whole, upload
from holdfast.transports import Transport
from holdfast.transports.embedded import Embedded
from holdfast.verbs import RunOptions
from holdfast.watching import OnDisplay, OnEvent, OnText, emitter, streamed
from holdfast.workfiles import Written

T = TypeVar("T")
Verb = Callable[[Transport], Awaitable[T]]


class AsyncSession:
    """A sandboxed kernel with a workspace of its own.

    Sessions of one process share its home, its zygotes and its event loop.
    """

    def __init__(
        self,
        *,
        memory: int | str = "1G",
        timeout: float | str | None = None,
        cpus: float = 2.0,
        processes: int = 256,
        disk: int | str = "10G",
        undo: int = 0,
        versions: int = 20,
        egress: Sequence[str] = (),
        env: str | Path | None = None,
        home: str | Path | None = None,
        memory_cap: MemoryCap = "cgroup",
        mode: Mode = "strict",
        preflight: Preflight = "warn",
        resume: str | None = None,
        keep: bool = False,
        report: Report | None = None,
        url: str | None = None,
        token: str | None = None,
        shared: bool = False,
        attached: bool = False,
    ) -> None:
        """`resume` is the id of a session that was kept, or whose host died: its files are there, its limits hold.
        `timeout` is the deadline of a run that names none: 60 seconds, or what a resumed session had. With `keep` its
        files and books stay, for `resume`, also if this process ends without closing it. With `undo` the memory of that
        many earlier versions is kept asleep, and `restore` brings it back with the files; files come back over the
        latest `versions` that changed any.

        `egress` lists the hosts that its code may reach by HTTP and HTTPS ("api.example.com", "*.example.org",
        "10.1.2.3:8080"); without it, none. A resumed session may reach what is listed now, and nothing else.

        With `url` the session is one at a server: `http://…`, or `unix:/path/socket`; `token` is its token or an API
        key, otherwise what HOLDFAST_TOKEN says. With `shared` it is one at the home's own server, which is started if
        need be and ends when nobody uses it. A home that another process owns and serves is used through that one.

        With `attached` a session at `url` ends with this process however that ends, as sessions of this machine do by
        themselves; without it, one whose process is killed stays at the server until somebody ends it.
        """
        if url is not None:
            _refuse_beside_url(home=home, memory_cap=memory_cap, report=report, shared=shared)
        elif token is not None:
            raise InvalidSetting("token= without url=", hint="name the server: url=")
        self._limits = parse_limits(
            memory=memory, timeout=timeout, cpus=cpus, processes=processes, disk=disk, undo=undo, versions=versions
        )
        self._timeout = timeout
        self._allowed = AllowList.parse(egress)
        self._settings = Settings(home=home_path(home), memory_cap=parse_cap(memory_cap))
        self._env = env
        self._mode: Mode = verbs.one_of(Mode, "mode", mode)
        self._preflight: Preflight = verbs.one_of(Preflight, "preflight", preflight)
        self._resume = resume
        self._report = report
        self._url, self._token, self._shared = url, token, shared
        named = env if env is None or url else parse_path(env, name="env")
        self._wanted = CreateSession(
            memory=memory, timeout=timeout, cpus=cpus, processes=processes, disk=disk, undo=undo,
            versions=versions, env=None if named is None else str(named), mode=mode, preflight=preflight, resume=resume,
            egress=self._allowed.texts(), keep=keep, attached=attached or url is None,
        )  # fmt: skip
        self._transport: Transport | None = None

    async def open(self) -> "AsyncSession":
        await engine.run(self._open)
        return self

    async def _open(self) -> None:
        if self._transport is None:
            self._transport = await self._reach()

    async def _reach(self) -> Transport:
        home = self._settings.home
        if self._url is not None:
            return await self._begin_at(self._url, self._token or os.environ.get("HOLDFAST_TOKEN"))
        if self._shared and not engine.owns(home):
            try:
                return await self._begin_at(f"unix:{await shared.ensure(home)}")
            except (ServerUnreachable, ServerStopping):  # it ended in this very moment: then another one is started
                return await self._begin_at(f"unix:{await shared.ensure(home)}")
        try:
            return await self._begin(await engine.service(self._settings))
        except HomeBusy:
            serving = await shared.find(home)
            if serving is None or self._settings.memory_cap != "cgroup":  # which cap is there is its owner's choice
                raise
            return await self._begin_at(f"unix:{serving}")

    async def _begin_at(self, url: str, token: str | None = None) -> Transport:
        """A session at a server. At one of this machine's it ends with this process, however that ends."""
        # Only here: whoever runs code in his own process does not wait until an HTTP client is loaded.
        from holdfast.transports.connection import Connection
        from holdfast.transports.http import open_session

        session = await open_session(Connection(url, token=token), self._wanted)
        engine.keep(session)
        return session

    async def _begin(self, service: Service) -> Transport:
        if self._resume is not None:
            live = await service.resume_session(
                self._resume, allowed=self._allowed, report=self._report, keep=self._wanted.keep
            )
        else:
            live = await service.create_session(
                limits=self._limits, allowed=self._allowed, mode=self._mode, env=self._env, report=self._report,
                keep=self._wanted.keep,
            )  # fmt: skip
        live.preflight = self._preflight
        return Embedded(service, live)

    async def __aenter__(self) -> "AsyncSession":
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def id(self) -> str:
        return self._reached.id

    @property
    def generation(self) -> int:
        """Counts kernels whose memory is not a continuation of the one before. Starts at 1."""
        return self._reached.generation

    @property
    def version(self) -> int:
        """Goes up with each run that is committed or kept, and with what a rolled-back one had saved on its way."""
        return self._reached.version

    @property
    def ckpt(self) -> str:
        """Names the state that the session is in."""
        return self._reached.ckpt

    async def info(self) -> SessionInfo:
        """Where it stands: state, limits, memory in use, the run that is under way."""
        return await self._do(lambda reached: reached.info())

    async def run(
        self,
        code: str | RunCard,
        *,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        on_display: OnDisplay | None = None,
        on_event: OnEvent | None = None,
        on_input: Ask | None = None,
        **options: Unpack[RunOptions],
    ) -> Run:
        """Execute one cell, or exactly a plan that was made before. Code that fails does not raise: see `run.error`.

        The callbacks see output while the cell runs; `on_event` sees all of it, in order. `on_input` answers `input()`
        (prompt, whether it is a password); without it `input()` fails. They run in the engine's event loop: keep them
        short.
        """
        emit = emitter(on_stdout, on_stderr, on_display, on_event)
        chosen = self._options(code, options)
        return await self._do(lambda reached: reached.run(code, chosen, emit=emit, ask=on_input))

    async def stream(
        self, code: str | RunCard, *, on_input: Ask | None = None, **options: Unpack[RunOptions]
    ) -> AsyncGenerator[Event | Run, None]:
        """The same, event by event as they happen, and the `Run` as the last. Whoever stops reading stops the run.

        A slow reader slows the cell down: it is at most a hundred events ahead.
        """

        async def run(on_event: OnEvent) -> Run:
            return await self.run(code, on_event=on_event, on_input=on_input, **options)

        async with aclosing(streamed(run)) as events:
            async for event in events:
                yield event

    async def plan(self, code: str, **options: Unpack[RunOptions]) -> RunCard:
        """The Run Card of a run, without running anything. `run(card)` then executes exactly that."""
        chosen = self._options(code, options)
        return await self._do(lambda reached: reached.plan(code, chosen))

    async def shell(
        self,
        command: str,
        *,
        timeout: float | str | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
    ) -> ShellResult:
        """Run a command line in the sandbox."""
        emit, chosen = emitter(on_stdout, on_stderr, None, None), self._chosen_timeout(timeout)
        return shell_result(await self._do(lambda reached: reached.shell(command, timeout=chosen, emit=emit)))

    async def files(self) -> list[FileEntry]:
        """What is committed in /mnt/data."""
        return await self._do(lambda reached: reached.files())

    async def read(self, path: str) -> bytes:
        """A committed file, whole; `download` for one that is large."""
        return await self._do(lambda reached: read_whole(reached, path))

    async def write(self, path: str, data: bytes | str) -> Written:
        """Put a file in /mnt/data. A run like any other: a version, a receipt."""
        source = as_stream(data)
        return await self._do(lambda reached: reached.write(path, source))

    async def upload(self, source: str | Path, path: str | None = None) -> Written:
        """The same from a file of yours, piece by piece."""
        return await self._do(lambda reached: upload(reached, Path(source), path))

    async def download(self, path: str, target: str | Path) -> Path:
        """A committed file into one of yours, piece by piece; its SHA-256 is checked on the way."""
        return await self._do(lambda reached: download(reached, path, Path(target)))

    async def remove(self, path: str) -> Written:
        """Take a file or directory away. An earlier version still has it."""
        return await self._do(lambda reached: reached.remove(path))

    async def restore(self, ckpt: str) -> Written:
        """Bring the files of an earlier version back, as a new version."""
        return await self._do(lambda reached: reached.restore(ckpt))

    async def recover(self) -> Recovery:
        """Where the session stands after a reset, and what to do next. Asking twice changes nothing."""
        return await self._do(lambda reached: reached.recover())

    async def history(self, limit: int = 1000) -> list[HistoryEntry]:
        """The session's runs, oldest first."""
        return await self._do(lambda reached: reached.history(limit=limit))

    async def code(self, run: str) -> str:
        """The code that a run was asked to execute, as the journal has it."""
        return await self._do(lambda reached: reached.code(run))

    async def names(self) -> dict[str, Name]:
        """The live variables."""
        return await self._do(lambda reached: reached.names())

    async def complete(self, code: str, cursor: int | None = None) -> Completions:
        """What could stand at the cursor."""
        at = len(code) if cursor is None else cursor
        return await self._do(lambda reached: reached.complete(code, at))

    async def inspect(self, code: str, cursor: int | None = None, *, detail: int = 0) -> dict[str, str | bytes]:
        """What is known about the name at the cursor, by MIME type; empty if nothing is."""
        at = len(code) if cursor is None else cursor
        return await self._do(lambda reached: reached.inspect(code, at, detail=detail))

    async def output(self, run: Run | ShellResult | str, stream: StreamName = "stdout") -> str:
        """All that a run printed, also what its result left out of the middle."""
        run_id = run if isinstance(run, str) else run.id
        return (await self._do(lambda reached: reached.output(run_id, stream))).decode(errors="replace")

    async def interrupt(self) -> bool:
        """Ask the running cell to end; False if nothing runs."""
        return await self._do(lambda reached: reached.interrupt())

    async def reset(self) -> None:
        """Purge memory, end processes, wipe the namespace. Files stay. What waits for its turn runs afterwards."""
        await self._do(lambda reached: reached.reset())

    async def close(self, *, keep: bool = False) -> None:
        """End the session and delete its files; `keep=True` leaves them, for `resume=`. Runs that wait are refused."""
        if self._transport is not None:
            await engine.run(lambda: self._close(keep=keep))

    async def _close(self, *, keep: bool = False) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            engine.forget(transport)
            await transport.close(keep=keep)

    async def _do(self, verb: Verb[T]) -> T:
        reached = self._reached

        async def carry_out() -> T:
            return await verb(reached)

        return await engine.run(carry_out)

    @property
    def _reached(self) -> Transport:
        if self._transport is None:
            raise SessionClosed("the session is not open", hint="use `async with`, or `await session.open()`")
        return self._transport

    def _options(self, code: str | RunCard, options: RunOptions) -> RunOptions:
        """A plan is run as it is, under the deadline that it was made with."""
        if isinstance(code, RunCard) or options.get("timeout") is not None or self._timeout is None:
            return options
        return RunOptions(**{**options, "timeout": self._timeout})

    def _chosen_timeout(self, timeout: float | str | None) -> float | str | None:
        return self._timeout if timeout is None else timeout


# -- what the two sessions share -----------------------------------------------------------------------------------


def shell_result(run: Run) -> ShellResult:
    return ShellResult(
        id=run.id, status=run.status, version=run.version, ckpt=run.ckpt, card=run.card, receipt=run.receipt,
        kernel_replaced=run.kernel_replaced,
        outputs=run.outputs, recovery=run.recovery, exit_code=run.exit_code, stdout=run.stdout, stderr=run.stderr,
        error=run.error, strays=run.strays, duration_s=run.duration_s, egress=run.egress,
    )  # fmt: skip


def _refuse_beside_url(**settings: object) -> None:
    """What a server chose for itself when it was started."""
    for name, value in settings.items():
        if value not in (None, False, "cgroup"):
            raise InvalidSetting(f"{name}= has no meaning with url=", hint=f"leave it out: {name} is the server's own")
