"""The line at the bottom of a terminal while a job runs: time, and memory against the cap."""

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from holdfast.cli.screen import Screen

_TICK_S = 0.25


class Status:
    """Draws it for as long as the block lasts. It stays away from lines that the job has begun and not ended."""

    def __init__(self, screen: Screen, memory_bytes: Callable[[], int | None], *, cap_bytes: int) -> None:
        self._screen = screen
        self._memory_bytes = memory_bytes
        self._cap_bytes = cap_bytes
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)

    def __enter__(self) -> None:
        if sys.stderr.isatty():
            self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._screen.status("")

    def _draw(self) -> None:
        while not self._over.wait(_TICK_S):
            self._screen.status(line(time.monotonic() - self._began, self._memory_bytes(), self._cap_bytes))


def line(seconds: float, used_bytes: int | None, cap_bytes: int) -> str:
    """
    >>> line(62.44, 300 << 20, 1 << 30)
    '62.4 s · 300 of 1,024 MiB'
    """
    used = "…" if used_bytes is None else f"{used_bytes >> 20:,}"
    return f"{seconds:.1f} s · {used} of {cap_bytes >> 20:,} MiB"
