"""How much may be asked for: headers, bodies, requests in a time. Each is checked before anything is looked at."""

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from starlette.types import Scope

from holdfast.errors import HeadersTooLarge, Malformed, RateLimited, TooLarge

_REMEMBERED = 10_000
"""Callers whose rate is known at once. Who was forgotten begins with a full bucket."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request, and one caller, may use."""

    headers: int = 100
    """Headers of a request."""
    header_bytes: int = 32 << 10
    """Request line and headers together."""
    json_bytes: int = 16 << 20
    """The body of a request that is not a file."""
    upload_bytes: Callable[[str], int] = lambda session_id: 10 << 30
    """The largest file for a session: what its disk may hold."""
    body_wait_s: float = 20.0
    """How long a body may keep us waiting, over and above what its bytes at the slowest pace take."""
    body_bytes_per_s: int = 4 << 10
    """The slowest pace of a body."""
    requests_per_s: float = 200.0
    """Of one caller, in the long run."""
    requests_at_once: int = 400
    """Of one caller, after a pause."""
    requests_under_way: int = 250
    """Of one caller, at once: a quarter of the connections, and a hold, a run and more for each of 100 sessions."""
    failures_per_s: float = 0.5
    """Wrong tokens from one address, in the long run."""
    failures_at_once: int = 20
    """Wrong tokens from one address, after a pause."""


def refuse_large_headers(scope: Scope, limits: Limits) -> None:
    headers = scope["headers"]
    if len(headers) > limits.headers:
        raise HeadersTooLarge(f"{len(headers)} headers", hint=f"at most {limits.headers}")
    size = len(scope.get("raw_path", b"")) + len(scope["query_string"])
    size += sum(len(name) + len(value) + 4 for name, value in headers)
    if size > limits.header_bytes:
        raise HeadersTooLarge(f"{size} bytes of headers and address", hint=f"at most {limits.header_bytes} bytes")


class Framing(msgspec.Struct, frozen=True):
    """How long the body is said to be."""

    has_body: bool
    length: int | None = None
    """None: it ends when it ends."""


def framing_of(scope: Scope) -> Framing:
    """The server has read the body's length by the same headers; a request that has both kinds is for two readers."""
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
    if len(lengths) + chunked > 1:
        raise Malformed("the length of the body is given twice", hint="send Content-Length or chunks, not both")
    if chunked:
        return Framing(True)
    if not lengths:
        return Framing(False, 0)
    if not lengths[0].isdigit():
        raise Malformed("Content-Length is no number", hint="send the length in bytes")
    return Framing(int(lengths[0]) > 0, int(lengths[0]))


def refuse_large_body(framing: Framing, limit: int) -> None:
    """At once, if the request says itself that it is too large. What it does not say is counted as it comes."""
    if framing.length is not None and framing.length > limit:
        raise too_large(limit)


def too_large(limit: int) -> TooLarge:
    return TooLarge(
        f"the body is larger than {limit} bytes",
        hint="send less; files go to PUT /v1/sessions/{id}/files/{path}, and may be as large as the session's disk",
    )


class Rate:
    """A token bucket per caller: `at_once` requests after a pause, `per_s` in the long run.

    >>> rate = Rate(per_s=1, at_once=2, clock=lambda: 0.0)
    >>> [rate.wait_s("ann"), rate.wait_s("ann"), rate.wait_s("ann"), rate.wait_s("bob")]
    [0.0, 0.0, 1.0, 0.0]
    """

    def __init__(self, *, per_s: float, at_once: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._at_once, self._clock = per_s, at_once, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """What is left for a caller, and when that was so; least recent first."""

    def wait_s(self, caller: str) -> float:
        """0: it is allowed, and spent. Otherwise how long until it would be."""
        left = self._left(caller)
        if left < 1:
            return (1 - left) / self._per_s
        self._buckets[caller] = (left - 1, self._clock())
        self._buckets.move_to_end(caller)
        if len(self._buckets) > _REMEMBERED:
            self._buckets.popitem(last=False)
        return 0.0

    def exhausted(self, caller: str) -> bool:
        """Whether nothing is left. Nothing is spent."""
        return self._left(caller) < 1

    def _left(self, caller: str) -> float:
        left, at = self._buckets.get(caller, (float(self._at_once), self._clock()))
        return min(self._at_once, left + (self._clock() - at) * self._per_s)

    def spend(self, caller: str) -> None:
        if wait_s := self.wait_s(caller):
            raise RateLimited(
                f"more than {self._per_s:g} requests a second",
                hint=f"wait {math.ceil(wait_s)} s, as Retry-After says, and send it again",
                retry_after_s=wait_s,
            )


class UnderWay:
    """The requests of each caller that are not answered to their end: a stream may go on for ever."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._now: Counter[str] = Counter()

    @contextmanager
    def counted(self, caller: str) -> Iterator[None]:
        if self._now[caller] >= self._most:
            raise RateLimited(
                f"{self._most} of your requests are under way already", hint="end one of them, and send it again"
            )
        self._now[caller] += 1
        try:
            yield
        finally:
            self._now[caller] -= 1
            if not self._now[caller]:
                del self._now[caller]
