"""What a run sends, and what is written down of it: before it leaves, in order, and whatever fails."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from holdfast import once, recovery
from holdfast.books import Books
from holdfast.departures import MOST_SENT, Departures, past_proxy
from holdfast.egress.allowed import AllowList
from holdfast.egress.log import MOST_REFUSALS, Log, Outgoing, Refusal
from holdfast.errors import DiskFull
from holdfast.journal import Journal
from holdfast.notes import Notes
from holdfast.protocol import is_legal
from holdfast.receipts import receipt
from holdfast.records import (
    AnyRecord,
    Executed,
    Planned,
    RunCard,
    Saved,
    SavedFile,
    Sent,
    Settled,
    Unsent,
    Verified,
    requests_sent,
)
from holdfast.requests import RunRequest
from holdfast.resources.workspace import Workspace
from holdfast.settling import settle
from holdfast.signing import SigningKey
from holdfast.store.rows import AnyWrite, Append, SessionRow

pytestmark = pytest.mark.anyio
SENT = ["POST http://api.example.com/orders", "CONNECT api.example.com:443"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def books(tmp_path: Path) -> AsyncIterator[Books]:
    journal = Journal(tmp_path / "journal.sqlite3")
    row = SessionRow(id="s1", created_at=1.0, generation=1, version=0, settings={})
    books = Books(journal, SigningKey.load_or_create(tmp_path / "keys"), Workspace(tmp_path / "s1"), row=row)
    books.register()
    yield books
    await journal.close()


def plan(books: Books, run: str = "r1", *, key: str | None = None, attempt: once.Attempt | None = None) -> Planned:
    attempt = attempt or once.Attempt()
    card = RunCard(
        run=run, session="s1", goal="", code_sha256="", base="", key=key, attempt=attempt.number
    )  # fmt: skip
    digest = RunRequest(code="send()").digest()
    planned = Planned(run=run, at=1.0, card=card, code="send()", request_sha256=digest)
    books.journal.append_nowait(*books.note(planned), *once.claim(planned, attempt))
    return planned


def notes(books: Books, run: str = "r1") -> Notes:
    return Notes(books, recall=lambda: books.recall(run))


def outgoing(request: str) -> Outgoing:
    method, target = request.split(" ")
    return Outgoing(run="r1", at=1.0, method=method, target=target, host="api.example.com", port=443)


def departures(books: Books, run: str = "r1", *, before: Sequence[str] = ()) -> Departures:
    async def planned() -> None:
        pass

    return Departures(notes(books, run), run, planned=planned, before=before)


def saved(path: str) -> Saved:
    return Saved(run="r1", at=1.0, files=[SavedFile(path=path, sha256="0" * 64, bytes=1)])


def tags(records: Sequence[AnyRecord]) -> list[str]:
    return [type(record).__name__ for record in records]


# -- the order of records --------------------------------------------------------------------------------------------


def test_requests_leave_between_plan_and_end() -> None:
    sent, unsent = Sent(run="r1", at=1.0, request=SENT[0]), Unsent(run="r1", at=1.0, request=SENT[0])

    assert [before for before in (Planned, Saved, Sent, Unsent) if not is_legal(before, sent)] == []
    assert [before for before in (Saved, Sent, Unsent) if not is_legal(before, unsent)] == []
    assert [before for before in (None, Planned, Executed, Verified, Settled) if is_legal(before, unsent)] == []
    assert [before for before in (None, Executed, Verified, Settled) if is_legal(before, sent)] == []
    assert is_legal(Sent, saved("a"))
    assert is_legal(Sent, Executed(run="r1", at=1.0, error_code=None, duration_s=0.0))


async def test_a_request_may_leave_once_it_is_durable_and_so_is_its_plan(books: Books) -> None:
    plan(books)
    await departures(books).note(outgoing(SENT[0]))

    assert tags(await books.read(lambda store: store.records("r1"))) == ["Planned", "Sent"]


async def test_a_request_waits_for_the_plan_of_its_run(books: Books) -> None:
    noted = asyncio.Event()
    sending = Departures(notes(books), "r1", planned=noted.wait)
    leaving = asyncio.create_task(sending.note(outgoing(SENT[0])))
    await asyncio.sleep(0)
    assert books.open == {}
    plan(books)
    noted.set()
    await leaving

    assert tags(books.open["r1"]) == ["Planned", "Sent"]


# -- writes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def commits(books: Books, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What each append was given; one that has a request to /fails in it finds no room."""
    given: list[list[str]] = []
    append = books.journal.append

    async def noted(*writes: AnyWrite) -> None:
        records = [write.record for write in writes if isinstance(write, Append)]
        given.append(tags(records))
        if any(isinstance(record, Sent) and "fails" in record.request for record in records):
            raise DiskFull("no room", hint="make some")
        await append(*writes)

    monkeypatch.setattr(books.journal, "append", noted)
    return given


async def test_many_that_wait_are_one_write(books: Books, commits: list[list[str]]) -> None:
    plan(books)
    sending = departures(books)
    await asyncio.gather(*(sending.note(outgoing(f"GET http://api/{number}")) for number in range(50)))

    assert len(commits) <= 2
    assert sum(map(len, commits)) == 50
    assert sending.sent == [f"GET http://api/{number}" for number in range(50)]


async def test_a_write_that_fails_lets_nothing_out_and_takes_no_savepoint_along(
    books: Books, commits: list[list[str]]
) -> None:
    plan(books)
    noting = notes(books)
    sending = Departures(noting, "r1", planned=_at_once)
    await noting.write(saved("before"))
    with pytest.raises(DiskFull):
        await sending.note(outgoing("GET http://api/fails"))
    await noting.write(saved("after"))
    await sending.note(outgoing(SENT[0]))

    assert sending.sent == [SENT[0]]
    assert tags(books.open["r1"]) == tags(await books.read(lambda store: store.records("r1")))
    assert tags(books.open["r1"]) == ["Planned", "Saved", "Saved", "Sent"]


async def test_what_is_saved_while_a_write_fails_is_kept_or_refused_and_never_forgotten(
    books: Books, commits: list[list[str]]
) -> None:
    """Each caller is told the truth: what was acknowledged is in the books, what was refused is not."""
    plan(books)
    noting = notes(books)
    sending = Departures(noting, "r1", planned=_at_once)
    acknowledged: list[str] = []

    async def save(path: str) -> None:
        await noting.write(saved(path))
        acknowledged.append(path)

    async def send(number: int) -> None:
        await sending.note(outgoing(f"GET http://api/{'fails' if number % 3 == 0 else number}"))

    tasks: list[asyncio.Task[None]] = []
    for number in range(30):
        tasks += [asyncio.create_task(save(f"file-{number}")), asyncio.create_task(send(number))]
        await asyncio.sleep(0)
        if number % 2:
            await asyncio.wait(tasks)
    await asyncio.gather(*tasks, return_exceptions=True)

    kept = [record.files[0].path for record in books.open["r1"] if isinstance(record, Saved)]
    assert kept == acknowledged
    assert len(kept) > 10
    assert [record.request for record in books.open["r1"] if isinstance(record, Sent)] == sending.sent


async def test_who_is_cut_off_while_it_is_written_has_sent_it(books: Books) -> None:
    """It may have left by then: the records say at least as much as happened."""
    plan(books)
    sending = departures(books)
    leaving = asyncio.create_task(sending.note(outgoing(SENT[0])))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    await sending.take(Log("r1"))

    assert tags(books.open["r1"]) == ["Planned", "Sent"]
    assert sending.sent == [SENT[0]]


async def test_a_run_sends_so_many_and_no_more(books: Books) -> None:
    plan(books)
    sending = departures(books)
    results = await asyncio.gather(
        *(sending.note(outgoing(f"GET http://api/{number}")) for number in range(MOST_SENT + 5)), return_exceptions=True
    )

    assert sum(isinstance(result, PermissionError) for result in results) == 5
    assert len(sending.sent) == MOST_SENT


async def test_a_write_that_fails_leaves_the_same_requests_in_the_receipt_as_in_the_journal(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the same was sent before, and where nobody waits for it any more: `verify` compares the two."""
    append = books.journal.append
    is_full = False

    async def noted(*writes: AnyWrite) -> None:
        if is_full:
            raise DiskFull("no room", hint="make some")
        await append(*writes)

    monkeypatch.setattr(books.journal, "append", noted)
    plan(books)
    sending = departures(books)
    for request in SENT:
        await sending.note(outgoing(request))
    is_full = True
    with pytest.raises(DiskFull):
        await sending.note(outgoing(SENT[0]))
    leaving = asyncio.create_task(sending.note(outgoing(SENT[1])))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    await sending.take(Log("r1"))

    assert requests_sent(await books.read(lambda store: store.records("r1"))) == SENT
    assert sending.log == SENT


async def _at_once() -> None:
    pass


# -- what is told ----------------------------------------------------------------------------------------------------


async def test_refusals_are_told_in_words_and_bounded(books: Books) -> None:
    sending, log = departures(books), Log("r1")
    log.refuse(Refusal(run="r1", at=1.0, reason="not_allowed", method="GET", target="http://no.example/"))
    log.refuse(Refusal(run="r1", at=1.0, reason="too_slow"))
    for _ in range(MOST_REFUSALS):
        log.refuse(Refusal(run="r1", at=1.0, reason="not_tls", method="CONNECT", target="a:443"))
    await sending.take(log)

    assert sending.log[:2] == ["refused: GET http://no.example/ (not allowed)", "refused: too slow"]
    assert sending.log[-1] == "refused: 2 more attempts"
    assert len(sending.log) == MOST_REFUSALS + 1


async def test_the_receipt_of_a_rolled_back_run_is_made_of_its_records_alone(books: Books) -> None:
    plan(books)
    sending = departures(books)
    for request in SENT:
        await sending.note(outgoing(request))
    settlement = await settle(books, "r1")

    assert receipt(settlement.receipt.envelope).facts().egress == SENT
    assert books.may_have_happened == SENT
    told = await recovery.of_session(books)
    assert told.may_have_happened == SENT
    assert f"May have happened: {SENT[0]}, {SENT[1]}" in told.text
    assert told.steps[0].action == "check"


async def test_what_reached_nobody_did_not_happen(books: Books) -> None:
    plan(books)
    sending = departures(books)
    for request in (SENT[0], SENT[1], SENT[0]):
        await sending.note(outgoing(request))
    await sending.withdraw(outgoing(SENT[0]))

    assert sending.may_have_happened == SENT
    settlement = await settle(books, "r1")
    assert receipt(settlement.receipt.envelope).facts().egress == SENT
    await books.load()
    assert books.may_have_happened == SENT


async def test_what_may_have_happened_outlives_the_host_until_code_is_committed(books: Books) -> None:
    for run in ("r1", "r2"):
        plan(books, run)
        await departures(books, run).note(outgoing(SENT[0]))
        await settle(books, run)
    await books.load()
    assert books.may_have_happened == [SENT[0], SENT[0]]

    plan(books, "r3")
    await books.journal.append(
        *books.note(
            Executed(run="r3", at=2.0, error_code=None, duration_s=0.1),
            Verified(run="r3", at=2.0, status="committed", version=1, stage="", changes=[], names={}, receipt=b""),
            Settled(run="r3", at=3.0, status="committed", version=1, ckpt=""),
        )
    )
    await books.load()
    assert books.may_have_happened == []


@pytest.mark.parametrize("blame", ["system", "user"])
async def test_a_key_names_what_all_of_its_attempts_sent(books: Books, blame: str) -> None:
    request = RunRequest(code="send()", key="k", retry=True)
    attempt = once.Attempt()
    for number in (1, 2, 3):
        assert (attempt.number, len(attempt.may_have_happened)) == (number, number - 1)
        plan(books, f"r{number}", key="k", attempt=attempt)
        await departures(books, f"r{number}", before=attempt.may_have_happened).note(outgoing(SENT[0]))
        await settle(books, f"r{number}", blame=blame)
        _, attempt = await once.earlier_answer(books, request)


# -- past the proxy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "past"),
    [
        ([], None),
        (["example.org"], ("localhost", "127.0.0.1", "::1")),
        (["127.0.0.1:8080"], ("localhost", "::1")),
        (["[::1]:8080", "127.0.0.1:1"], ("localhost",)),
    ],
)
def test_loopback_is_the_guests_own_unless_the_hosts_is_listed(listed: list[str], past: tuple[str, ...] | None) -> None:
    assert past_proxy(AllowList.parse(listed)) == past
