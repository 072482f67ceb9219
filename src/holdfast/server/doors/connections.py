"""One connection: what uvicorn leaves open to slow clients, and does not say about local ones.

uvicorn 0.54 has no end of patience for a connection that sends nothing, for headers that do not end, and for a client
that does not read its answer. Each holds a connection, and enough of them hold the server. So:

1. Headers must be complete `headers_wait_s` after the connection, or after their first byte.
2. What we write must go on leaving, `answer_bytes_per_s` at least; if it does not, the connection is cut.
   Buffers beyond the socket's own are off, so that this sees every byte that a client does not take.
3. Past `connections` requests on further ones get 503; past twice as many they are cut at once.
4. On a Unix socket the kernel tells who is at the other end. The owner's own are not counted there, and never refused:
   whatever comes over the network, he gets in to put an end to it.

The body's pace is `exchange.py`'s business: it depends on what is asked for. Used by `uvicorn_options`.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import h11
import msgspec
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

KEY = "connection"
"""Where a request finds its connection in `scope["state"]`."""


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How many clients we have patience for, and how much."""

    connections: int = 1_000
    """At once; requests on more than these get 503."""
    headers_wait_s: float = 15.0
    """For a request's headers."""
    answer_wait_s: float = 30.0
    """How long a client may take nothing of an answer."""
    answer_bytes_per_s: int = 1 << 10
    """The slowest pace of a client that takes something."""
    idle_s: int = 15
    """How long a connection is kept for the next request."""


class Connection(msgspec.Struct, frozen=True):
    peer_uid: int | None
    """Who is at the other end of a Unix socket; None: it is no Unix socket."""
    cut: Callable[[], None]
    """End it now, whatever is unsent."""


def connection_of(scope: Scope) -> Connection | None:
    found = scope.get("state", {}).get(KEY)
    return found if isinstance(found, Connection) else None


def peer_uid_of(scope: Scope) -> int | None:
    connection = connection_of(scope)
    return connection.peer_uid if connection else None


def is_owner(peer_uid: int | None) -> bool:
    """Whether the peer of a Unix socket is who we are, or root."""
    return peer_uid in (os.geteuid(), 0)


def uvicorn_options(patience: Patience, *, header_bytes: int) -> dict[str, Any]:
    """What `uvicorn.Config` must be given for all of this to hold."""
    return {
        "http": _protocol(patience),
        "ws": "none",
        "proxy_headers": False,  # X-Forwarded-For is anybody's to write: addresses are what failures are counted by
        "server_header": False,
        "timeout_keep_alive": patience.idle_s,
        "limit_concurrency": patience.connections,
        "h11_max_incomplete_event_size": header_bytes,
    }


def _protocol(patience: Patience) -> type[H11Protocol]:
    return type("GuardedProtocol", (GuardedProtocol,), {"patience": patience})


class GuardedProtocol(H11Protocol):
    """uvicorn's, with an end to its patience."""

    patience = Patience()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._headers_due, self._progress_due = _Alarm(self.loop), _Alarm(self.loop)
        transport.set_write_buffer_limits(high=0)
        peer_uid = _peer_uid(transport)
        self.app_state = {**self.app_state, KEY: Connection(peer_uid, transport.abort)}
        super().connection_made(transport)
        if is_owner(peer_uid):
            self.limit_concurrency = None
        # uvicorn answers 503 to requests beyond the limit; those that never send one must not pile up either.
        elif self._limited() > 2 * self.patience.connections:
            transport.abort()
        self._expect_headers()

    def _limited(self) -> int:
        return sum(isinstance(each, H11Protocol) and each.limit_concurrency is not None for each in self.connections)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_due.clear()
        self._progress_due.clear()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        """A clock runs while headers are incomplete. More of them does not set it back."""
        if self.conn.their_state is not h11.IDLE:
            self._headers_due.clear()
        elif not self._headers_due.is_set:
            self._headers_due.set(self.patience.headers_wait_s, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        if not self._progress_due.is_set:
            self._look_for_progress(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._progress_due.clear()

    def _look_for_progress(self, unsent: int) -> None:
        self._progress_due.set(self.patience.answer_wait_s, lambda: self._cut_if_stuck(unsent))

    def _cut_if_stuck(self, unsent_before: int) -> None:
        # While writing is paused nothing is added: `send` waits. So what became less was taken by the client.
        unsent = self.transport.get_write_buffer_size()
        if unsent_before - unsent < self.patience.answer_bytes_per_s * self.patience.answer_wait_s:
            self.transport.abort()
        else:
            self._look_for_progress(unsent)


class _Alarm:
    """Rings once, unless it is cleared before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self, after_s: float, ring: Callable[[], None]) -> None:
        self.clear()
        self._timer = self._loop.call_later(after_s, ring)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None


def _peer_uid(transport: asyncio.Transport) -> int | None:
    peer: socket.socket = transport.get_extra_info("socket")
    if peer.family != socket.AF_UNIX:
        return None
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    _, uid, _ = struct.unpack("iII", credentials)
    return int(uid)
