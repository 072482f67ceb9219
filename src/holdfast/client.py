"""The Python API. `AsyncSession` is the real thing; `Session` the same for code without an event loop.

Both speak to the process's engine: one thread with an event loop of its own, in which kernels are watched whatever
the caller's own loop or thread is busy with.
"""

import queue
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, get_args

import anyio
import anyio.to_thread

from holdfast import engine
from holdfast.config import Limits, Settings, default_home, parse_bytes, parse_seconds
from holdfast.environments import Report
from holdfast.errors import InvalidSetting, SessionClosed
from holdfast.kernel.conduct import Emit
from holdfast.model import (
    Completions,
    Display,
    Displayed,
    Event,
    MemoryCap,
    Mode,
    Name,
    Output,
    Run,
    ShellResult,
    StreamName,
)
from holdfast.service import Service
from holdfast.sessions import LiveSession

T = TypeVar("T")
OnText = Callable[[str], object]
OnDisplay = Callable[[Display], object]


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
        report: Report | None = None,
    ) -> None:
        self._limits = _limits(memory=memory, timeout=timeout, cpus=cpus, processes=processes, disk=disk)
        path = default_home() if home is None else Path(home).expanduser().absolute()
        self._settings = Settings(home=path, memory_cap=memory_cap)
        self._env = env
        self._mode = _mode(mode)
        self._report = report
        self._service: Service | None = None
        self._live: LiveSession | None = None

    async def open(self) -> "AsyncSession":
        await engine.run(self._open)
        return self

    async def _open(self) -> None:
        if self._live is None:
            self._service = await engine.service(self._settings)
            self._live = await self._service.create_session(
                limits=self._limits, mode=self._mode, env=self._env, report=self._report
            )

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

    async def run(
        self,
        code: str,
        *,
        timeout: float | str | None = None,
        mode: Mode | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        on_display: OnDisplay | None = None,
    ) -> Run:
        """Execute one cell. Code that fails does not raise: look at `run.error`.

        The callbacks see output while the cell runs. They run in the event loop: keep them short.
        """
        emit = _emitter(on_stdout, on_stderr, on_display)
        session, timeout_s = self._session, self._timeout_s(timeout)
        mode = None if mode is None else _mode(mode)
        return await engine.run(lambda: session.run(code, timeout_s=timeout_s, mode=mode, emit=emit))

    async def shell(
        self,
        command: str,
        *,
        timeout: float | str | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
    ) -> ShellResult:
        """Run a command line in the sandbox."""
        emit = _emitter(on_stdout, on_stderr, None)
        session, timeout_s = self._session, self._timeout_s(timeout)
        return await engine.run(lambda: session.shell(command, timeout_s=timeout_s, emit=emit))

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

    async def close(self) -> None:
        """End the session and delete its files. Closing twice is fine."""
        if self._live is not None:
            await engine.run(self._close)

    async def _close(self) -> None:
        live, self._live = self._live, None
        if live is not None and self._service is not None:
            await self._service.end_session(live)

    @property
    def _session(self) -> LiveSession:
        if self._live is None:
            raise SessionClosed("the session is not open", hint="use `async with`, or `await session.open()`")
        return self._live

    def _timeout_s(self, timeout: float | str | None) -> float:
        return self._limits.timeout_s if timeout is None else parse_seconds(timeout, name="timeout")


class Session:
    """`AsyncSession` for ordinary code: the same verbs, blocking, from any thread.

    >>> with Session(memory="512M", timeout=30) as s:
    ...     run = s.run("x = 21 * 2\\nx")
    ...     run.status, run.text
    ('ok', '42')
    """

    def __init__(self, **settings: Any) -> None:
        """Takes what `AsyncSession` takes: memory, timeout, cpus, processes, disk, env, home, memory_cap, report."""
        self._session = AsyncSession(**settings)
        engine.wait(self._session._open)

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def id(self) -> str:
        return self._session.id

    @property
    def generation(self) -> int:
        return self._session.generation

    def run(
        self,
        code: str,
        *,
        timeout: float | str | None = None,
        mode: Mode | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        on_display: OnDisplay | None = None,
    ) -> Run:
        """Execute one cell. Code that fails does not raise: look at `run.error`.

        The callbacks see output while the cell runs, in the calling thread. Ctrl-C interrupts the cell.
        """
        session, timeout_s = self._session._session, self._session._timeout_s(timeout)
        mode = None if mode is None else _mode(mode)
        return self._watched(
            lambda emit: session.run(code, timeout_s=timeout_s, mode=mode, emit=emit), on_stdout, on_stderr, on_display
        )

    def shell(
        self,
        command: str,
        *,
        timeout: float | str | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
    ) -> ShellResult:
        """Run a command line in the sandbox."""
        session, timeout_s = self._session._session, self._session._timeout_s(timeout)
        return self._watched(
            lambda emit: session.shell(command, timeout_s=timeout_s, emit=emit), on_stdout, on_stderr, None
        )

    def names(self) -> dict[str, Name]:
        """The live variables."""
        return engine.wait(self._session._session.names)

    def complete(self, code: str, cursor: int | None = None) -> Completions:
        """What could stand at the cursor."""
        session, at = self._session._session, len(code) if cursor is None else cursor
        return engine.wait(lambda: session.complete(code, at))

    def inspect(self, code: str, cursor: int | None = None, *, detail: int = 0) -> dict[str, str | bytes]:
        """What is known about the name at the cursor, by MIME type; empty if nothing is."""
        session, at = self._session._session, len(code) if cursor is None else cursor
        return engine.wait(lambda: session.inspect(code, at, detail))

    def output(self, run: Run | ShellResult | str, stream: StreamName = "stdout") -> str:
        """All that a run printed, also what its result left out of the middle."""
        session, run_id = self._session._session, run if isinstance(run, str) else run.id
        return engine.wait(lambda: session.output(run_id, stream)).decode(errors="replace")

    def interrupt(self) -> bool:
        """Ask the running cell to end, from another thread; False if nothing runs."""
        return self._session.interrupt()

    def reset(self) -> None:
        """Purge memory, end processes, wipe the namespace. Files stay."""
        engine.wait(self._session._session.reset)

    def close(self) -> None:
        """End the session and delete its files. Closing twice is fine."""
        engine.wait(self._session._close)

    def _watched(
        self,
        verb: Callable[[Emit | None], Coroutine[Any, Any, T]],
        on_stdout: OnText | None,
        on_stderr: OnText | None,
        on_display: OnDisplay | None,
    ) -> T:
        """Carry out a verb in the event loop while this thread hands its events to the callbacks."""
        deliver = _deliverer(on_stdout, on_stderr, on_display)
        if deliver is None:
            return self._interruptible(lambda: verb(None))
        events: queue.Queue[Event | None] = queue.Queue(maxsize=1000)

        async def emit(event: Event) -> None:
            try:
                events.put_nowait(event)
            except queue.Full:  # a slow callback slows the kernel down, not the other sessions
                await anyio.to_thread.run_sync(events.put, event)

        async def carry_out() -> T:
            try:
                return await verb(emit)
            finally:
                await anyio.to_thread.run_sync(events.put, None)

        return self._interruptible(carry_out, lambda: _pump(events, deliver))

    def _interruptible(
        self, verb: Callable[[], Coroutine[Any, Any, T]], meanwhile: Callable[[], None] = lambda: None
    ) -> T:
        future = engine.start(verb)
        try:
            meanwhile()
            return future.result()
        except KeyboardInterrupt:
            self.interrupt()
            meanwhile()  # what is on its way must still be taken, or the run could not end
            future.result()
            raise


def _pump(events: "queue.Queue[Event | None]", deliver: Callable[[Event], None]) -> None:
    failure: BaseException | None = None
    while (event := events.get()) is not None:
        try:
            if failure is None:
                deliver(event)
        except Exception as error:  # the caller's own callback: let the run end first, then tell him
            failure = error
    if failure is not None:
        raise failure


def _deliverer(
    on_stdout: OnText | None, on_stderr: OnText | None, on_display: OnDisplay | None
) -> Callable[[Event], None] | None:
    if not (on_stdout or on_stderr or on_display):
        return None

    def deliver(event: Event) -> None:
        match event:
            case Output(stream="stdout") if on_stdout:
                on_stdout(event.text)
            case Output(stream="stderr") if on_stderr:
                on_stderr(event.text)
            case Displayed() if on_display:
                on_display(event.display)

    return deliver


def _emitter(on_stdout: OnText | None, on_stderr: OnText | None, on_display: OnDisplay | None) -> Emit | None:
    deliver = _deliverer(on_stdout, on_stderr, on_display)
    if deliver is None:
        return None

    async def emit(event: Event) -> None:
        deliver(event)

    return emit


def _limits(*, memory: int | str, timeout: float | str, cpus: float, processes: int, disk: int | str) -> Limits:
    if not cpus > 0:
        raise InvalidSetting(f"cpus={cpus!r} is not a number of cores", hint="write a number above 0, such as 0.5")
    if processes < 8:
        raise InvalidSetting(f"processes={processes!r} is too few", hint="a kernel needs at least 8")
    return Limits(
        memory_bytes=parse_bytes(memory, name="memory"), timeout_s=parse_seconds(timeout, name="timeout"),
        cpus=cpus, processes=processes, disk_bytes=parse_bytes(disk, name="disk"),
    )  # fmt: skip


def _mode(mode: Mode) -> Mode:
    if mode not in get_args(Mode):
        raise InvalidSetting(f"mode={mode!r} is not a mode", hint='write "strict" or "notebook"')
    return mode
