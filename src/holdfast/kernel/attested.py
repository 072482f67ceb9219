"""Who sent a packet: not by his words, but as Linux attests."""

import fcntl
import socket
import struct
import sys
import termios
from contextlib import suppress

from holdfast.kernel import framing
from holdfast.sandbox import procfs

_MOST_LEFT_OVER = 4096
"""Packets: many times what a socket holds."""
_SO_PASSRIGHTS = 83
_CREDENTIALS = struct.Struct("iii")
_ROOM = socket.CMSG_SPACE(_CREDENTIALS.size)
_CUT_SHORT = int(socket.MSG_TRUNC)  # plain numbers: an enum's `&` is a dozen calls, for every packet
_ATTESTED = int(socket.SOL_SOCKET), int(socket.SCM_CREDENTIALS)


def hear_only_words(sock: socket.socket) -> None:
    """Have Linux attest who sends; and take no descriptors. We have no use for one, but whoever gets the last of a file
    closes it, and that can take Linux seconds (a deleted file in thousands of pieces): they would be the host's."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    with suppress(OSError):  # before Linux 6.16: SECURITY.md
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


def receive(sock: socket.socket, size: int) -> tuple[bytes, int]:
    """One packet and the pid of its sender, as our pid namespace numbers it."""
    data, ancillary, flags, _ = sock.recvmsg(size, _ROOM)
    if flags & _CUT_SHORT:
        raise framing.ProtocolViolation("a packet that is too long")
    for level, kind, value in ancillary:
        if (level, kind) == _ATTESTED:
            return data, _CREDENTIALS.unpack(value)[0]
    return data, 0


def drain(sock: socket.socket) -> bool:
    """Read what lies there, for nobody. False: there is no end of it."""
    for _ in range(_MOST_LEFT_OVER):
        try:
            if not receive(sock, framing.PACKET_BYTES + 1)[0]:
                return True
        except framing.ProtocolViolation:
            continue
        except OSError:
            return True
    return False


def is_unread(sock: socket.socket) -> bool:
    """Whether something that we sent has not been read. Linux counts it: the other end cannot claim it."""
    left = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(left, sys.byteorder) > 0


def number_inside(pid: int) -> int:
    """A process's number in its own pid namespace; 0 if it is gone."""
    numbers = procfs.status(pid, b"NSpid")
    return int(numbers[-1]) if numbers else 0
