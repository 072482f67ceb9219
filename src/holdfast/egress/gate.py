"""What stands between a request and the network: listed, public, counted, written down; in this order."""

import errno
import socket
from collections.abc import Awaitable, Callable, Sequence

import anyio
import msgspec

from holdfast.egress.addresses import is_public
from holdfast.egress.allowed import AllowList
from holdfast.egress.answers import Refused, not_allowed
from holdfast.egress.heads import Head
from holdfast.egress.log import Log, Outgoing
from holdfast.egress.names import Address, address_of
from holdfast.egress.wire import Idle, Wire
from holdfast.pace import Pace
from holdfast.sockets import KEEPALIVE

Note = Callable[[Outgoing], Awaitable[None]]
Resolve = Callable[[str], Awaitable[Sequence[Address]]]

_MOST_FOUND, _MOST_TRIED = 32, 4
_NOT_PUBLIC = "{} leads to an address that is not public; such a one is reached only if the address itself is listed"


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


class Gate:
    """Of one run."""

    def __init__(
        self, allowed: AllowList, *, note: Note, withdraw: Note, resolve: Resolve, bounds: Bounds, log: Log,
        pace: Pace, withheld: str = "",
    ) -> None:  # fmt: skip
        self.bounds = bounds
        self.pace = pace
        self.log = log
        self._allowed = allowed
        self._note = note
        self._withdraw = withdraw
        self._resolve = resolve
        self._withheld = withheld
        """Why nothing gets out at all; empty: what is listed does."""

    async def admit(self, head: Head) -> list[Address]:
        """The addresses that may be connected to, for what is asked for. They are looked up once, here."""
        if self._withheld:
            raise Refused("withheld", self._withheld)
        if not self._allowed.allows(head.host, head.port):
            raise not_allowed(self._allowed, head.authority)
        if (literal := address_of(head.host)) is not None:
            return [literal]
        try:
            with anyio.fail_after(self.bounds.connect_s):
                found = await self._resolve(head.host)
        except TimeoutError:
            raise Refused("unknown_host", f"{head.host} could not be looked up in time", status=504) from None
        except OSError:
            raise Refused("unknown_host", f"{head.host} has no address") from None
        passing = [address for address in found[:_MOST_FOUND] if is_public(address) or self._listed(address, head.port)]
        if not passing:
            raise Refused("not_public", _NOT_PUBLIC.format(head.host))
        return passing[:_MOST_TRIED]

    async def let_out(self, head: Head, addresses: Sequence[Address], idle: Idle) -> Wire:
        """A connection to one of them, and not before it is written down that there may be one."""
        if self.log.sent >= self.bounds.sent:
            raise Refused("too_many", f"this run has sent {self.bounds.sent} requests, which is all it may", status=429)
        self.log.sent += 1  # before it is noted, or many at once would pass together
        outgoing = head.outgoing(self.log.run)
        try:
            await self._note(outgoing)
        except Exception:
            self.log.sent -= 1
            raise Refused("not_noted", "the request could not be written down, and so it was not sent") from None
        try:
            return await self._connected(head, addresses, idle)
        except BaseException:  # also if the run has ended: nothing was written to anybody
            with anyio.CancelScope(shield=True):
                await self._withdraw(outgoing)
            raise

    async def _connected(self, head: Head, addresses: Sequence[Address], idle: Idle) -> Wire:
        timed_out = False
        for address in addresses:
            with anyio.move_on_after(self.bounds.connect_s / len(addresses)) as patience:
                if (connection := await _connect(address, head.port, self._listed(address, head.port))) is not None:
                    return Wire(connection, idle, self.pace)
            timed_out |= patience.cancelled_caught
        raise Refused("unreachable", f"{head.authority} takes no connection", status=504 if timed_out else 502)

    def _listed(self, address: Address, port: int) -> bool:
        return self._allowed.allows(str(address), port)


async def _connect(address: Address, port: int, listed: bool) -> socket.socket | None:
    """In the host's own network. The address is the very one that was checked: nothing is looked up here."""
    try:
        connection = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        connection.setblocking(False)
        failed = connection.connect_ex((str(address), port))
        if failed == errno.EINPROGRESS:
            await anyio.wait_writable(connection)
            failed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, "no connection")
        for level, option, value in KEEPALIVE:
            connection.setsockopt(level, option, value)
        # Both ends have one address: it is this machine, and no firewall stands between us and what listens on it.
        if connection.getsockname()[0] == connection.getpeername()[0] and not listed:
            raise OSError(errno.EHOSTUNREACH, "a name does not lead here")
    except OSError:
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return connection
