"""`AsyncSession` for code without an event loop: the same verbs, blocking, from any thread."""

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar, Unpack

import anyio
import anyio.to_thread

from holdfast import engine
from holdfast.api import SessionInfo
from holdfast.client import AsyncSession, Verb, shell_result
from holdfast.errors import RunAbandoned
from holdfast.kernel.conduct import Ask, Emit
from holdfast.model import Completions, Event, HistoryEntry, Name, Output, Recovery, Run, ShellResult, StreamName
from holdfast.records import FileEntry, RunCard
from holdfast.transfers import as_stream, download, read_whole, upload
from holdfast.verbs import RunOptions
from holdfast.watching import OnDisplay, OnEvent, OnText, deliverer, pump
from holdfast.workfiles import Written

T = TypeVar("T")
Interrupt = Callable[["asyncio.Task[Any] | None"], Awaitable[bool]]
"""Asks what a task waits for to end; False: it does not run."""
_CATCH_UP_S = 10.0
"""A callback that failed is called no more: it is not waited for longer than this."""


class Session:
    """`AsyncSession` for ordinary code: the same verbs, blocking, from any thread.

    >>> with Session(memory="512M", timeout=30) as s:
    ...     run = s.run("x = 21 * 2\\nx")
    ...     run.status, run.text
    ('committed', '42')
    """

    def __init__(self, **settings: Any) -> None:
        """Takes what `AsyncSession` takes: memory, timeout, cpus, processes, disk, undo, versions, egress, env, mode,
        preflight, resume, keep; and where: home, memory_cap, report, shared; or url, token, attached."""
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

    @property
    def version(self) -> int:
        return self._session.version

    @property
    def ckpt(self) -> str:
        return self._session.ckpt

    def info(self) -> SessionInfo:
        """Where it stands: state, limits, memory in use, the run that is under way."""
        return self._do(lambda reached: reached.info())

    def run(
        self,
        code: str | RunCard,
        *,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        on_display: OnDisplay | None = None,
        on_event: OnEvent | None = None,
        on_input: Callable[[str, bool], str] | None = None,
        **options: Unpack[RunOptions],
    ) -> Run:
        """Execute one cell, or exactly a plan that was made before. Code that fails does not raise: see `run.error`.

        The callbacks see output while the cell runs, in the calling thread; `on_event` sees all of it, in order.
        `on_input` answers `input()` (prompt, whether it is a password), in a thread of its own; without it `input()`
        fails. Ctrl-C interrupts the cell.
        """
        reached, chosen = self._session._reached, self._session._options(code, options)
        deliver = deliverer(on_stdout, on_stderr, on_display, on_event)
        if on_input is None:
            return self._watched(lambda emit: reached.run(code, chosen, emit=emit), deliver)
        asker = _Asker(on_input)
        return self._watched(
            lambda emit: reached.run(code, chosen, emit=emit, ask=asker.asking(emit)),
            deliver and asker.noticing(deliver),
        )

    def plan(self, code: str, **options: Unpack[RunOptions]) -> RunCard:
        """The Run Card of a run, without running anything. `run(card)` then executes exactly that."""
        chosen = self._session._options(code, options)
        return self._do(lambda reached: reached.plan(code, chosen))

    def shell(
        self,
        command: str,
        *,
        timeout: float | str | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
    ) -> ShellResult:
        """Run a command line in the sandbox."""
        reached, chosen = self._session._reached, self._session._chosen_timeout(timeout)
        deliver = deliverer(on_stdout, on_stderr, None, None)
        return shell_result(self._watched(lambda emit: reached.shell(command, timeout=chosen, emit=emit), deliver))

    def files(self) -> list[FileEntry]:
        """What is committed in /mnt/data."""
        return self._do(lambda reached: reached.files())

    def read(self, path: str) -> bytes:
        """A committed file, whole; `download` for one that is large."""
        return self._do(lambda reached: read_whole(reached, path))

    def write(self, path: str, data: bytes | str) -> Written:
        """Put a file in /mnt/data. A run like any other: a version, a receipt."""
        source = as_stream(data)
        return self._do(lambda reached: reached.write(path, source))

    def upload(self, source: str | Path, path: str | None = None) -> Written:
        """The same from a file of yours, piece by piece."""
        return self._do(lambda reached: upload(reached, Path(source), path))

    def download(self, path: str, target: str | Path) -> Path:
        """A committed file into one of yours, piece by piece; its SHA-256 is checked on the way."""
        return self._do(lambda reached: download(reached, path, Path(target)))

    def remove(self, path: str) -> Written:
        """Take a file or directory away. An earlier version still has it."""
        return self._do(lambda reached: reached.remove(path))

    def restore(self, ckpt: str) -> Written:
        """Bring the files of an earlier version back, as a new version."""
        return self._do(lambda reached: reached.restore(ckpt))

    def recover(self) -> Recovery:
        """Where the session stands after a reset, and what to do next. Asking twice changes nothing."""
        return self._do(lambda reached: reached.recover())

    def history(self, limit: int = 1000) -> list[HistoryEntry]:
        """The session's runs, oldest first."""
        return self._do(lambda reached: reached.history(limit=limit))

    def code(self, run: str) -> str:
        """The code that a run was asked to execute, as the journal has it."""
        return self._do(lambda reached: reached.code(run))

    def names(self) -> dict[str, Name]:
        """The live variables."""
        return self._do(lambda reached: reached.names())

    def complete(self, code: str, cursor: int | None = None) -> Completions:
        """What could stand at the cursor."""
        at = len(code) if cursor is None else cursor
        return self._do(lambda reached: reached.complete(code, at))

    def inspect(self, code: str, cursor: int | None = None, *, detail: int = 0) -> dict[str, str | bytes]:
        """What is known about the name at the cursor, by MIME type; empty if nothing is."""
        at = len(code) if cursor is None else cursor
        return self._do(lambda reached: reached.inspect(code, at, detail=detail))

    def output(self, run: Run | ShellResult | str, stream: StreamName = "stdout") -> str:
        """All that a run printed, also what its result left out of the middle."""
        run_id = run if isinstance(run, str) else run.id
        return self._do(lambda reached: reached.output(run_id, stream)).decode(errors="replace")

    def interrupt(self) -> bool:
        """Ask the running cell to end, from another thread; False if nothing runs."""
        return self._do(lambda reached: reached.interrupt())

    def reset(self) -> None:
        """Purge memory, end processes, wipe the namespace. Files stay. What waits for its turn runs afterwards."""
        self._do(lambda reached: reached.reset())

    def close(self, *, keep: bool = False) -> None:
        """End the session and delete its files; `keep=True` leaves them, for `resume=`. Runs that wait are refused."""
        engine.wait(lambda: self._session._close(keep=keep))

    def _do(self, verb: Verb[T]) -> T:
        reached = self._session._reached

        async def carry_out() -> T:
            return await verb(reached)

        return engine.wait(carry_out)

    def _watched(
        self, verb: Callable[[Emit | None], Coroutine[Any, Any, T]], deliver: Callable[[Event], object] | None
    ) -> T:
        reached = self._session._reached
        return watched(verb, deliver, interrupt=lambda caller: reached.interrupt(caller=caller))


def watched(
    verb: Callable[[Emit | None], Coroutine[Any, Any, T]],
    deliver: Callable[[Event], object] | None,
    *,
    interrupt: Interrupt,
) -> T:
    """Carry out a verb in the event loop while this thread hands its events to the callbacks."""
    if deliver is None:
        return _Call(lambda: verb(None), interrupt).wait()
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
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(events.put, None)

    call = _Call(carry_out, interrupt)
    return call.wait(lambda: pump(events, deliver, is_over=call.is_over))


class _Call(Generic[T]):
    """A verb under way in the engine. Ctrl-C ends it and no other, also while it waits behind another's run."""

    def __init__(self, verb: Callable[[], Coroutine[Any, Any, T]], interrupt: Interrupt) -> None:
        self._verb = verb
        self._interrupt = interrupt
        self._future: Future[T] = Future()
        self._begun: tuple[asyncio.Task[Any] | None, anyio.CancelScope] | None = None

    def is_over(self) -> bool:
        return self._future.done()

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> T:
        try:
            engine.start(self._carry_out, self._future)
            meanwhile()
            return engine.outcome(self._future)
        except KeyboardInterrupt:
            if engine.wait(self._end):
                meanwhile()  # what is on its way must still be taken, or the run could not end
                with suppress(RunAbandoned):
                    engine.outcome(self._future)
            raise

    async def _carry_out(self) -> T:
        with anyio.CancelScope() as scope:
            self._begun = asyncio.current_task(), scope
            return await self._verb()
        raise RunAbandoned("it was interrupted before it began", hint="run it again when you mean it")

    async def _end(self) -> bool:
        """False: it has not even begun, and will not. What was handed to the engine before this has."""
        if self._begun is None:
            return False
        caller, scope = self._begun
        if not await self._interrupt(caller):
            scope.cancel()
        return True


class _Asker:
    """Calls `on_input` in a thread of its own, when the callbacks have seen all that was printed before."""

    def __init__(self, on_input: Callable[[str, bool], str]) -> None:
        self._on_input = on_input
        self._mark = Output(stream="stdout", text="")
        self._seen = threading.Event()

    def noticing(self, deliver: Callable[[Event], object]) -> Callable[[Event], object]:
        def notice(event: Event) -> object:
            if event is not self._mark:
                return deliver(event)
            self._seen.set()
            return None

        return notice

    def asking(self, emit: Emit | None) -> Ask:
        async def ask(prompt: str, password: bool) -> str:
            if emit is not None:
                self._seen.clear()
                await emit(self._mark)
            return await anyio.to_thread.run_sync(self._ask, prompt, password, emit is not None, abandon_on_cancel=True)

        return ask

    def _ask(self, prompt: str, password: bool, watched: bool) -> str:
        if watched:
            self._seen.wait(_CATCH_UP_S)
        return self._on_input(prompt, password)
