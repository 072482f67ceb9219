"""The MCP face at /mcp, loaded when somebody first asks for it: importing its SDK takes about a second."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio.to_thread
import msgspec
from starlette.types import Receive, Scope, Send

from holdfast.service import Service

if TYPE_CHECKING:
    from holdfast.server.mcp.http import McpApp


class McpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How this face behaves."""

    idle_s: float = 1800.0
    """A session that nobody asks for anything for so long is ended, and kept."""
    sessions_per_key: int = 100
    """The most sessions of one API key, kept ones too. The server's owner has no such limit."""
    clients: int = 1_000
    """The most clients at once."""
    body_bytes: int = 16 << 20
    """The largest request."""


class LateMcp:
    """An ASGI application. Its sessions end with `close`."""

    def __init__(self, service: Service, settings: McpSettings | None = None) -> None:
        self._service = service
        self._settings = settings or McpSettings()
        self._loading = asyncio.Lock()
        self._app: McpApp | None = None
        self._running: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (await self._loaded())(scope, receive, send)

    async def stop(self, grace_s: float, *, at_once: Callable[[], bool] = lambda: False) -> None:
        """No new calls; those under way have so long to end. What still runs at `close` is interrupted."""
        if self._app is not None:
            await self._app.stop(grace_s, at_once=at_once)

    async def close(self) -> None:
        self._closing.set()
        if self._running is not None:
            await self._running

    async def _loaded(self) -> "McpApp":
        async with self._loading:
            if self._app is None:
                app = await anyio.to_thread.run_sync(self._load)
                entered = asyncio.Event()
                self._running = asyncio.create_task(self._run(app, entered))
                await entered.wait()
                self._app = app
            return self._app

    def _load(self) -> "McpApp":
        from holdfast.server.mcp.http import McpApp

        return McpApp(self._service, self._settings)

    async def _run(self, app: "McpApp", entered: asyncio.Event) -> None:
        """One task enters it and leaves it."""
        async with app.run():
            entered.set()
            await self._closing.wait()
