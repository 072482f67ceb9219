"""`CONNECT host:443`: TLS from end to end, for the host that was asked for.

We do not see what is inside. What can be seen is whom the first message is meant for, and it has to be the host that is
listed: otherwise a tunnel to one customer of a large front would be one to all of them.
"""

import anyio

from holdfast.egress.answers import Refused
from holdfast.egress.gate import Gate
from holdfast.egress.heads import Head
from holdfast.egress.hello import Hello, HelloReader, NotTls
from holdfast.egress.names import Address, address_of
from holdfast.egress.wire import Idle, Wire, together

ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


async def tunnel(guest: Wire, head: Head, addresses: list[Address], gate: Gate, idle: Idle) -> None:
    """`Refused`: the guest is to be told inside the tunnel. `OSError`: one of both ends is gone."""
    await guest.write(ESTABLISHED)
    first = await _read_hello(guest, head, gate.bounds.head_s)
    upstream = await gate.let_out(head, addresses, idle)
    ended = False
    try:
        gate.log.bytes_out += len(first)
        await upstream.write(first)
        await together(lambda: _out(guest, upstream, gate), lambda: _in(upstream, guest, gate))
        ended = True
    finally:
        if ended:
            upstream.close()
        else:
            upstream.abort()


async def _read_hello(guest: Wire, head: Head, within_s: float) -> bytes:
    """The first bytes, all of them, once it is clear whom they are meant for."""
    reader = HelloReader()
    with anyio.move_on_after(within_s):
        try:
            data, _ = head.connection.trailing_data
            while (hello := reader.feed(data)) is None:
                if not (data := await guest.read()):
                    raise NotTls("it ends")
        except NotTls as error:
            raise Refused("not_tls", f"in a tunnel TLS has to begin: {error}") from None
        _check(hello, head)
        return bytes(reader.taken)
    raise Refused("too_slow", "in a tunnel TLS has to begin")


def _check(hello: Hello, head: Head) -> None:
    if hello.hidden:
        raise Refused("wrong_name", "TLS that hides whom it is for (ECH) does not get out")
    if hello.name != head.host and not (hello.name is None and address_of(head.host) is not None):
        raise Refused("wrong_name", "TLS in a tunnel has to be for the host of the tunnel (SNI)")


async def _out(guest: Wire, upstream: Wire, gate: Gate) -> bool:
    while data := await guest.read():
        gate.log.bytes_out += len(data)
        await upstream.write(data)
    upstream.half_close()
    return False


async def _in(upstream: Wire, guest: Wire, gate: Gate) -> bool:
    while data := await upstream.read():
        gate.log.bytes_in += len(data)
        await guest.write(data)
    guest.half_close()
    return False
