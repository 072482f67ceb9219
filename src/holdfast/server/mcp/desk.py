"""One MCP client's session, tool by tool. The same over stdio and HTTP: a `Seat` knows how to reach the session."""

import asyncio
import base64
import binascii
import io
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

import anyio
import anyio.to_thread
import msgspec

from holdfast import cards, expectations
from holdfast.errors import (
    DiskFailed,
    DiskLimit,
    HoldfastError,
    InvalidSetting,
    KernelStartFailed,
    ProcessStuck,
    ServerUnreachable,
    SessionClosed,
    SessionHalted,
    SessionUnknown,
    StateMoved,
)
from holdfast.expectations import Declared
from holdfast.model import Recovery, Run
from holdfast.patterns import Files
from holdfast.server.mcp import answers, tools
from holdfast.server.mcp.answers import Answer, Standing
from holdfast.server.mcp.files import look
from holdfast.server.mcp.progress import Progress, passing_on
from holdfast.transports import Transport
from holdfast.verbs import RunOptions

T = TypeVar("T")
Verb = Callable[[Transport], Awaitable[T]]

_LATEST_RUNS = 10
_MOST_CODES = 20
_STATE_IN_QUESTION = (StateMoved, SessionHalted, DiskFailed, DiskLimit, KernelStartFailed, ProcessStuck)
"""Errors after which a model has to know where the session stands."""
_SESSION_GONE = (SessionClosed, SessionUnknown, ServerUnreachable)
"""Errors after which the next call begins with a session that is opened anew."""


class Seat(Protocol):
    """An open session, and where its verbs are carried out."""

    @property
    def remark(self) -> str:
        """What a client has to know of how it was opened; told with the first answer."""
        ...

    async def do(self, verb: Verb[T]) -> T: ...

    async def close(self) -> None:
        """The client is done with it."""
        ...

    async def leave(self) -> None:
        """It does not answer: let go of what is left, and end nothing that may still be there."""
        ...


Open = Callable[[], Awaitable[Seat]]


class Desk:
    """It opens its session when that is needed first; if that fails, each call tries again."""

    def __init__(self, open_seat: Open, *, timeout: float | str | None = None) -> None:
        """`timeout` is the deadline of a call that names none; None: the session's own."""
        self._open_seat = open_seat
        self._timeout = timeout
        self._opening: asyncio.Task[Seat] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._remark = ""
        self._under_way: dict[object, tuple[float, str]] = {}
        """Runs that were asked for here: since when, and what they are for."""
        self._calls = 0
        self._used_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """How long nobody has asked for anything."""
        return 0.0 if self._calls else time.monotonic() - self._used_at

    def open_ahead(self) -> None:
        """While the client introduces itself."""
        self._opening = asyncio.create_task(self._open())

    async def answer(self, call: tools.Call, progress: Progress | None = None) -> Answer:
        """What a tool has to say. Our own failures are answers too."""
        self._calls += 1
        try:
            answer = await self._attended(call, progress)
        finally:
            self._calls -= 1
            self._used_at = time.monotonic()
        remark, self._remark = self._remark, ""
        if not remark:
            return answer
        return msgspec.structs.replace(
            answer, text=f"{answer.text}\nnote: {remark}", facts={**answer.facts, "note": remark}
        )

    async def close(self) -> None:
        """End the session, or keep it, as its seat has it."""
        opening, self._opening = self._opening, None
        if self._leaving is not None:
            await asyncio.wait([self._leaving])
        if opening is None:
            return
        opening.cancel()  # had it failed, each call was told
        (seat,) = await asyncio.gather(opening, return_exceptions=True)
        if not isinstance(seat, BaseException):
            await seat.close()

    # -- tools -------------------------------------------------------------------------------------------------

    async def _attended(self, call: tools.Call, progress: Progress | None) -> Answer:
        try:
            seat = await self._seat()
        except HoldfastError as error:
            return answers.of_error(error)
        try:
            return await self._attend(seat, call, progress)
        except _SESSION_GONE as error:
            self._leave(seat)
            return answers.of_error(error)
        except HoldfastError as error:
            recovery = await _recovery(seat) if isinstance(error, _STATE_IN_QUESTION) else None
            return answers.of_error(error, recovery)

    async def _attend(self, seat: Seat, call: tools.Call, progress: Progress | None) -> Answer:
        match call:
            case tools.RunCode() | tools.Rehearse():
                return answers.of_run(await self._run(seat, call, progress))
            case tools.Plan():
                return answers.of_card(await seat.do(lambda reached: reached.plan(call.code, self._options(call))))
            case tools.Status():
                return await self._status(seat)
            case tools.Recover():
                return await seat.do(_recover)
            case tools.Reset():
                return await seat.do(_reset)
            case _:
                return await seat.do(lambda reached: _on_files(reached, call))

    async def _run(self, seat: Seat, call: tools.RunCode | tools.Rehearse, progress: Progress | None) -> Run:
        options = self._options(call)
        if isinstance(call, tools.Rehearse):
            options["rehearse"] = True
        else:
            options["key"] = call.key
        async with self._noted(call.code), passing_on(progress) as emit:
            return await seat.do(lambda reached: reached.run(call.code, options, emit=emit))

    def _options(self, call: tools.Plan | tools.RunCode | tools.Rehearse) -> RunOptions:
        timeout = None if isinstance(call, tools.Plan) else call.timeout
        return RunOptions(
            mode="notebook", timeout=self._timeout if timeout is None else timeout, expect=call.expect,
            outputs=_declared(call.outputs),
        )  # fmt: skip

    async def _status(self, seat: Seat) -> Answer:
        """From the books while a run is under way: memory could be asked only after it."""
        since = min(self._under_way.values(), default=None)

        async def look(reached: Transport) -> Standing:
            info, files = await reached.info(), await reached.files()
            names = None
            if since is None and info.running is None:
                with anyio.CancelScope(shield=True):  # an answer that nobody takes would be taken for the next one
                    names = await reached.names()
            cap = info.limits.get("memory_bytes")
            return Standing(
                session=info.id, ckpt=info.ckpt, version=info.version, generation=info.generation, files=files,
                runs=await reached.history(limit=_LATEST_RUNS), names=names, running=_in_words(info.running, since),
                egress=info.egress,
                memory_bytes=info.memory_bytes, memory_cap_bytes=int(cap) if isinstance(cap, int | float) else None,
            )  # fmt: skip

        return answers.of_standing(await seat.do(look))

    # -- the session -------------------------------------------------------------------------------------------

    async def _seat(self) -> Seat:
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)  # a call that is given up leaves it to the next

    async def _open(self) -> Seat:
        if self._leaving is not None:  # two seats at once would be two sessions
            await asyncio.wait([self._leaving])
        seat = await self._open_seat()
        self._remark = seat.remark
        return seat

    def _leave(self, seat: Seat) -> None:
        """Of several calls that find the session gone, the first has it left."""
        if self._opening is not None and self._opening.done() and self._opening.result() is seat:
            self._opening = None
            self._leaving = asyncio.create_task(_left(seat))

    @asynccontextmanager
    async def _noted(self, code: str) -> AsyncIterator[None]:
        token = object()
        self._under_way[token] = (time.monotonic(), cards.goal_of(code))
        try:
            yield
        finally:
            del self._under_way[token]


async def _left(seat: Seat) -> None:
    with suppress(HoldfastError):  # it is gone, and that was told
        await seat.leave()


# -- verbs that are more than one call -----------------------------------------------------------------------------


async def _recover(reached: Transport) -> Answer:
    recovery = await reached.recover()
    again = [step.run for step in recovery.steps if step.action == "rerun"][:_MOST_CODES]
    return answers.of_recovery(recovery, {run: await reached.code(run) for run in again})


async def _reset(reached: Transport) -> Answer:
    await reached.reset()
    return answers.of_reset(await reached.recover())


async def _on_files(reached: Transport, call: Any) -> Answer:
    match call:
        case tools.ListFiles():
            files = await reached.files()
            if call.pattern:
                (pattern,) = expectations.inputs([call.pattern])
                wanted = set(await _meant_by(pattern, [file.path for file in files]))
                files = [file for file in files if file.path in wanted]
            return answers.of_files(files, limit=call.limit, ckpt=reached.ckpt)
        case tools.ReadFile():
            return answers.of_file(await look(reached, call))
        case tools.WriteFile():
            return answers.of_written(await reached.write(call.path, io.BytesIO(_content(call))))
        case tools.Restore():
            return answers.of_written(await reached.restore(call.ckpt))
        case _:
            raise TypeError(f"{type(call).__name__} is no tool")


async def _meant_by(pattern: str, files: list[str]) -> list[str]:
    return await anyio.to_thread.run_sync(lambda: Files(files).meant_by(pattern))


async def _recovery(seat: Seat) -> Recovery | None:
    try:
        return await seat.do(lambda reached: reached.recover())
    except HoldfastError:  # the error itself is told
        return None


def _content(call: tools.WriteFile) -> bytes:
    if call.encoding == "base64":
        try:
            return base64.b64decode(call.content, validate=True)
        except binascii.Error as error:
            raise InvalidSetting(f"the content is not base64: {error}", hint="encode it, or send it as text") from None
    try:
        return call.content.encode()
    except UnicodeEncodeError as error:
        raise InvalidSetting(f"the content is no text: {error.reason}", hint="send it as base64") from None


def _declared(outputs: list[str] | dict[str, Any] | None) -> Declared:
    if isinstance(outputs, dict):
        return {path: terms for path, terms in outputs.items()}
    return outputs or []


def _in_words(running: str | None, since: tuple[float, str] | None) -> str | None:
    """
    >>> _in_words("run_1", None)
    'run_1'
    """
    if since is None:
        return running
    began, goal = since
    return f"{running or 'a run'}, asked for {time.monotonic() - began:.0f} s ago: {goal}"
