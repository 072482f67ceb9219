"""MCP over streamable HTTP: an ASGI application that a server mounts at `/mcp`, behind its door.

1. A session belongs to who asks (`scope["state"]["principal"]`) and a name: `?session=NAME` of the address, or else the
   name by which the client introduces itself. So whoever comes back finds his session: after a broken connection, with
   a new MCP session, with a protocol that has no sessions at all, after a restart of the server.
2. A session that nobody has asked for anything for a while is ended, and kept: it then comes back with its files.
3. Nothing runs on unattended: a client that goes away while its code runs has it interrupted and settled.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import anyio.to_thread
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, AuthorizationContext
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from holdfast.access import OWNER_ID, Principal
from holdfast.config import Limits, parse_limits
from holdfast.errors import ServerStopping, SessionUnknown, TooManySessions
from holdfast.server.mcp import tools
from holdfast.server.mcp.answers import Answer
from holdfast.server.mcp.desk import Desk, Seat, T, Verb
from holdfast.server.mcp.late import McpSettings
from holdfast.server.mcp.names import BEGAN_ANEW, CAME_BACK, Named
from holdfast.server.mcp.progress import Progress
from holdfast.server.mcp.protocol import Context, mcp_server
from holdfast.service import Service
from holdfast.sessions import LiveSession
from holdfast.transports.embedded import Embedded

_UNNAMED = "mcp"
"""The session of a client that does not introduce itself."""
_LOOKS = 4
"""How often in the time of its patience the reaper looks."""
_KEYS = 4
"""So many keys at least can have an MCP session at once, whatever each of them does."""
_LEFT = "holdfast.left"
"""In a request's scope: the event that nobody reads its answer any more."""
Key = tuple[str, str]
"""Who asks, and for which of his sessions."""


class McpApp:
    """An ASGI application. It works while its `run` is entered."""

    def __init__(self, service: Service, settings: McpSettings) -> None:
        self._desks = _Desks(service, settings)
        self._manager = _Conversations(
            mcp_server(self._desks.attend),
            session_idle_timeout=settings.idle_s,
            max_request_body_size=settings.body_bytes,
            max_sessions=settings.clients,
        )

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """While the server answers; entered and left by one task. Then every session is ended, and kept."""
        async with self._manager.run(), anyio.create_task_group() as tasks:
            tasks.start_soon(self._desks.reap)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await self._desks.close()

    async def stop(self, grace_s: float, *, at_once: Callable[[], bool] = lambda: False) -> None:
        """No new calls; those under way have so long to end. What still runs when `run` is left is interrupted."""
        self._desks.stopping = True
        give_up_at = time.monotonic() + grace_s
        while (calls := self._desks.calls) and time.monotonic() < give_up_at and not at_once():
            await asyncio.wait(calls, timeout=0.1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = anyio.Event()
        # So that the SDK lets nobody into an MCP session but who began it.
        who = AuthenticatedUser(AccessToken(token="", client_id=_principal(scope).id, scopes=[]))
        try:
            await self._manager.handle_request({**scope, "user": who, _LEFT: left}, receive, send)
        finally:
            left.set()


class _Conversations(StreamableHTTPSessionManager):
    """The SDK's, where no key can fill the room of all, and the owner always has some."""

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        owner = requestor is not None and requestor["client_id"] == OWNER_ID
        room, self.max_sessions = self.max_sessions, None if owner else self.max_sessions
        try:
            if room is not None and not owner and self._begun_by(requestor) >= max(1, room // _KEYS):
                return None
            return super()._admit_session(requestor)
        finally:
            self.max_sessions = room

    def _begun_by(self, requestor: AuthorizationContext | None) -> int:
        return sum(other == requestor for other in self._session_owners.values())


class _Desks:
    """A desk for each client. All of it lives in the server's event loop."""

    def __init__(self, service: Service, settings: McpSettings) -> None:
        self._service = service
        self._settings = settings
        self._desks: dict[Key, Desk] = {}
        self._sessions: dict[Key, LiveSession] = {}
        """What the desks have opened."""
        self._ending: dict[Key, asyncio.Task[None]] = {}
        self.calls: set[asyncio.Task[object]] = set()
        """Under way."""
        self.stopping = False

    async def attend(self, context: Context, call: tools.Call, progress: Progress | None) -> Answer:
        """A call, for as long as somebody waits for its answer."""
        request: Request = context.request  # type: ignore[assignment]  # what came over HTTP has one
        desk, left = self._desk(request, context), request.scope[_LEFT]
        answer = Answer(text="the client is gone", facts={}, refused=True)
        with self._counted():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_after, left, tasks.cancel_scope)
                answer = await desk.answer(call, progress)
                tasks.cancel_scope.cancel()
        return answer

    @contextmanager
    def _counted(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self.calls.add(task)
        try:
            yield
        finally:
            self.calls.discard(task)

    def _desk(self, request: Request, context: Context) -> Desk:
        if self.stopping:
            raise ServerStopping("the server is stopping", hint="send it again when it is back")
        principal = _principal(request.scope)
        key = (principal.id, _name(request, context))
        if key not in self._desks:
            self._refuse_if_crowded(principal)
            limits = _limits(request.query_params)
            self._desks[key] = Desk(lambda: self._open(principal, key, limits))
        return self._desks[key]

    def _refuse_if_crowded(self, principal: Principal) -> None:
        if principal.owner:  # the machine is his
            return
        own = sum(owner == principal.id for owner, _ in self._desks)
        if own >= self._settings.sessions_per_key:
            raise TooManySessions(f"{own:,} of your clients are here already", hint="end one of them")
        if len(self._desks) >= self._settings.clients:
            raise TooManySessions(f"{len(self._desks):,} clients are here already", hint="try again later")

    async def reap(self) -> None:
        """End the sessions of clients that are gone."""
        while True:
            await anyio.sleep(self._settings.idle_s / _LOOKS)
            for key in [key for key in self._desks if self._idle_s(key) > self._settings.idle_s]:
                self._ending[key] = asyncio.create_task(self._end(key, self._desks.pop(key)))

    def _idle_s(self, key: Key) -> float:
        """Its client may use the session by another face as well."""
        session = self._sessions.get(key)
        return self._desks[key].idle_s if session is None else min(self._desks[key].idle_s, session.idle_s)

    async def close(self) -> None:
        while self._desks:
            key, desk = self._desks.popitem()
            self._ending[key] = asyncio.create_task(self._end(key, desk))
        await asyncio.gather(*self._ending.values(), return_exceptions=True)

    async def _end(self, key: Key, desk: Desk) -> None:
        try:
            await desk.close()
        finally:
            self._ending.pop(key, None)
            if key not in self._desks:
                self._sessions.pop(key, None)

    async def _open(self, principal: Principal, key: Key, limits: Limits) -> Seat:
        if (ending := self._ending.get(key)) is not None:  # whoever comes back at that very moment
            await asyncio.wait([ending])
        named = Named(self._service.home.path, key[1], owner=key[0])
        known = named.session()
        if (seat := await self._back(known)) is not None:
            self._sessions[key] = seat.session
            return seat
        session = await self._service.create_session(
            limits=limits, mode="notebook", owner="" if principal.owner else principal.id, keep=True,
            at_most=None if principal.owner else self._settings.sessions_per_key,
        )  # fmt: skip
        await anyio.to_thread.run_sync(named.remember, session.id)
        self._sessions[key] = session
        return _Here(self._service, session, remark="" if known is None else BEGAN_ANEW)

    async def _back(self, known: str | None) -> "_Here | None":
        """The session that the name had, if it is still there."""
        if known is None:
            return None
        if self._service.is_live(known):  # another face brought it back: theirs to end
            return _Here(self._service, self._service.live(known), ends=False)
        try:
            session = await self._service.resume_session(known, keep=True)
        except SessionUnknown:
            return None
        return _Here(self._service, session, remark=CAME_BACK)


class _Here:
    """A session of this very event loop."""

    def __init__(self, service: Service, session: LiveSession, *, remark: str = "", ends: bool = True) -> None:
        self.session = session
        self._reached = Embedded(service, session)
        self._ends = ends
        self.remark = remark

    async def do(self, verb: Verb[T]) -> T:
        return await verb(self._reached)

    async def close(self) -> None:
        if self._ends:
            await self._reached.close(keep=True)

    async def leave(self) -> None:
        """Nothing is left to let go of."""


async def _cancel_after(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _principal(scope: Scope) -> Principal:
    principal: Principal = scope["state"]["principal"]
    return principal


def _name(request: Request, context: Context) -> str:
    """Which of his sessions is meant."""
    if (named := request.query_params.get("session")) is not None:
        return named
    client = context.session.client_params
    return (client.client_info.name if client else "") or _UNNAMED


def _limits(query: QueryParams) -> Limits:
    """What a new session may use, as the address has it: `?memory=2G&timeout=5m`."""
    usual = Limits()
    return parse_limits(
        memory=query.get("memory", usual.memory_bytes), timeout=query.get("timeout"),
        disk=query.get("disk", usual.disk_bytes), versions=query.get("versions", usual.versions),
    )  # fmt: skip
