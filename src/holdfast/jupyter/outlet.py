"""A cell's events on their way to the notebook.

They are heard in the engine's thread and sent from the kernel's own, in order. Each waits a moment for those that come
next: a `print` is two writes, and a cell that prints line by line must not be thousands of messages, which servers
throttle.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from holdfast.model import Event

_PAUSE_S = 0.03
_MOST_WAITING = 200


class Outlet:
    def __init__(self, publish: Callable[[Iterable[Event]], None]) -> None:
        """To be made in the thread that publishes."""
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._heard: deque[Event] = deque()
        self._sending: asyncio.TimerHandle | None = None

    async def hear(self, event: Event) -> None:
        """Awaited in the engine's thread: a cell that shows more than can be sent is slowed down."""
        self._heard.append(event)
        if len(self._heard) < _MOST_WAITING:
            self._loop.call_soon_threadsafe(self._send_soon)
        else:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._send_now(), self._loop))

    def flush(self) -> None:
        """Send what is left."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        if waiting := [self._heard.popleft() for _ in range(len(self._heard))]:
            self._publish(waiting)

    async def _send_now(self) -> None:
        self.flush()

    def _send_soon(self) -> None:
        if self._heard and self._sending is None:
            self._sending = self._loop.call_later(_PAUSE_S, self.flush)
