"""The plan of one run: its card, with the inputs as they are found on disk, and the record of it.

A plan that cannot stop the run is made while the guest is at it already. Its record is not waited for: until `Verified`
nothing lasts, and that is written after it.
"""

import time

import anyio

from holdfast import once, planning
from holdfast.causes import bound_names
from holdfast.faults import crashpoint
from holdfast.records import Planned, RunCard
from holdfast.requests import RunRequest
from holdfast.sessions import LiveSession
from holdfast.store.rows import AnyWrite
from holdfast.verification import as_found, reads_files


class Plan:
    """Guards the card of one run, and whether it is written down."""

    def __init__(self, session: LiveSession, request: RunRequest, *, run: str, attempt: int) -> None:
        self.card: RunCard
        self.record: Planned
        self.is_noted = False
        self.outside: list[str] = []
        """Files that were changed past us before the run."""
        self._session = session
        self._books = session.books
        self._request = request
        self._run = run
        self._attempt = attempt

    async def make(self) -> None:
        """The card, and nothing that lasts."""
        self.card = card_of(self._session, self._request, run=self._run, attempt=self._attempt)
        bound_names(self._request.code)  # for later, while there is time
        if reads_files(self.card):
            with anyio.CancelScope(shield=True):  # what has begun is planned, whoever goes away
                self.card, strange = await as_found(self._books, self.card)
            self.outside += strange

    async def begin(self, *, watched: bool) -> None:
        """The card and its record, once."""
        if self.is_noted:
            return
        await self.make()
        self.note(at_once=watched or self._request.key is not None or bool(self._books.watchers))
        crashpoint("run.planned")

    def note(self, *, at_once: bool) -> None:
        self.record = Planned(
            run=self._run,
            at=time.time(),
            card=self.card,
            code=self._request.code,
            kind=self._request.kind,
            request_sha256=self._request.digest(),
        )
        self.is_noted = True
        writes: list[AnyWrite] = [*self._books.note(self.record), *once.claim(self.record)]
        if at_once:
            self._books.journal.append_nowait(*writes)
        else:
            self._books.journal.append_soon(*writes)


def card_of(session: LiveSession, request: RunRequest, *, run: str, attempt: int) -> RunCard:
    return planning.plan(
        session.books,
        request,
        run=run,
        limits=session.limits,
        environment=session.computer.environment.fingerprint,
        policy=request.preflight or session.preflight,
        attempt=attempt,
    )
