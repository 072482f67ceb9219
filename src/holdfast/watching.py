"""Handing a run's events to a caller's callbacks, in the thread that the caller expects them in."""

import queue
from collections.abc import Awaitable, Callable

from holdfast.kernel.conduct import Emit
from holdfast.model import Display, Displayed, Event, Output

OnText = Callable[[str], object]
OnDisplay = Callable[[Display], object]
OnEvent = Callable[[Event], object]


def pump(events: "queue.Queue[Event | None]", deliver: Callable[[Event], object]) -> None:
    failure: BaseException | None = None
    while (event := events.get()) is not None:
        try:
            if failure is None:
                deliver(event)
        except Exception as error:  # the caller's own callback: let the run end first, then tell him
            failure = error
    if failure is not None:
        raise failure


def deliverer(
    on_stdout: OnText | None, on_stderr: OnText | None, on_display: OnDisplay | None, on_event: OnEvent | None
) -> Callable[[Event], object] | None:
    if not (on_stdout or on_stderr or on_display or on_event):
        return None

    def deliver(event: Event) -> object:
        match event:
            case Output(stream="stdout") if on_stdout:
                on_stdout(event.text)
            case Output(stream="stderr") if on_stderr:
                on_stderr(event.text)
            case Displayed() if on_display:
                on_display(event.display)
        return on_event(event) if on_event else None

    return deliver


def emitter(
    on_stdout: OnText | None, on_stderr: OnText | None, on_display: OnDisplay | None, on_event: OnEvent | None
) -> Emit | None:
    """An `on_event` that is a coroutine function is awaited: a slow one slows the kernel down."""
    deliver = deliverer(on_stdout, on_stderr, on_display, on_event)
    if deliver is None:
        return None

    async def emit(event: Event) -> None:
        if isinstance(waiting := deliver(event), Awaitable):
            await waiting

    return emit
