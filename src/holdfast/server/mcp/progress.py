"""What a client hears while code runs: its output as it comes, and when it is silent, that it still runs.

Progress is in seconds since the call began: a client that shows it shows time, and it always grows.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

from holdfast.kernel.conduct import Emit
from holdfast.model import Event, Output

Progress = Callable[[float, str], Awaitable[None]]

_OFTEN_S = 0.2
"""At most so often is a client told of new output."""
_SILENT_S = 5.0
"""So often is it told that there is none."""
_MOST_CHARACTERS = 4_000
"""Of what is new; the answer has the rest."""


@asynccontextmanager
async def passing_on(progress: Progress | None) -> AsyncIterator[Emit | None]:
    """What hears a run's events; nothing if nobody wants to know."""
    if progress is None:
        yield None
        return
    told = _Told()
    passing = asyncio.create_task(told.pass_on(progress))
    try:
        yield told.hear
    finally:
        passing.cancel()
        await asyncio.gather(passing, return_exceptions=True)


class _Told:
    """Output on its way. It is heard in the session's event loop, which may be that of another thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = time.monotonic()
        self._new = asyncio.Event()
        self._waiting = ""

    async def hear(self, event: Event) -> None:
        if isinstance(event, Output):
            self._loop.call_soon_threadsafe(self._add, event.text)

    def _add(self, text: str) -> None:
        self._waiting = (self._waiting + text)[-_MOST_CHARACTERS:]
        self._new.set()

    async def pass_on(self, progress: Progress) -> None:
        while True:
            with anyio.move_on_after(_SILENT_S):
                await self._new.wait()
            self._new.clear()
            text, self._waiting = self._waiting, ""
            elapsed_s = time.monotonic() - self._began
            await progress(round(elapsed_s, 3), text or f"still running after {elapsed_s:.0f} s, no output")
            await anyio.sleep(_OFTEN_S)
