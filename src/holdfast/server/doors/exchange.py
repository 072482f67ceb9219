"""One request and its answer, as both pass the door. Nothing is buffered.

In:  a body is counted as it comes, and its pace is measured. Past its limit, or too slow, `receive` raises; whatever
     the application then says itself is dropped, so that the client hears the reason (413, 408) and nothing else.
Out: every answer gets the headers that protect it. An answer that comes before the body's end closes the connection:
     the rest is no next request. It is read for a moment longer, for a close with unread data would also destroy an
     answer that is still on its way (RFC 9112, 9.6).
"""

import time

import anyio
import anyio.lowlevel
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from holdfast.errors import Refused, SlowClient
from holdfast.server.doors.connections import connection_of
from holdfast.server.doors.hosts import Headers
from holdfast.server.doors.limits import Limits, too_large

LINGER_S = 1.0
LINGER_BYTES = 16 << 20


class Exchange:
    """What happened so far, and the two ends that the application gets."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, limits: Limits) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._limits = limits
        self.headers: Headers = []
        """For the answer, if it does not have them already."""
        self.limit_bytes = limits.json_bytes
        self.refusal: Refused | None = None
        """Why the body was not read to its end."""
        self.bytes_in = self.bytes_out = self.status = 0
        self.complete = False
        self._body_ended = not _has_body(scope)
        self._asked_for_body = False
        self._waited_s = 0.0

    # -- in --------------------------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        if self.refusal is not None:
            raise self.refusal
        if self._body_ended:
            return await self._next()
        message = await self._next_in_time()
        if self.bytes_in > self.limit_bytes:
            raise self._refuse(too_large(self.limit_bytes))
        return message

    async def _next_in_time(self) -> Message:
        allowed_s = self._limits.body_wait_s + self.bytes_in / self._limits.body_bytes_per_s - self._waited_s
        began = time.monotonic()
        with anyio.move_on_after(max(0, allowed_s)):
            message = await self._next()
            self._waited_s += time.monotonic() - began
            return message
        raise self._refuse(SlowClient("the body did not arrive in time", hint="send it again, without a pause"))

    async def _next(self) -> Message:
        self._asked_for_body = True
        message = await self._receive()
        if message["type"] == "http.request":
            self.bytes_in += len(message.get("body", b""))
            self._body_ended = not message.get("more_body", False)
        else:
            self._body_ended = True
        return message

    def _refuse(self, refusal: Refused) -> Refused:
        self.refusal = refusal
        return refusal

    # -- out -------------------------------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        if self.refusal is not None and not self.status:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": self._guarded(list(message.get("headers", [])))}
        elif message["type"] == "http.response.body":
            self.bytes_out += len(message.get("body", b""))
            if not message.get("more_body", False):
                return await self._send_last(message)
            # uvicorn's `send` does not wait when the client is fast, nor when it is gone: a stream that never waits
            # itself would stop the whole server, and never hear that nobody listens.
            await anyio.lowlevel.checkpoint()
        await self._send(message)

    def _guarded(self, headers: Headers) -> Headers:
        there = {name.lower() for name, _ in headers}
        headers += [(name, value) for name, value in self.headers if name not in there or name == b"vary"]
        if not self._body_ended:
            headers.append((b"connection", b"close"))
        return headers

    async def _send_last(self, message: Message) -> None:
        if not self._body_ended:
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        self.complete = True
        await self._send(message)

    async def _linger(self) -> None:
        if not self._asked_for_body and _waits_for_leave(self._scope):
            return  # the client has sent nothing, and now will not
        end = self.bytes_in + LINGER_BYTES
        with anyio.move_on_after(LINGER_S):
            while not self._body_ended and self.bytes_in < end:
                await self._next()

    async def answer(self, response: Response) -> None:
        """Say this in place of the application; if it is in the middle of an answer, cut that short."""
        self.refusal = None
        if not self.status:
            await response(self._scope, self._receive, self.send)
        elif not self.complete:
            await self.cut()

    async def cut(self) -> None:
        """End the connection, so that nobody takes what he got for the whole."""
        connection = connection_of(self._scope)
        if connection is None:
            raise ConnectionAbortedError("an answer broke off")
        connection.cut()
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )  # fmt: skip


def _waits_for_leave(scope: Scope) -> bool:
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"])
