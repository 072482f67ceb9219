"""Accepts what a guest sends to its way out: while a run goes on, and at no other time."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from holdfast.egress.allowed import AllowList
from holdfast.egress.log import Log, Outgoing
from holdfast.egress.names import Address

Note = Callable[[Outgoing], Awaitable[None]]
Resolve = Callable[[str], Awaitable[Sequence[Address]]]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How much, and how long."""

    connections: int = 64
    """At once."""
    sent: int = 1000
    """Requests and tunnels of one run."""
    head_s: float = 10.0
    """For the head of a request, and for the beginning of TLS."""
    connect_s: float = 15.0
    """For the lookup of a name, and for a connection to any of its addresses."""
    idle_s: float = 600.0
    """Without a byte either way; slow answers are common, and the run has a deadline of its own."""


class Proxy:
    """One session's way out.

    `note` is awaited before the first byte of a request leaves. If it raises, nothing leaves.
    """

    def __init__(
        self, allowed: AllowList, *, note: Note, resolve: Resolve | None = None, bounds: Bounds | None = None
    ) -> None:
        raise NotImplementedError

    async def serve(self, listener: socket.socket) -> None:
        """Until cancelled, or until the listener fails (OSError).

        The listener listens, does not block, and is the caller's to close.
        """
        raise NotImplementedError

    @asynccontextmanager
    async def open(self, run: str) -> AsyncIterator[Log]:
        """Only in here connections are accepted. At its end none is left, and nothing of them is under way.

        Those that were begun before it are closed unserved. `serve` has to be running, one is open at a time.
        """
        raise NotImplementedError
        yield Log(run)
