"""One request on one kernel, from its first byte to its end, whatever end that is.

`conduct` is the only reader of a kernel while a run goes on. It ends in one of three ways: the kernel says
`Finished`; the kernel dies; or we lose patience (deadline, interrupt, a limit), ask by SIGINT, and after a
grace kill it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio

from holdfast.config import Limits
from holdfast.kernel import wire
from holdfast.kernel.client import Kernel
from holdfast.kernel.happenings import INIT_GONE, SOCKET_CLOSED, Died, Gone, Happening, Pressed, Printed
from holdfast.kernel.outcomes import Guard, Outcome, Stop
from holdfast.kernel.output import RunOutput
from holdfast.kernel.saves import TOO_LATE, OnSave, Saves
from holdfast.kernel.shelf import Shelf
from holdfast.kernel.unfinished_lines import Piece, UnfinishedLines
from holdfast.model import Displayed, DisplaysCleared, Event, Output
from holdfast.pace import Pace

Emit = Callable[[Event], Awaitable[None]]
Ask = Callable[[str, bool], Awaitable[str]]
Meanwhile = Callable[[], Coroutine[Any, Any, None] | None]
"""What is done once the kernel has the request: at once; or, as far as it takes a while, beside the reading."""

_TICK_S = 0.1
_MOMENT_S = 0.001
"""Most cells of a conversation are over by then."""
_ASK_AGAIN_S = 0.005
_READS_S = 1.0
"""How long a kernel that waits for a reply may leave us no room to send it. An honest one always has room."""
_MOST_QUESTIONS = 100
"""That threads of a cell may have open at once."""
_LOCATION_S = 0.1
"""How long a kernel that is to be killed has to write down where it is. One that does nothing wrong takes a
millisecond; who blocks the signal waits it out."""
_DEATH_REPORT_S = 0.5
"""How long a kernel that fell silent has for its death to be reported."""


def nothing() -> None:
    """There is nothing to do meanwhile."""


class Conduct:
    """One request under way. `stop` may be called by others while `run` waits."""

    def __init__(
        self,
        kernel: Kernel,
        output: RunOutput,
        limits: Limits,
        *,
        run: str = "",
        pace: Pace | None = None,
        emit: Emit | None = None,
        ask: Ask | None = None,
        on_save: OnSave | None = None,
    ) -> None:
        self.output = output
        self.shelf = Shelf(limits)
        self._kernel = kernel
        self._limits = limits
        self._run_id = run
        self._pace = pace or Pace()
        self._emit = emit
        self._ask = ask
        self._asked: list[wire.Asked] = []
        self._asking: asyncio.Task[None] | None = None
        self._meanwhile: asyncio.Task[None] | None = None
        self._lines = UnfinishedLines(kernel.is_busy)
        self._saves = Saves(on_save, self._reply)
        self._started = time.monotonic()
        self._deadline = float("inf")
        self._deadline_message = ""
        self._turn = 0
        self._began = False
        self._eager = False
        self._guards: list[Guard] = []
        self._stop: Stop | None = None
        self._ask_again_at = float("inf")
        self._kill_at = float("inf")
        self._give_up_at = float("inf")
        self._killed = False
        self._heard = True
        self._was_sent = False
        self._replied = False
        self._finished: wire.Finished | None = None
        self._raised: wire.Raised | None = None
        self._died: Died | None = None
        self._gone: str | None = None

    def successor(self) -> "Conduct":
        """For what else belongs to the run: its output goes on, and its time."""
        after = Conduct(
            self._kernel, self.output, self._limits, run=self._run_id, pace=self._pace,
            emit=self._emit, ask=self._ask, on_save=self._saves.on_save,
        )  # fmt: skip
        after.shelf, after._started = self.shelf, self._started
        return after

    def stop(self, stop: Stop) -> None:
        """Ask the kernel to end the cell; `run` sees to it that it ends."""
        if self._stop is not None:
            return
        self._stop = stop
        now, grace_s = time.monotonic(), self._limits.interrupt_grace_s
        self._kill_at = now + (0 if stop.at_once else grace_s)
        if not stop.at_once:
            self._ask_again_at = now + grace_s / 2
            self._heard = self._kernel.interrupt()

    async def run(
        self,
        request: wire.Conducted,
        *,
        timeout_s: float,
        guards: list[Guard],
        wake: Callable[[], None],
        meanwhile: Meanwhile = nothing,
        eager: bool = False,
    ) -> Outcome:
        """A kernel that sleeps is woken (`wake`) when the request lies before it: once, and on a core that is free,
        where it would otherwise displace us. `meanwhile` is called when it has the request, or cannot be given it, and
        is done when this returns. If it fails, so does this. `eager`: there is nobody else to wait for."""
        if self._stop is not None:
            return await self._decline(request, meanwhile)
        self._deadline = self._started + timeout_s
        self._deadline_message = f"the run was not done after {timeout_s:g} s"
        self._guards = guards
        self._eager = eager
        self._turn = request.turn
        self._kernel.tracebacks.read()  # of an earlier run that was warned and lived
        # What a thread sent between two runs answers nothing; but it may wait to save, or the kernel have died.
        early = self._kernel.collect()
        try:
            for event in early:
                if isinstance(event, (Printed, Died, Gone)):
                    await self._take(event)
            # Not to a dead one: its snapshot has the same socket, and would find the request there.
            lost = self._is_over() or self._gone is not None
            sent = lost or self._kernel.send_nowait(request)
            self._was_sent = not lost
            wake()
            if not sent:
                with anyio.move_on_after(timeout_s):  # a kernel that was made to stop reading would hold us here
                    await self._kernel.send(request)
        finally:
            rest = meanwhile()
            self._meanwhile = None if rest is None else asyncio.create_task(rest)
        self._saves.begin(self._meanwhile is None)
        for event in early:
            if isinstance(event, wire.Saving):
                await self._save(event)
        outcome = await self._end()
        if self._meanwhile is not None:
            await asyncio.wait([self._meanwhile])
            await self._look_meanwhile()
        return outcome

    async def _decline(self, request: wire.Conducted, meanwhile: Meanwhile) -> Outcome:
        """It was to end before the kernel had it: nothing of it runs, and it ends as if its first step had been to."""
        if (rest := meanwhile()) is not None:
            await rest
        return Outcome(
            finished=wire.Finished(turn=request.turn),
            raised=wire.Raised(name="KeyboardInterrupt", message="", traceback="", kind="exception"),
            stop=self._stop, died=None, gone=None, location="", printed=self.output.logged_bytes > 0,
            duration_s=time.monotonic() - self._started, begun=False,
        )  # fmt: skip

    async def abandon(self, stop: Stop) -> Outcome:
        """End it for a caller who is gone: nothing runs on unattended."""
        self._emit = self._ask = self._saves.on_save = None
        self._stop_asking()
        self.stop(stop)
        meanwhile, self._meanwhile = self._meanwhile, None
        self._saves.begin()
        outcome = await self._end()
        if meanwhile is not None:  # if it fails now, whoever wants what it was to do will see
            await asyncio.wait([meanwhile])
            meanwhile.exception()
        return outcome

    async def _end(self) -> Outcome:
        """Wait for the end, and bring it about when it does not come by itself."""
        self._began = True  # what was printed before was not printed by this run
        while not self._is_over():
            await self._keep_time()
            for event in await self._next():
                await self._pace.turn()
                with self._pace.step(len(event.data) if isinstance(event, Printed) else 0):
                    await self._take(event)
            await self._print(self._lines.lines())
            await self._check()
        self._stop_asking()
        await self._saves.stop()
        for event in self._kernel.read_pipes():
            await self._take(event)
        begun = self._finished is not None or self._has_begun()
        for stream, text in self.output.finish():
            await self._print(self._lines.add(stream, text))
        await self._print(self._lines.rest())
        return Outcome(
            finished=self._finished,
            raised=self._raised,
            stop=self._stop,
            died=self._died,
            gone=self._gone if self._killed else None,
            location="" if self._finished else self._kernel.tracebacks.read(),
            printed=self.output.logged_bytes > 0,
            duration_s=time.monotonic() - self._started,
            begun=begun,
            lost_init=self._has_lost_init(),
        )

    def _has_begun(self) -> bool:
        """A kernel that died with the request unread has run nothing of it. Once we have sent more than the request,
        that can be what is unread."""
        return self._was_sent and (self._replied or not self._kernel.has_unread())

    def _has_lost_init(self) -> bool:
        """A kernel that broke the rules was ended for that, whatever else ended with it."""
        ended_by_itself = self._gone in (None, SOCKET_CLOSED, INIT_GONE)
        return self._finished is None and self._died is None and ended_by_itself and self._kernel.lost_init()

    async def _next(self) -> list[Happening]:
        eager, self._eager = self._eager, False
        if eager and self._meanwhile is None and (at_once := self._kernel.watch(_MOMENT_S)):
            return at_once
        tick_s = _TICK_S if self._heard else _ASK_AGAIN_S
        left_s = min(self._deadline - time.monotonic(), self._lines.left_s())
        return await self._kernel.wait(min(tick_s, max(0.001, left_s)))

    def _is_over(self) -> bool:
        if self._finished and self._saves:  # of a thread, which the cell did not wait for
            return bool(self._died)
        return bool(self._finished or self._died) or time.monotonic() >= self._give_up_at

    async def _keep_time(self) -> None:
        """Ask the kernel to end when its time is over, ask again, and end it when it does not heed."""
        now = time.monotonic()
        if now >= self._deadline:
            self.stop(Stop(reason="timeout", message=self._deadline_message))
        if now >= self._kill_at and not self._killed and self._finished is None:
            await self._kill()
        if now >= self._ask_again_at:  # IPython swallows one that comes in the midst of a hook of its own
            self._heard, self._ask_again_at = False, float("inf")
        if not self._heard:  # the cell had not begun when it was asked to end
            self._heard = self._kernel.interrupt()

    async def _kill(self) -> None:
        self._killed = True
        self._kernel.ask_location()
        await self._kernel.tracebacks.wait(_LOCATION_S)
        self._give_up_at = time.monotonic() + _DEATH_REPORT_S
        self._kernel.kill()

    async def _look_meanwhile(self) -> None:
        if self._meanwhile is not None and self._meanwhile.done():
            done, self._meanwhile = self._meanwhile, None
            done.result()
            self._saves.begin()

    async def _check(self) -> None:
        await self._look_meanwhile()
        if self._asking is not None and self._asking.done():
            failed, self._asking = self._asking, None
            failed.result()  # raises: it is the face's own failure
        self._saves.look()
        if self.output.over_limit:
            limit = self._limits.log_bytes
            self.stop(Stop(reason="output_limit", message=f"the run printed more than {limit:,} bytes"))
        if time.monotonic() - self._started < _TICK_S:
            return  # most cells are over before a limit can be in danger
        await self._ask_guards()

    async def _ask_guards(self) -> None:
        for guard in self._guards:
            if (stop := await guard()) is not None:
                self.stop(stop)
                self._kill_at = min(self._kill_at, time.monotonic() if stop.at_once else float("inf"))

    async def _take(self, event: Happening) -> None:
        match event:
            case Printed():
                text = self.output.add(event.stream, event.data, charged=self._began)
                if text:
                    await self._print(self._lines.add(event.stream, text))
            case Died():
                self._died = event
            case Gone():
                self._lose(event.reason)
            case Pressed():
                await self._ask_guards()
            case _:
                await self._hear(event)

    async def _hear(self, message: wire.KernelMessage) -> None:
        match message:
            case wire.Shown() | wire.Cleared():
                await self._show(message)
            case wire.Printing() | wire.Saving() if self._gone is not None:
                pass  # it is to be killed: nothing more is done for it
            case wire.Printing():
                await self._reply(wire.Taken())
            case wire.Raised():
                self._raised = message
            case wire.Finished() if message.turn == self._turn:
                if message.result is not None:
                    await self._hear(message.result)
                self._finished = message
            case wire.Asked() if self._ask is not None and len(self._asked) < _MOST_QUESTIONS:
                await self._print(self._lines.rest())  # what a question is about stands before it
                self._asked.append(message)
                self._asking = self._asking or asyncio.create_task(self._answer(self._ask))
            case wire.Saving():
                await self._save(message)
            case wire.Snapped() if self._kernel.owes_snapped:
                self._kernel.owes_snapped -= 1  # the copy is killed, as whatever a run leaves
            case _:
                self._lose(f"it sent {type(message).__name__} where that has no place")

    async def _save(self, message: wire.Saving) -> None:
        """A cell that was asked to end may still save; what it was saving just then is not finished."""
        if self._finished is not None:
            return await self._reply(wire.SavedReply(refused=TOO_LATE))
        asked_to_end = self._stop

        def is_over() -> bool:
            is_late = self._stop is not asked_to_end or time.monotonic() >= self._kill_at
            return is_late or self._died is not None or self._gone is not None

        if not self._saves.add(message, is_over):
            self._lose("it saves and waits for no answer")

    async def _reply(self, message: wire.Message) -> None:
        """While we wait here nobody looks at the clock: a kernel that asks and does not read gets to do so once."""
        self._replied = True
        with anyio.move_on_after(_READS_S) as waiting:
            await self._kernel.send(message)
        if waiting.cancelled_caught:
            self._lose("it does not read what it asks for")

    async def _show(self, message: wire.Shown | wire.Cleared) -> None:
        await self._print(self._lines.rest())
        match message:
            case wire.Shown():
                display = self.shelf.add(message)
                is_result = message.kind == "result"
                await self._tell(Displayed(display=display, update=message.update, result=is_result, run=self._run_id))
            case wire.Cleared():
                self.shelf.clear(wait=message.wait)
                await self._tell(DisplaysCleared(wait=message.wait))

    async def _answer(self, ask: Ask) -> None:
        """Beside the reading: who waits for an answer can still be interrupted, run out of time, or die."""
        while self._asked:
            asked = self._asked.pop(0)
            answer = await ask(asked.prompt, asked.password)
            if self._stop is None:
                self._replied = True
                with anyio.move_on_after(max(0.0, self._deadline - time.monotonic())):
                    await self._kernel.send(wire.Answer(text=answer))
        self._asking = None

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        self._asked, self._asking = [], None

    async def _print(self, pieces: list[Piece]) -> None:
        for stream, text in pieces:
            await self._tell(Output(stream=stream, text=text))

    async def _tell(self, event: Event) -> None:
        """A slow reader slows the cell down; the clock goes on, and from the end on he is not waited for any more."""
        if self._emit is None:
            return
        telling = asyncio.ensure_future(self._emit(event))
        try:
            is_late = False
            while not (await asyncio.wait([telling], timeout=_TICK_S))[0]:
                if is_late:
                    self._emit = None
                    return
                if not self._is_over():
                    await self._keep_time()
                    await self._ask_guards()
                is_late = self._stop is not None or time.monotonic() >= self._deadline
            telling.result()
        finally:
            telling.cancel()

    def _lose(self, reason: str) -> None:
        """A kernel that cannot be talked to any more is given a moment to have its death reported, then killed."""
        if self._killed:  # that was us: nobody is left to report anything
            self._give_up_at = 0.0
        elif self._gone is None:
            self._gone = reason
            self._kill_at = min(self._kill_at, time.monotonic() + _DEATH_REPORT_S)
