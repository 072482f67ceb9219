"""Handing a run's events to a caller's callbacks, in the thread that the caller expects them in."""

import asyncio
import queue
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from holdfast.kernel.conduct import Emit
from holdfast.model import Display, Displayed, Event, Output, Run

OnText = Callable[[str], object]
OnDisplay = Callable[[Display], object]
OnEvent = Callable[[Event], object]
_AHEAD = 100
_LOOK_UP_S = 0.5
"""See `engine`."""


def pump(
    events: "queue.Queue[Event | None]", deliver: Callable[[Event], object], *, is_over: Callable[[], bool]
) -> None:
    """Until `None` comes, or the run is over: Ctrl-C may have taken that away, or be noticed only where we look up."""
    failure: BaseException | None = None
    while (event := _next(events, is_over)) is not None:
        try:
            if failure is None:
                deliver(event)
        except Exception as error:  # the caller's own callback: let the run end first, then tell him
            failure = error
    if failure is not None:
        raise failure


def _next(events: "queue.Queue[Event | None]", is_over: Callable[[], bool]) -> Event | None:
    while True:
        was_over = is_over()
        with suppress(queue.Empty):
            return events.get(timeout=0 if was_over else _LOOK_UP_S)
        if was_over:
            return None


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


async def streamed(run: Callable[[OnEvent], Coroutine[Any, Any, Run]]) -> AsyncGenerator[Event | Run, None]:
    """A run's events in the caller's own event loop, and the run as the last. Left early, it is cancelled."""
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event](maxsize=_AHEAD)

    async def put(event: Event) -> None:
        """Called in the engine's event loop, which goes on when there is room."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(events.put(event), loop))

    running = asyncio.create_task(run(put))
    getting: asyncio.Task[Event] | None = None
    try:
        while not running.done():
            getting = getting or asyncio.create_task(events.get())
            await asyncio.wait({running, getting}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                event, getting = getting.result(), None
                yield event
        if getting is not None and getting.done():
            yield getting.result()
        while not events.empty():
            yield events.get_nowait()
        yield running.result()
    finally:
        running.cancel()
        if getting is not None:
            getting.cancel()
