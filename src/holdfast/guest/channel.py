"""The kernel's end of the control socket."""

import socket
import threading
from _thread import get_ident
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import getpid  # ours, whatever a cell makes of `os.getpid`
from types import FrameType

import msgspec

from holdfast.guest.signals import SIGINT, set_handler
from holdfast.kernel import framing, wire

MAX_MESSAGE_BYTES = 32 << 20
"""The host takes no larger message; what is larger is left out here, with a word about it."""

_HOST_MESSAGE_BYTES = 1 << 30  # it is trusted
_AT_ONCE = int(socket.MSG_DONTWAIT)
_MAIN = get_ident()
_decoder: "msgspec.msgpack.Decoder[wire.HostRequest]" = msgspec.msgpack.Decoder(wire.HostRequest)


class Channel:
    """Sends and receives whole messages, from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        # Bound now: a cell that patches `socket.socket` for its own tests must not cut us off.
        self._keep, self._send, self._receive = sock, sock.send, sock.recv
        self._lock = threading.Lock()
        self._assembler = framing.Assembler(max_bytes=_HOST_MESSAGE_BYTES)

    def send(self, message: wire.Message) -> None:
        packets = framing.packets(message)
        if len(packets) == 1:
            with self._lock:
                self._send(packets[0])
            return
        with self._lock, _interrupts_deferred():
            for packet in packets:
                self._send(packet)

    def forget_unread(self) -> None:
        """What was asked of the kernel before us is not ours to do: it died of it, or before it."""
        self._assembler = framing.Assembler(max_bytes=_HOST_MESSAGE_BYTES)
        with suppress(BlockingIOError):
            while self._receive(framing.ADDRESSED_BYTES, _AT_ONCE):
                pass

    def receive(self) -> wire.HostRequest | None:
        """The next request that is for us; None when the host has hung up. A thread of a woken copy may be here already
        when what was for the kernel before us lies there still."""
        while packet := self._receive(framing.ADDRESSED_BYTES):
            ours = framing.received(packet, by=getpid())
            if ours == framing.FORGET:
                self._assembler = framing.Assembler(max_bytes=_HOST_MESSAGE_BYTES)
            elif ours is not None and (body := self._assembler.feed(ours)) is not None:
                return _decoder.decode(body)
        return None


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """A KeyboardInterrupt between two packets would tear a message; let it wait until the last is out."""
    if get_ident() != _MAIN:
        yield
        return
    pending: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        pending.append(number)

    handler = set_handler(SIGINT, remember)
    try:
        yield
    finally:
        set_handler(SIGINT, handler)
        if pending and callable(handler):
            handler(pending[0], None)
