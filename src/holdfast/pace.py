"""A fair share of the event loop for each session.

A guest chooses how much it prints, displays and moves through its egress, and one event loop reads it for all sessions.
So the loop takes such work in *steps*, none of which waits for anything.

1. After steps of `TURN_S` in all a session lets the loop have a turn without it. Of several busy sessions each does so
   the sooner.
2. Reading a few bytes costs as much as reading many. Steps that move `BYTES_PER_S` or more are free. Of the others a
   session may make as many as take a quarter of the loop's time; past that its next step waits, and meanwhile more
   bytes arrive for it.

Time is the processor's: what other processes of the machine take is no session's fault.
"""

import asyncio
import time
from collections import deque
from typing import ClassVar

TURN_S = 0.001
BYTES_PER_S = 50e6
_WAKE_S = 0.0001
"""What it costs, about, to wait for a socket and to be woken."""
_COPY_BYTES_PER_S = 1e9
"""How fast, about, a socket is read or written."""
_SHARE = 4
"""A session has a quarter of the loop for what moves little."""
_BURST_S = 0.2
"""It may use up what it was entitled to in this time."""
_LONGEST_S = 0.1
"""That one step is waited for: those who wait also look at the clock of their run."""
_LEAST_S = 0.0001
"""However many sessions are busy: less work than this costs less than to wait for the next turn."""


class Step:
    """Work that waits for nothing. If it may take long, it should look at `is_over`; `moved_bytes` says what for."""

    def __init__(self, pace: "Pace", moved_bytes: int) -> None:
        self.moved_bytes = moved_bytes
        self._pace = pace
        self._began = self._ends = 0.0

    def __enter__(self) -> "Step":
        self._began = time.thread_time()
        self._ends = self._began + self._pace.left_s
        return self

    def __exit__(self, *_: object) -> None:
        self._pace.spend(time.thread_time() - self._began, self.moved_bytes)

    def is_over(self) -> bool:
        """Whether the rest has to wait for the next turn."""
        return time.thread_time() >= self._ends


class Pace:
    """Guards what one session takes of the event loop. All its methods are called in that loop."""

    _busy: ClassVar[set["Pace"]] = set()
    """Sessions that wait for their next turn."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        """Since the session let the loop have a turn without it."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_renewing = False
        self._paid_at = 0.0
        """When the session will have been entitled to all that moved little."""

    @property
    def left_s(self) -> float:
        """How long the next step may take."""
        return max(_LEAST_S, TURN_S / max(1, len(self._busy))) - self._spent_s

    async def turn(self) -> None:
        """Returns when the session may take its next step. Several that wait go on one by one."""
        if self._is_renewing:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter

    def step(self, moved_bytes: int = 0) -> Step:
        return Step(self, moved_bytes)

    def spend_moving(self, moved_bytes: int) -> None:
        """For one read or write of a socket. Its cost is known: to measure it would cost as much again."""
        self.spend(_WAKE_S + moved_bytes / _COPY_BYTES_PER_S, moved_bytes)

    def spend(self, took_s: float, moved_bytes: int) -> None:
        self._spent_s += took_s
        now, dear_s = time.monotonic(), took_s - moved_bytes / BYTES_PER_S
        if dear_s > 0:
            self._paid_at = max(self._paid_at, now - _BURST_S) + min(_SHARE * dear_s, _LONGEST_S)
        if not self._is_renewing and (self.left_s <= 0 or self._paid_at > now):
            self._is_renewing = True
            self._busy.add(self)
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        """In the next turn of the loop, or when what moved little is paid for: one of those that wait goes on."""
        loop = asyncio.get_running_loop()
        if (unpaid_s := self._paid_at - time.monotonic()) > 0:
            loop.call_later(unpaid_s, self._renew)
            return
        self._spent_s = 0.0
        while self._waiting:
            if not (waiter := self._waiting.popleft()).done():
                waiter.set_result(None)
                loop.call_soon(self._renew)
                return
        self._is_renewing = False
        self._busy.discard(self)
