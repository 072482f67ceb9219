"""One TCP connection: read and written in small steps, each of which lets others go on.

Nothing is buffered here. Who reads from one connection and writes to another reads no faster than that one takes it.
"""

import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio

from holdfast.pace import Pace

STEP_BYTES = 1 << 16
_LINGER_S = 2.0
_LINGER_BYTES = 1 << 20


class Idle:
    """Ends what is done in its scope when for too long nothing was moved."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self.scope = anyio.CancelScope(deadline=anyio.current_time() + idle_s)

    def touch(self) -> None:
        deadline = anyio.current_time() + self._idle_s
        if deadline - self.scope.deadline > self._idle_s / 16:  # a timer for every byte would be dear
            self.scope.deadline = deadline


class Wire:
    """A connected socket that does not block; it is ours to close. Failures are `OSError`."""

    def __init__(self, connection: socket.socket, idle: Idle, pace: Pace) -> None:
        self._socket = connection
        self._idle = idle
        self.pace = pace
        """Of the session: all its connections share it."""

    async def read(self) -> bytes:
        """At least a byte; nothing at its end."""
        while True:
            await anyio.wait_readable(self._socket)
            await self.pace.turn()
            with suppress(BlockingIOError, InterruptedError):
                data = self._socket.recv(STEP_BYTES)
                self.pace.spend_moving(len(data))
                self._idle.touch()
                return data

    async def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            await anyio.wait_writable(self._socket)
            await self.pace.turn()
            with suppress(BlockingIOError, InterruptedError):
                sent = self._socket.send(left)
                self.pace.spend_moving(sent)
                left = left[sent:]
                self._idle.touch()

    def half_close(self) -> None:
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_WR)

    async def finish(self) -> None:
        """The last has been written. What still comes is read for a moment, or it would not arrive (RST)."""
        self.half_close()
        left = _LINGER_BYTES
        with anyio.move_on_after(_LINGER_S), suppress(OSError):
            while left > 0 and (data := await self.read()):
                left -= len(data)
        self.close()

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        """The other end shall notice that this is not the end of what was said; and nothing more leaves."""
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


async def together(*parts: Callable[[], Awaitable[bool]]) -> None:
    """All at once. One that returns True ends the others; so does one that fails, and what it raised is raised here."""
    failures: list[Exception] = []

    async def attempt(part: Callable[[], Awaitable[bool]]) -> None:
        try:
            if await part():
                tasks.cancel_scope.cancel()
        except Exception as error:
            failures.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for part in parts:
            tasks.start_soon(attempt, part)
    if failures:
        raise failures[0]
