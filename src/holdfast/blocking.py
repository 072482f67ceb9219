"""`AsyncSession` for code without an event loop: the same verbs, blocking, from any thread."""

import queue
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

import anyio
import anyio.to_thread

from holdfast import engine, verbs
from holdfast.client import AsyncSession
from holdfast.kernel.conduct import Emit
from holdfast.model import Completions, Event, HistoryEntry, Name, Recovery, Run, ShellResult, StreamName
from holdfast.records import FileEntry, RunCard
from holdfast.sessions import LiveSession
from holdfast.verbs import RunOptions
from holdfast.watching import OnDisplay, OnText, deliverer, pump
from holdfast.workfiles import Written

T = TypeVar("T")


class Session:
    """`AsyncSession` for ordinary code: the same verbs, blocking, from any thread.

    >>> with Session(memory="512M", timeout=30) as s:
    ...     run = s.run("x = 21 * 2\\nx")
    ...     run.status, run.text
    ('committed', '42')
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

    @property
    def version(self) -> int:
        return self._session.version

    @property
    def ckpt(self) -> str:
        return self._session.ckpt

    def run(
        self,
        code: str | RunCard,
        *,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        on_display: OnDisplay | None = None,
        **options: Unpack[RunOptions],
    ) -> Run:
        """Execute one cell, or exactly a plan that was made before. Code that fails does not raise: see `run.error`.

        The callbacks see output while the cell runs, in the calling thread. Ctrl-C interrupts the cell.
        """
        session, request = self._session._session, self._session._request(code, options)
        return self._watched(lambda emit: verbs.run(session, request, emit=emit), on_stdout, on_stderr, on_display)

    def plan(self, code: str, **options: Unpack[RunOptions]) -> RunCard:
        """The Run Card of a run, without running anything. `run(card)` then executes exactly that."""
        session, request = self._session._session, self._session._request(code, options)
        return engine.wait(lambda: verbs.plan(session, request))

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
            lambda emit: verbs.shell(session, command, timeout_s=timeout_s, emit=emit), on_stdout, on_stderr, None
        )

    def files(self) -> list[FileEntry]:
        """What is committed in /mnt/data."""
        return self._verb(verbs.files)

    def read(self, path: str) -> bytes:
        """A committed file, whole; `download` for one that is large."""
        return self._verb(lambda session: verbs.read(session, path))

    def write(self, path: str, data: bytes | str) -> Written:
        """Put a file in /mnt/data. A run like any other: a version, a receipt."""
        return self._verb(lambda session: verbs.write(session, path, data))

    def upload(self, source: str | Path, path: str | None = None) -> Written:
        """The same from a file of yours, piece by piece."""
        return self._verb(lambda session: verbs.upload(session, Path(source), path))

    def download(self, path: str, target: str | Path) -> Path:
        """A committed file into one of yours, piece by piece; its SHA-256 is checked on the way."""
        return self._verb(lambda session: verbs.download(session, path, Path(target)))

    def remove(self, path: str) -> Written:
        """Take a file or directory away. An earlier version still has it."""
        return self._verb(lambda session: verbs.remove(session, path))

    def restore(self, ckpt: str) -> Written:
        """Bring the files of an earlier version back, as a new version."""
        return self._verb(lambda session: verbs.restore(session, ckpt))

    def recover(self) -> Recovery:
        """Where the session stands after a reset, and what to do next. Asking twice changes nothing."""
        return self._verb(verbs.recover)

    def history(self, limit: int = 1000) -> list[HistoryEntry]:
        """The session's runs, oldest first."""
        return self._verb(lambda session: verbs.history(session, limit=limit))

    def code(self, run: str) -> str:
        """The code that a run was asked to execute, as the journal has it."""
        return self._verb(lambda session: verbs.code(session, run))

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

    def close(self, *, keep: bool = False) -> None:
        """End the session and delete its files; `keep=True` leaves them, for `resume=`. Closing twice is fine."""
        engine.wait(lambda: self._session._close(keep=keep))

    def _verb(self, verb: Callable[[LiveSession], Coroutine[Any, Any, T]]) -> T:
        session = self._session._session
        return engine.wait(lambda: verb(session))

    def _watched(
        self,
        verb: Callable[[Emit | None], Coroutine[Any, Any, T]],
        on_stdout: OnText | None,
        on_stderr: OnText | None,
        on_display: OnDisplay | None,
    ) -> T:
        """Carry out a verb in the event loop while this thread hands its events to the callbacks."""
        deliver = deliverer(on_stdout, on_stderr, on_display)
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

        return self._interruptible(carry_out, lambda: pump(events, deliver))

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
