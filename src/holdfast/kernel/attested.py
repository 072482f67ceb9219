"""Who sent a packet: not by his words, but as Linux attests."""

import socket
import struct

from holdfast.kernel import framing
from holdfast.sandbox import procfs

_CREDENTIALS = struct.Struct("iii")
_ROOM = socket.CMSG_SPACE(_CREDENTIALS.size)


def receive(sock: socket.socket, size: int) -> tuple[bytes, int]:
    """One packet and the pid of its sender, as our pid namespace numbers it."""
    data, ancillary, flags, _ = sock.recvmsg(size, _ROOM)
    if flags & socket.MSG_TRUNC:
        raise framing.ProtocolViolation("a packet that is too long")
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return data, _CREDENTIALS.unpack(value)[0]
    return data, 0


def number_inside(pid: int) -> int:
    """A process's number in its own pid namespace; 0 if it is gone."""
    numbers = procfs.status(pid, b"NSpid")
    return int(numbers[-1]) if numbers else 0
