"""`GET http://host/path`: one request, one answer, then the connection ends.

Both are read by h11 and written anew by h11, so that the framing on either side is ours. Bodies go through in steps: no
more of one is held than was read at once.
"""

import h11

from holdfast.egress.answers import Refused
from holdfast.egress.heads import HEAD_BYTES, Head, anew, end_to_end
from holdfast.egress.log import Log
from holdfast.egress.wire import Wire, together

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
                event = await _next(self._server, self._guest)
            except h11.RemoteProtocolError:
                raise Refused("malformed", "the request's body is not framed as it should be") from None
            if not isinstance(event, (h11.Data, h11.EndOfMessage)):
                raise Refused("malformed", "the request ends before its body does")
            over = isinstance(event, h11.EndOfMessage)
            if isinstance(event, h11.Data):
                self._log.bytes_out += len(event.data)
            try:
                # Trailers stay here: they are of this connection, and could pose as headers.
                await self._upstream.write(self._client.send(h11.EndOfMessage() if over else event))
            except OSError:
                return False  # it wants no more of it, and may have said why: that is read by who downloads
            if over:
                return False

    async def _download(self) -> bool:
        early = 0
        while True:
            try:
                event = await _next(self._client, self._upstream)
                if isinstance(event, h11.InformationalResponse):
                    early += 1
                    if early > _MOST_EARLY or event.status_code == 101:
                        raise h11.RemoteProtocolError("there is no answer in sight")
                    continue
                data = self._server.send(self._written(event))
            except (OSError, h11.ProtocolError):
                raise Refused("broken_upstream", f"{self._head.authority} broke off, or does not speak HTTP") from None
            self.answered = True
            await self._guest.write(data)
            if isinstance(event, h11.EndOfMessage):
                return True

    def _written(self, event: h11.Event) -> h11.Response | h11.Data | h11.EndOfMessage:
        """What of an answer the guest gets."""
        if isinstance(event, h11.Data):
            self._log.bytes_in += len(event.data)
            return event
        if isinstance(event, h11.EndOfMessage):
            return h11.EndOfMessage()
        if not isinstance(event, h11.Response):
            raise h11.RemoteProtocolError("it ended before its answer did")
        names = [name for name, _ in event.headers]
        if b"content-length" in names and b"transfer-encoding" in names:
            raise h11.RemoteProtocolError("two readers would see two answers")
        headers = [*end_to_end(event), (b"Connection", b"close")]
        return h11.Response(status_code=event.status_code, reason=event.reason, headers=headers)


async def _next(connection: h11.Connection, wire: Wire) -> h11.Event:
    """One event. Each is written somewhere before the next is asked for, so that thousands in a packet stall nobody."""
    while True:
        event = connection.next_event()
        if isinstance(event, (h11.Request, h11.InformationalResponse, h11.Response, h11.Data, h11.EndOfMessage)):
            return event
        if event is not h11.NEED_DATA:
            raise h11.RemoteProtocolError("the message ended before its end")
        connection.receive_data(await wire.read())
