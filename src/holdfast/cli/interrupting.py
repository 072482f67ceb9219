"""A signal ends the cell in order; a second one ends us at once."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol


class Interruptible(Protocol):
    """A session, or a job."""

    def interrupt(self) -> bool: ...


class Stop:
    """Ends the cell, once, from a signal handler or a callback: neither may wait."""

    def __init__(self, session: Interruptible) -> None:
        self.number: int | None = None
        self._session = session
        self._over = threading.Event()
        self._asked = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:  # a second time: whoever asks twice means at once
            raise KeyboardInterrupt
        self.number = number
        self.ask()

    def ask(self) -> None:
        if not self._asked:
            self._asked = True
            threading.Thread(target=self._interrupt, daemon=True).start()

    def end(self) -> None:
        self._over.set()

    def _interrupt(self) -> None:
        # The cell may not have begun yet.
        while not self._over.is_set() and not self._session.interrupt():
            time.sleep(0.02)


@contextmanager
def interrupting(session: Interruptible) -> Iterator[Stop]:
    stop = Stop(session)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop.on_signal) for number in numbers}
    try:
        yield stop
    finally:
        stop.end()
        for number, handler in before.items():
            signal.signal(number, handler)
