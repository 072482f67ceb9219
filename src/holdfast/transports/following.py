"""One run at a server, from the request to its last event, over as many connections as that takes.

Every run carries a key, the caller's own or one made for it, so that sending it again is safe:

    nothing is known of it yet      the request is sent again: the key gets the same run, or its recorded answer
    `Began` said its id             its events are asked for from the first that is missing: none is lost or doubled
    the server has no more of it    what the journal says: an answer that is recorded is fetched by the key; if it was
                                    rolled back meanwhile, or nobody can tell, `ServerUnreachable` says so

Whoever stops following (cancelled, or a callback of his failed) has the run interrupted: nothing runs on unattended.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, suppress

import anyio
import httpx2
import msgspec

from holdfast import api
from holdfast.errors import (
    EventsGone,
    HoldfastError,
    InvalidSetting,
    RateLimited,
    RunUnknown,
    ServerUnreachable,
)
from holdfast.kernel.conduct import Ask, Emit
from holdfast.model import Displayed, DisplaysCleared, Event, Output, Run
from holdfast.requests import check_text
from holdfast.transports.connection import Connection, told_failure

_LAST_WORD_S = 5.0
"""How long we take to tell a server that nobody follows any more."""


class Follower:
    """One run. `follow` once."""

    def __init__(
        self, connection: Connection, session: str, asked: api.AskedRun, *, emit: Emit | None, ask: Ask | None
    ) -> None:
        self._key_is_ours = asked.key is None
        if asked.key is None and asked.plan is None:
            asked = msgspec.structs.replace(asked, key=api.new_call())
        self._connection = connection
        self._at = f"/v1/sessions/{session}/runs"
        self._asked = asked
        self._emit = emit
        self._ask = ask
        self._patience = connection.patience()
        self._run = asked.plan
        """Its id, once the server said it began; that of a plan is known before."""
        self._began = self._over = False
        self._next = 0
        self._sent_again = False
        self._told = False
        """The caller saw some of its events."""
        self._asking: asyncio.Task[None] | None = None
        self._failed: Exception | None = None
        """What asking the caller ended with."""
        self._scope = anyio.CancelScope()
        self._until_begun = anyio.CancelScope(shield=True)
        """Who goes away is heard when the run has an id, so that it can be ended; a server says that at once."""

    async def follow(self) -> Run:
        ended: Run | None = None
        try:
            with self._scope, self._until_begun:
                ended = await self._end()
        except BaseException:  # a callback's failure, or a cancellation: both go on, when the server knows
            await self._interrupt()
            raise
        finally:
            if self._asking is not None:
                self._asking.cancel()
        if ended is None:
            assert self._failed is not None
            await self._interrupt()
            raise self._failed
        return ended

    async def _end(self) -> Run:
        while True:
            resuming = self._began
            try:
                async with self._connect() as events:
                    resuming = False
                    async for event in events:
                        if (ended := await self._take(event)) is not None:
                            return ended
                raise httpx2.RemoteProtocolError("the events ended before the run did")
            except httpx2.TransportError as error:
                self._began = self._run is not None  # a plan's id is known before: its run may have begun
                self._sent_again = True
                await self._patience.wait(error)
            except RateLimited as error:
                await self._patience.wait_allowed(error)
            except HoldfastError as error:
                if not resuming:
                    raise
                await self._look_up(error)

    def _connect(self) -> AbstractAsyncContextManager[AsyncIterator[api.RunEvent]]:
        if not self._began:
            return self._connection.events("POST", self._at, body=self._asked)
        return self._connection.events("GET", f"{self._at}/{self._run}/events", query={"from": self._next})

    async def _look_up(self, refusal: HoldfastError) -> None:
        """What the journal has of a run whose events are gone. Unless that is the end, the request is sent again."""
        self._began, begun = False, self._next > 0
        try:
            record = await self._connection.ask("GET", f"{self._at}/{self._run}", api.RunRecord)
        except HoldfastError as error:
            if begun:
                raise self._lost("nobody can tell what became of it") from error
            return  # a plan that never got there
        if record.entry is None:
            raise self._lost("it is still under way, and its events are gone") from refusal
        if record.entry.status == "rolled_back" or self._asked.key is None:
            became = record.entry.status.replace("_", " ")
            raise self._lost(f"it was {became}: {record.entry.reason or 'see history()'}") from refusal
        self._next = 0
        self._asked = msgspec.structs.replace(self._asked, retry=False)

    def _lost(self, what: str) -> ServerUnreachable:
        return ServerUnreachable(
            f"the connection to {self._connection.where} was lost during {self._run}, and {what}",
            hint="history() and recover() say where the session stands; the same key again gets a recorded answer",
        )

    async def _take(self, event: api.RunEvent) -> Run | None:
        self._patience.renew()
        if event.number < self._next:
            return None
        self._next = event.number + 1
        match event:
            case api.Began():
                self._began, self._run = True, event.run
                self._until_begun.shield = False
            case api.Settled():
                self._over = True
                return await self._own(event.run)
            case api.Refused():
                self._over = True
                raise told_failure(event.problem)
            case api.Asked() if self._ask is not None:
                self._asking = asyncio.create_task(self._answer(self._ask, event))
            case _ if self._emit is not None and (told := _event(event, self._run or "")) is not None:
                self._told = True
                await self._emit(told)
        return None

    async def _own(self, run: Run) -> Run:
        """A run that only this call knows of, and yet an earlier one: the connection broke before we heard of it."""
        if not (self._key_is_ours and self._sent_again and run.replayed):
            return run
        if self._emit is not None and not self._told:
            for event in _all_events(run):
                await self._emit(event)
        return msgspec.structs.replace(run, replayed=False)

    async def _answer(self, ask: Ask, asked: api.Asked) -> None:
        """Beside the reading: the run may end while the caller thinks."""
        try:
            text = await ask(asked.prompt, asked.password)
            check_text(text)
        except Exception as error:  # the caller's own callback: he is told in his own call
            self._fail(error)
            return
        body = api.Answer(text=text, number=asked.number)
        try:
            await self._connection.ask("POST", f"{self._at}/{self._run}/input", object, body=body)
        except (
            InvalidSetting,
            RunUnknown,
            EventsGone,
        ):  # it came too late: how the run ended is told where it is followed
            return
        except HoldfastError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed = error
        self._scope.cancel()

    async def interrupt(self) -> bool:
        """Ask it to end, also while it waits for its turn, and go on following. False: it is over, or not known yet."""
        if self._over or not self._began:
            return False
        address = f"{self._at}/{self._run}/interrupt"
        return (await self._connection.ask("POST", address, api.Interrupted)).interrupted

    async def _interrupt(self) -> None:
        with anyio.move_on_after(_LAST_WORD_S, shield=True), suppress(HoldfastError):
            await self.interrupt()


def _all_events(run: Run) -> list[Event]:
    printed: list[Event] = []
    if run.stdout:
        printed.append(Output(stream="stdout", text=run.stdout))
    if run.stderr:
        printed.append(Output(stream="stderr", text=run.stderr))
    return [*printed, *(Displayed(display=display, run=run.id) for display in run.displays)]


def _event(event: api.RunEvent, run: str) -> Event | None:
    match event:
        case api.Printed():
            return Output(stream=event.stream, text=event.text)
        case api.Shown():
            return Displayed(display=event.display, update=event.update, result=event.result, run=run)
        case api.Cleared():
            return DisplaysCleared(wait=event.wait)
    return None
