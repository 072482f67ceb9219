"""`GET http://host/path`: one request, one answer, then the connection ends.

Both are read by h11 and written anew by h11, so that the framing on either side is ours. Bodies go through in steps: no
more of one is held than was read at once.
"""

import h11

from holdfast.egress.answers import Refused
from holdfast.egress.heads import HEAD_BYTES, MOST_HEADERS, Head, anew, end_to_end
from holdfast.egress.log import Log
from holdfast.egress.wire import Wire, together
from holdfast.pace import Step

_MOST_EARLY = 20
"""Answers before the answer (1xx)."""


class Forwarding:
    """A request on its way, and its answer back. `Refused` is raised as what it is; `OSError`: the guest is gone."""

    def __init__(self, guest: Wire, head: Head, upstream: Wire, log: Log) -> None:
        self.answered = False
        """The guest has a part of the answer: nothing else can be said to it any more."""
        self._guest = guest
        self._head = head
        self._server = head.connection
        self._upstream = upstream
        self._client = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
        self._log = log

    async def run(self) -> None:
        try:
            await self._upstream.write(self._client.send(anew(self._head)))
        except OSError:
            raise Refused("broken_upstream", f"{self._head.authority} broke off") from None
        if self._server.they_are_waiting_for_100_continue:
            await self._guest.write(self._server.send(h11.InformationalResponse(status_code=100, headers=[])))
        await together(self._upload, self._download)

    async def _upload(self) -> bool:
        while True:
            try:
                body, event = await _gather(self._server, self._guest)
            except h11.RemoteProtocolError:
                raise Refused("malformed", "the request's body is not framed as it should be, or ends early") from None
            self._log.bytes_out += len(body)
            data = (self._client.send(h11.Data(data=body)) or b"") if body else b""
            if event is not None:  # trailers stay here: they are of this connection, and could pose as headers
                data += self._client.send(h11.EndOfMessage())
            try:
                await self._upstream.write(data)
            except OSError:
                return False  # it wants no more of it, and may have said why: that is read by who downloads
            if event is not None:
                break
        while await self._guest.read():
            pass  # what comes behind the request is nobody's
        # It was closed: the client has lost patience. Half a close looks the same, but no client of HTTP does that.
        raise ConnectionAbortedError("nobody waits for the answer")

    async def _download(self) -> bool:
        early = 0
        while True:
            try:
                body, event = await _gather(self._client, self._upstream)
                if isinstance(event, h11.InformationalResponse):
                    early += 1
                    if early > _MOST_EARLY or event.status_code == 101:
                        raise h11.RemoteProtocolError("there is no answer in sight")
                    continue
                self._log.bytes_in += len(body)
                data = (self._server.send(h11.Data(data=body)) or b"") if body else b""
                if event is not None:
                    data += self._server.send(_answer(event))
            except (OSError, h11.ProtocolError):
                raise Refused("broken_upstream", f"{self._head.authority} broke off, or does not speak HTTP") from None
            self.answered = True
            await self._guest.write(data)
            if isinstance(event, h11.EndOfMessage):
                return True


def _answer(event: h11.Event) -> h11.Response | h11.EndOfMessage:
    """What of it the guest gets."""
    if not isinstance(event, h11.Response):
        return h11.EndOfMessage()
    names = [name for name, _ in event.headers]
    if len(names) > MOST_HEADERS * 2 or {b"content-length", b"transfer-encoding"}.issubset(names):
        raise h11.RemoteProtocolError("it has two ends, or none in sight")
    headers = [*end_to_end(event), (b"Connection", b"close")]
    return h11.Response(status_code=event.status_code, reason=event.reason, headers=headers)


async def _gather(connection: h11.Connection, wire: Wire) -> tuple[bytes, h11.Event | None]:
    """What there is of a body, and what comes behind it if that is there too. It waits if there is nothing.

    A packet may hold thousands of parts. They are taken together, or each would cost a packet; but only as many as the
    session's pace allows. What was taken is written before more is.
    """
    while True:
        await wire.pace.turn()
        with wire.pace.step() as step:
            body, event = _take(connection, step)
            step.moved_bytes = len(body)
        if body or event is not None:
            return body, event
        connection.receive_data(await wire.read())


def _take(connection: h11.Connection, step: Step) -> tuple[bytes, h11.Event | None]:
    parts: list[bytes] = []
    while not parts or not step.is_over():
        event = connection.next_event()
        if isinstance(event, h11.Data):
            parts.append(event.data)
        elif isinstance(event, (h11.InformationalResponse, h11.Response, h11.EndOfMessage)):
            return b"".join(parts), event
        elif event is h11.NEED_DATA:
            break
        else:
            raise h11.RemoteProtocolError("the message ended before its end")
    return b"".join(parts), None
