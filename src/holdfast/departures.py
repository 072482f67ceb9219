"""What a run sends through the session's egress, and what it tries to in vain.

Each request is journalled as `Sent` before its first byte leaves: when the run is taken back, or the host is killed,
that is how anybody knows what may have happened outside. `Unsent` takes it back where nobody could be reached. What is
refused leaves nothing but a line in the receipt.
"""

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import anyio
import msgspec

from holdfast.books import MOST_TOLD
from holdfast.egress.addresses import Lookups
from holdfast.egress.allowed import AllowList
from holdfast.egress.log import Log, Outgoing, Refusal
from holdfast.egress.proxy import Proxy
from holdfast.executions import Execution
from holdfast.faults import crashpoint
from holdfast.model import RunError
from holdfast.notes import Notes
from holdfast.pace import Pace
from holdfast.records import Sent, Unsent

MOST_SENT = 1_000
"""Of one run. Those past it do not leave."""
LONGEST = 600
"""Of what is written down of a request."""
NOBODY = AllowList()
"""What a session may reach that was not given anything."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NO_NETWORK = re.compile(r"gaierror|NameResolution|Connect(ion|or)?\w*Error|URLError|MaxRetryError|ConnectTimeout")
"""What the usual clients raise where nothing can be reached."""
_NO_ROUTE = re.compile(r"gaierror|NameResolution|in name resolution|Network is unreachable")
"""What is raised where a name, or an address, was tried that only our proxy could have reached."""
_NO_EGRESS = 'this session reaches no network; whoever opens it can list hosts: egress=["api.example.com"] or --egress'

_PAST_PROXY = (
    "this session gets out by HTTP and HTTPS, through the proxy that http_proxy and https_proxy name, and this went "
    "past it; some clients have to be told to use it (aiohttp: trust_env=True)"
)


class Departures:
    """What one run has sent."""

    def __init__(
        self, notes: Notes, run: str, *, planned: Callable[[], Awaitable[object]], before: Sequence[str] = ()
    ) -> None:
        self.run = run
        self.before = list(before)
        """Requests of earlier attempts."""
        self.refused: list[str] = []
        self._notes = notes
        self._planned = planned
        self.withheld = ""
        """Why nothing leaves at all; empty: what is allowed does."""
        self.is_way_there = False
        """The session may reach something."""
        self._left = 0

    @property
    def sent(self) -> list[str]:
        """As the journal has it: `verify` compares that with the receipt. Until the run is settled."""
        return self._notes.sent(self.run)

    @property
    def log(self) -> list[str]:
        """All of it, as receipts have it: what left, then what did not."""
        return [*self.sent, *self.refused]

    @property
    def may_have_happened(self) -> list[str]:
        """If it is rolled back: by this attempt, and by those before it."""
        return [*self.before, *self.sent][-MOST_TOLD:]

    async def note(self, outgoing: Outgoing) -> None:
        """Returns when it may leave. Raises if it may not."""
        if self._left >= MOST_SENT or self.withheld:
            raise PermissionError("nothing more leaves")
        self._left += 1  # before it is written: who waits is counted
        await self._planned()  # nothing is written of a run whose plan is not
        await self._notes.write(Sent(run=self.run, at=time.time(), request=_in_a_line(outgoing)))
        crashpoint("egress.noted")

    async def withdraw(self, outgoing: Outgoing) -> None:
        """It was noted, and did not leave after all."""
        with suppress(Exception):  # whatever kept it from being written: then it may have left, for all that is known
            await self._notes.write(Unsent(run=self.run, at=time.time(), request=_in_a_line(outgoing)))

    async def take(self, log: Log) -> None:
        """When the way out is closed again: what it refused, and nothing is on its way to the journal any more."""
        await self._notes.wait_written()
        self.refused += [self._refusal(refusal) for refusal in log.refusals]
        if log.refused > len(log.refusals):
            self.refused.append(f"refused: {log.refused - len(log.refusals):,} more attempts")

    def explained(self, execution: Execution) -> Execution:
        """With a hint, where the code failed because it did not get out."""
        error = execution.error
        if error is None or error.code != "exception" or error.hint or not (hint := self._hint(error)):
            return execution
        return msgspec.structs.replace(execution, error=msgspec.structs.replace(error, hint=hint))

    def _hint(self, error: RunError) -> str:
        if self.refused:
            return f"egress {self.refused[-1]}; run.egress has each attempt"
        if self.is_way_there:
            return _PAST_PROXY if _NO_ROUTE.search(f"{error.name} {error.message}") else ""
        return _NO_EGRESS if _NO_NETWORK.search(error.name) or _NO_ROUTE.search(error.message) else ""

    def _refusal(self, refusal: Refusal) -> str:
        what = f"{refusal.method} {refusal.target}".strip()[:LONGEST]
        why = refusal.reason.replace("_", " ")
        return f"refused: {what} ({why})" if what else f"refused: {why}"


def _in_a_line(outgoing: Outgoing) -> str:
    return f"{outgoing.method} {outgoing.target}"[:LONGEST]


def past_proxy(allowed: AllowList) -> tuple[str, ...] | None:
    """Names of its own network that a guest with this list reaches itself; None: there is no proxy to go past.

    A guest's loopback is its own, and its programs speak to each other there. Only whoever lists the host's means that.
    """
    listed = {entry.host for entry in allowed.entries}
    return tuple(name for name in _LOOPBACK if name not in listed) if listed else None


class WayOut:
    """One session's: whom it may reach, and that it does so while a run goes on and at no other time."""

    def __init__(self, past_proxy: tuple[str, ...] | None) -> None:
        self._pace = Pace()
        self.past_proxy = past_proxy
        """Kernels have a listener for our proxy, which these names go past; None: they have none."""
        self.allowed = NOBODY
        self._resolve = Lookups()  # of all its runs: a lookup may outlive the run that wanted it

    @asynccontextmanager
    async def open(self, listener: socket.socket | None, departures: Departures | None) -> AsyncIterator[None]:
        """For one run. What is begun in here has ended when this is left."""
        if listener is None or departures is None:
            yield
            return
        departures.is_way_there = True
        proxy = Proxy(
            self.allowed, note=departures.note, withdraw=departures.withdraw, resolve=self._resolve,
            pace=self._pace, withheld=departures.withheld,
        )  # fmt: skip
        serving = asyncio.create_task(proxy.serve(listener))
        log = Log(departures.run)
        try:
            async with proxy.open(departures.run) as log:
                yield
        finally:
            serving.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([serving])
                _ = serving.cancelled() or serving.exception()  # where it failed, nothing got out any more
                await departures.take(log)
