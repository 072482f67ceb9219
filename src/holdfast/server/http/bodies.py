"""Structs from and to what goes over the wire: JSON, or msgpack for who asks for it."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from holdfast.api import JSON, MSGPACK, MSGPACK_SEQ, SSE, RunEvent
from holdfast.errors import InvalidSetting, Malformed, WrongMediaType

T = TypeVar("T")
_to_json = msgspec.json.Encoder().encode
_to_msgpack = msgspec.msgpack.Encoder().encode


async def taken(request: Request, kind: type[T]) -> T:
    """The body, as a struct. Nothing at all stands for one with every field left out."""
    body = await request.body() or b"{}"
    sent = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    try:
        if sent == MSGPACK and body != b"{}":
            return msgspec.msgpack.decode(body, type=kind)
        if sent in (JSON, MSGPACK):
            return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidSetting(f"the body is not what is wanted here: {error}", hint="see /docs") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"the body cannot be read: {error}", hint=f"send {JSON}, or {MSGPACK}") from error
    raise WrongMediaType(f"the body is of type {sent!r}", hint=f"send {JSON}, or {MSGPACK}")


def given(request: Request, value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer in the format that the client would rather have."""
    if accepted(request, JSON, MSGPACK) == MSGPACK:
        return Response(_to_msgpack(value), status, headers, MSGPACK)
    return Response(_to_json(value), status, headers, JSON)


class Stream(StreamingResponse):
    """An answer that comes piece by piece. However it ends, so does what it comes from, and at once."""

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], status: int = 200, *,
        headers: dict[str, str] | None = None, media_type: str,
    ) -> None:  # fmt: skip
        super().__init__(pieces, status, headers, media_type)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces):
            if scope["method"] == "HEAD":
                return await Response(headers=dict(self.headers))(scope, receive, send)
            await super().__call__(scope, receive, send)


def accepted(request: Request, *offers: str) -> str:
    """Which of the offers a client likes best; the first if it does not say, or likes none.

    What it gets instead is named in Content-Type: an answer that a client can look at is better than a refusal.
    """
    wanted = [_preference(part) for part in request.headers.get("accept", "*/*").split(",")]
    best, best_weight = offers[0], 0.0
    for offer in offers:
        exact = [weight for name, weight in wanted if name == offer]
        loose = [weight for name, weight in wanted if name in ("*/*", offer.partition("/")[0] + "/*")]
        weight = max(exact or loose or [0.0])
        if weight > best_weight:
            best, best_weight = offer, weight
    return best


def _preference(part: str) -> tuple[str, float]:
    name, _, rest = part.partition(";")
    for parameter in rest.split(";"):
        key, _, value = parameter.partition("=")
        if key.strip().lower() == "q":
            try:
                return name.strip().lower(), min(1.0, max(0.0, float(value)))
            except ValueError:
                return name.strip().lower(), 0.0
    return name.strip().lower(), 1.0


def integer(request: Request, name: str, default: int, *, least: int = 0, most: int = 1 << 53) -> int:
    """A number in the query."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise InvalidSetting(f"{name}={text!r} is no number from {least} to {most}", hint="leave it out, or mend it")
    return int(text)


def truth(request: Request, name: str) -> bool:
    """A yes or no in the query."""
    text = request.query_params.get(name, "false")
    if text not in ("true", "false", "1", "0"):
        raise InvalidSetting(f"{name}={text!r} is neither true nor false", hint=f"{name}=true, or leave it out")
    return text in ("true", "1")


# -- events --------------------------------------------------------------------------------------------------------


def framed(event: RunEvent, media_type: str) -> bytes:
    """One event, as a stream of that type has it."""
    if media_type == MSGPACK_SEQ:
        body = _to_msgpack(event)
        return len(body).to_bytes(4, "big") + body
    if media_type == SSE:
        return sse(event, name=str(event.__struct_config__.tag), number=event.number)
    return _to_json(event) + b"\n"


def sse(value: Any, *, name: str, number: int | None = None) -> bytes:
    """JSON has no raw newline, so that it is one line of data."""
    numbered = b"" if number is None else b"id: %d\n" % number
    return numbered + b"event: %b\ndata: %b\n\n" % (name.encode(), _to_json(value))
