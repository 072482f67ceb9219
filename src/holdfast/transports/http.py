"""A session at a server. See `following.py` for runs, `connection.py` for how the server is reached.

What the session's state is (`version`, `ckpt`, `generation`) is known from the latest answer: nobody is asked for it.
"""

import asyncio
import hashlib
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, BinaryIO
from urllib.parse import quote

import anyio
import anyio.lowlevel
import anyio.to_thread
import httpx2

from holdfast import api, expectations, paths, verbs
from holdfast.ckpt import parse
from holdfast.config import Limits, parse_seconds
from holdfast.errors import HoldfastError, InvalidSetting, RateLimited, SessionClosed, SessionUnknown, VerifyFailed
from holdfast.expectations import Declared, PathLike
from holdfast.kernel.conduct import Ask, Emit
from holdfast.model import Completions, HistoryEntry, Name, Recovery, Run, StreamName
from holdfast.records import FileEntry, RunCard
from holdfast.requests import check_text
from holdfast.sessions import checked_id
from holdfast.transports.connection import Connection, decode
from holdfast.transports.following import Follower
from holdfast.verbs import RunOptions
from holdfast.workfiles import Written

_PIECE_BYTES = 1 << 20
_TIMEOUT_S = Limits().timeout_s
_HOLD_AGAIN_S = (0.1, 0.2, 0.4, 0.8, 1.0, 5.0)
_MOST_PLANS = 1_000
_LAST_WORDS_S = 5.0
_UPLOAD = {"accept": api.MSGPACK, "content-type": api.BYTES}


async def open_session(connection: Connection, wanted: api.CreateSession) -> "Remote":
    """A session at a server. An attached one is held from now on, and ends with this process however that ends."""
    doubt = "whether it began a session is not known"
    with anyio.CancelScope(shield=True):  # who goes away meanwhile must not leave a session that nobody knows
        try:
            info = await connection.ask("POST", "/v1/sessions", api.SessionInfo, body=wanted, doubt=doubt)
        except BaseException:
            await connection.close()
            raise
    session = Remote(connection, info, keep=wanted.keep, attached=wanted.attached)
    try:
        await anyio.lowlevel.checkpoint_if_cancelled()
    except BaseException:
        with anyio.CancelScope(shield=True), suppress(HoldfastError):
            await (session.leave() if wanted.resume else session.close(keep=False))
        raise
    return session


class Remote:
    """Each verb is one question; see `Transport`."""

    def __init__(self, connection: Connection, info: api.SessionInfo, *, keep: bool, attached: bool) -> None:
        self.id = info.id
        self.generation, self.version, self.ckpt = info.generation, info.version, info.ckpt
        self._connection = connection
        self._keep = keep
        self._at = f"/v1/sessions/{info.id}"
        self._following: dict[asyncio.Task[Any] | None, Follower] = {}
        """By who waits for it."""
        self._followed = asyncio.Event()
        self._used_up: deque[str] = deque(maxlen=_MOST_PLANS)
        self._holding = asyncio.create_task(self._hold()) if attached else None

    # -- runs ------------------------------------------------------------------------------------------------------

    async def run(
        self, code: str | RunCard, options: RunOptions, *, emit: Emit | None = None, ask: Ask | None = None
    ) -> Run:
        if isinstance(code, RunCard):
            verbs.refuse_beside_plan(options)
            self._use_up(code)
            asked = api.AskedRun(plan=code.run, stdin=ask is not None)
        else:
            asked = _asked(code, options, stdin=ask is not None)
        return await self._follow(asked, emit, ask)

    async def shell(self, command: str, *, timeout: float | str | None, emit: Emit | None = None) -> Run:
        check_text(command)
        if timeout is not None:
            parse_seconds(timeout, name="timeout")
        asked = api.AskedRun(code=command, kind="command", timeout=timeout)
        return await self._follow(asked, emit, None)

    async def plan(self, code: str, options: RunOptions) -> RunCard:
        asked = _asked(code, options)
        return await self._connection.ask("POST", f"{self._at}/plans", RunCard, body=asked)

    def _use_up(self, card: RunCard) -> None:
        """A server that is asked for the same plan again takes it for a retry; within one call it is one."""
        if card.run in self._used_up:
            raise InvalidSetting(f"{card.run} is no plan that waits here", hint="plan() again; each plan runs once")
        self._used_up.append(card.run)

    async def _follow(self, asked: api.AskedRun, emit: Emit | None, ask: Ask | None) -> Run:
        follower = Follower(self._connection, self.id, asked, emit=emit, ask=ask)
        caller = asyncio.current_task()
        self._following[caller] = follower
        try:
            run = await follower.follow()
        finally:
            del self._following[caller]
            self._followed.set()
        self._learn(run.generation, run.version, run.ckpt)
        return run

    # -- files -----------------------------------------------------------------------------------------------------

    async def files(self) -> list[FileEntry]:
        return await self._connection.ask("GET", f"{self._at}/files", list[FileEntry])

    async def read(self, path: PathLike) -> AsyncGenerator[bytes, None]:
        """A connection that breaks in the middle is taken up where it broke, if the file is still the same."""
        place, digest, received, whole, etag = self._place(path), hashlib.sha256(), 0, -1, ""
        patience = self._connection.patience()
        while True:
            rest = {"range": f"bytes={received}-", "if-range": etag} if received else {}
            try:
                async with self._connection.stream("GET", place, headers=rest) as response:
                    if received and response.status_code != HTTPStatus.PARTIAL_CONTENT:
                        raise VerifyFailed(f"{path} changed while it was read", hint="read it again")
                    etag = response.headers.get("etag", "")
                    whole = received + int(response.headers.get("content-length", -1))
                    async for piece in response.aiter_raw(_PIECE_BYTES):
                        patience.renew()
                        digest.update(piece)
                        received += len(piece)
                        yield piece
                break
            except httpx2.TransportError as error:
                if received == whole:  # only its end was not heard
                    break
                await patience.wait(error)
            except RateLimited as error:
                await patience.wait_allowed(error)
        _compare(str(path), arrived=digest.hexdigest(), committed=etag.strip('"'))

    async def write(self, path: PathLike, source: BinaryIO) -> Written:
        place, begin, patience = self._place(path), source.tell(), self._connection.patience(_doubt("written", path))
        while True:
            source.seek(begin)
            digest = hashlib.sha256()
            content = _pieces(source, digest)
            try:
                async with self._connection.stream("PUT", place, content=content, headers=_UPLOAD) as response:
                    written = self._learn_written(decode(await response.aread(), Written))
                break
            except httpx2.TransportError as error:
                await patience.wait(error)
            except RateLimited as error:
                await patience.wait_allowed(error)
        for change in written.outputs:
            if change.kind == "file" and change.action != "removed":
                _compare(change.path, arrived=change.sha256, committed=digest.hexdigest())
        return written

    async def remove(self, path: PathLike) -> Written:
        asked = self._connection.ask("DELETE", self._place(path), Written, doubt=_doubt("removed", path))
        return self._learn_written(await asked)

    async def restore(self, ckpt: str) -> Written:
        doubt = "whether the files were restored is not known"
        body = api.Restore(ckpt=ckpt)
        return self._learn_written(
            await self._connection.ask("POST", f"{self._at}/restore", Written, body=body, doubt=doubt)
        )

    def _place(self, path: PathLike) -> str:
        (name,) = expectations.inputs([path])
        return f"{self._at}/files/{quote(paths.to_bytes(name), safe='/')}"

    # -- questions -------------------------------------------------------------------------------------------------

    async def info(self) -> api.SessionInfo:
        info = await self._connection.ask("GET", self._at, api.SessionInfo)
        self._learn(info.generation, info.version, info.ckpt)
        return info

    async def recover(self) -> Recovery:
        recovery = await self._connection.ask("POST", f"{self._at}/recover", Recovery)
        self._learn(recovery.generation, recovery.version, recovery.ckpt)
        return recovery

    async def history(self, *, limit: int) -> list[HistoryEntry]:
        return await self._connection.ask("GET", f"{self._at}/history", list[HistoryEntry], query={"limit": limit})

    async def code(self, run: str) -> str:
        return (await self._connection.fetch(f"{self._at}/runs/{_quoted(run)}/code")).decode()

    async def names(self) -> dict[str, Name]:
        return await self._connection.ask("GET", f"{self._at}/names", dict[str, Name])

    async def complete(self, code: str, cursor: int) -> Completions:
        check_text(code)
        body = api.AtCursor(code=code, cursor=cursor)
        return await self._connection.ask("POST", f"{self._at}/complete", Completions, body=body)

    async def inspect(self, code: str, cursor: int, *, detail: int) -> dict[str, str | bytes]:
        check_text(code)
        body = api.AtCursor(code=code, cursor=cursor, detail=detail)
        return await self._connection.ask("POST", f"{self._at}/inspect", dict[str, Any], body=body)

    async def output(self, run: str, stream: StreamName) -> bytes:
        checked_id(run)
        return await self._connection.fetch(f"{self._at}/runs/{run}/output", query={"stream": stream})

    # -- lifecycle -------------------------------------------------------------------------------------------------

    async def interrupt(self, *, caller: "asyncio.Task[Any] | None" = None) -> bool:
        if caller is not None:
            return caller in self._following and await self._following[caller].interrupt()
        return (await self._connection.ask("POST", f"{self._at}/interrupt", api.Interrupted)).interrupted

    async def reset(self) -> None:
        doubt = "whether memory was reset is not known; recover() tells"
        info = await self._connection.ask("POST", f"{self._at}/reset", api.SessionInfo, doubt=doubt)
        self._learn(info.generation, info.version, info.ckpt)

    async def end(self) -> None:
        """As it was said when it was opened: nobody closed it, and the process ends."""
        await self.close(keep=self._keep)

    async def close(self, *, keep: bool) -> None:
        """It may have ended already: the server stopped, or somebody else ended it."""
        try:
            with suppress(SessionUnknown, SessionClosed):
                await self._connection.ask("DELETE", self._at, object, query={"keep": str(keep).lower()})
            with anyio.move_on_after(_LAST_WORDS_S):  # who follows a run is told how it ended
                while self._following:
                    self._followed.clear()
                    await self._followed.wait()
        finally:
            await self.leave()

    async def leave(self) -> None:
        """The session as it is, and only our connection to it."""
        if self._holding is not None:
            self._holding.cancel()
        with anyio.CancelScope(shield=True):
            await self._connection.close()

    async def _hold(self) -> None:
        """Until the session ends; a connection that breaks is made again, within the time that the server gives us."""
        pauses = iter(_HOLD_AGAIN_S)
        while True:
            try:
                async with self._connection.stream("GET", f"{self._at}/hold") as response:
                    pauses = iter(_HOLD_AGAIN_S)
                    async for _ in response.aiter_raw():
                        pass
            except (SessionUnknown, SessionClosed):
                return  # it has ended: whoever uses it next is told why
            except (HoldfastError, httpx2.TransportError):
                pass
            await anyio.sleep(next(pauses, _HOLD_AGAIN_S[-1]))

    # -- what is known of it ---------------------------------------------------------------------------------------

    def _learn(self, generation: int, version: int, ckpt: str) -> None:
        """Answers may come in another order than they were given in: the latest state is what counts."""
        if (generation, version) >= (self.generation, self.version):
            self.generation, self.version, self.ckpt = generation, version, ckpt

    def _learn_written(self, written: Written) -> Written:
        self._learn(parse(written.ckpt).generation, written.version, written.ckpt)
        return written


def _asked(code: str, options: RunOptions, *, stdin: bool = False) -> api.AskedRun:
    """Checked here as it is for a session of this process: what is nonsense is not sent."""
    timeout = options.get("timeout")
    timeout_s = _TIMEOUT_S if timeout is None else parse_seconds(timeout, name="timeout")
    request = verbs.new_request(code, options, timeout_s=timeout_s)
    check_text(code)
    return api.AskedRun(
        code=code, timeout=timeout, mode=request.mode, goal=request.goal,
        inputs=[os.fspath(path) for path in options.get("inputs") or ()], outputs=_declared(options.get("outputs")),
        asserts=request.asserts, key=request.key, retry=request.retry, expect=request.expect,
        rehearse=request.rehearse, preflight=request.preflight, silent=request.silent, stdin=stdin,
    )  # fmt: skip


def _declared(outputs: Declared | None) -> list[str] | dict[str, Any]:
    if isinstance(outputs, Mapping):
        return {os.fspath(path): terms for path, terms in outputs.items()}
    return [os.fspath(path) for path in outputs or ()]


def _doubt(done: str, path: PathLike) -> str:
    return f"whether {path} was {done} is not known"


async def _pieces(source: BinaryIO, digest: "hashlib._Hash") -> AsyncIterator[bytes]:
    while piece := await anyio.to_thread.run_sync(source.read, _PIECE_BYTES):
        digest.update(piece)
        yield piece


def _compare(path: str, *, arrived: str, committed: str) -> None:
    if arrived != committed:
        raise VerifyFailed(
            f"{path} arrived with the SHA-256 {arrived}, and is {committed}", hint="send or read it again"
        )


def _quoted(run: str) -> str:
    return quote(run, safe="")
