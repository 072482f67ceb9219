"""A live session: its books, its computer, and one request at a time.

After each request, while the caller thinks, the files are staged anew if they were published, a snapshot of the kernel
is taken, and the session's cgroup is frozen: nothing runs in the background.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from holdfast import durable, retention
from holdfast.books import Books, delete
from holdfast.ckpt import Ckpt
from holdfast.computer import Computer
from holdfast.egress.allowed import AllowList
from holdfast.errors import (
    DiskFailed,
    DiskRefused,
    EgressRefused,
    HoldfastError,
    InternalFault,
    InvalidSetting,
    JournalLimit,
    SessionClosed,
    as_told,
)
from holdfast.executions import Aftermath
from holdfast.kernel import wire
from holdfast.kernel.outcomes import Stop
from holdfast.kernel.output import log_file
from holdfast.model import Completions, Mode, Name, Preflight, StreamName
from holdfast.once import Once
from holdfast.requests import RunRequest, check_text, weight
from holdfast.resources.workspace import Workspace
from holdfast.settling import RolledBack, settle_open

_MOST_PLANS = 100
_PLANS_BYTES = 32 << 20
"""Of all plans of a session together; the oldest go first."""
_REPLY_FIRST_S = 0.002
"""Two threads share one interpreter: the reply gets to the caller before we go on with what he need not wait for."""
_QUICK_S = 10.0
"""For what the guest answers by itself: names, completions."""
Names = Mapping[str, tuple[str, str]]
"""name -> (type, run that bound it last)"""
Reply = TypeVar("Reply", wire.Named, wire.Completed, wire.Inspected)


class LiveSession:
    """Guards one session's turns."""

    def __init__(self, books: Books, computer: Computer, *, mode: Mode = "strict") -> None:
        self.id = books.session
        self.books = books
        self.computer = computer
        self.limits = computer.limits
        self.mode = mode
        self.preflight: Preflight = "warn"
        self.reading = anyio.Lock()
        """One text of the session's at a time is read outside of the event loop."""
        self.once = Once()
        self.plans: dict[str, RunRequest] = {}
        """Made and not yet run."""
        self.endings: dict[str, RolledBack] = {}
        """Of runs that could not be settled at once: whoever settles them says the same."""
        self.single_use = False
        """It is for one run: nothing need be ready for another."""
        self.published = False
        """The layer under the kernel was moved into the files; before it runs again it gets a fresh one."""
        self._unlaid: DiskFailed | None = None
        """Why it has not got one yet."""
        self._queue = asyncio.Lock()
        """Whoever wants a turn waits here: who resets or closes the session comes before all of them."""
        self._turn = asyncio.Lock()
        self.asked_at = time.monotonic()
        """When somebody asked it for something last, by whatever face."""
        self._caller: asyncio.Task[Any] | None = None
        """Who has the turn."""
        self._settling: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        """Somebody waits for it."""
        self._closed = False
        self._names: dict[int, Names] = {}
        """Of the versions whose memory is kept."""
        self.kernel_replaced = ""
        """How and when a kernel ended between two runs, until the next run tells it: `Run.kernel_replaced`."""
        self.has_untold_loss = False
        """Memory was lost between two runs, and no run has told it yet."""
        self._is_told = False
        """There is no kernel, and whatever was lost with it is in the generation already."""
        self.ended = asyncio.Event()
        """Nothing of it is left but, if it was kept, its files and books."""

    @property
    def generation(self) -> int:
        return self.books.state.generation

    @property
    def idle_s(self) -> float:
        """How long nobody has asked it for anything."""
        return 0.0 if self._turn.locked() else time.monotonic() - self.asked_at

    @property
    def workspace(self) -> Workspace:
        return self.computer.workspace

    async def start(self, *, cause: str = "") -> None:
        """The first kernel, or after a restart of the host one whose memory is empty."""
        await self.computer.disk.take_stock()  # else the first run would have to wait for that
        await self.computer.renew()
        if self.generation == 0 or cause:
            self.raise_generation(cause)

    def allow(self, allowed: AllowList) -> None:
        """Whom it may reach from its next run on, and nobody else."""
        if allowed.entries and self.computer.way.past_proxy is None:
            raise EgressRefused(
                f"session {self.id} is open, and was opened without egress",
                hint="end it (keep=True keeps its files), and resume it with egress=",
            )
        self.computer.way.allowed = allowed

    def raise_generation(self, cause: str, *, run: str | None = None) -> None:
        if self.generation == 0:
            self.books.begin()
        else:
            self.books.lose_memory(cause, run=run)

    def memory_bytes(self) -> int | None:
        """In use now; None: no kernel is up."""
        now = self.computer.now
        return now.cgroup.memory_now_bytes() if now else None

    def remember_plan(self, run: str, request: RunRequest) -> None:
        self.plans[run] = request
        size_bytes = sum(weight(plan) for plan in self.plans.values())
        while len(self.plans) > _MOST_PLANS or (size_bytes > _PLANS_BYTES and len(self.plans) > 1):
            size_bytes -= weight(self.plans.pop(next(iter(self.plans))))

    # -- questions: what the guest answers without running a cell -----------------------------------------------

    async def names(self) -> dict[str, Name]:
        named = await self._ask_guest(wire.ListNames(), wire.Named)
        return {
            name: Name(type=value.type, approx_bytes=max(0, value.approx_bytes))
            for name, value in (named.names if named else {}).items()
        }

    async def complete(self, code: str, cursor: int) -> Completions:
        check_text(code)
        reply = await self._ask_guest(wire.Complete(code=code, cursor=cursor), wire.Completed)
        if reply is None:
            return Completions(matches=[], start=cursor, end=cursor)
        return Completions(matches=reply.matches, start=reply.start, end=reply.end)

    async def inspect(self, code: str, cursor: int, detail: int) -> dict[str, str | bytes]:
        check_text(code)
        reply = await self._ask_guest(wire.Inspect(code=code, cursor=cursor, detail=detail), wire.Inspected)
        return reply.data.merged() if reply else {}

    async def output(self, run_id: str, stream: StreamName) -> bytes:
        """All that a run printed, as far as it is still kept."""
        path = log_file(self.workspace.logs / checked_id(run_id), stream)
        with durable.ours("reading what a run printed"):
            return await anyio.to_thread.run_sync(lambda: path.read_bytes() if path.exists() else b"")

    # -- lifecycle ---------------------------------------------------------------------------------------------

    def interrupt(self, *, caller: "asyncio.Task[Any] | None" = None) -> bool:
        """Ask the run that has its turn to end, also before its code begins; that of one caller, if he is named. False
        if nothing runs, or not any more."""
        if caller is not None and caller is not self._caller:
            return False
        return self.computer.stops.ask(Stop(reason="interrupted", message="the run was interrupted"))

    async def reset(self) -> None:
        """Purge memory, end every process, wipe the namespace. Files stay; the generation rises. What runs is
        interrupted; what waits for its turn runs afterwards, in the new generation."""
        self.interrupt()
        async with self._turn:
            await self._refuse_if_unfit()
            await self.computer.renew()
            self._is_told = False
            self.raise_generation("reset by the caller")
            with suppress(DiskFailed):  # memory is reset; old layers are removed after a later run
                await self.sweep()

    async def close(self, *, keep: bool = False) -> None:
        """End the session: kernel, processes, cgroup; and, unless they are to be kept, its files and its books. What
        runs is interrupted; what waits for its turn is refused."""
        self.interrupt()
        async with self._turn:
            if self._closed:
                return
            self._closed = True
            with anyio.CancelScope(shield=True):
                async with AsyncExitStack() as steps:  # each is taken, whatever becomes of the one before
                    steps.callback(self.ended.set)
                    steps.push_async_callback(self._put_away, keep=keep)
                    steps.push_async_callback(self.computer.close)
                    await self.wait_settled()

    async def _put_away(self, *, keep: bool) -> None:
        if keep and (self.books.open or self.books.journal.is_in_doubt):
            return  # a disk that failed; its stages are for whoever opens the session next
        if keep:
            await anyio.to_thread.run_sync(self.workspace.sweep_stages)
            await self.books.journal.wait_written(self.id)
        else:
            with suppress(DiskFailed):  # its directory says that it is deleted, and the next start writes it down
                await delete(self.books.journal, self.workspace)

    # -- turns -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def turn(self, *, changes_memory: bool = True) -> AsyncIterator[Computer]:
        """The session's turn. Frozen until it is given something to do; afterwards, without the caller, protected and
        frozen again."""
        async with self._queue, self._turn:
            self.computer.stops.expect(changes_memory)
            self._caller = asyncio.current_task()
            try:
                await self._refuse_if_unfit()
                self.computer.disk.refuse_if_hopeless()
                if changes_memory:
                    self._refuse_if_full()
                await self._lay_again()
                if self.computer.is_hurt() or self.computer.pristine:
                    with anyio.CancelScope(shield=True):  # a kernel half made is no use to whoever comes next
                        await self._ensure_kernel()
                        await self._protect_the_beginning()
                await anyio.lowlevel.checkpoint_if_cancelled()
                try:
                    yield self.computer
                finally:
                    self._put_to_rest(changes_memory=changes_memory)
            finally:
                self._caller = None
                self.computer.stops.expect(False)

    @asynccontextmanager
    async def quiet_turn(self) -> AsyncIterator[Computer]:
        """The same for what the host does by itself: the kernel stays frozen."""
        async with self._queue, self._turn:
            await self._refuse_if_unfit()
            self._refuse_if_full()
            if self.computer.is_hurt():  # its layer may go with it, and be among the files by now
                with anyio.CancelScope(shield=True):
                    await self._ensure_kernel()
            try:
                yield self.computer
            finally:
                self._put_to_rest(changes_memory=self.published or self.computer.has_woken)

    def _refuse_if_full(self) -> None:
        if why := self.books.why_full(self.limits):
            raise JournalLimit(
                why,
                hint="go on in a new session, with a larger disk=… if it is to run as much; files and history of this "
                "session stay readable",
            )

    async def _refuse_if_unfit(self) -> None:
        """Where the disk was full, there may be room by now; and what a mistake of ours kept from its end has one."""
        self._refuse_if_closed()
        await self.wait_settled()
        self.workspace.mend()
        if isinstance(stopped := self.books.stopped, (DiskRefused, InternalFault)):
            await self._settle_late(stopped)
        self.books.refuse_if_halted()

    async def _lay_again(self) -> None:
        """A layer that found no room when it was due, or that somebody removed. Raises DiskFailed while it cannot be
        laid: the kernel sleeps on, and nothing runs on another layer than it should."""
        if self.computer.now is None or not (self.published or self.computer.staging.is_gone()):
            return
        self.published = True
        self._put_to_rest(changes_memory=True)
        await self.wait_settled()
        if self._unlaid is not None:
            raise self._unlaid

    async def _settle_late(self, stopped: HoldfastError) -> None:
        await self.computer.hold()  # what is published now is moved into the files below its layer
        await self.books.reload()
        were_open = bool(self.books.open)
        try:
            await settle_open(self.books, reason=f"it could not be settled: {stopped.message}", endings=self.endings)
        except DiskRefused:
            raise
        except Exception as error:
            self.endings.clear()  # it may be what was to be said that failed
            raise as_told(error) from error
        self.books.stopped = None
        self.endings.clear()
        if were_open and self.computer.now is not None:
            self.published = True
            self._put_to_rest(changes_memory=True)
            await self.wait_settled()

    async def sweep(self) -> None:
        """Remove the layers that nobody wants any more."""
        await self.computer.staging.sweep(wanted=self.books.staged())

    async def roll_back(self, *, alive: bool, cause: str, run: str | None = None) -> Aftermath:
        """Memory and files as before; where memory could not be kept, the generation rises."""
        aftermath = await self.computer.roll_back(alive=alive)
        if aftermath.memory == "lost":
            self.raise_generation(cause, run=run)
        self._is_told = self.computer.now is None
        return aftermath

    def names_at(self, target: Ckpt) -> Names | str:
        """The names of a version whose memory can be brought back; or why it cannot."""
        if not self.limits.undo:
            return "the session keeps no snapshots of earlier versions (undo=0)"
        if target.generation != self.generation or self.computer.now is None:
            return "memory was lost since"
        kept = self.computer.protection.kept
        names = self._names.get(target.version)
        return kept.why_not(target.version) if names is None or kept.find(target.version) is None else names

    async def go_back(self, version: int) -> Aftermath:
        """Memory as it was at a version; the files under it are committed already. It may be lost instead."""
        aftermath = await self.computer.go_back(version)
        self.published = False  # what is under the kernel now is fresh
        if aftermath.memory == "lost":
            self.raise_generation(f"the snapshot of version {version} did not wake")
        self._is_told = self.computer.now is None
        return aftermath

    async def _ensure_kernel(self) -> None:
        """It may have died while it was idle, or not have come up."""
        computer = self.computer
        if computer.now is None:
            death = computer.died
            await computer.renew()
            if not self._is_told:
                self.kernel_replaced, self.has_untold_loss = death, True
                self.raise_generation(death or "the kernel had ended between two runs")
            self._is_told = False
        elif computer.is_hurt():
            await self._mend()

    async def _mend(self) -> None:
        """Its kernel was ended while nothing of the session's ran. No run is to fail for it: what the kernel held is
        brought back before the next one begins, and that says how the kernel ended."""
        computer = self.computer
        if (death := await computer.find_death()) is not None:
            self.kernel_replaced = death
            aftermath = await self.roll_back(alive=False, cause=death)
            self.has_untold_loss = aftermath.memory == "lost"
            if computer.now is None:
                await computer.renew()
                self._is_told = False
        await self._protect()
        computer.freeze()

    def _put_to_rest(self, *, changes_memory: bool) -> None:
        self.asked_at = time.monotonic()
        self._wanted = asyncio.Event()
        self._settling = asyncio.create_task(self._settle(changes_memory=changes_memory))

    async def _settle(self, *, changes_memory: bool) -> None:
        """What a turn leaves to do, hidden in the caller's thinking time."""
        computer = self.computer
        with anyio.move_on_after(_REPLY_FIRST_S):
            await self._wanted.wait()
        async with computer.resting():
            try:
                if self.single_use:
                    await computer.end_kernel()
                elif self.published:
                    self._unlaid = None
                    await computer.restage()
                    self.published = False
                if changes_memory:
                    await self._protect()
            except DiskFailed as error:  # the kernel sleeps on the layer that it had until there is another
                self._unlaid = error
            except Exception:  # whatever it was, the kernel is lost; the next turn starts another and says so
                await computer.give_up_kernel()
            computer.freeze()
        with suppress(OSError, HoldfastError):  # no fault of whoever comes next; what is damaged has halted the session
            await self.sweep()
            await retention.trim(self.books, self.limits)
            await computer.disk.take_stock()

    async def _protect_the_beginning(self) -> None:
        """What is kept before anything has run is worth going back to, and nothing else."""
        computer = self.computer
        if self.limits.undo and computer.pristine and not computer.protection.kept.find(self.books.state.version):
            await self._protect()

    async def _protect(self) -> None:
        await self.computer.protect(self.books.state.version)
        if self.limits.undo and self.computer.now is not None:
            self._names[self.books.state.version] = self.books.state.live()
            kept = self.computer.protection.kept.versions()
            self._names = {version: names for version, names in self._names.items() if version in kept}

    async def wait_settled(self) -> None:
        """Whoever is cancelled here leaves it to the next to wait: no turn begins before it is over."""
        settling = self._settling
        if settling is None:
            return
        self._wanted.set()
        if not settling.done():
            await asyncio.wait([settling])
        if self._settling is settling:
            self._settling = None
            settling.result()

    async def _ask_guest(self, request: wire.Message, kind: type[Reply]) -> Reply | None:
        """A question that the guest answers by itself, without running a cell."""
        async with self.turn(changes_memory=False) as computer:
            assert computer.now is not None
            computer.thaw()
            with anyio.CancelScope(shield=True):  # nobody else is to get the answer of one who went away
                with anyio.move_on_after(_QUICK_S):
                    await computer.now.kernel.send(request)
                    if (reply := await computer.now.kernel.expect(kind)) is not None:
                        return reply
                # It died, or threads or hooks of the user's hold it; it is not to answer later out of turn.
                await self.roll_back(alive=False, cause="the kernel did not answer")
            return None

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SessionClosed(f"session {self.id} is closed", hint="open a new session")


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(6)}"


def checked_id(run_id: str) -> str:
    """An id becomes a file name."""
    if not run_id.replace("_", "").isalnum():
        raise InvalidSetting(f"{run_id!r} is not the id of a run", hint="take it from run.id")
    return run_id
