"""The host's end of one kernel. All that comes in here is hostile: typed, bounded, never executed.

Four descriptors come from a session: the kernel's control socket, pid 1's reports, stdout, stderr. One epoll
watches them, so that a wait is one wait. Reading is bounded per round, so a kernel that floods the host gets
backpressure and nobody else notices.
"""

import os
import select
import signal
import socket
import struct
from contextlib import suppress
from typing import Literal

import anyio
import msgspec

from holdfast.kernel import wire

MAX_MESSAGE_BYTES = 33 << 20
"""A little more than an honest guest ever sends (`guest.channel.MAX_MESSAGE_BYTES`)."""

_READ_BYTES = 1 << 16
_READS_PER_ROUND = 16
_MESSAGES_PER_ROUND = 256
_REPORT = struct.Struct("ii")
_CREDENTIALS = struct.Struct("iii")

_decoder: "msgspec.msgpack.Decoder[wire.KernelMessage]" = msgspec.msgpack.Decoder(wire.KernelMessage)


class Printed(msgspec.Struct, frozen=True):
    """Bytes from one of the pipes."""

    stream: Literal["stdout", "stderr"]
    data: bytes


class Died(msgspec.Struct, frozen=True):
    """pid 1 reaped the kernel."""

    status: int


class Gone(msgspec.Struct, frozen=True):
    """The kernel can no longer be talked to, and nobody reported its death."""

    reason: str


Happening = Printed | Died | Gone | wire.KernelMessage


class Kernel:
    """One running kernel, as long as it runs."""

    def __init__(self, *, control: socket.socket, reports: socket.socket, stdout: int, stderr: int) -> None:
        self.pid = 0
        self.init_pid = 0
        self._pidfds: dict[int, int] = {}
        self._pid_inside = 0
        self._control = control
        self._reports = reports
        self._pipes: dict[int, Literal["stdout", "stderr"]] = {stdout: "stdout", stderr: "stderr"}
        self._assembler = wire.Assembler(max_bytes=MAX_MESSAGE_BYTES)
        self._epoll = select.epoll()
        for sock in (control, reports):
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        for fd in (control.fileno(), reports.fileno(), stdout, stderr):
            os.set_blocking(fd, False)
            self._epoll.register(fd, select.EPOLLIN)

    async def wait_ready(self) -> None:
        """Until pid 1 and the kernel both are up. Learns their pids from the socket, not from their words."""
        while not (self.pid and self.init_pid):
            for event in await self.wait(None):
                match event:
                    case wire.Ready():
                        self._pid_inside = event.pid
                    case Died() | Gone():
                        raise ConnectionError(f"the kernel ended while it started: {event}")

    async def wait(self, timeout_s: float | None) -> list[Happening]:
        """What happened next; nothing, if the time is over."""
        with anyio.move_on_after(timeout_s):
            await anyio.wait_readable(self._epoll)
        return self.collect()

    def collect(self) -> list[Happening]:
        """What has happened so far. What was printed comes before what was sent later."""
        ready = {fd for fd, _ in self._epoll.poll(0)}
        messages = self._read_messages() if self._control.fileno() in ready else []
        deaths = self._read_reports() if self._reports.fileno() in ready else []
        # The pipes last, but first in line: a cell flushes before it sends.
        return [*self.read_pipes(), *messages, *deaths]

    def read_pipes(self) -> list[Happening]:
        """What the pipes hold now, up to a bound."""
        printed: list[Happening] = []
        for fd, stream in list(self._pipes.items()):
            for _ in range(_READS_PER_ROUND):
                try:
                    data = os.read(fd, _READ_BYTES)
                except BlockingIOError:
                    break
                if not data:
                    self._forget_pipe(fd)
                    break
                printed.append(Printed(stream, data))
        return printed

    async def send(self, message: wire.Message) -> None:
        """Give the kernel a request. A kernel that is gone is noticed by `wait`, not here."""
        with suppress(BrokenPipeError, ConnectionResetError):
            for packet in wire.packets(message):
                await self._send_packet(packet)

    def interrupt(self) -> None:
        self._signal(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """End the session's processes, all of them: with its pid 1 goes the pid namespace."""
        self._signal(self.init_pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._epoll.close()
        self._control.close()
        self._reports.close()
        for fd in [*self._pipes, *self._pidfds.values()]:
            os.close(fd)
        self._pipes.clear()
        self._pidfds.clear()

    async def _send_packet(self, packet: bytes) -> None:
        while True:
            try:
                self._control.send(packet)
                return
            except BlockingIOError:
                await anyio.wait_writable(self._control)

    def _read_messages(self) -> list[Happening]:
        messages: list[Happening] = []
        try:
            for _ in range(_MESSAGES_PER_ROUND):
                packet, pid = _receive(self._control, wire.PACKET_BYTES + 1)
                if not packet:
                    self._forget_socket(self._control)
                    return [*messages, Gone("it closed its control socket")]
                self.pid = self.pid or self._meet(pid)
                body = self._assembler.feed(packet)
                if body is not None:
                    messages.append(wire.decode(body, _decoder))
        except (BlockingIOError, InterruptedError):
            pass
        except ConnectionResetError:
            self._forget_socket(self._control)
        except wire.ProtocolViolation as violation:
            self._forget_socket(self._control)
            messages.append(Gone(f"it broke the protocol ({violation})"))
        return messages

    def _read_reports(self) -> list[Happening]:
        deaths: list[Happening] = []
        try:
            while True:
                report, pid = _receive(self._reports, _REPORT.size)
                if len(report) < _REPORT.size:
                    self._forget_socket(self._reports)
                    return [*deaths, Gone("its pid 1 is gone")]
                self.init_pid = self.init_pid or self._meet(pid)
                reaped, status = _REPORT.unpack(report)
                if reaped and reaped == self._pid_inside:
                    deaths.append(Died(status))
        except (BlockingIOError, InterruptedError):
            return deaths

    def _meet(self, pid: int) -> int:
        """Hold on to a process: a number may be another's by the time we use it, a pidfd never is."""
        with suppress(ProcessLookupError):
            self._pidfds[pid] = os.pidfd_open(pid)
        return pid

    def _signal(self, pid: int, number: int) -> None:
        if pid in self._pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfds[pid], number)

    def _forget_pipe(self, fd: int) -> None:
        self._epoll.unregister(fd)
        del self._pipes[fd]
        os.close(fd)

    def _forget_socket(self, sock: socket.socket) -> None:
        # A closed peer stays readable for ever; the descriptor itself lives until `close`.
        self._epoll.unregister(sock.fileno())


def _receive(sock: socket.socket, size: int) -> tuple[bytes, int]:
    """One packet and the pid of its sender, as our pid namespace numbers it."""
    data, ancillary, flags, _ = sock.recvmsg(size, socket.CMSG_SPACE(_CREDENTIALS.size))
    if flags & socket.MSG_TRUNC:
        raise wire.ProtocolViolation("a packet that is too long")
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return data, _CREDENTIALS.unpack(value)[0]
    return data, 0
