"""What a run sends through the session's egress, and what it tries to in vain.

Each request is journalled as `Sent` before its first byte leaves: when the run is taken back, or the host is killed,
that is how anybody knows what may have happened outside. What is refused leaves nothing but a line in the receipt.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import anyio

from holdfast.books import MOST_TOLD
from holdfast.egress.allowed import AllowList
from holdfast.egress.log import Log, Outgoing, Refusal
from holdfast.egress.proxy import Proxy
from holdfast.faults import crashpoint
from holdfast.notes import Notes
from holdfast.records import Sent

MOST_SENT = 1_000
"""Of one run. Those past it do not leave."""


NOBODY = AllowList()
"""What a session may reach that was not given anything."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Withheld(Exception):
    """Why a request does not leave, in words."""


class Departures:
    """What one run has sent."""

    def __init__(
        self, notes: Notes, run: str, *, planned: Callable[[], Awaitable[object]], before: Sequence[str] = ()
    ) -> None:
        self.run = run
        self.before = list(before)
        """Requests of earlier attempts."""
        self.sent: list[str] = []
        self.refused: list[str] = []
        self._notes = notes
        self._planned = planned
        self._withheld = ""

    @property
    def log(self) -> list[str]:
        """All of it, as receipts have it: what left, then what did not."""
        return [*self.sent, *self.refused]

    @property
    def may_have_happened(self) -> list[str]:
        """If it is rolled back: by this attempt, and by those before it."""
        return [*self.before, *self.sent][-MOST_TOLD:]

    def withhold(self, why: str) -> None:
        """Nothing leaves from now on."""
        self._withheld = why

    async def note(self, outgoing: Outgoing) -> None:
        """Returns when it may leave. Raises if it may not."""
        if self._withheld:
            raise Withheld(self._withheld)
        if len(self.sent) >= MOST_SENT:
            raise Withheld(f"a run sends at most {MOST_SENT:,} requests")
        request = in_words(outgoing)
        self.sent.append(request)  # before it is written: who waits is counted
        try:
            await self._planned()  # nothing is written of a run whose plan is not
            await self._notes.write(Sent(run=self.run, at=time.time(), request=request))
        except Exception:
            self.sent.remove(request)
            raise
        crashpoint("egress.noted")

    async def take(self, log: Log) -> None:
        """When the way out is closed again: what it refused, and nothing is on its way to the journal any more."""
        await self._notes.wait_written()
        self.refused += [self._refusal(refusal) for refusal in log.refusals]
        if log.refused > len(log.refusals):
            self.refused.append(f"refused: {log.refused - len(log.refusals):,} more attempts")

    def _refusal(self, refusal: Refusal) -> str:
        what = f"{refusal.method} {refusal.target}".strip()
        why = self._withheld or refusal.reason.replace("_", " ")
        return f"refused: {what} ({why})" if what else f"refused: {why}"


def past_proxy(allowed: AllowList) -> tuple[str, ...] | None:
    """Names of its own network that a guest with this list reaches itself; None: there is no proxy to go past.

    A guest's loopback is its own, and its programs speak to each other there. Only whoever lists the host's means that.
    """
    listed = {entry.host for entry in allowed.entries}
    return tuple(name for name in _LOOPBACK if name not in listed) if listed else None


def in_words(outgoing: Outgoing) -> str:
    """One line of a receipt."""
    return f"{outgoing.method} {outgoing.target}"


@asynccontextmanager
async def open_way(
    listener: socket.socket | None, allowed: AllowList, departures: Departures | None
) -> AsyncIterator[None]:
    """The way out of a session, for as long as this lasts: at no other time does anything get through."""
    if listener is None or departures is None:
        yield
        return
    _turn_away(listener)
    proxy = Proxy(allowed, note=departures.note)
    serving = asyncio.create_task(proxy.serve(listener))
    try:
        async with proxy.open(departures.run) as log:
            yield
    finally:
        serving.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([serving])
            await departures.take(log)


def _turn_away(listener: socket.socket) -> None:
    """Who knocked when nothing ran: that was no run's request."""
    listener.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
