"""The plan of one run: its card, with the inputs as they are found on disk, and the record of it.

A plan that cannot stop the run is made while the guest is at it already, and where files have to be hashed for it,
beside the reading of what the guest says: no deadline waits for that. Its record is not waited for: until `Verified`
nothing lasts, and that is written after it.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import anyio

from holdfast import once, planning, recovery
from holdfast.books import Books
from holdfast.errors import PatternsTooCostly
from holdfast.faults import crashpoint
from holdfast.inputs import as_found, is_certain, refuse_missing
from holdfast.once import Attempt
from holdfast.patterns import IN_LOOP, MOST_STEPS
from holdfast.planning import live_names
from holdfast.preflight import Reading, read_aside, read_here
from holdfast.records import AnyRecord, Planned, RunCard
from holdfast.requests import RunRequest, refuse_nonsense
from holdfast.sessions import LiveSession, new_id
from holdfast.store.rows import AnyWrite
from holdfast.whereabouts import explained, is_explained


class Plan:
    """Guards the card of one run, and whether it is written down."""

    def __init__(self, session: LiveSession, request: RunRequest, *, run: str, attempt: Attempt) -> None:
        self.card: RunCard
        self.record: Planned
        self.reading = Reading()
        """Of the request's code."""
        self.is_noted = False
        self.noted = asyncio.Event()
        """The same, to wait for."""
        self.outside: list[str] = []
        """Files that were changed past us before the run."""
        self._session = session
        self._books = session.books
        self._request = request
        self._run = run
        self._attempt = attempt

    async def make(self) -> None:
        """The card, and nothing that lasts."""
        self.reading = await _read(self._session, self._request)
        draft = partial(
            card_of, self._session, self._request, self.reading, run=self._run, attempt=self._attempt.number
        )
        await self._look(await _drafted(self._books, draft))

    def begin(self, *, watched: bool) -> Coroutine[Any, Any, None] | None:
        """The card and its record, once: at once; or where files must be looked into first, or a large text be read
        elsewhere, what is left to do."""
        if self.is_noted:
            return None
        if (reading := _read_here(self._session, self._request)) is None:
            return self._begin_later(None, watched=watched)
        self.reading = reading
        try:
            self.card = card_of(
                self._session, self._request, reading, run=self._run, attempt=self._attempt.number, most_steps=IN_LOOP
            )
        except PatternsTooCostly:
            return self._begin_later(None, watched=watched)
        if not (is_certain(self._books, self.card) and is_explained(self._books, self.card)):
            return self._begin_later(self.card, watched=watched)
        self._note_first(watched=watched)
        return None

    async def _begin_later(self, drafted: RunCard | None, *, watched: bool) -> None:
        with anyio.CancelScope(shield=True):  # what has begun is planned, also when its caller goes away
            await (self._look(drafted) if drafted is not None else self.make())
        self._note_first(watched=watched)

    async def _look(self, card: RunCard) -> None:
        with anyio.CancelScope(shield=True):  # what has begun is planned, whoever goes away
            found, strange = await as_found(self._books, card)
            self.card = await explained(self._session, found, is_kept=self._is_kept)
        self.outside += strange

    @property
    def _is_kept(self) -> bool:
        """Whether the run becomes a version also if it raises, as one that lacks a name does."""
        policy = self._request.preflight or self._session.preflight
        is_begun = policy != "block" and not self._request.rehearse
        return is_begun and (self._request.mode or self._session.mode) == "notebook"

    def _note_first(self, *, watched: bool) -> None:
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
        self.noted.set()
        writes: list[AnyWrite] = [*self._books.note(self.record), *once.claim(self.record, self._attempt)]
        if at_once:
            self._books.journal.append_nowait(*writes)
        else:
            self._books.journal.append_soon(*writes)

    async def recall(self) -> list[AnyRecord]:
        """The run's records as the journal has them, after a write of some failed. If the plan was among those it is
        written again: the run goes on."""
        records = await self._books.recall(self._run)
        if not records:
            self.note(at_once=False)
        return records


async def plan(session: LiveSession, request: RunRequest) -> RunCard:
    """The card of a run that has not been asked for yet."""
    refuse_nonsense(request, session.limits)
    await session.wait_settled()
    await recovery.refuse_if_moved(session.books, request.expect)
    await refuse_missing(session.books, request.inputs)
    reading = await _read(session, request)
    drafted = await _drafted(session.books, partial(card_of, session, request, reading, run=new_id("run"), attempt=1))
    card, _ = await as_found(session.books, drafted)
    return await explained(session, card)


async def _drafted(books: Books, draft: Callable[..., RunCard]) -> RunCard:
    """A card, made here if the patterns on it are few, and else in a thread."""
    with suppress(PatternsTooCostly):
        return draft(most_steps=IN_LOOP)
    return await books.in_thread(draft)


async def _read(session: LiveSession, request: RunRequest) -> Reading:
    """What the code shows. A large text is read by another process, within the run's own time."""
    here = _read_here(session, request)
    return here or await read_aside(request.code, session.reading, timeout_s=request.timeout_s)


def _read_here(session: LiveSession, request: RunRequest) -> Reading | None:
    if request.kind != "cell":
        return Reading()
    return read_here(request.code, live=live_names(session.books.state, request))


def card_of(
    session: LiveSession, request: RunRequest, reading: Reading, *, run: str, attempt: int, most_steps: int = MOST_STEPS
) -> RunCard:
    return planning.plan(
        session.books,
        request,
        run=run,
        limits=session.limits,
        environment=session.computer.environment.fingerprint,
        policy=request.preflight or session.preflight,
        reading=reading,
        attempt=attempt,
        most_steps=most_steps,
    )
