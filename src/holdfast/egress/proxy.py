"""Accepts what a guest sends to its way out: while a run goes on, and at no other time."""

import errno
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.abc import TaskGroup

from holdfast.egress.addresses import Lookups
from holdfast.egress.allowed import AllowList
from holdfast.egress.exchange import Exchange, turn_away
from holdfast.egress.gate import Bounds, Gate, Note, Resolve
from holdfast.egress.log import Log, Outgoing
from holdfast.pace import Pace

_log = logging.getLogger("holdfast.egress")

_MOST_QUEUED = 1 << 12
_NOT_OURS = {errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EINTR}
"""What is wrong with a connection that was to be accepted, and not with the listener."""
_SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_SCARCE_S = 0.1
_BUFFER_BYTES = 1 << 17
"""Of a guest's connection. Linux charges them to the host, and would let them grow to megabytes each."""
_TURNED_AWAY_S = 0.01
"""Between two connections too many: a guest that makes them in a loop is not the host's only work."""


class _Opened:
    """One run's time."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.scope = anyio.CancelScope()
        self.done = anyio.Event()


class Proxy:
    """One session's way out.

    `note` is awaited before the first byte of a request leaves. If it raises, nothing leaves. `withdraw` is awaited if
    none did after all, for nobody took a connection; it does not raise.
    """

    def __init__(
        self,
        allowed: AllowList,
        *,
        note: Note,
        withdraw: Note | None = None,
        resolve: Resolve | None = None,
        bounds: Bounds | None = None,
        pace: Pace | None = None,
        withheld: str = "",
    ) -> None:
        self.allowed = allowed
        self._note = note
        self._withdraw = withdraw or _stays_noted
        self._resolve = resolve or Lookups()
        self._pace = pace or Pace()
        self._withheld = withheld
        self._bounds = bounds or Bounds()
        self._listener: socket.socket | None = None
        self._tasks: TaskGroup | None = None
        self._serving = anyio.Event()
        self._failure: Exception | None = None
        self._open = False

    async def serve(self, listener: socket.socket) -> None:
        """Until cancelled, or until the listener fails (OSError).

        The listener is the caller's to close, and nobody else has it: who has could make it block.
        """
        try:
            listener.setblocking(False)
            async with anyio.create_task_group() as tasks:
                self._listener, self._tasks, self._failure = listener, tasks, None
                self._serving.set()
                await anyio.sleep_forever()
        finally:
            self._tasks = None
            self._serving.set()  # also if it never was: nobody waits for it
        if self._failure is not None:
            raise OSError("the way out cannot be listened on") from self._failure

    @asynccontextmanager
    async def open(self, run: str) -> AsyncIterator[Log]:
        """Only in here connections are accepted. At its end none is left, and nothing of them is under way.

        Those that were begun before it are closed unserved. `serve` has to be running (or about to), one is open at a
        time. Where `serve` has ended, nothing is accepted.
        """
        if self._open:
            raise RuntimeError("another run has the way out open")
        self._open = True
        try:
            await self._serving.wait()
            log = Log(run)
            gate = Gate(
                self.allowed, note=self._note, withdraw=self._withdraw, resolve=self._resolve, bounds=self._bounds,
                log=log, pace=self._pace, withheld=self._withheld,
            )  # fmt: skip
            opened = _Opened(gate)
            if self._tasks is None or self._listener is None:
                yield log
                return
            _drop_queued(self._listener)
            self._tasks.start_soon(self._accept_while, opened, self._listener)
            try:
                yield log
            finally:
                opened.scope.cancel()
                with anyio.CancelScope(shield=True):
                    await opened.done.wait()
        finally:
            self._open = False

    async def _accept_while(self, opened: _Opened, listener: socket.socket) -> None:
        try:
            with opened.scope:
                async with anyio.create_task_group() as connections:
                    try:
                        await self._accept(opened.gate, listener, connections)
                    except (OSError, ValueError) as error:  # it failed, or was closed under our hands
                        self._fail(error)
        finally:
            opened.done.set()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    async def _accept(self, gate: Gate, listener: socket.socket, connections: TaskGroup) -> None:
        at_once = begun = 0

        async def attend(connection: socket.socket) -> None:
            nonlocal at_once
            try:
                await Exchange(connection, gate).run()
            except Exception:
                _log.exception("a connection of a guest's was given up")  # a mistake of ours ends no run
            finally:
                connection.close()
                at_once -= 1

        while True:
            await anyio.wait_readable(listener)
            connection = await _accepted(listener)
            if connection is None:
                continue
            if at_once >= gate.bounds.connections:
                turn_away(connection, gate)
                await anyio.sleep(_TURNED_AWAY_S)
                continue
            at_once += 1
            begun += 1
            connections.start_soon(attend, connection)
            if begun > 2 * gate.bounds.sent:  # so many requests are not even allowed
                await anyio.sleep(_TURNED_AWAY_S)


async def _stays_noted(outgoing: Outgoing) -> None:
    pass


async def _accepted(listener: socket.socket) -> socket.socket | None:
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno in _NOT_OURS:
            return None
        if error.errno in _SCARCE:
            await anyio.sleep(_SCARCE_S)
            return None
        raise
    connection.setblocking(False)
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            connection.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)
    return connection


def _drop_queued(listener: socket.socket) -> None:
    """What was begun between two runs belongs to neither."""
    with suppress(OSError):
        for _ in range(_MOST_QUEUED):
            listener.accept()[0].close()
