"""The head of a request: read strictly, and put together anew for whom it is meant.

h11 reads it, after a look at the bytes: it is lenient where servers differ (folded lines, bare line feeds). Nothing of
the guest's own framing or spelling is handed on, so that nobody behind us sees another request than we did.
"""

import re
import time

import anyio
import h11
import msgspec

from holdfast.egress.answers import Refused
from holdfast.egress.log import Outgoing, printable
from holdfast.egress.names import BadHost, join, split
from holdfast.egress.wire import Wire

HEAD_BYTES = 1 << 15
MOST_HEADERS = 100
_LONGEST_METHOD = 32
_LINES = re.compile(rb"(?:[\t\x20-\x7e\x80-\xff]+\r\n)+\r\n")
_FOLDED = re.compile(rb"\r\n[\t ]")
_TARGET = re.compile(r"http://([^/?#@\\]+)((?:[/?][^#\\]*)?)", re.IGNORECASE)
_HOP_BY_HOP = {
    b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"http2-settings",
}  # fmt: skip
_OURS = b"x-holdfast-egress"

Headers = list[tuple[bytes, bytes]]


class Head(msgspec.Struct, frozen=True):
    """What a guest asks for."""

    method: str
    target: str
    """As `Outgoing` has it."""
    host: str
    port: int
    request: h11.Request
    connection: h11.Connection
    """Has read the head, and holds what came behind it."""
    path: str = ""
    """Empty for a tunnel."""

    @property
    def authority(self) -> str:
        return join(self.host, self.port)

    def outgoing(self, run: str) -> Outgoing:
        return Outgoing(
            run=run, at=time.time(), method=self.method, target=self.target, host=self.host, port=self.port
        )  # fmt: skip


async def read_head(guest: Wire, within_s: float) -> Head | None:
    """The request that a connection begins with; none if it ends without a byte."""
    taken, end, seen = bytearray(), -1, 0
    with anyio.move_on_after(within_s) as patience:
        while (end := taken.find(b"\r\n\r\n", max(0, seen - 3))) < 0:
            seen = len(taken)
            if seen > HEAD_BYTES:
                raise Refused("too_large", "the head of the request is too large")
            if not (data := await guest.read()):
                if not taken:
                    return None
                raise Refused("malformed", "the request ends before its head does")
            taken += data
    if patience.cancelled_caught:
        raise Refused("too_slow", "the head of the request took too long")
    if end > HEAD_BYTES:
        raise Refused("too_large", "the head of the request is too large")
    return _understand(bytes(taken[: end + 4]), bytes(taken[end + 4 :]))


def _understand(lines: bytes, rest: bytes) -> Head:
    if lines.count(b"\r\n") > MOST_HEADERS + 2:  # counted before anybody takes the time to read them
        raise Refused("too_large", "the request has too many headers")
    if not _LINES.fullmatch(lines) or _FOLDED.search(lines):
        raise Refused("malformed", "the head of the request has folded lines, bare line ends or control characters")
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES + 4)
    try:
        connection.receive_data(lines)
        request = connection.next_event()
    except h11.RemoteProtocolError:
        raise Refused("malformed", "the request is not HTTP/1.1 as this proxy reads it") from None
    if not isinstance(request, h11.Request):
        raise Refused("malformed", "the request is not HTTP/1.1 as this proxy reads it")
    _check_framing(request)
    if rest:
        connection.receive_data(rest)
    method, target = request.method.decode("ascii"), request.target.decode("ascii")
    try:
        if method == "CONNECT":
            host, port = split(target)
            return Head(method, join(host, port), host, port, request, connection)
        return _absolute(method, target, request, connection)
    except BadHost as error:
        raise Refused("malformed", f"{printable(target, 100)} cannot be asked for: {error}") from None


def _check_framing(request: h11.Request) -> None:
    names = [name for name, _ in request.headers]
    framed = {b"content-length", b"transfer-encoding"}.intersection(names)
    if len(request.method) > _LONGEST_METHOD or request.http_version not in (b"1.0", b"1.1"):
        raise Refused("malformed", "the request is not HTTP/1.1 as this proxy reads it")
    if (
        len(framed) > 1
        or (framed and request.method == b"CONNECT")
        or (b"transfer-encoding" in framed and request.http_version == b"1.0")
    ):
        raise Refused("malformed", "where the request's body ends can be read in two ways")


def _absolute(method: str, target: str, request: h11.Request, connection: h11.Connection) -> Head:
    found = _TARGET.fullmatch(target)
    if found is None:
        raise Refused("malformed", "a proxy is asked for http://host/path, or with CONNECT for a tunnel to host:port")
    host, port = split(found[1], 80)
    path = found[2] if found[2].startswith("/") else f"/{found[2]}"
    shown, query, _ = path.partition("?")
    site = join(host, port).removesuffix(":80")
    return Head(
        method, printable(f"http://{site}{shown}") + ("?..." if query else ""), host, port, request, connection, path
    )  # fmt: skip


def anew(head: Head) -> h11.Request:
    """The request as it leaves."""
    host = head.authority.removesuffix(":80").encode()
    headers = [(b"Host", host), *end_to_end(head.request), (b"Connection", b"close")]
    if any(name == b"transfer-encoding" for name, _ in head.request.headers):
        headers.append((b"Transfer-Encoding", b"chunked"))
    return h11.Request(method=head.method, target=head.path, headers=[*headers])


def end_to_end(message: h11.Request | h11.Response) -> Headers:
    """Those that are not about the connection they came over."""
    dropped = _HOP_BY_HOP | {b"host", _OURS}
    for name, value in message.headers:
        if name == b"connection":
            dropped |= {option.strip().lower() for option in value.split(b",")} - {b"content-length"}
    return [
        (raw, value)
        for raw, value in message.headers.raw_items()
        if (name := raw.lower()) not in dropped and not name.startswith(b"proxy-")
    ]
