"""Exactly once: a key has at most one committed run.

The same key again gets the recorded answer, also while the first is still running (it waits), also after a crash of
the host. A run that we or a crash rolled back, or that was never started, may run again, as the next attempt; one that
its own code failed keeps its answer, unless the caller wants a retry.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import msgspec

from holdfast import agreement
from holdfast.api import is_call
from holdfast.books import MOST_TOLD, Books
from holdfast.errors import EventsGone, KeyMismatch, KeyReused
from holdfast.model import Run
from holdfast.receipts import facts_in, receipt
from holdfast.records import AnyRecord, Planned, Settled, requests_sent
from holdfast.requests import RunRequest
from holdfast.store.rows import KeyRow, PutKey
from holdfast.store.sqlite import Store

_RESULT_BYTES = 1 << 20
"""Of displays that are kept with an answer; more are left out of it and counted."""


class Once:
    """Lets those who come with the same key wait for each other."""

    def __init__(self) -> None:
        self._turns: dict[str, anyio.Lock] = {}
        self._waiting: dict[str, int] = {}

    @asynccontextmanager
    async def turn(self, key: str | None) -> AsyncIterator[None]:
        if key is None:
            yield
            return
        lock = self._turns.setdefault(key, anyio.Lock())
        self._waiting[key] = self._waiting.get(key, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key], self._turns[key]


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """Which one a run is, of those with its key."""

    number: int = 1
    may_have_happened: list[str] = []
    """Requests that those before it sent, the latest: nobody can take them back."""


class Earlier(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a key."""

    row: KeyRow
    settled: Settled | None
    result: bytes | None
    sent: list[str] = []
    """Requests of the run, and of attempts before it."""


async def look_up(books: Books, key: str) -> Earlier | None:
    """Raises KeyMismatch if the rows are not what the run's receipt says: no key gets another run's answer."""

    def read(store: Store) -> Earlier | None:
        row = store.key(books.session, key)
        if row is None:
            return None
        records = store.records(row.run)
        _refuse_mismatch(books, key, row, records, store)
        settled = [record for record in records if isinstance(record, Settled)]
        sent = [*row.may_have_happened, *requests_sent(records)]
        return Earlier(row=row, settled=settled[-1] if settled else None, result=store.result(row.run), sent=sent)

    return await books.read(read)


def _refuse_mismatch(books: Books, key: str, row: KeyRow, records: Sequence[AnyRecord], store: Store) -> None:
    sealed, body = store.receipt(row.run), store.result(row.run)
    facts = facts_in(sealed[-1].envelope) if sealed and isinstance(records[-1] if records else None, Settled) else None
    public = books.key.public
    wrong = agreement.key_difference(row, records, facts, session=books.session, key=key, public=public)
    if not wrong and facts is not None and body is not None:
        wrong = agreement.answer_difference(decode(body), facts)
    if wrong:
        raise KeyMismatch(
            f"the key {key!r} cannot be answered: {wrong}",
            hint=f"the journal was changed or damaged: `holdfast verify {books.session}` says more. Nothing ran; look "
            "at the history before you run it under another key",
        )


async def earlier_answer(books: Books, request: RunRequest) -> tuple[Run | None, Attempt]:
    """The recorded run of a request's key, with the session's present CKPT; or None and which attempt this is."""
    if request.key is None or request.rehearse:
        return None, Attempt()
    earlier = await look_up(books, request.key)
    if earlier is None:
        return None, Attempt()
    recorded, attempt = answer(earlier, key=request.key, digest=request.digest(), retry=request.retry)
    if recorded is None:
        return None, attempt
    receipts = await books.read(lambda store: store.receipt(earlier.row.run))
    sealed = receipt(receipts[-1].envelope) if receipts else None
    return msgspec.structs.replace(recorded, ckpt=str(books.state.ckpt()), receipt=sealed, replayed=True), attempt


def answer(earlier: Earlier, *, key: str, digest: str, retry: bool) -> tuple[Run | None, Attempt]:
    """The recorded run, and which attempt it was; or None, and which attempt comes next."""
    row, settled = earlier.row, earlier.settled
    if row.request_sha256 != digest:
        raise KeyReused(
            f"the key {key!r} belongs to {row.run}, which had other code or inputs",
            hint="use another key for another request; the same key only to ask again for the same one",
        )
    sent = earlier.sent[-MOST_TOLD:]
    following = Attempt(number=row.attempt + 1, may_have_happened=sent)
    if settled is None or settled.by == "system":
        return None, following
    if earlier.result is None and is_call(key):
        raise EventsGone(
            f"the answer of {row.run} is not kept any more: it was {settled.status}, at version {settled.version}",
            hint="the history has how it ended; look before you run it again",
        )
    if earlier.result is None or (settled.status == "rolled_back" and retry):
        return None, following
    return decode(earlier.result), Attempt(number=row.attempt, may_have_happened=sent)


def claim(planned: Planned, attempt: Attempt) -> list[PutKey]:
    """What lets the key of a plan, if it has one, stand for its run from now on."""
    card = planned.card
    if card.key is None:
        return []
    return [stand_for(card.session, card.key, planned.run, digest=planned.request_sha256, attempt=attempt)]


def stand_for(session: str, key: str, run: str, *, digest: str, attempt: Attempt) -> PutKey:
    row = KeyRow(
        session=session,
        key=key,
        run=run,
        request_sha256=digest,
        attempt=attempt.number,
        may_have_happened=tuple(attempt.may_have_happened),
    )
    return PutKey(session=session, row=row)


def encode(run: Run, request: RunRequest) -> bytes:
    """The answer, for whoever asks again; nothing for a run without a key, unless it is a job's (`jobs`)."""
    if request.key is None and request.script is None:
        return b""
    size = sum(len(value) for display in run.displays for value in display.data.values())
    if size > _RESULT_BYTES:
        run = msgspec.structs.replace(run, displays=[], dropped_displays=run.dropped_displays + len(run.displays))
    return msgspec.msgpack.encode(run)


def decode(body: bytes) -> Run:
    return msgspec.msgpack.decode(body, type=Run)
