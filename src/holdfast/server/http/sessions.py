"""Sessions: made, listed, held, watched, ended; and what can be asked of one beside runs and files."""

import asyncio
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from holdfast import api, manifest, recovery
from holdfast.config import parse_limits
from holdfast.egress.allowed import AllowList
from holdfast.errors import Forbidden, InvalidSetting, ServerStopping
from holdfast.server.http import ceiling, life
from holdfast.server.http.bodies import Stream, given, taken, truth
from holdfast.server.http.hub import Hub, hub_of, may_use, principal_of
from holdfast.service import unknown
from holdfast.sessions import LiveSession

_BREATH_S = 15.0
"""So often a stream without news says that it is alive."""


async def create(request: Request) -> Response:
    """Make a session, or bring a kept one back."""
    hub, asked = hub_of(request), await taken(request, api.CreateSession)
    if hub.stopping.is_set():
        raise ServerStopping("the server is stopping", hint="send it again when it is back")
    _refuse_foreign_env(request, asked)
    known = asked.resume is not None and hub.service.is_live(asked.resume)
    session = await (_resumed(request, asked, asked.resume) if asked.resume else _created(request, asked))
    session.preflight = asked.preflight
    if asked.attached and not known:
        hub.holds.attach(session)
    if asked.keep:
        await hub.service.journal.wait_written(session.id)  # what was promised to last is known to whoever comes next
    info = await hub.service.session_info(session.id)
    return given(request, info, status=200 if known else 201, headers={"location": f"/v1/sessions/{session.id}"})


def _refuse_foreign_env(request: Request, asked: api.CreateSession) -> None:
    if asked.env is not None and not principal_of(request).owner:
        raise Forbidden("env is a path on the server: only its owner may choose one", hint="leave env out")


async def _created(request: Request, asked: api.CreateSession) -> LiveSession:
    hub, principal = hub_of(request), principal_of(request)
    limits = parse_limits(
        memory=asked.memory, timeout=asked.timeout, cpus=asked.cpus, processes=asked.processes, disk=asked.disk,
        undo=asked.undo, versions=asked.versions,
    )  # fmt: skip
    return await hub.service.create_session(
        limits=limits, allowed=_allowed(request, asked), mode=asked.mode, env=asked.env,
        owner=principal.session_owner, keep=asked.keep,
        at_most=None if principal.owner else hub.settings.sessions_per_key,
    )  # fmt: skip


async def _resumed(request: Request, asked: api.CreateSession, session_id: str) -> LiveSession:
    """One that is live already is there: whoever asks twice gets the same; what it may reach is said by the last."""
    service, may_reach = hub_of(request).service, _allowed(request, asked)
    if not may_use(principal_of(request), await service.books(session_id)):
        raise unknown(session_id)
    if service.is_live(session_id):
        session = service.live(session_id)
        session.allow(may_reach)
        return session
    return await service.resume_session(session_id, allowed=may_reach, keep=asked.keep)


def _allowed(request: Request, asked: api.CreateSession) -> AllowList:
    return ceiling.allowed(request, asked.egress, ceiling=hub_of(request).settings.egress)


async def list_all(request: Request) -> Response:
    """All sessions that are yours, the kept ones too."""
    principal, sessions = principal_of(request), await hub_of(request).service.list_sessions()
    return given(request, [info for info in sessions if principal.may_use(info.owner)])


async def show(request: Request) -> Response:
    """One session."""
    hub = hub_of(request)
    return given(request, await hub.service.session_info((await hub.books(request)).session))


async def end(request: Request) -> Response:
    """End a session. Its files and books are deleted, unless keep=true."""
    hub, keep = hub_of(request), truth(request, "keep")
    session_id = (await hub.books(request)).session
    if hub.service.is_live(session_id):
        await hub.end(hub.service.live(session_id), keep=keep)
        await hub.service.journal.wait_written(session_id)
    elif not keep:
        await hub.service.drop_session(session_id)
    return given(request, {})


async def hold(request: Request) -> Response:
    """Hold an attached session: it ends shortly after the last of these connections."""
    hub = hub_of(request)
    session = await hub.live(request)
    return Stream(_holding(hub, session), media_type="text/plain")


async def _holding(hub: Hub, session: LiveSession) -> AsyncGenerator[bytes, None]:
    with hub.holds.held(session):
        while not (session.ended.is_set() or hub.stopping.is_set()):
            yield b"\n"
            await first_of(session.ended, hub.stopping, timeout_s=_BREATH_S)


async def events(request: Request) -> Response:
    """What happens to a session, as it happens."""
    hub = hub_of(request)
    session = await hub.live(request)
    return Stream(life.told(session, hub.stopping, breath_s=_BREATH_S), media_type=api.SSE)


async def first_of(*events: asyncio.Event, timeout_s: float) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


# -- what can be asked of one --------------------------------------------------------------------------------------


async def reset(request: Request) -> Response:
    """Purge memory, end processes, wipe the namespace. Files stay."""
    hub = hub_of(request)
    session = await hub.live(request)
    hub.runs.interrupt(session)
    await session.reset()
    return given(request, await hub.service.session_info(session.id))


async def interrupt(request: Request) -> Response:
    """Ask what runs to end."""
    hub = hub_of(request)
    return given(request, api.Interrupted(interrupted=hub.runs.interrupt(await hub.live(request))))


async def recover(request: Request) -> Response:
    """Where the session stands after a reset, and what to do next. Asking changes nothing."""
    return given(request, await recovery.of_session(await hub_of(request).books(request)))


async def names(request: Request) -> Response:
    """The live variables."""
    return given(request, await (await hub_of(request).live(request)).names())


async def complete(request: Request) -> Response:
    """What could stand at the cursor."""
    session, at = await hub_of(request).live(request), await taken(request, api.AtCursor)
    return given(request, await session.complete(at.code, _cursor(at)))


async def inspect(request: Request) -> Response:
    """What is known about the name at the cursor, by MIME type."""
    session, at = await hub_of(request).live(request), await taken(request, api.AtCursor)
    return given(request, await session.inspect(at.code, _cursor(at), _detail(at)))


def _cursor(at: api.AtCursor) -> int:
    cursor = len(at.code) if at.cursor is None else at.cursor
    if not 0 <= cursor <= len(at.code):
        raise InvalidSetting(f"cursor={cursor} is not in the code", hint=f"0 to {len(at.code)}")
    return cursor


def _detail(at: api.AtCursor) -> int:
    if at.detail not in (0, 1):
        raise InvalidSetting(f"detail={at.detail} is not one", hint="write 0 or 1")
    return at.detail


async def show_manifest(request: Request) -> Response:
    """All files with their SHA-256, as `sha256sum -c` reads it."""
    books = await hub_of(request).books(request)
    return Response(manifest.render(books.state.files), headers=as_download("manifest-sha256.txt"), media_type=PLAIN)


PLAIN = "text/plain; charset=utf-8"


def as_download(name: str) -> dict[str, str]:
    """What a guest wrote is never a page of this server: it is saved, not shown; and if shown, it could do nothing."""
    return {
        "content-disposition": f'attachment; filename="{name}"',
        "content-security-policy": "sandbox; default-src 'none'; frame-ancestors 'none'",
    }
