"""How messages are framed: over SOCK_SEQPACKET, so that a dying writer cannot leave half a packet.

A message is msgpack, cut into packets of at most `PACKET_BYTES`. The first byte of each packet says whether
more follow (1) or the message is complete (0). Whoever reads from a kernel gives `Assembler` a limit and treats
everything that does not decode as an attack: see `ProtocolViolation`.

What the host sends to a kernel has an address after that byte: the kernel's pid, as its own pid namespace numbers it. A
kernel and the snapshot that takes its place have one socket: what lies there for a dead one must not be carried out.
Where a message was broken off between two of its packets, the next begins with `FORGET`.
"""

import array
import os
import socket
import struct
from typing import TypeVar

import msgspec

from holdfast.kernel.wire import Message

PACKET_BYTES = 60_000
MAX_FDS = 16
_ADDRESS = struct.Struct("<I")
FORGET = b"\2"
ADDRESSED_BYTES = 1 + _ADDRESS.size + PACKET_BYTES

_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


class ProtocolViolation(Exception):
    """The peer sent what nobody who follows the protocol sends."""


def packets(message: Message) -> list[bytes]:
    """The packets that carry a message."""
    body = _encoder.encode(message)
    if len(body) <= PACKET_BYTES:
        return [b"\0" + body]
    parts = [body[start : start + PACKET_BYTES] for start in range(0, len(body), PACKET_BYTES)]
    return [*(b"\1" + part for part in parts[:-1]), b"\0" + parts[-1]]


def addressed(message: Message, *, to: int, forget: bool = False) -> list[bytes]:
    """The same, for the kernel of that pid and no other; `forget`: it has a part of another, which does not go on."""
    address = _ADDRESS.pack(to)
    first = [FORGET] if forget else []
    return [packet[:1] + address + packet[1:] for packet in (*first, *packets(message))]


def received(packet: bytes, *, by: int) -> bytes | None:
    """A packet without its address; None if it is for another."""
    start = 1 + _ADDRESS.size
    if len(packet) < start or _ADDRESS.unpack_from(packet, 1) != (by,):
        return None
    return packet[:1] + packet[start:]


class Assembler:
    """Puts packets together again, up to a limit."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._body = bytearray()

    def feed(self, packet: bytes) -> bytes | None:
        """The body of the message that this packet completes, if it completes one."""
        more, part = packet[:1], packet[1:]
        if more not in (b"\0", b"\1") or len(self._body) + len(part) > self._max_bytes or (more == b"\1" and not part):
            raise ProtocolViolation(f"a packet of {len(packet)} bytes after {len(self._body)}")
        self._body += part
        if more == b"\1":
            return None
        body, self._body = bytes(self._body), bytearray()
        return body


def decode(body: bytes, decoder: "msgspec.msgpack.Decoder[T]") -> T:
    """A typed message, or `ProtocolViolation`."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(str(error)) from error


# -- blocking ends, for the trusted small processes (keeper, zygote) -------------------------------------------


def send_with_fds(sock: socket.socket, message: Message, fds: list[int]) -> None:
    """One message that fits one packet, with descriptors."""
    (packet,) = packets(message)
    sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])


def receive_with_fds(sock: socket.socket) -> tuple[bytes, list[int]]:
    """The body of one single-packet message and its descriptors; an empty body means the peer is gone."""
    packet, ancillary, _, _ = sock.recvmsg(PACKET_BYTES + 1, socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize))
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)
    return packet[1:], list(fds)
