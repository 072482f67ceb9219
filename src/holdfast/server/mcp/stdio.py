"""`holdfast mcp`: one session for one MCP client, over stdin and stdout.

The session is one at the home's own server, which is started if need be: any number of clients use a home at once. It
ends with its client (end of input) or when it is told to (SIGTERM, SIGHUP, Ctrl-C): what runs is given up and settled,
the session is ended or kept, and only then is the client's pipe let go. A server that nobody uses ends by itself.
"""

import asyncio
import signal
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from holdfast import engine
from holdfast.client import AsyncSession
from holdfast.config import home_path
from holdfast.errors import SessionUnknown
from holdfast.server.mcp.desk import Desk, Open, T, Verb
from holdfast.server.mcp.names import BEGAN_ANEW, CAME_BACK, Named, first_free
from holdfast.server.mcp.protocol import mcp_server
from holdfast.server.mcp.streams import client_streams

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(settings: dict[str, Any], *, keep: bool = False, name: str | None = None) -> int:
    """Until the client is gone; returns the exit code. `settings` are those of `AsyncSession`."""
    return asyncio.run(_serve(Desk(opening(settings, keep=keep, name=name), timeout=settings.get("timeout"))))


def opening(settings: dict[str, Any], *, keep: bool = False, name: str | None = None) -> Open:
    """How the session is opened: a new one, the one that `settings["resume"]` names, or that of a name. Opened again,
    for its server was gone, it is the one that it was."""
    had = settings.get("resume")

    async def open_seat() -> _Own:
        nonlocal had
        if name is not None:
            return await _open_named(settings, first_free(_home(settings), name))
        session, remark = await _back_or_new(settings, had, keep=keep)
        had = session.id
        return _Own(session, keep=keep, remark=remark)

    return open_seat


async def _open_named(settings: dict[str, Any], named: Named) -> "_Own":
    try:
        session, remark = await _back_or_new(settings, named.session(), keep=True)
        await anyio.to_thread.run_sync(named.remember, session.id)
    except BaseException:
        named.let_go()
        raise
    return _Own(session, keep=True, remark=remark, named=named)


async def _back_or_new(settings: dict[str, Any], known: str | None, *, keep: bool) -> tuple[AsyncSession, str]:
    """The session that the client had, if it is still there; and what he has to know."""
    if known is None:
        return await _opened(settings, keep=keep), ""
    try:
        return await _opened({**settings, "resume": known}, keep=keep), CAME_BACK
    except SessionUnknown:
        if known == settings.get("resume"):
            raise  # that very one was asked for
        return await _opened(settings, keep=keep), BEGAN_ANEW


async def _opened(settings: dict[str, Any], *, keep: bool) -> AsyncSession:
    return await AsyncSession(**settings, keep=keep).open()


def _home(settings: dict[str, Any]) -> Path:
    return home_path(settings.get("home"))


class _Own:
    """A session of the Python API: its verbs are carried out in the engine's event loop."""

    def __init__(self, session: AsyncSession, *, keep: bool, remark: str, named: Named | None = None) -> None:
        self._session = session
        self._keep = keep
        self._named = named
        self.remark = remark

    async def do(self, verb: Verb[T]) -> T:
        return await self._session._do(verb)

    async def close(self) -> None:
        await self._close(keep=self._keep)

    async def leave(self) -> None:
        await self._close(keep=True)

    async def _close(self, *, keep: bool) -> None:
        try:
            await self._session.close(keep=keep)
        finally:
            if self._named is not None:
                self._named.let_go()


async def _serve(desk: Desk) -> int:
    ended_by: list[int] = []
    server = mcp_server(lambda _, call, progress: desk.answer(call, progress))
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch_signals, tasks.cancel_scope, ended_by)
            async with client_streams() as (read, write):
                try:
                    desk.open_ahead()
                    await server.run(read, write, server.create_initialization_options())
                finally:
                    with anyio.CancelScope(shield=True):
                        await _end(desk)
            tasks.cancel_scope.cancel()
    except* BrokenPipeError:  # a client that is gone has nothing more to hear
        pass
    return 128 + ended_by[0] if ended_by else 0


async def _end(desk: Desk) -> None:
    try:
        await desk.close()
    finally:
        await anyio.to_thread.run_sync(engine.shut_down)


async def _watch_signals(scope: anyio.CancelScope, ended_by: list[int]) -> None:
    with anyio.open_signal_receiver(*_ENDING) as signals:
        async for number in signals:
            ended_by.append(number)
            scope.cancel()
