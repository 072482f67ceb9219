"""One connection of a guest's, from its first byte to its last."""

import socket
import time
from contextlib import suppress

from holdfast.egress.answers import Refused, alert, answer
from holdfast.egress.gate import Gate
from holdfast.egress.heads import Head, read_head
from holdfast.egress.log import Reason, Refusal
from holdfast.egress.plain import Forwarding
from holdfast.egress.tunnels import tunnel
from holdfast.egress.wire import Idle, Wire


class Exchange:
    """Nothing that a guest or a server does is raised by `run`. When it returns, both connections are closed."""

    def __init__(self, connection: socket.socket, gate: Gate) -> None:
        self._gate = gate
        self._idle = Idle(gate.bounds.idle_s)
        self._guest = Wire(connection, self._idle, gate.pace)
        self._head: Head | None = None

    async def run(self) -> None:
        try:
            with self._idle.scope, suppress(OSError):  # whoever is gone is told nothing
                await self._attend()
            if self._idle.scope.cancelled_caught:
                self._log("too_slow")
        finally:
            self._guest.abort()  # unless it was closed in peace

    async def _attend(self) -> None:
        try:
            self._head = await read_head(self._guest, self._gate.bounds.head_s)
            if self._head is None:
                return
            addresses = await self._gate.admit(self._head)
            if self._head.method != "CONNECT":
                upstream = await self._gate.let_out(self._head, addresses, self._idle)
        except Refused as refused:
            return await self._tell(refused, answer(refused))
        if self._head.method != "CONNECT":
            return await self._forward(self._head, upstream)
        try:
            await tunnel(self._guest, self._head, addresses, self._gate, self._idle)
        except Refused as refused:
            return await self._tell(refused, alert(refused))
        self._guest.close()

    async def _forward(self, head: Head, upstream: Wire) -> None:
        forwarding = Forwarding(self._guest, head, upstream, self._gate.log)
        try:
            await forwarding.run()
        except Refused as refused:
            upstream.abort()
            if not forwarding.answered:
                return await self._tell(refused, answer(refused))
            self._log(refused.reason)  # and the answer breaks off, as it must
        else:
            upstream.close()
            await self._guest.finish()
        finally:
            upstream.abort()  # unless it was closed in peace

    async def _tell(self, refused: Refused, words: bytes) -> None:
        self._log(refused.reason, refused.method, refused.target)
        await self._guest.write(words)
        await self._guest.finish()

    def _log(self, reason: Reason, method: str = "", target: str = "") -> None:
        if self._head is not None:
            method, target = self._head.method, self._head.target
        self._gate.log.refuse(
            Refusal(run=self._gate.log.run, at=time.time(), reason=reason, method=method, target=target)
        )  # fmt: skip


def turn_away(connection: socket.socket, gate: Gate) -> None:
    """There are too many already. It is told so if that can be done at once."""
    refused = Refused(
        "too_many", f"{gate.bounds.connections} connections are open, which is all a run may have at once"
    )
    gate.log.refuse(Refusal(run=gate.log.run, at=time.time(), reason=refused.reason))
    with connection, suppress(OSError):
        connection.send(answer(refused))
        connection.shutdown(socket.SHUT_WR)
