"""What can be done with a session, verb by verb: the same for every face."""

import difflib
import hashlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypedDict, get_args

import anyio.to_thread
import msgspec

from holdfast import cards, expectations, plans, recovery, transaction, workfiles
from holdfast.api import RunRecord
from holdfast.books import Books
from holdfast.config import shown
from holdfast.errors import InvalidSetting, RunUnknown, SessionHalted
from holdfast.expectations import Declared, PathLike
from holdfast.kernel.conduct import Ask, Emit
from holdfast.model import HistoryEntry, Mode, Preflight, Recovery, Run
from holdfast.receipts import receipt
from holdfast.records import Planned, RunCard
from holdfast.requests import RunRequest
from holdfast.sessions import LiveSession
from holdfast.store.sqlite import Store

_PIECE_BYTES = 1 << 20


class RunOptions(TypedDict, total=False):
    """What `run` and `plan` take beside the code."""

    timeout: float | str | None
    mode: Mode | None
    goal: str
    """In a few words, for the card and the receipt."""
    inputs: Sequence[PathLike]
    outputs: Declared
    """Files that must exist afterwards: paths, or path -> {"format": "parquet", "columns": […], "min_rows": 1}."""
    asserts: Sequence[str]
    """Python that must be true afterwards; a failed one rolls the run back."""
    key: str | None
    """Idempotency key: at most one run with it commits; asked again, the recorded answer."""
    retry: bool
    expect: str | None
    """The CKPT that you believe in; the run is refused (`state_moved`) if the session is elsewhere."""
    rehearse: bool
    """Execute, report what would change, and take it all back."""
    preflight: Preflight | None
    silent: bool
    """Not counted (`Out[n]`), not in IPython's history, and its value is not shown: for tools that look on."""


def request(session: LiveSession, code: str | RunCard, options: RunOptions, *, timeout_s: float) -> RunRequest:
    """What a caller asks for, checked."""
    if isinstance(code, RunCard):
        return _planned_request(session, code, options)
    return new_request(code, options, timeout_s=timeout_s)


def new_request(code: str, options: RunOptions, *, timeout_s: float) -> RunRequest:
    """The same for what was not planned before."""
    _refuse_unknown(options)
    return RunRequest(
        code=_text("code", code),
        timeout_s=timeout_s,
        mode=one_of(Mode, "mode", options.get("mode")),
        goal=_text("goal", options.get("goal", ""))[:200],
        inputs=expectations.inputs(options.get("inputs")),
        outputs=expectations.outputs(options.get("outputs")),
        asserts=expectations.asserts(options.get("asserts")),
        key=None if options.get("key") is None else _text("key", options.get("key")),
        retry=options.get("retry", False),
        expect=None if options.get("expect") is None else _text("expect", options.get("expect")),
        rehearse=options.get("rehearse", False),
        preflight=one_of(Preflight, "preflight", options.get("preflight")),
        silent=options.get("silent", False),
    )


def _planned_request(session: LiveSession, card: RunCard, options: RunOptions) -> RunRequest:
    refuse_beside_plan(options)
    return planned(session, card.run)


def planned(session: LiveSession, run: str) -> RunRequest:
    """What a plan asks for that has not run yet."""
    if (waiting := session.plans.get(run)) is None:
        raise InvalidSetting(f"{run} is no plan that waits here", hint="plan() again; each plan runs once")
    return waiting


def refuse_beside_plan(options: RunOptions) -> None:
    if options:
        raise InvalidSetting("a plan is run as it is", hint="pass these to plan() instead: " + ", ".join(options))


def _refuse_unknown(options: RunOptions) -> None:
    """A mistyped `expect=` or `outputs=` must not be a promise that nobody keeps."""
    for name in options:
        if name not in RunOptions.__annotations__:
            alike = difflib.get_close_matches(name, RunOptions.__annotations__, n=1)
            hint = f"did you mean {alike[0]}=?" if alike else f"these are: {', '.join(RunOptions.__annotations__)}"
            raise InvalidSetting(f"{name}= is no option of a run", hint=hint)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidSetting(f"{name}={shown(value)} is no text", hint="write it as a string")
    return value


def one_of(kind: object, name: str, value: str | None) -> Any:
    if value is not None and value not in get_args(kind):
        raise InvalidSetting(f"{name}={shown(value)} is not one", hint=f"write one of {', '.join(get_args(kind))}")
    return value


async def run(session: LiveSession, request: RunRequest, *, emit: Emit | None = None, ask: Ask | None = None) -> Run:
    session.plans.pop(request.run, None)
    return await transaction.run(session, request, emit=emit, ask=ask)


async def plan(session: LiveSession, request: RunRequest) -> RunCard:
    card = await plans.plan(session, request)
    session.remember_plan(card.run, msgspec.structs.replace(request, run=card.run, expect=card.base))
    return card


async def shell(session: LiveSession, command: str, *, timeout_s: float, emit: Emit | None = None) -> Run:
    """A command is a run too: its files are committed, unless it was killed."""
    return await transaction.run(session, RunRequest(code=command, kind="command", timeout_s=timeout_s), emit=emit)


async def read(session: LiveSession, path: PathLike) -> AsyncGenerator[bytes, None]:
    """A committed file, piece by piece. It ends well only if the whole has the SHA-256 it was committed with."""
    entry, digest = workfiles.entry(session, path), hashlib.sha256()
    with workfiles.open_committed(session, entry.path) as source:
        while piece := await anyio.to_thread.run_sync(source.read, _PIECE_BYTES):
            digest.update(piece)
            yield piece
    now = session.books.state.files.get(entry.path)  # a run may have committed meanwhile
    if digest.hexdigest() not in (entry.sha256, now.sha256 if now else entry.sha256):
        raise SessionHalted(
            f"{path} has the SHA-256 {digest.hexdigest()}, and was committed with {entry.sha256}",
            hint=f"`holdfast verify {session.id}` looks at all of it",
        )


async def recover(session: LiveSession) -> Recovery:
    return await recovery.of_session(session.books)


async def history(session: LiveSession, *, limit: int) -> list[HistoryEntry]:
    return (await workfiles.history(session.books, limit=limit))[::-1]


async def code(session: LiveSession, run: str) -> str:
    """The code that a run was asked to execute."""
    return (await record(session.books, run)).code


async def record(books: Books, run: str) -> RunRecord:
    """A run as the journal has it."""

    def read(store: Store) -> RunRecord | None:
        records = store.records(run)
        planned = next((each for each in records if isinstance(each, Planned)), None)
        if planned is None or planned.card.session != books.session:
            return None
        receipts = store.receipt(run)
        sealed = receipt(receipts[-1].envelope) if receipts else None
        entry = workfiles.history_entry(store, run)
        card = cards.as_far(planned.card, records)
        if card.stage == "planned" and run in books.executed:
            card = msgspec.structs.replace(card, stage="executed")
        return RunRecord(entry=entry, card=card, code=planned.code, receipt=sealed)

    if (found := await books.read(read)) is None:
        for planned in books.open.get(run, ()):  # its plan may be on the way to the journal
            if isinstance(planned, Planned):
                return RunRecord(entry=None, card=planned.card, code=planned.code)
        raise RunUnknown(f"{run!r} is no run of session {books.session}", hint="history() lists them")
    return found
