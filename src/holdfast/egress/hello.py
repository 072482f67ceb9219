"""Whom a TLS connection is meant for: its ClientHello, read strictly and without any cryptography.

It may come in any number of segments, and in several records. What two readers could understand differently (an
extension twice, a second name, bytes that nobody counted) is not understood at all.
"""

import msgspec

MOST_BYTES = 1 << 15
"""Of a hello and its records. Common ones have 300 to 2,000."""
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_RECORD_BYTES = 1 << 14
_SERVER_NAME, _ECH, _ESNI = 0, 0xFE0D, 0xFFCE


class NotTls(ValueError):
    """It does not begin as TLS does."""


class Hello(msgspec.Struct, frozen=True):
    """What of it is of interest."""

    name: str | None
    """The server's name (SNI), lower case; none was sent."""
    hidden: bool
    """It can carry another name that nobody else reads (ECH). So does a mere decoy: they cannot be told apart."""


class HelloReader:
    """Takes what arrives until there is a hello; `taken` is all of it, to be handed on as it came."""

    def __init__(self) -> None:
        self.taken = bytearray()
        self._message = bytearray()
        self._at = 0

    def feed(self, data: bytes) -> Hello | None:
        """The hello, when it is complete. `NotTls` as soon as it can be none."""
        self.taken += data
        while (hello := self._read()) is None and self._next_record():
            pass
        if hello is None and len(self.taken) > MOST_BYTES:
            raise NotTls("the hello is too large")
        return hello

    def _next_record(self) -> bool:
        header = self.taken[self._at : self._at + 5]
        if (header and header[0] != _HANDSHAKE) or (len(header) > 1 and header[1] != 3):
            raise NotTls("no handshake begins")
        if len(header) < 5:
            return False
        length = int.from_bytes(header[3:5])
        if not 0 < length <= _RECORD_BYTES or self._at + 5 + length > MOST_BYTES:
            raise NotTls("a record of that size is none of a hello")
        if len(self.taken) < self._at + 5 + length:
            return False
        self._message += self.taken[self._at + 5 : self._at + 5 + length]
        self._at += 5 + length
        return True

    def _read(self) -> Hello | None:
        if self._message and self._message[0] != _CLIENT_HELLO:
            raise NotTls("the first message is not a hello")
        if len(self._message) < 4:
            return None
        length = int.from_bytes(self._message[1:4])
        if length > MOST_BYTES:
            raise NotTls("the hello is too large")
        if len(self._message) < 4 + length:
            return None
        if len(self._message) > 4 + length:
            raise NotTls("something is behind the hello, in the same record")
        return _understand(_Bytes(bytes(self._message[4:])))


class _Bytes:
    """Bytes that are taken from the front; what is not there cannot be taken."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if self.left < count:
            raise NotTls("the hello is cut short")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count))

    def vector(self, count: int) -> bytes:
        """As many bytes as the `count` bytes before them say."""
        return self.take(self.number(count))


def _understand(body: _Bytes) -> Hello:
    if body.number(2) >> 8 != 3:
        raise NotTls("that version of TLS is none")
    body.take(32)
    session, suites, compressions = body.vector(1), body.vector(2), body.vector(1)
    if len(session) > 32 or not suites or len(suites) % 2 or not compressions:
        raise NotTls("the hello has a part of the wrong size")
    extensions = _Bytes(body.vector(2) if body.left else b"")
    if body.left:
        raise NotTls("something is behind the hello's extensions")
    found: set[int] = set()
    name: str | None = None
    while extensions.left:
        kind, content = extensions.number(2), extensions.vector(2)
        if kind in found:
            raise NotTls("an extension is there twice")
        found.add(kind)
        if kind == _SERVER_NAME:
            name = _server_name(_Bytes(content))
    return Hello(name, bool(found & {_ECH, _ESNI}))


def _server_name(content: _Bytes) -> str:
    names = _Bytes(content.vector(2))
    kind, name = names.number(1), names.vector(2)
    if kind != 0 or not name or names.left or content.left:
        raise NotTls("the server's name is not one name")
    try:
        return name.decode("ascii").lower()
    except UnicodeDecodeError:
        raise NotTls("the server's name is not ASCII") from None
