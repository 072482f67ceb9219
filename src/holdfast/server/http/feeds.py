"""The numbered events of one run, for whoever reads them now, and for who comes back.

1. Numbers begin at 0, and each event has its own.
2. What was read is kept as long as there is room: a client that was cut off asks for the rest by number. What is not
   there any more is said to be gone.
3. When there is no room for more, the run waits: its output is held back in the sandbox until the slowest reader has
   read the oldest event. Past the run's deadline nobody is waited for: the reader then sees a gap in the numbers.
4. The last event always has room.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from itertools import islice

import msgspec

from holdfast.api import Asked, Printed, Refused, RunEvent, Settled, Shown
from holdfast.errors import EventsGone
from holdfast.kernel.shelf import metadata_bytes
from holdfast.model import Display

MOST_BYTES = 8 << 20
MOST_EVENTS = 20_000


class Signal:
    """Wakes all who wait for the next change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> None:
        try:
            await asyncio.wait_for(self._event.wait(), timeout_s)
        except TimeoutError:
            return


class _Reader:
    def __init__(self, number: int) -> None:
        self.number = number
        """Of the event that it takes next."""


class Feed:
    """Guards the events of one run."""

    def __init__(self, *, most_bytes: int = MOST_BYTES, most_events: int = MOST_EVENTS) -> None:
        self._most_bytes, self._most_events = most_bytes, most_events
        self._kept: deque[tuple[RunEvent, int]] = deque()
        self._bytes = 0
        self._readers: set[_Reader] = set()
        self._changed = Signal()
        self.next = 0
        """The number of the event that comes next."""
        self.held_back = True
        """Whether to wait for readers when there is no room."""
        self.ended = False

    @property
    def first(self) -> int:
        """The oldest that is kept."""
        return self.next - len(self._kept)

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def add(self, event: RunEvent) -> None:
        """It has the number `next`."""
        assert event.number == self.next
        size = _size(event)
        for _ in range(self._first_to_stay(size) - self.first):
            self._bytes -= self._kept.popleft()[1]
        self._kept.append((event, size))
        self._bytes += size
        self.next += 1
        self.ended = isinstance(event, (Settled, Refused))
        self._changed.fire()

    async def wait_room(self, event: RunEvent, *, attended: Callable[[], bool], until: float) -> None:
        """Until what has to go for it was read by everybody. `attended`: somebody is there, if only for the end."""
        size = _size(event)
        while self.held_back and not self._is_read_before(self._first_to_stay(size), attended):
            if (left_s := until - time.monotonic()) <= 0:
                return
            await self._changed.wait(left_s)

    def let_go(self) -> None:
        """From now on nobody is waited for."""
        self.held_back = False
        self._changed.fire()

    def refuse_if_gone(self, number: int) -> None:
        if number < self.first:
            raise EventsGone(
                f"the events before number {self.first} are not kept any more",
                hint=f"ask from {self.first} on; …/output has all that was printed",
            )

    async def read(self, number: int) -> AsyncGenerator[RunEvent, None]:
        """From a number on, until the last one."""
        reader = _Reader(number)
        self._readers.add(reader)
        try:
            while not (self.ended and reader.number >= self.next):
                reader.number = max(reader.number, self.first)
                if reader.number < self.next:
                    event, _ = self._kept[reader.number - self.first]
                    yield event
                    reader.number = max(reader.number, event.number + 1)
                    self._changed.fire()
                else:
                    await self._changed.wait()
        finally:
            self._readers.discard(reader)
            self._changed.fire()

    async def wait_end(self) -> RunEvent:
        """The last event."""
        while not self.ended:
            await self._changed.wait()
        return self._kept[-1][0]

    def _first_to_stay(self, more_bytes: int) -> int:
        """The oldest that can be kept beside one more of that size."""
        left = self._bytes + more_bytes
        number = max(self.first, self.next + 1 - self._most_events)
        left -= sum(size for _, size in islice(self._kept, number - self.first))
        for _, size in islice(self._kept, number - self.first, None):
            if left <= self._most_bytes:
                break
            left -= size
            number += 1
        return number

    def _is_read_before(self, number: int, attended: Callable[[], bool]) -> bool:
        if number == self.first:
            return True
        return all(reader.number >= number for reader in self._readers) if self._readers else attended()


def _size(event: RunEvent) -> int:
    """About what it takes in memory."""
    match event:
        case Printed():
            return 200 + len(event.text)
        case Shown():
            return 500 + _content(event.display)
        case Asked():
            return 500 + 4 * len(event.prompt)
        case Settled():
            shown = sum(metadata_bytes(display.metadata) for display in event.run.displays)
            return _of_any_part(event) + shown
        case Refused():
            return _of_any_part(event)
        case _:
            return 500


def _of_any_part(event: RunEvent) -> int:
    """Outputs, names, recovery, a traceback: each may be large, and as objects they take about twice what is sent."""
    return 30_000 + 2 * len(msgspec.msgpack.encode(event))


def _content(display: Display) -> int:
    """The names of its forms, its id and what is said of it are its guest's to choose as well."""
    data = sum(len(kind) + len(value) for kind, value in display.data.items())
    return data + len(display.display_id or "") + metadata_bytes(display.metadata)
