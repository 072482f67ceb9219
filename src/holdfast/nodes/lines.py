"""How the host speaks to the keeper and to zygotes: one question, one answer, in turn; descriptors go both ways."""

import array
import os
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import msgspec

from holdfast.errors import HoldfastError, KernelStartFailed, SandboxUnavailable, disk_failed
from holdfast.kernel import framing, wire
from holdfast.sandbox.overlay import LayerNotWritable, OverlayUnavailable

_decoder: "msgspec.msgpack.Decoder[wire.Supervision]" = msgspec.msgpack.Decoder(wire.Supervision)


_ROOM = socket.CMSG_SPACE(12) + socket.CMSG_SPACE(4 * wire.MOST_FDS_BACK)
"""For who sent it, and for the descriptors that came with it."""


class LineBroken(Exception):
    """The process at the other end is gone."""


class Line:
    """A conversation with the keeper or a zygote: one question, one answer, in turn."""

    def __init__(self, sock: socket.socket) -> None:
        self.peer_pid = 0
        self._owed = 0
        """Answers that nobody waits for any more, and that are to come."""
        self._sock = sock
        self._turn = anyio.Lock()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    async def ask(self, request: wire.Message, fds: list[int], *, timeout_s: float) -> list[int]:
        """The descriptors that came with the answer. Raises what a refusal says."""
        # Shielded: an answer that nobody waited for would be taken for the next one's.
        async with self._turn, _shielded():
            while self._owed:
                await self._drop_late(timeout_s=timeout_s)
            try:
                framing.send_with_fds(self._sock, request, fds)
            except OSError as error:
                raise LineBroken(str(error)) from error
            try:
                return await self.receive(timeout_s=timeout_s)
            except TimeoutError:
                self._owed += 1
                raise

    async def _drop_late(self, *, timeout_s: float) -> None:
        """Before anything else is asked: who answers may be a child of the one that was asked, in any order."""
        with suppress(HoldfastError):  # it was refused, and whoever asked has given up
            for fd in await self.receive(timeout_s=timeout_s):
                os.close(fd)
        self._owed -= 1

    async def receive(self, *, timeout_s: float) -> list[int]:
        try:
            with anyio.fail_after(timeout_s):
                await anyio.wait_readable(self._sock)
            packet, ancillary, _, _ = self._sock.recvmsg(framing.PACKET_BYTES + 1, _ROOM, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise
        except (OSError, ValueError, anyio.ClosedResourceError) as error:
            raise LineBroken(str(error) or "it was closed") from error
        if not packet:
            raise LineBroken("it closed the line")
        came_with = {kind: data for _, kind, data in ancillary}
        # By its first answer: later ones may come from a child that it had do the work, and that is gone by now.
        sender = int.from_bytes(came_with[socket.SCM_CREDENTIALS][:4], sys.byteorder, signed=True)
        self.peer_pid = self.peer_pid or sender
        answer = framing.decode(packet[1:], _decoder)
        if isinstance(answer, wire.Refused):
            raise _refusal(answer.reason.strip())
        return list(array.array("i", came_with.get(socket.SCM_RIGHTS, b"")))

    def is_broken(self) -> bool:
        """A session that is just being forked holds a copy of the zygote's socket: that it is open proves nothing."""
        if self.peer_pid and not _is_alive(self.peer_pid):
            return True
        try:
            return self._sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            anyio.notify_closing(self._sock)  # who waits for an answer: another line may have this number at once
            with suppress(OSError):  # also where a child that the application forked has a copy of it
                self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


@asynccontextmanager
async def _shielded() -> AsyncIterator[None]:
    with anyio.CancelScope(shield=True):
        yield


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as status:
            return status.read().rpartition(b")")[2].split()[0] != b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _refusal(reason: str) -> HoldfastError:
    if found := re.search(rf"{LayerNotWritable.__name__}: \[Errno (\d+)\]", reason):
        number = int(found[1])
        return disk_failed("laying the session's layer", OSError(number, os.strerror(number)))
    if OverlayUnavailable.__name__ in reason:
        return SandboxUnavailable(
            f"no overlay can be mounted over the session's files: {reason.splitlines()[-1]}",
            hint="load it (sudo modprobe overlay; Linux 5.11, or 5.19 for a job of root's), and keep the home, or the "
            "job's directory, on a disk: ext4, xfs, btrfs, not a container's own root. `holdfast doctor` tries it",
        )
    return KernelStartFailed(reason, hint="run `holdfast doctor`")
