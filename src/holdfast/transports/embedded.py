"""A session of this process."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, BinaryIO

from holdfast import verbs, workfiles
from holdfast.api import SessionInfo
from holdfast.config import parse_seconds
from holdfast.expectations import PathLike
from holdfast.kernel.conduct import Ask, Emit
from holdfast.model import Completions, HistoryEntry, Name, Recovery, Run, StreamName
from holdfast.records import FileEntry, RunCard
from holdfast.requests import RunRequest
from holdfast.service import Service
from holdfast.sessions import LiveSession
from holdfast.verbs import RunOptions
from holdfast.workfiles import Written


class Embedded:
    """Each verb is one call; see `Transport`."""

    def __init__(self, service: Service, session: LiveSession) -> None:
        self._service = service
        self._session = session
        self.id = session.id

    @property
    def generation(self) -> int:
        return self._session.generation

    @property
    def version(self) -> int:
        return self._session.books.state.version

    @property
    def ckpt(self) -> str:
        return str(self._session.books.state.ckpt())

    async def info(self) -> SessionInfo:
        return await self._service.session_info(self.id)

    async def run(
        self, code: str | RunCard, options: RunOptions, *, emit: Emit | None = None, ask: Ask | None = None
    ) -> Run:
        return await verbs.run(self._session, self._request(code, options), emit=emit, ask=ask)

    async def plan(self, code: str, options: RunOptions) -> RunCard:
        return await verbs.plan(self._session, self._request(code, options))

    async def shell(self, command: str, *, timeout: float | str | None, emit: Emit | None = None) -> Run:
        return await verbs.shell(self._session, command, timeout_s=self._timeout_s(timeout), emit=emit)

    async def files(self) -> list[FileEntry]:
        return workfiles.list_files(self._session)

    def read(self, path: PathLike) -> AsyncGenerator[bytes, None]:
        return verbs.read(self._session, path)

    async def write(self, path: PathLike, source: BinaryIO) -> Written:
        return await workfiles.write(self._session, path, source)

    async def remove(self, path: PathLike) -> Written:
        return await workfiles.remove(self._session, path)

    async def restore(self, ckpt: str) -> Written:
        return await workfiles.restore(self._session, ckpt)

    async def recover(self) -> Recovery:
        return await verbs.recover(self._session)

    async def history(self, *, limit: int) -> list[HistoryEntry]:
        return await verbs.history(self._session, limit=limit)

    async def code(self, run: str) -> str:
        return await verbs.code(self._session, run)

    async def names(self) -> dict[str, Name]:
        return await self._session.names()

    async def complete(self, code: str, cursor: int) -> Completions:
        return await self._session.complete(code, cursor)

    async def inspect(self, code: str, cursor: int, *, detail: int) -> dict[str, str | bytes]:
        return await self._session.inspect(code, cursor, detail)

    async def output(self, run: str, stream: StreamName) -> bytes:
        return await self._session.output(run, stream)

    async def interrupt(self, *, caller: "asyncio.Task[Any] | None" = None) -> bool:
        return self._session.interrupt(caller=caller)

    async def reset(self) -> None:
        await self._session.reset()

    async def close(self, *, keep: bool) -> None:
        await self._service.end_session(self._session, keep=keep)

    def _request(self, code: str | RunCard, options: RunOptions) -> RunRequest:
        return verbs.request(self._session, code, options, timeout_s=self._timeout_s(options.get("timeout")))

    def _timeout_s(self, timeout: float | str | None) -> float:
        return self._session.limits.timeout_s if timeout is None else parse_seconds(timeout, name="timeout")
