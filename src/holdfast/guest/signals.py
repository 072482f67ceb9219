"""Python's own signal functions: ours, whatever a cell makes of those in `signal`, and without the enums that make up
most of what they cost. Several are called for each cell."""

import _signal  # type: ignore[import-not-found]  # what `signal` itself is made of
import signal
from collections.abc import Callable, Iterable
from typing import Any

Handler = Callable[..., Any] | int | None
IGNORE = int(signal.SIG_IGN)
SIGINT = int(signal.SIGINT)
_UNBLOCK = int(signal.SIG_UNBLOCK)
_sigmask = _signal.pthread_sigmask

set_handler: Callable[[int, Handler], Handler] = _signal.signal
"""Takes a signal's number; returns the handler that it had."""


def unblock(numbers: Iterable[int]) -> None:
    _sigmask(_UNBLOCK, numbers)
