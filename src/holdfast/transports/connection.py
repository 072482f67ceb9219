"""A server, over TCP or a Unix socket: one question and its answer, or one stream of events.

1. What a server refuses is raised as the very exception that the embedded API raises: by its `code`.
2. A connection that breaks is tried again where that can do no harm: nothing was sent, or asking twice does what asking
   once does. Otherwise `ServerUnreachable` says what is in doubt.
3. Patience lasts `PATIENCE_S` from the first failure, with a server that has answered before.
"""

import random
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

import anyio
import httpx2
import msgspec

from holdfast import api, errors
from holdfast.errors import HoldfastError, InvalidSetting, RateLimited, ServerUnreachable, StateMoved
from holdfast.recovery import Differences
from holdfast.sockets import KEEPALIVE, address_of

T = TypeVar("T")
Query = Mapping[str, str | int]

PATIENCE_S = 10.0
_PAUSES_S = (0.02, 0.1, 0.3, 0.6, 1.0)
_CONNECT_S = 10.0
_KEPT_S = 5.0
"""How long an idle connection is kept; servers keep theirs longer."""
_MOST_RATE_LIMITED_S = 60.0
_LONGEST_EVENT_BYTES = 1 << 30
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MSGPACK = {"accept": f"{api.MSGPACK}, {api.PROBLEM};q=0.5"}
_EVENTS = {"accept": f"{api.MSGPACK_SEQ}, {api.PROBLEM};q=0.5"}
_EVENT: "msgspec.msgpack.Decoder[api.RunEvent]" = msgspec.msgpack.Decoder(api.RunEvent)


class _Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What a server tells of a failure; see RFC 9457."""

    detail: str = ""
    code: str = "holdfast_error"
    hint: str = ""
    differs: Differences | None = None


class Connection:
    """Where a server is, and how to ask it."""

    def __init__(self, url: str, *, token: str | None = None) -> None:
        base, inside, uds = _address(url)
        self.where = str(uds) if uds else base
        self._answered = False
        self._gave_up = True
        """Nothing answered lately, or ever: what is asked next is tried once."""
        self._socket = ExitStack()
        self._client = httpx2.AsyncClient(
            base_url=base,
            headers=_credentials(token or inside),
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            trust_env=False,  # its proxy is chosen below
            transport=self._transport(base, uds),
        )

    def _transport(self, base: str, uds: Path | None) -> httpx2.AsyncHTTPTransport:
        try:
            address = self._socket.enter_context(address_of(uds)) if uds else None
        except OSError as error:  # there is no such directory
            raise self.unreachable(error, "") from error
        # Without a context of its own it would read all certificates of the machine, for nothing.
        verify = True if base.startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        options, proxy = (None, None) if uds else (KEEPALIVE, _proxy(base))
        return httpx2.AsyncHTTPTransport(
            limits=_LIMITS, verify=verify, uds=address, socket_options=options, proxy=proxy
        )

    async def close(self) -> None:
        await self._client.aclose()
        self._socket.close()

    def patience(self, doubt: str = "") -> "Patience":
        return Patience(self, doubt=doubt)

    async def ask(
        self,
        method: str,
        path: str,
        into: type[T],
        *,
        body: msgspec.Struct | None = None,
        query: Query | None = None,
        doubt: str = "",
    ) -> T:
        """One question. `doubt` says what is not known if its answer is lost; without it, it may be asked again."""
        content = None if body is None else encode(body)
        headers = _MSGPACK if content is None else {**_MSGPACK, "content-type": api.MSGPACK}
        patience = self.patience(doubt)
        while True:
            try:
                response = await self._client.request(method, path, content=content, params=query, headers=headers)
                await self._refuse(response)
                return decode(response.content, into)
            except httpx2.TransportError as error:
                await patience.wait(error)
            except RateLimited as error:
                await patience.wait_allowed(error)

    async def fetch(self, path: str, *, query: Query | None = None) -> bytes:
        """The same for what is no struct."""
        patience = self.patience()
        while True:
            try:
                async with self.stream("GET", path, query=query) as response:
                    return await response.aread()
            except httpx2.TransportError as error:
                await patience.wait(error)
            except RateLimited as error:
                await patience.wait_allowed(error)

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        content: bytes | AsyncIterator[bytes] | None = None,
        query: Query | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[httpx2.Response]:
        """An answer that comes piece by piece; broken ones are the caller's to mend."""
        request = self._client.stream(method, path, content=content, params=query, headers=headers)
        async with request as response:
            await self._refuse(response)
            yield response

    @asynccontextmanager
    async def events(
        self, method: str, path: str, *, body: msgspec.Struct | None = None, query: Query | None = None
    ) -> AsyncIterator[AsyncIterator[api.RunEvent]]:
        content = None if body is None else encode(body)
        headers = _EVENTS if content is None else {**_EVENTS, "content-type": api.MSGPACK}
        async with (
            self.stream(method, path, content=content, query=query, headers=headers) as response,
            aclosing(_events(response)) as events,
        ):
            yield events

    async def _refuse(self, response: httpx2.Response) -> None:
        self._answered, self._gave_up = True, False
        if response.status_code >= 400:
            raise _failure(await response.aread(), response)

    def unreachable(self, error: Exception, doubt: str) -> ServerUnreachable:
        self._gave_up = True
        why = str(error) or type(error).__name__
        return ServerUnreachable(
            f"{self.where} does not answer: {why}" + (f"; {doubt}" if doubt and self._answered else ""),
            hint="history() shows what happened, when it answers again; the same key gets the recorded answer"
            if self._answered
            else "see that `holdfast serve` runs there, and that url= is what it printed",
        )


class Patience:
    """How long one verb goes on trying."""

    def __init__(self, connection: Connection, *, doubt: str) -> None:
        self._connection = connection
        self._doubt = doubt
        self._ends_at: float | None = None
        self._limited_until: float | None = None
        self._tries = 0

    def renew(self) -> None:
        """It went on: the next failure is a first one."""
        self._ends_at, self._tries = None, 0

    async def wait(self, error: httpx2.TransportError) -> None:
        """Until it may be tried again; or no longer."""
        if self._doubt and not isinstance(error, _NEVER_SENT):
            raise self._connection.unreachable(error, self._doubt) from error
        if self._ends_at is None:
            self._ends_at = time.monotonic() + (0 if self._connection._gave_up else PATIENCE_S)
        if time.monotonic() >= self._ends_at:
            raise self._connection.unreachable(error, "") from error
        await anyio.sleep(_PAUSES_S[min(self._tries, len(_PAUSES_S) - 1)])
        self._tries += 1

    async def wait_allowed(self, error: RateLimited) -> None:
        """Until so many requests are allowed again: nothing was looked at."""
        if self._limited_until is None:
            self._limited_until = time.monotonic() + _MOST_RATE_LIMITED_S
        if time.monotonic() >= self._limited_until:
            raise error
        await anyio.sleep(error.retry_after_s * random.uniform(0.5, 1.0))  # noqa: S311 (they need not come at once)


# -- what goes over the wire -----------------------------------------------------------------------------------------


def encode(body: msgspec.Struct) -> bytes:
    try:
        return msgspec.msgpack.encode(body)
    except (UnicodeEncodeError, TypeError, OverflowError) as error:
        raise InvalidSetting(f"this cannot be sent: {error}", hint="write text, numbers, lists and mappings") from error


def decode(body: bytes, into: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=into)
    except msgspec.MsgspecError as error:
        raise _not_ours(str(error)) from error


async def _events(response: httpx2.Response) -> AsyncGenerator[api.RunEvent, None]:
    """Each after its length in four bytes."""
    kept = bytearray()
    async for piece in response.aiter_raw():
        kept += piece
        at = 0
        while len(kept) - at >= 4:
            end = at + 4 + int.from_bytes(kept[at : at + 4], "big")
            if end - at > _LONGEST_EVENT_BYTES:
                raise _not_ours("an event without an end")
            if len(kept) < end:
                break
            yield _event(bytes(kept[at + 4 : end]))
            at = end
        del kept[:at]


def _event(body: bytes) -> api.RunEvent:
    try:
        return _EVENT.decode(body)
    except msgspec.MsgspecError as error:
        raise _not_ours(str(error)) from error


def _failure(body: bytes, response: httpx2.Response) -> HoldfastError:
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _not_ours(f"{response.status_code} {response.reason_phrase}")
    return _error(problem, retry_after=response.headers.get("retry-after", ""))


def told_failure(problem: dict[str, Any]) -> HoldfastError:
    """A problem that came as an event."""
    try:
        return _error(msgspec.convert(problem, _Problem, strict=False))
    except msgspec.MsgspecError as error:
        return _not_ours(str(error))


def _error(problem: _Problem, *, retry_after: str = "") -> HoldfastError:
    """The same exception as if it had happened here; a code that we do not know is at least said."""
    kind = errors.by_code().get(problem.code)
    if kind is StateMoved:
        return StateMoved(problem.detail, hint=problem.hint, differs=problem.differs)
    if kind is RateLimited:
        wait_s = float(retry_after) if retry_after.isdigit() else 1.0
        return RateLimited(problem.detail, hint=problem.hint, retry_after_s=min(wait_s, _MOST_RATE_LIMITED_S))
    error = (kind or HoldfastError)(problem.detail, hint=problem.hint)
    if kind is None:
        error.code = problem.code
    return error


def _not_ours(what: str) -> ServerUnreachable:
    return ServerUnreachable(
        f"what answers there is no Holdfast server: {what}", hint="look at url=, and at its version"
    )


# -- where it is -------------------------------------------------------------------------------------------------------


_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=_KEPT_S)


def _credentials(token: str | None) -> dict[str, str]:
    if token and not (token.isascii() and token.isprintable()):
        raise InvalidSetting("the token has characters that no token has", hint="copy it as it was printed")
    return {"authorization": f"Bearer {token}"} if token else {}


def _proxy(base: str) -> str | None:
    """What the environment says; but between two processes of one machine it would only see our token."""
    parts = urlsplit(base)
    host = parts.hostname or ""
    return None if host in _LOOPBACK or proxy_bypass(host) else getproxies().get(parts.scheme)


def _parts(url: str) -> SplitResult | None:
    """None: brackets or a port that are none."""
    try:
        parts = urlsplit(url)
        httpx2.URL(urlunsplit((parts.scheme, parts.netloc, "", "", "")))
        return parts if parts.port != 0 else None
    except (ValueError, httpx2.InvalidURL):
        return None


def _address(url: str) -> tuple[str, str | None, Path | None]:
    """Base, token and socket.

    >>> _address("http://127.0.0.1:8765/?token=abc")
    ('http://127.0.0.1:8765', 'abc', None)
    >>> _address("unix:/run/holdfast/socket")
    ('http://localhost', None, PosixPath('/run/holdfast/socket'))
    """
    if url.startswith("unix:/"):
        return "http://localhost", None, Path("/" + url.removeprefix("unix:").lstrip("/"))
    parts = _parts(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise InvalidSetting(f"url={url!r} is no server", hint='write "http://127.0.0.1:8765", or "unix:/path/socket"')
    token = dict(parse_qsl(parts.query)).get("token")
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", "")), token, None
