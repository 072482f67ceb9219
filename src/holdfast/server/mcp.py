"""`holdfast mcp`: one session for one MCP client, over stdin and stdout.

It ends with its client (end of input) or when it is told to (SIGTERM, SIGHUP, Ctrl-C): what runs is given up and rolled
back, the session is ended, and no process is left. Only then is the client's pipe let go.
"""

import asyncio
import base64
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.types import (
    CallToolRequestParams,
    CallToolResult,
    ContentBlock,
    ImageContent,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
)

from holdfast import __version__, engine
from holdfast.client import AsyncSession
from holdfast.errors import HoldfastError
from holdfast.expectations import Declared
from holdfast.server import answers, tools
from holdfast.server.answers import Answer, Standing
from holdfast.server.stdio import client_streams
from holdfast.watching import OnText

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PROGRESS_S = 0.2
"""At most so often is a client told of new output."""
_PROGRESS_CHARACTERS = 4_000
"""Of what is new; the answer has the rest."""
_LATEST_RUNS = 10
_MOST_CODES = 20

Context = ServerRequestContext[dict[str, Any]]
Progress = Callable[[float, str], Awaitable[None]]


def serve(desk: "Desk") -> int:
    """Until the client is gone; returns the exit code."""
    return asyncio.run(_serve(desk))


async def _serve(desk: "Desk") -> int:
    ended_by: list[int] = []
    server = _server(desk)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch_signals, tasks.cancel_scope, ended_by)
            async with client_streams() as (read, write):
                try:
                    desk.open_ahead()
                    await server.run(read, write, server.create_initialization_options())
                finally:
                    with anyio.CancelScope(shield=True):
                        await desk.close()
            tasks.cancel_scope.cancel()
    except* BrokenPipeError:  # a client that is gone has nothing more to hear
        pass
    return 128 + ended_by[0] if ended_by else 0


async def _watch_signals(scope: anyio.CancelScope, ended_by: list[int]) -> None:
    with anyio.open_signal_receiver(*_ENDING) as signals:
        async for number in signals:
            ended_by.append(number)
            scope.cancel()


def _server(desk: "Desk") -> Server[dict[str, Any]]:
    async def list_tools(context: Context, params: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=tools.listed())

    async def call_tool(context: Context, params: CallToolRequestParams) -> CallToolResult:
        async def tell(progress: float, message: str) -> None:
            await context.session.report_progress(progress, message=message)

        wanted = context.meta is not None and "progress_token" in context.meta
        return _encoded(await _answer(desk, params, tell if wanted else None))

    return Server(
        "holdfast",
        version=__version__,
        instructions=tools.INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def _answer(desk: "Desk", params: CallToolRequestParams, progress: Progress | None) -> Answer:
    try:
        match tools.parse(params.name, params.arguments):
            case tools.RunCode() as call:
                return await desk.run_code(call, progress)
            case tools.Status():
                return await desk.status()
            case tools.Recover():
                return await desk.recover()
    except HoldfastError as error:
        return answers.of_error(error)


def _encoded(answer: Answer) -> CallToolResult:
    content: list[ContentBlock] = [TextContent(text=answer.text)]
    content += [
        ImageContent(data=base64.b64encode(figure.data).decode(), mime_type=figure.kind) for figure in answer.figures
    ]
    return CallToolResult(content=content, structured_content=answer.facts, is_error=answer.refused)


class Desk:
    """The server's one session. It is opened ahead of the first call; if that fails, each call tries again."""

    def __init__(self, settings: dict[str, Any], *, keep: bool = False) -> None:
        """`settings` are those of `AsyncSession`."""
        self._settings = settings
        self._keep = keep
        self._opening = asyncio.Lock()
        self._session: AsyncSession | None = None
        self._ahead: asyncio.Task[AsyncSession] | None = None

    def open_ahead(self) -> None:
        """While the client introduces itself."""
        self._ahead = asyncio.create_task(self._opened())

    async def _opened(self) -> AsyncSession:
        async with self._opening:
            if self._session is None:
                self._session = await AsyncSession(**self._settings).open()
            return self._session

    async def close(self) -> None:
        """End the session and all that it was made of."""
        if self._ahead is not None:
            await _ended(self._ahead)  # had it failed, each call was told
        session, self._session = self._session, None
        try:
            if session is not None:
                await session.close(keep=self._keep)
        finally:
            await anyio.to_thread.run_sync(engine.shut_down)

    async def run_code(self, call: tools.RunCode, progress: Progress | None) -> Answer:
        session = await self._opened()
        async with _passing_on(progress) as hear:
            run = await session.run(
                call.code, on_stdout=hear, on_stderr=hear, mode="notebook", timeout=call.timeout, key=call.key,
                expect=call.expect, outputs=_declared(call),
            )  # fmt: skip
        return answers.of_run(run)

    async def status(self) -> Answer:
        session = await self._opened()
        names, files = await session.names(), await session.files()
        return answers.of_standing(
            Standing(
                session=session.id, ckpt=session.ckpt, version=session.version, generation=session.generation,
                names=names, files=files, runs=await session.history(_LATEST_RUNS),
            )
        )  # fmt: skip

    async def recover(self) -> Answer:
        session = await self._opened()
        recovery = await session.recover()
        again = [step.run for step in recovery.steps if step.action == "rerun"][:_MOST_CODES]
        return answers.of_recovery(recovery, {run: await session.code(run) for run in again})


def _declared(call: tools.RunCode) -> Declared:
    if isinstance(call.outputs, dict):
        return {path: terms for path, terms in call.outputs.items()}
    return call.outputs or []


@asynccontextmanager
async def _passing_on(progress: Progress | None) -> AsyncIterator[OnText | None]:
    """What hears the output; nothing if nobody wants to know."""
    if progress is None:
        yield None
        return
    told = _Told()
    passing = asyncio.create_task(told.pass_on(progress))
    try:
        yield told.hear
    finally:
        await _ended(passing)


async def _ended(task: "asyncio.Task[Any]") -> None:
    """Cancelled, and whatever it had to say passed over."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class _Told:
    """Output on its way to a client that wants to see it come. It is heard in the engine's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._new = asyncio.Event()
        self._waiting = ""
        self._heard = 0

    def hear(self, text: str) -> None:
        self._loop.call_soon_threadsafe(self._add, text)

    def _add(self, text: str) -> None:
        self._heard += len(text)
        self._waiting = (self._waiting + text)[-_PROGRESS_CHARACTERS:]
        self._new.set()

    async def pass_on(self, progress: Progress) -> None:
        while await self._new.wait():
            self._new.clear()
            text, self._waiting = self._waiting, ""
            await progress(float(self._heard), text)
            await anyio.sleep(_PROGRESS_S)
