"""Runs: planned, started, followed, looked up."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing

import anyio
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from holdfast import api, cards, verbs, workfiles
from holdfast.books import Books
from holdfast.config import parse_seconds
from holdfast.errors import EventsGone, InvalidSetting, Malformed, RunUnknown
from holdfast.kernel.output import log_file
from holdfast.model import Run, StreamName
from holdfast.records import RunCard
from holdfast.requests import RunRequest
from holdfast.server.http.bodies import Stream, accepted, framed, given, integer, taken
from holdfast.server.http.hub import hub_of
from holdfast.server.http.running import LiveRun
from holdfast.server.http.sessions import PLAIN, as_download
from holdfast.sessions import LiveSession, checked_id, new_id

_REFUSED_WITHIN_S = 1.0
"""So long we wait for a refusal before the events begin: as an answer of its own it is easier to handle."""
_MOST_RUNS = 10_000
_OPTIONS = (
    "mode", "goal", "inputs", "outputs", "asserts", "key", "retry", "expect", "rehearse", "preflight", "silent"
)  # fmt: skip


async def plan(request: Request) -> Response:
    """The Run Card of a run, without running anything."""
    session, asked = await hub_of(request).live(request), await _asked(request)
    if asked.plan is not None or asked.kind != "cell":
        raise InvalidSetting("only a cell can be planned", hint="leave plan and kind out")
    return given(request, await verbs.plan(session, _new(session, asked)))


async def start(request: Request) -> Response:
    """Run a cell, a command or a plan. Its events, or by Accept its result alone."""
    hub = hub_of(request)
    session, asked = await hub.live(request), await _asked(request)
    if asked.plan is not None and (known := hub.runs.find(session.id, asked.plan)) is not None:
        run, joined = known, True
    else:
        wanted = _wanted(session, asked)
        run = hub.runs.start(session, wanted, stdin=asked.stdin)
        joined = run.request is not wanted
    chosen = accepted(request, *api.EVENTS, api.JSON, api.MSGPACK)
    if chosen in (api.JSON, api.MSGPACK):
        return given(request, _as_told(await _result(request, run), joined=joined))
    if chosen != api.MSGPACK_SEQ:  # our own client is told the id at once, so that it can interrupt what waits
        await _refused_or_begun(request, run)
    return _following(run, 0, chosen, joined=joined)


async def events(request: Request) -> Response:
    """The events of a run, replayed from a number on, then as they come."""
    run = await _live_run(request)
    number = integer(request, "from", _after_last(request))
    run.feed.refuse_if_gone(number)
    return _following(run, number, accepted(request, *api.EVENTS))


async def answer(request: Request) -> Response:
    """The answer to an `asked` event."""
    run = await _live_run(request)
    run.answer(await taken(request, api.Answer))
    return given(request, {})


async def interrupt(request: Request) -> Response:
    """Ask this run to end, and no other; also while it waits for its turn."""
    run = await _live_run(request)
    return given(request, api.Interrupted(interrupted=run.interrupt()))


# -- what is known of runs -----------------------------------------------------------------------------------------


async def list_all(request: Request) -> Response:
    """The session's runs, oldest first."""
    books = await hub_of(request).books(request)
    limit = integer(request, "limit", 1000, least=1, most=_MOST_RUNS)
    return given(request, (await workfiles.history(books, limit=limit))[::-1])


async def show(request: Request) -> Response:
    """One run, as the journal has it."""
    return given(request, (await _record(request))[1])


async def card(request: Request) -> Response:
    """Its Run Card."""
    return given(request, (await _record(request))[1].card)


async def code(request: Request) -> Response:
    """The code that it was asked to execute."""
    return Response((await _record(request))[1].code, headers=as_download("code.txt"), media_type=PLAIN)


async def receipt(request: Request) -> Response:
    """Its receipt: a DSSE envelope."""
    record = (await _record(request))[1]
    if record.receipt is None:
        raise RunUnknown(f"{record.card.run} has no receipt yet", hint="it has one when it is settled")
    return Response(record.receipt.envelope, media_type=api.DSSE)


async def output(request: Request) -> Response:
    """All that it printed, as far as it is still kept."""
    stream = _stream(request)
    books, record = await _record(request)
    path = log_file(books.workspace.logs / checked_id(record.card.run), stream)
    printed = await anyio.to_thread.run_sync(lambda: path.read_bytes() if path.exists() else b"")
    return Response(printed, headers=as_download(f"{stream}.txt"), media_type=api.BYTES)


def _stream(request: Request) -> StreamName:
    wanted = request.query_params.get("stream", "stdout")
    return "stderr" if verbs.one_of(StreamName, "stream", wanted) == "stderr" else "stdout"


async def _record(request: Request) -> tuple[Books, api.RunRecord]:
    hub, run = hub_of(request), request.path_params["run"]
    books = await hub.books(request)
    try:
        return books, await verbs.record(books, run)
    except RunUnknown:
        live = hub.runs.find(books.session, run)
        if live is None or live.over:
            raise
        return books, _begun(live)


def _begun(run: LiveRun) -> api.RunRecord:
    """Of a run whose plan is not written yet: it waits for its turn, or is a rehearsal."""
    asked = run.request
    card = RunCard(
        run=run.id, session=run.session.id, goal=asked.goal or cards.goal_of(asked.code),
        code_sha256=hashlib.sha256(asked.code.encode()).hexdigest(), base=str(run.session.books.state.ckpt()),
        key=asked.key,
    )  # fmt: skip
    return api.RunRecord(entry=None, card=card, code=asked.code, waiting=not run.begun.is_set())


async def _live_run(request: Request) -> LiveRun:
    """One whose events are here."""
    hub, run = hub_of(request), request.path_params["run"]
    books = await hub.books(request)
    if (found := hub.runs.find(books.session, run)) is not None:
        return found
    await verbs.record(books, run)
    raise EventsGone(f"the events of {run} are not kept any more", hint="GET …/runs/{run} says how it ended")


# -- what is asked for ---------------------------------------------------------------------------------------------


async def _asked(request: Request) -> api.AskedRun:
    """With what the headers say."""
    asked = await taken(request, api.AskedRun)
    return _with_header(request, _with_header(request, asked, "idempotency-key", "key"), "if-match", "expect")


def _with_header(request: Request, asked: api.AskedRun, header: str, field: str) -> api.AskedRun:
    if (text := request.headers.get(header)) is None:
        return asked
    text = text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text
    if getattr(asked, field) not in (None, text):
        raise Malformed(f"{header} and {field} differ", hint="send one of them")
    return msgspec.structs.replace(asked, **{field: text})


def _wanted(session: LiveSession, asked: api.AskedRun) -> RunRequest:
    if asked.plan is None:
        return _new(session, asked)
    if msgspec.structs.replace(asked, plan=None, stdin=False) != api.AskedRun():
        raise InvalidSetting("a plan is run as it is", hint="say these to …/plans instead")
    return verbs.planned(session, asked.plan)


def _new(session: LiveSession, asked: api.AskedRun) -> RunRequest:
    if asked.code is msgspec.UNSET:
        raise InvalidSetting("the body has no code", hint='send {"code": "…"}, or the id of a Run Card as "plan"')
    timeout_s = session.limits.timeout_s
    if asked.timeout is not None:
        timeout_s = parse_seconds(asked.timeout, name="timeout")
    options = verbs.RunOptions(**{name: getattr(asked, name) for name in _OPTIONS})  # type: ignore[typeddict-item]
    wanted = verbs.new_request(asked.code, options, timeout_s=timeout_s)
    run = new_id("run" if asked.kind == "cell" else "cmd")
    return msgspec.structs.replace(wanted, kind=asked.kind, run=run)


# -- how it is told ------------------------------------------------------------------------------------------------


async def _refused_or_begun(request: Request, run: LiveRun) -> None:
    with run.attended():
        await _unless_gone(request, run.begun, timeout_s=_REFUSED_WITHIN_S)
    if run.error is not None and run.feed.next == 2:  # it began and was refused: nothing else was told
        raise run.error


async def _result(request: Request, run: LiveRun) -> Run:
    over = asyncio.Event()
    with run.attended():
        waiting = asyncio.create_task(run.feed.wait_end())
        waiting.add_done_callback(lambda _: over.set())
        try:
            await _unless_gone(request, over)
        finally:
            waiting.cancel()
    if run.result is None:
        assert run.error is not None
        raise run.error
    return run.result


async def _unless_gone(request: Request, event: asyncio.Event, *, timeout_s: float | None = None) -> None:
    """Wait for an event, as long as the client does."""
    waiting, leaving = asyncio.create_task(event.wait()), asyncio.create_task(_left(request))
    try:
        await asyncio.wait([waiting, leaving], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done() and not event.is_set():
            raise ClientDisconnect
    finally:
        waiting.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _as_told(run: Run, *, joined: bool) -> Run:
    """Who joined a run that was under way already for the same key had nothing executed himself."""
    return msgspec.structs.replace(run, replayed=True) if joined else run


def _following(run: LiveRun, number: int, media_type: str, *, joined: bool = False) -> Response:
    headers = {"x-holdfast-run": run.id, "x-accel-buffering": "no"}
    return Stream(_told(run, number, media_type, joined=joined), headers=headers, media_type=media_type)


async def _told(run: LiveRun, number: int, media_type: str, *, joined: bool) -> AsyncGenerator[bytes, None]:
    with run.attended():
        async with aclosing(run.feed.read(number)) as events:
            async for event in events:
                if isinstance(event, api.Settled):
                    event = msgspec.structs.replace(event, run=_as_told(event.run, joined=joined))
                yield framed(event, media_type)


def _after_last(request: Request) -> int:
    """A browser's EventSource says by itself what it saw last."""
    last = request.headers.get("last-event-id", "")
    return int(last) + 1 if last.isascii() and last.isdigit() and len(last) < 16 else 0
