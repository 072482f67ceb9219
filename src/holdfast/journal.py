"""Append-only record of every run. The only authority on how far a run got.

1. Nothing is published before `Verified` is durable.
2. `Settled` is written last, when nothing is left to do.
3. Records never change.

So after a crash the last record alone says what to do: `Verified` means publish (again) and settle; anything earlier
means discard back to the last `Saved` and settle.

What `append` is given is one unit: all of it is durable when it returns, and none of it ever will be if it fails.
Unless it was the sync that failed (`SyncFailed`): it was written by then, and whoever opens the journal next finds all
of it or nothing. Units become durable in the order in which they were queued, many of them in one commit when many
wait. A commit that failed is not tried again: everyone in it is told.

A plan that nobody waits for and nobody watches (`append_soon`) lingers for a few milliseconds: most runs are over by
then, and it is in the commit that has their end. It keeps its place in the order, and is staged for that commit at
once: there is time for it while the code runs. A host that dies meanwhile leaves no word of that run, and nothing else
of it either: what could last comes after `Verified`, and that is behind the plan.

Where a commit takes a millisecond, whoever waits for it makes it, in the event loop: to wake a thread and be woken by
it takes longer. Where it takes more, and for what nobody waits for, there is a thread.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import anyio.to_thread

from holdfast.faults import crashpoint, is_armed
from holdfast.records import Planned, Saved, Verified
from holdfast.store.rows import AnyWrite, Append, PutFiles, PutNames, PutReceipt, PutResult
from holdfast.store.sqlite import Store

T = TypeVar("T")
_QUICK_S = 0.003
"""A commit that usually takes less is not worth a thread's wake-up, and holds nobody up."""
_LINGER_S = 0.02
"""How long `append_soon` waits for company. A run that lasts longer is one that others may want to know of."""
_LARGE = 1_000
"""What is written in a unit, in rows and kilobytes; more is left to the thread."""
_USUAL = 1 / 8
"""How much the last commit counts in what is usual."""


class _Unit:
    """Writes that stand or fall together, and who waits for them, if anybody does."""

    def __init__(
        self, writes: Sequence[AnyWrite], waiter: "asyncio.Future[None] | None", *, session: str | None = None
    ) -> None:
        self.writes = writes
        self.waiter = waiter
        self.sessions = {write.session for write in writes} if session is None else {session}
        self.is_large = sum(map(_size, writes)) > _LARGE
        self.error: BaseException | None = None

    @property
    def tags(self) -> list[str]:
        return [type(write.record).__name__ for write in self.writes if isinstance(write, Append)]


class Journal:
    """One queue for all sessions of a home; what is in it is written by whoever holds `_writing`, all at once.

    A caller that is cancelled while it waits has queued its writes all the same.
    """

    def __init__(self, store_path: Path) -> None:
        self._store = Store(store_path)
        self._view = Store(store_path, read_only=True)
        self._queue: deque[_Unit] = deque()
        self._bell: SimpleQueue[bool] = SimpleQueue()
        """Wakes the writer's thread; False ends it."""
        self._closed = False
        # So that nothing is queued behind the end: its caller would wait for ever.
        self._gate = threading.Lock()
        self._writing = threading.Lock()
        self._staged: list[_Unit] = []
        """In the store's next commit already. Of whoever is writing."""
        # Failures that nobody waited for, until the session's next unit takes them. Of whoever is writing.
        self._untold: dict[str, BaseException] = {}
        self._usual_s = _QUICK_S
        self._latest: set[str] = set()
        """Whose writes were in the last commit: a session that was alone in it probably is so still."""
        self._lingers = False
        self._ended = False
        self._reading = threading.Lock()
        self._one_reader = anyio.CapacityLimiter(1)
        self._writer = threading.Thread(target=self._write_until_closed, name="journal-writer", daemon=True)
        self._writer.start()

    async def append(self, *writes: AnyWrite) -> None:
        """Returns when all of it is durable. ValueError: a record that is not legal there; nothing was written."""
        waiter = await self._push(writes)
        await waiter

    async def _push(self, writes: Sequence[AnyWrite], *, session: str | None = None) -> "asyncio.Future[None]":
        waiter = asyncio.get_running_loop().create_future()
        unit = _Unit(writes, waiter, session=session)
        self._enqueue(unit)
        try:
            if self._usual_s < _QUICK_S and unit.sessions != self._latest:
                await asyncio.sleep(0)  # whoever else is ready to append gets into the same commit
        finally:
            if not waiter.done() and not self._write_here():
                self._bell.put(True)
        return waiter

    def append_nowait(self, *writes: AnyWrite) -> None:
        """Queue it before all that is appended later. If it fails, so does the session's next `append`."""
        self._enqueue(_Unit(writes, None))
        self._bell.put(True)

    def append_soon(self, *writes: AnyWrite) -> None:
        """The same, in one commit with what is appended next; or alone, if that is long in coming."""
        self._enqueue(_Unit(writes, None))
        if self._is_small() and self._writing.acquire(blocking=False):
            try:
                self._stage_queued()
            finally:
                self._writing.release()
        if not self._lingers:
            self._lingers = True
            asyncio.get_running_loop().call_later(_LINGER_S, self._write_lingering)

    def _write_lingering(self) -> None:
        self._lingers = False
        if self._queue or self._staged:
            self._bell.put(True)

    async def wait_written(self, session: str) -> None:
        """All that was queued of a session is durable; raises if a part of it failed and nobody has been told yet."""
        waiter = await self._push((), session=session)
        await waiter

    async def wait_tried(self, session: str) -> None:
        """All that was queued of a session is durable, or has failed: nobody else is told of that any more, and what
        is there says which."""
        waiter = await self._push((), session=session)
        await asyncio.wait([waiter])
        waiter.exception()

    def kept_bytes(self, session: str) -> int:
        """What was written of a session's runs and is kept, as far as it was queued for long enough to be written."""
        return self._store.kept_bytes.get(session, 0)

    def count_from(self, session: str, size_bytes: int) -> None:
        """What an earlier process wrote of a session; for one that is counted already it changes nothing."""
        self._store.kept_bytes.setdefault(session, size_bytes)

    @property
    def is_in_doubt(self) -> bool:
        """A sync failed: what this has is not, or not all, that whoever opens the file next finds there."""
        return self._store.is_broken

    async def read(self, query: Callable[[Store], T]) -> T:
        """Ask the store something; all of the query sees one state, with every append that has returned."""
        # Not in a pool of `concurrent.futures`: those take no work any more when the process ends, and sessions that
        # nobody has closed are closed then.
        return await anyio.to_thread.run_sync(self._ask, query, limiter=self._one_reader)

    async def close(self) -> None:
        """Write what is queued, and end."""
        with self._gate:
            first, self._closed = not self._closed, True
            if first:
                self._bell.put(False)
        await anyio.to_thread.run_sync(self._end if first else self._writer.join)

    def _end(self) -> None:
        self._writer.join()
        with self._reading:
            self._ended = True
            # The writer's last: whoever closes last folds the WAL into the file, and a reader cannot.
            self._view.close()
            self._store.close()

    def _ask(self, query: Callable[[Store], T]) -> T:
        with self._reading:
            if self._ended:
                raise RuntimeError("the journal is closed")
            with self._view.view():
                return query(self._view)

    def _enqueue(self, unit: _Unit) -> None:
        with self._gate:
            if self._closed:
                raise RuntimeError("the journal is closed")
            self._queue.append(unit)

    # -- writing -------------------------------------------------------------------------------------------------

    def _write_until_closed(self) -> None:
        while self._bell.get():
            with self._writing:
                self._write_queued()
        with self._writing:
            self._write_queued()

    def _write_here(self) -> bool:
        """In the event loop; not where that could take long, or where the thread is at it."""
        if self._usual_s >= _QUICK_S or not self._is_small() or not self._writing.acquire(blocking=False):
            return False
        try:
            self._write_queued()
        finally:
            self._writing.release()
        return True

    def _is_small(self) -> bool:
        """Whether all that is queued can be staged in the event loop."""
        return not any(unit.is_large for unit in tuple(self._queue))

    def _write_queued(self) -> None:
        """All that waits, in one commit."""
        started = time.monotonic()
        self._stage_queued()
        units, self._staged = self._staged, []
        if units:
            self._commit(units)
            if not any(unit.is_large for unit in units):  # those are the thread's, however quick the others are
                self._usual_s += (time.monotonic() - started - self._usual_s) * _USUAL
            self._latest = set().union(*(unit.sessions for unit in units))
            _tell(units)

    def _stage_queued(self) -> None:
        with suppress(IndexError):
            while True:
                self._stage(self._queue.popleft())

    def _stage(self, unit: _Unit) -> None:
        self._staged.append(unit)
        if not self._check_told(unit) or not unit.writes:
            return
        try:
            self._store.stage(unit.writes)
        except ValueError as error:
            self._fail(unit, error)
        except BaseException as error:  # the thread's edge: whatever it was, everyone who waits must hear of it
            self._fail_all(self._staged, error)
            if not isinstance(error, Exception):
                raise

    def _commit(self, units: list[_Unit]) -> None:
        _pass("journal.{}.before", units)
        if not any(unit.writes and unit.error is None for unit in units):
            self._store.abandon()
            return
        try:
            self._store.commit()
        except Exception as error:  # as above
            self._fail_all(units, error)
            return
        _pass("journal.{}.after", units)

    def _fail_all(self, units: list[_Unit], error: BaseException) -> None:
        for unit in units:
            if unit.writes:
                self._fail(unit, unit.error or error)
            else:  # who only waits is told of his own
                self._check_told(unit)

    def _check_told(self, unit: _Unit) -> bool:
        """Whether no earlier failure is in the way; if one is, it becomes this unit's own."""
        for session in sorted(unit.sessions):
            if session in self._untold:
                self._fail(unit, self._untold[session])
                return False
        return True

    def _fail(self, unit: _Unit, error: BaseException) -> None:
        unit.error = error
        for session in unit.sessions:
            if unit.waiter is None:
                self._untold[session] = error
            else:
                self._untold.pop(session, None)


def _size(write: AnyWrite) -> int:
    """In rows, about; a kilobyte that is written counts as one."""
    match write:
        case Append(record=Verified() as record):
            return len(record.changes) + (len(record.receipt) >> 10)
        case Append(record=Planned() as record):
            return len(record.code) >> 10
        case Append(record=Saved() as record):
            return len(record.files)
        case PutFiles():
            return len(write.put) + len(write.gone)
        case PutNames():
            return len(write.put) + len(write.gone)
        case PutReceipt():
            return len(write.row.envelope) >> 10
        case PutResult():
            return len(write.body) >> 10
    return 1


def _pass(point: str, units: Iterable[_Unit]) -> None:
    if is_armed():
        for tag in sorted({tag for unit in units for tag in unit.tags}):
            crashpoint(point.format(tag))


def _tell(units: list[_Unit]) -> None:
    """Wake everyone who waits: each event loop once, and the one that we are in at once."""
    waiting: dict[asyncio.AbstractEventLoop, list[_Unit]] = {}
    for unit in units:
        if unit.waiter is not None:
            waiting.setdefault(unit.waiter.get_loop(), []).append(unit)
    here = asyncio._get_running_loop()
    for loop, told in waiting.items():
        if loop is here:
            _complete(told)
            continue
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_complete, told)


def _complete(units: list[_Unit]) -> None:
    for unit in units:
        if unit.waiter is None or unit.waiter.done():
            continue
        if unit.error is None:
            unit.waiter.set_result(None)
        else:
            unit.waiter.set_exception(unit.error)
