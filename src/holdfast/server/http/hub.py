"""What the HTTP face knows beside the service: who may see what, which runs go on, which sessions are held."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
from starlette.requests import Request

from holdfast.access import Principal
from holdfast.books import Books
from holdfast.egress.allowed import AllowList
from holdfast.errors import SessionClosed
from holdfast.server.doors.metrics import Gauges, Metrics
from holdfast.server.http.running import Runs
from holdfast.server.http.uploads import Uploads
from holdfast.service import Service, unknown
from holdfast.sessions import LiveSession


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How this face behaves."""

    grace_s: float = 5.0
    """How long a client that was cut off has to come back to its run."""
    hold_grace_s: float = 5.0
    """How long an attached session lives on without a hold."""
    first_hold_s: float = 30.0
    """How long a new attached session waits for its first hold."""
    sessions_per_key: int = 100
    """The most sessions of one API key, kept ones too. The server's owner has no such limit."""
    egress: AllowList = AllowList()
    """The most that clients may have their sessions reach."""


class Hub:
    """The state of the face. All of it lives in one event loop."""

    def __init__(self, service: Service, settings: HttpSettings) -> None:
        self.service = service
        self.settings = settings
        self.metrics = Metrics(self._gauges)
        self.runs = Runs(self.metrics, grace_s=settings.grace_s)
        self.holds = Holds(self.end, settings)
        self.uploads = Uploads()
        self.stopping = asyncio.Event()
        """Streams that would go on for ever end now."""

    # -- sessions, for who may see them --------------------------------------------------------------------------

    async def books(self, request: Request) -> Books:
        """Of the session that a request names, live or kept."""
        books = await self.service.books(session_id := request.path_params["id"])
        if not may_use(principal_of(request), books):
            raise unknown(session_id)
        return books

    async def live(self, request: Request) -> LiveSession:
        """The same, if it has a kernel."""
        session_id = request.path_params["id"]
        if not self.service.is_live(session_id):
            await self.books(request)
            raise SessionClosed(
                f"session {session_id} is kept, and has no kernel",
                hint='bring it back: POST /v1/sessions {"resume": …}',
            )
        session = self.service.live(session_id)
        if not may_use(principal_of(request), session.books):
            raise unknown(session_id)
        session.asked_at = time.monotonic()
        return session

    async def end(self, session: LiveSession, *, keep: bool) -> None:
        """A run that waits for its readers is not waited for."""
        self.runs.interrupt(session)
        await self.service.end_session(session, keep=keep)

    def _gauges(self) -> Gauges:
        sessions = self.service.live_sessions
        return Gauges(
            sessions=len(sessions), kernels=sum(session.computer.now is not None for session in sessions),
            memory_bytes=sum(session.memory_bytes() or 0 for session in sessions),
        )  # fmt: skip


def hub_of(request: Request) -> Hub:
    hub: Hub = request.app.state.hub
    return hub


def principal_of(request: Request) -> Principal:
    principal: Principal = request.scope["state"]["principal"]
    return principal


def may_use(principal: Principal, books: Books) -> bool:
    return principal.may_use(str(books.row.settings.get("owner") or ""))


class End(Protocol):
    """Ends a session."""

    def __call__(self, session: LiveSession, *, keep: bool) -> Coroutine[Any, Any, None]: ...


class Holds:
    """An attached session lives while somebody holds it."""

    def __init__(self, end: "End", settings: HttpSettings) -> None:
        self._end_session = end
        self._settings = settings
        self._held: dict[LiveSession, int] = {}
        """Not by id: one that was kept and is resumed is another session with the same."""
        self._timers: dict[LiveSession, asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    def attach(self, session: LiveSession) -> None:
        """From now on it ends without a hold."""
        if session not in self._held:
            self._held[session] = 0
            self._end_in(self._settings.first_hold_s, session)

    @contextmanager
    def held(self, session: LiveSession) -> Iterator[None]:
        if session not in self._held:  # it was not made to end with its clients
            yield
            return
        self._held[session] += 1
        self._keep_on(session)
        try:
            yield
        finally:
            self._held[session] -= 1
            if not self._held[session]:
                self._end_in(self._settings.hold_grace_s, session)

    def _end_in(self, seconds: float, session: LiveSession) -> None:
        self._keep_on(session)
        if self._closed:
            return
        self._timers[session] = asyncio.get_running_loop().call_later(seconds, self._end, session)

    def _keep_on(self, session: LiveSession) -> None:
        if (timer := self._timers.pop(session, None)) is not None:
            timer.cancel()

    def _end(self, session: LiveSession) -> None:
        del self._timers[session], self._held[session]
        keep = bool(session.books.row.settings.get("keep"))
        task = asyncio.create_task(self._end_session(session, keep=keep))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Sessions then end with the service."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._ending:
            await asyncio.wait(self._ending)
