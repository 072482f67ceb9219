"""`holdfast serve`: one process, one event loop, in which the home is open and its sessions are served.

    open       the home is ours; sockets are bound; requests are answered, while the environment is warmed
    serve      until SIGTERM or SIGINT; or, on demand, until nobody has needed us for a while
    stop       no new runs; those under way finish, or are given up when the grace is over (a second signal: at once)
    close      sessions end (kept if they are to be), then every process, mount, cgroup and socket of ours is gone

SIGKILL takes the way of every crash: the keeper ends what runs, and the next owner settles it from the journal.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from socket import AF_INET6, AF_UNIX, socket
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp

from holdfast.access import Access, KeyRing
from holdfast.config import Settings
from holdfast.environments import Report
from holdfast.errors import KeeperLost
from holdfast.home import SOCKET
from holdfast.opening import open_service
from holdfast.server.doors import DoorSettings, Hosts, Limits, guarded
from holdfast.server.doors.connections import Patience, uvicorn_options
from holdfast.server.http.app import application
from holdfast.server.http.hub import HttpSettings, Hub
from holdfast.server.listening import listen_tcp, listen_unix
from holdfast.server.mcp.late import LateMcp, McpSettings
from holdfast.service import Service

_LAST_ANSWERS_S = 5
"""How long answers that are under way have to leave when all runs are over."""
_TICK_S = 0.25


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `holdfast serve` was asked for."""

    home: Settings
    host: str = "127.0.0.1"
    port: int | None = 8765
    """None: no TCP at all."""
    uds: Path | None = None
    """One more socket beside the home's own."""
    token: str | None = None
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    stop_grace_s: float = 30.0
    """How long runs may go on when the server is told to stop."""
    idle_s: float | None = None
    """End by itself when there was no session and no connection for so long; None: never."""
    mcp_idle_s: float = McpSettings().idle_s
    """How long the session of an MCP client lives on that asks for nothing; then it is ended, and kept."""
    http: HttpSettings = HttpSettings()


class Ready(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a server is."""

    url: str
    token: str
    socket: str
    pid: int


class Stop:
    """Told by signals, or by nobody's need."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = False

    def ask(self) -> None:
        self.at_once = self.asked.is_set()
        self.asked.set()


async def serve(
    settings: ServeSettings,
    *,
    reporting: Callable[[], AbstractContextManager[Report]],
    on_ready: Callable[[Service, str, str], None],
) -> None:
    """All of it, in order. `reporting` shows how far the environment is; `on_ready` gets the service, the address and
    the token."""
    stop = Stop()
    with _signals(stop), ExitStack() as sockets:
        service = await open_service(settings.home)
        try:
            listening, url = _listen(settings, service, sockets)
            hub = Hub(service, settings.http)
            wanted = McpSettings(idle_s=settings.mcp_idle_s, sessions_per_key=settings.http.sessions_per_key)
            mcp = LateMcp(service, wanted)
            access = Access(KeyRing(service.home.keys), token=settings.token)
            app = application(hub, mcp=mcp)
            async with _answering(settings, hub, app, access, listening) as server:
                server.on_end(stop.ask)
                try:
                    with reporting() as report:
                        await _unless_stopped(stop, service.prepare(report=report))
                    if not stop.asked.is_set():
                        on_ready(service, url, access.token)
                    async with _ends_beyond_help(service, stop):
                        await _until_unneeded(settings, hub, server, stop)
                finally:
                    await _wind_down(settings, hub, mcp, stop)
                    await mcp.close()
        finally:
            await service.close()


def _listen(settings: ServeSettings, service: Service, stack: ExitStack) -> tuple[list[socket], str]:
    own = service.home.path / SOCKET
    own.unlink(missing_ok=True)  # we own the home: whoever listened there is gone
    listening = [stack.enter_context(listen_unix(own))]
    if settings.uds is not None:
        listening.append(stack.enter_context(listen_unix(settings.uds)))
    if settings.port is None:
        return listening, f"unix:{own}"
    tcp = stack.enter_context(listen_tcp(settings.host, settings.port))
    host, port = f"[{settings.host}]" if tcp.family == AF_INET6 else settings.host, tcp.getsockname()[1]
    return [*listening, tcp], f"http://{host}:{port}"


@asynccontextmanager
async def _answering(
    settings: ServeSettings, hub: Hub, app: ASGIApp, access: Access, listening: list[socket]
) -> AsyncIterator["Server"]:
    """While the block lasts; then no new connection, and the last answers leave."""
    limits = Limits(upload_bytes=lambda session: _upload_bytes(hub.service, session))
    tcp = [each for each in listening if each.family != AF_UNIX]
    hosts = Hosts(
        names=(*_names(settings.host), *settings.allow_hosts), port=tcp[0].getsockname()[1] if tcp else None,
        origins=settings.allow_origins,
    )  # fmt: skip
    door = guarded(app, DoorSettings(access=access, hosts=hosts, limits=limits, metrics=hub.metrics))
    config = uvicorn.Config(
        door, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=_LAST_ANSWERS_S,
        **uvicorn_options(Patience(), header_bytes=limits.header_bytes),
    )  # fmt: skip
    server = Server(config)
    server.answering = asyncio.create_task(server.serve(sockets=listening))
    try:
        yield server
    finally:
        server.should_exit = True
        await server.answering


class Server(uvicorn.Server):
    """uvicorn's, where signals are ours to handle."""

    answering: asyncio.Task[None]

    def on_end(self, told: Callable[[], None]) -> None:
        """Should it end by itself, which it does only if something is wrong."""
        self.answering.add_done_callback(lambda _: told())

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @property
    def connections(self) -> int:
        return len(self.server_state.connections)


def _names(host: str) -> tuple[str, ...]:
    """One that means every address is no name: such a server is told its names by --allow-host."""
    return () if host in ("0.0.0.0", "::", "") else (f"[{host}]" if ":" in host else host,)  # noqa: S104 (compared)


def _upload_bytes(service: Service, session: str) -> int:
    return service.live(session).limits.disk_bytes if service.is_live(session) else 1 << 20


# -- the end -------------------------------------------------------------------------------------------------------


@contextmanager
def _signals(stop: Stop) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop.ask)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _unless_stopped(stop: Stop, work: Coroutine[Any, Any, None]) -> None:
    """Work that may take minutes, given up when we are told to stop."""
    working, stopped = asyncio.create_task(work), asyncio.create_task(stop.asked.wait())
    try:
        await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working


@asynccontextmanager
async def _ends_beyond_help(service: Service, stop: Stop) -> AsyncIterator[None]:
    """A server whose keeper ended, and that cannot start another one, does nothing useful any more: it ends with an
    error, so that a supervisor starts another server."""
    beyond_help = service.node.beyond_help
    waiting = asyncio.create_task(beyond_help.wait())
    waiting.add_done_callback(lambda _: stop.ask() if beyond_help.is_set() else None)
    try:
        yield
    finally:
        waiting.cancel()
    if beyond_help.is_set():
        raise KeeperLost(
            "the keeper ended, and no other could be started: this server can run no code",
            hint="see logs/keeper.log in the home, run `holdfast doctor`, and start the server again",
        )


async def _until_unneeded(settings: ServeSettings, hub: Hub, server: Server, stop: Stop) -> None:
    needed_at = time.monotonic()
    while not stop.asked.is_set():
        if settings.idle_s is None:
            await stop.asked.wait()
            return
        if server.connections or hub.service.live_sessions:
            needed_at = time.monotonic()
        if time.monotonic() - needed_at >= settings.idle_s:
            return
        try:
            await asyncio.wait_for(stop.asked.wait(), _TICK_S)
        except TimeoutError:
            continue


async def _wind_down(settings: ServeSettings, hub: Hub, mcp: LateMcp, stop: Stop) -> None:
    """No new work, and the work that is under way to its end."""
    hub.stopping.set()
    async with asyncio.TaskGroup() as faces:
        for face in (hub.runs, mcp):
            faces.create_task(face.stop(settings.stop_grace_s, at_once=lambda: stop.at_once))
    await hub.holds.close()
