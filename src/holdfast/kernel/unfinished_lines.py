"""Puts together what a guest printed as one, however it came out of the pipes.

`print("x")` is two writes, and a large text is many reads. So the text of one look is one piece, and a line without
its end waits for it: until text of the other stream or anything else is to be told, and not past `MOST_CHARACTERS`. A
guest that sleeps has written what it wanted to write, so its text is told after `HOLD_S`. One that runs, or waits for
a processor, may be between two writes, so its text is told after `HOLD_BUSY_S`. The order of all pieces stays.
"""

import time
from collections.abc import Callable

from holdfast.model import StreamName

HOLD_S, HOLD_BUSY_S = 0.1, 0.5
"""A prompt without a newline is seen that much later."""
_LOOK_AGAIN_S = 0.05
MOST_CHARACTERS = 1 << 20
Piece = tuple[StreamName, str]


class UnfinishedLines:
    """Text of one stream at a time that was read and not told."""

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._stream: StreamName = "stdout"
        self._parts: list[str] = []
        self._characters = 0
        self._since = self._until = float("inf")

    def add(self, stream: StreamName, text: str) -> list[Piece]:
        """Keep it; returns what is to be told at once."""
        due = self.rest() if stream != self._stream else []
        self._stream = stream
        if self._parts:
            self._parts.append(text)
            self._characters += len(text)
        else:
            self._keep(text)
        return due if self._characters < MOST_CHARACTERS else [*due, *(self.lines() or self.rest())]

    def lines(self) -> list[Piece]:
        """All up to the end of the last line; all, if a line has waited for long enough."""
        newest = next((at for at in reversed(range(len(self._parts))) if "\n" in self._parts[at]), None)
        if newest is None:
            return self.rest() if self._is_due() else []
        head, end, tail = self._parts[newest].rpartition("\n")
        told, left = [*self._parts[:newest], head, end], [tail, *self._parts[newest + 1 :]]
        self._keep("".join(left))
        return [(self._stream, "".join(told))]

    def rest(self) -> list[Piece]:
        told = "".join(self._parts)
        self._keep("")
        return [(self._stream, told)] if told else []

    def left_s(self) -> float:
        """How long what is held may wait."""
        return max(0.0, self._until - time.monotonic())

    def _keep(self, text: str) -> None:
        self._parts = [text] if text else []
        self._characters = len(text)
        self._since = time.monotonic() if text else float("inf")
        self._until = self._since + HOLD_S

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now >= self._until and now < self._since + HOLD_BUSY_S and self._is_busy():
            self._until = now + _LOOK_AGAIN_S
        return now >= self._until
