"""The host's end of one kernel. All that comes in here is hostile: typed, bounded, never executed.

Six descriptors come from a session: the kernel's control socket, pid 1's reports, stdout, stderr, the socket on which
snapshots sleep, and a pipe for tracebacks. One epoll watches the first four, so that a wait is one wait. Reading is
bounded per round, so a kernel that floods the host gets backpressure and nobody else notices.
"""

import os
import select
import signal
import socket
import struct
import time
from contextlib import suppress
from typing import Literal, TypeVar

import anyio
import msgspec

from holdfast.kernel import early, framing, wire
from holdfast.kernel.attested import drain, hear_only_words, is_unread, number_inside, receive
from holdfast.kernel.beds import Beds
from holdfast.kernel.happenings import INIT_GONE, SOCKET_CLOSED, Died, Gone, Happening, Pressed, Printed, Snapshot
from holdfast.kernel.pidfds import Pidfds
from holdfast.kernel.tracebacks import Tracebacks
from holdfast.kernel.waiting import readable, watch
from holdfast.sandbox import procfs
from holdfast.sandbox.cgroups import MemoryWatch

MAX_MESSAGE_BYTES = 33 << 20
"""A little more than an honest guest ever sends (`guest.channel.MAX_MESSAGE_BYTES`)."""

_READ_BYTES = 1 << 16
_READS_PER_ROUND = 16
_MESSAGES_PER_ROUND = 32
_ROUND_S = 0.001
"""A round reads no more after so long. What is left is read in the next, when others had their turn."""
_REPORT = struct.Struct("ii")
_LOOK_AGAIN_S = 0.02
"""At processes that are about to end: not each end is reported to us."""

Reply = TypeVar("Reply", bound=wire.Message)
_decoder: "msgspec.msgpack.Decoder[wire.KernelMessage]" = msgspec.msgpack.Decoder(wire.KernelMessage)


class Kernel:
    """One running kernel, as long as it runs."""

    def __init__(
        self,
        *,
        control: socket.socket,
        reports: socket.socket,
        wake: socket.socket,
        trace: int,
        stdout: int,
        stderr: int,
    ) -> None:
        self.pid = 0
        self.init_pid = 0
        self.turn = 0
        """Counts requests. A reply names the one it ends, so that a forged or belated one ends no other."""
        self.snapshot: Snapshot | None = None
        self.owes_snapped = 0
        """Answers that may still come, to what we have given up."""
        self._wake = wake
        self.tracebacks = Tracebacks(trace)
        self._memory_watch: MemoryWatch | None = None
        self._early: list[Happening] = []
        self._pidfds = Pidfds()
        self.beds = Beds(wake, self._pidfds)
        self._pid_inside = 0
        self._reaped: set[int] | None = None  # since a snapshot was asked for; None: nobody waits for one
        self._control = control
        self._sending = anyio.Lock(fast_acquire=True)
        self._is_torn = False  # the last message was not sent to its end
        self._was_reset = False  # its end was closed before it had read all that we sent
        self._reports = reports
        self._pipes: dict[int, Literal["stdout", "stderr"]] = {stdout: "stdout", stderr: "stderr"}
        self._assembler = framing.Assembler(max_bytes=MAX_MESSAGE_BYTES)
        self._epoll = select.epoll()
        for sock in (control, reports, wake):
            sock.setblocking(False)
            hear_only_words(sock)
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
        await readable(self._epoll.fileno(), timeout_s)
        return self.collect()

    def watch(self, for_s: float) -> list[Happening]:
        """The same for a moment, without going to sleep. Nobody else has his turn meanwhile."""
        return self.collect() if watch(self._epoll, for_s) else []

    def collect(self) -> list[Happening]:
        """What has happened so far. What was printed comes before what was sent later."""
        kept, self._early = self._early, []
        return [*kept, *self._news()]

    def _news(self) -> list[Happening]:
        if not (ready := self._ready()):
            return []
        pressed = self._read_pressure(ready)
        messages = self._read_messages() if self._control.fileno() in ready else []
        deaths = self._read_reports() if self._reports.fileno() in ready else []
        # The pipes last, but first in line: a cell flushes before it sends.
        return [*self.read_pipes(), *pressed, *messages, *deaths]

    def _ready(self) -> set[int]:
        return {fd for fd, _ in self._epoll.poll(0)}

    def read_pipes(self) -> list[Happening]:
        """What the pipes hold now, up to a bound."""
        printed: list[Happening] = []
        ready = self._ready()  # asked anew: what is printed may be there only since a message was read
        for fd, stream in [each for each in self._pipes.items() if each[0] in ready]:
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
        async with self._sending:  # an answer of many packets may be on its way, and a thread's save be done meanwhile
            left = framing.addressed(message, to=self._pid_inside, forget=self._is_torn)
            with suppress(BrokenPipeError, ConnectionResetError):
                while left:
                    await self._send_packet(left[0])
                    self._is_torn = len(left) > 1  # whoever is cancelled here leaves it so
                    left.pop(0)

    def send_nowait(self, message: wire.Message) -> bool:
        """The same without waiting; False: it does not fit at once, and nothing was sent."""
        packets = framing.addressed(message, to=self._pid_inside, forget=self._is_torn)
        if len(packets) > 1:
            return False
        try:
            self._control.send(packets[0])
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            pass
        return True

    def watch_memory(self, watch: MemoryWatch) -> None:
        """Report `Pressed` when the session's cgroup says so."""
        self._memory_watch = watch
        self._epoll.register(watch.fd, watch.epoll_events)

    def is_alive(self) -> bool:
        return self._pidfds.lives(self.pid)

    def is_busy(self) -> bool:
        """Whether its main thread runs, or waits for a processor: a sleeping one has nothing half done."""
        return procfs.status(self.pid, b"State")[:1] == [b"R"]

    def is_lost(self) -> bool:
        """The kernel or the session's pid 1 has ended, or nobody can talk to it any more."""
        return not (self.is_alive() and self._pidfds.lives(self.init_pid)) or early.is_lost(self._early)

    def lost_init(self) -> bool:
        """The session's pid 1 was ended, and every process of the session with it. Without a child it also ends by
        itself, but not before it has reported the kernel's end."""
        if self._pidfds.lives(self.init_pid):
            return False
        return not any(isinstance(death, Died) for death in self.note_deaths())

    def doomed(self) -> set[int]:
        """Those of the kernel, its pid 1 and its snapshot that live only because they are frozen: a signal waits for
        them that ends them when they are thawed."""
        pids = {self.pid, self.init_pid} | ({self.snapshot.pid} if self.snapshot else set())
        return {pid for pid in pids if procfs.is_to_die(pid)}

    async def wait_dead(self, pids: set[int], timeout_s: float) -> None:
        """Until these have ended, which are thawed by now."""
        with anyio.move_on_after(timeout_s):
            while any(self._pidfds.lives(pid) for pid in pids):
                await readable(self._epoll.fileno(), _LOOK_AGAIN_S)
                self.note_deaths()

    async def wait_told(self, timeout_s: float) -> None:
        """If the kernel is lost, until pid 1 has told how it ended: its socket is closed a moment before that."""
        with anyio.move_on_after(timeout_s):
            while self.is_lost() and self._pidfds.lives(self.init_pid):
                if any(isinstance(death, Died) for death in self.note_deaths()):
                    return
                await readable(self._epoll.fileno(), _LOOK_AGAIN_S)

    def note_deaths(self) -> list[Died | Gone]:
        """What is known of the kernel's end. It stays known until another takes its place."""
        early.keep(self._early, self._news())
        return [event for event in self._early if isinstance(event, (Died, Gone))]

    def has_unread(self) -> bool:
        """Whether the kernel has not read all that we sent to it, as Linux says."""
        return self._was_reset or is_unread(self._control)

    def has_snapshot(self) -> bool:
        """One that was killed is none any more, though on a busy machine it takes a while to end."""
        snapshot = self.snapshot
        return snapshot is not None and self.sleeps(snapshot) and not procfs.is_to_die(snapshot.pid)

    def sleeps(self, snapshot: Snapshot) -> bool:
        return self._pidfds.lives(snapshot.pid)

    def interrupt(self) -> bool:
        """Send SIGINT; False if it would be lost, because the cell has not begun (the guest ignores it then)."""
        if _ignores(self.pid, signal.SIGINT):
            return False
        self._pidfds.signal_main_thread(self.pid, signal.SIGINT)
        return True

    def warn_of_memory(self) -> None:
        self._pidfds.signal_main_thread(self.pid, wire.MEMORY_SIGNAL)

    def ask_location(self) -> None:
        """Have the kernel write down where it is (`tracebacks`)."""
        self._pidfds.signal_main_thread(self.pid, wire.LOCATION_SIGNAL)

    def kill(self) -> None:
        """End the kernel, and it alone: its snapshot, if it has one, can take its place."""
        self._pidfds.signal(self.pid, signal.SIGKILL)

    def kill_session(self) -> None:
        """End the session's processes, all of them: with its pid 1 goes the pid namespace."""
        self._pidfds.signal(self.init_pid, signal.SIGKILL)

    def init_handle(self) -> int:
        """A pidfd of the session's pid 1, ours to close."""
        if self.init_pid not in self._pidfds:
            raise ProcessLookupError("the session's pid 1 is gone")
        return self._pidfds[self.init_pid]

    async def restage(self, timeout_s: float) -> wire.Restaged | None:
        """Have the kernel move to the stage that was mounted under it. None: it is lost, or does not answer."""
        with anyio.move_on_after(timeout_s):
            await self.send(wire.Restage())
            return await self.expect(wire.Restaged)
        return None

    # -- snapshots -----------------------------------------------------------------------------------------------

    async def take_snapshot(self, timeout_s: float) -> str | None:
        """Have the kernel fork a frozen copy; the one before it is dropped. None, or why there is none now."""
        before, self.snapshot = self.snapshot, None
        self._reaped = set()
        if before is not None:  # of no use any more; it dies while its successor is born, which may need its room
            self._pidfds.signal(before.pid, signal.SIGKILL)
        try:
            with anyio.fail_after(timeout_s):
                await self.send(wire.TakeSnapshot())
                snapped = await self.expect(wire.Snapped)
                if snapped is None or snapped.pid == 0:
                    return snapped.reason if snapped else "the kernel is gone"
                sleeper = await self._wait_asleep(snapped.pid)
                if sleeper is None:
                    return "the snapshot ended before it slept"
        except TimeoutError:
            self.owes_snapped += 1
            return f"the kernel did not take it within {timeout_s:g} s"
        finally:
            self._reaped = None
            await self.beds.bury(before)
        self.snapshot = Snapshot(sleeper, snapped.pid)
        return None

    async def put_to_bed(self) -> bool:
        """Let the snapshot sleep on, however many come after it. False: there is none, or it is lost."""
        snapshot, self.snapshot = self.snapshot, None
        if snapshot is not None and self.sleeps(snapshot):
            return await self.beds.lay(snapshot)
        await self.beds.bury(snapshot)
        return False

    async def wake_snapshot(self, timeout_s: float, *, kept: Snapshot | None = None) -> wire.Woken | None:
        """Let the snapshot, or one that was put to bed, be the kernel from now on. The old kernel and its children are
        dead."""
        snapshot = kept or self.snapshot
        if snapshot is None:
            return None
        if not self._discard_leftovers():
            return None
        self._pidfds.part_from(self.pid)
        try:
            if kept is None:
                self.snapshot = None
                self._pidfds.signal(snapshot.pid, signal.SIGCONT)  # user code may have stopped it
                self._wake.send(b"wake")
            else:
                self.beds.wake(kept)
            with anyio.fail_after(timeout_s):
                self.pid, self._pid_inside = snapshot.pid, snapshot.pid_inside
                return await self.expect(wire.Woken)
        except (TimeoutError, OSError):
            return None

    async def drop_snapshot(self) -> None:
        """Give up the snapshot and its memory, which is free when this returns."""
        snapshot, self.snapshot = self.snapshot, None
        await self.beds.bury(snapshot)

    async def expect(self, kind: type[Reply]) -> Reply | None:
        """The next message of a kind; None if the kernel is lost. Of what happens meanwhile the next run learns."""
        while not early.is_lost(self._early):
            await readable(self._epoll.fileno(), None)
            events = self._news()
            early.keep(self._early, events)
            for event in events:
                if isinstance(event, kind):
                    return event
        return None

    async def _wait_asleep(self, pid_inside: int) -> int | None:
        """The sleeper's pid. Any process of the session can write to this socket: only the one that the kernel named,
        by the number that Linux attests, is heard. None: it ended, or the socket is shut."""
        # Watched only now: it would be readable all the while that the kernel is busy with something else.
        self._epoll.register(self._wake.fileno(), select.EPOLLIN)
        try:
            return await self._hear_sleeper(pid_inside)
        finally:
            self._epoll.unregister(self._wake.fileno())

    async def _hear_sleeper(self, pid_inside: int) -> int | None:
        while pid_inside not in (self._reaped or ()) and not early.is_lost(self._early):
            await anyio.wait_readable(self._epoll)
            try:
                word, pid = receive(self._wake, 64)
            except framing.ProtocolViolation:
                continue
            except BlockingIOError:
                early.keep(self._early, self._news())
                continue
            if not word:
                return None
            if word == b"asleep" and number_inside(pid) == pid_inside and self._pidfds.meet(pid) in self._pidfds:
                return pid
        return None

    def _discard_leftovers(self) -> bool:
        """What the dead kernel sent, whole or in part. False: it has no end, so who was said to be asleep sends it."""
        self._assembler = framing.Assembler(max_bytes=MAX_MESSAGE_BYTES)
        self._early = [event for event in self._early if isinstance(event, Printed)]
        if not drain(self._control):
            return False
        with suppress(FileExistsError):
            self._epoll.register(self._control.fileno(), select.EPOLLIN)
        return True

    def close(self) -> None:
        self.kill_session()
        self._epoll.close()
        self._control.close()
        self._reports.close()
        self._wake.close()
        self.tracebacks.close()
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()
        self.beds.close()
        self._pidfds.close()

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
            until = time.perf_counter() + _ROUND_S
            for _ in range(_MESSAGES_PER_ROUND):
                if time.perf_counter() >= until:
                    break
                packet, pid = receive(self._control, framing.PACKET_BYTES + 1)
                if not packet:
                    self._forget_socket(self._control)
                    return [*messages, Gone(SOCKET_CLOSED)]
                self.pid = self.pid or self._pidfds.meet(pid)
                body = self._assembler.feed(packet)
                if body is not None:
                    messages.append(framing.decode(body, _decoder))
                    if isinstance(messages[-1], wire.Finished):  # its last word, nearly always
                        break
        except (BlockingIOError, InterruptedError):
            pass
        except ConnectionResetError:
            self._was_reset = True
            self._forget_socket(self._control)
            messages.append(Gone(SOCKET_CLOSED))
        except framing.ProtocolViolation as violation:
            self._forget_socket(self._control)
            messages.append(Gone(f"it broke the protocol ({violation})"))
        return messages

    def _read_reports(self) -> list[Happening]:
        deaths: list[Happening] = []
        try:
            while True:
                report, pid = receive(self._reports, _REPORT.size)
                if len(report) < _REPORT.size:
                    self._forget_socket(self._reports)
                    return [*deaths, Gone(INIT_GONE)]
                self.init_pid = self.init_pid or self._pidfds.meet(pid)
                reaped, status = _REPORT.unpack(report)
                if self._reaped is not None:
                    self._reaped.add(reaped)
                if reaped and reaped == self._pid_inside:
                    deaths.append(Died(status))
                elif self.snapshot is not None and reaped == self.snapshot.pid_inside:
                    self._pidfds.part_from(self.snapshot.pid)
                    self.snapshot = None  # user code may kill it: then this run is unprotected, and nothing worse
                else:
                    self.beds.forget(reaped)
        except (BlockingIOError, InterruptedError):
            return deaths

    def _read_pressure(self, ready: set[int]) -> list[Happening]:
        if self._memory_watch is None or self._memory_watch.fd not in ready:
            return []
        self._memory_watch.acknowledge()
        return [Pressed()]

    def _forget_pipe(self, fd: int) -> None:
        self._epoll.unregister(fd)
        del self._pipes[fd]
        os.close(fd)

    def _forget_socket(self, sock: socket.socket) -> None:
        # A closed peer stays readable for ever; the descriptor itself lives until `close`.
        self._epoll.unregister(sock.fileno())


def _ignores(pid: int, number: int) -> bool:
    mask = procfs.status(pid, b"SigIgn")
    return bool(mask) and bool(int(mask[0], 16) >> (number - 1) & 1)
