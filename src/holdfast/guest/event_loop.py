"""The event loop of the cells, in a cell that does not await as well.

`asyncio.create_task()` in such a cell finds the loop that cells with `await` run on. The loop gets a moment at the end
of the cell; after that its tasks wait, as everything of a session does between two runs. `asyncio.run()` and
`anyio.run()` still work in a cell: `asyncio` itself asks whether a loop really runs, and libraries get the true answer.
"""

import asyncio
import asyncio.events
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from IPython.core import async_helpers

_INSTALLED = (sys.prefix, sys.base_prefix)
_ASYNCIO = os.path.dirname(asyncio.__file__)
_ROUNDS = 10
"""How often each task that is ready goes on after a cell."""


class CellLoop:
    """Offers the cells' loop where code of a cell asks for the running one."""

    def __init__(self, in_cell: Callable[[], bool]) -> None:
        self._in_cell = in_cell
        self._is_current = False
        self._running: Callable[[], asyncio.AbstractEventLoop | None] = asyncio.events._get_running_loop

    def install(self) -> None:
        """In the places where `asyncio` itself, and whoever imports it later, looks the two functions up."""
        events: Any = asyncio.events
        name = "_get_event_loop" if hasattr(events, "_get_event_loop") else "get_event_loop"  # the former before 3.12
        current = getattr(events, name)

        def get_running_loop() -> asyncio.AbstractEventLoop:
            """Return the event loop of this thread, or of the cell."""
            loop = self._running()
            if loop is None and not _is_library(sys._getframe(1).f_code.co_filename):
                loop = self._offered()
            if loop is None:
                raise RuntimeError("no running event loop")
            return loop

        def get_event_loop(*arguments: Any, **options: Any) -> asyncio.AbstractEventLoop:
            """Return the event loop of this thread, or of the cell."""
            if self._running() is None and not self._is_current and (loop := self._offered()) is not None:
                asyncio.set_event_loop(loop)
                self._is_current = True
            try:
                found: asyncio.AbstractEventLoop = current(*arguments, **options)
            except RuntimeError:  # `asyncio.run` has left the thread without one
                if (offered := self._offered()) is None:
                    raise
                return offered
            return found

        events.get_running_loop = asyncio.get_running_loop = get_running_loop
        setattr(events, name, get_event_loop)
        events.get_event_loop = asyncio.get_event_loop = get_event_loop

    def tasks(self) -> "set[asyncio.Task[Any]]":
        """Of the cells' loop, those that are not done."""
        loop = self._existing()
        return set() if loop is None else asyncio.all_tasks(loop)

    def give_a_moment(self) -> None:
        """Let tasks that a cell has made begin."""
        loop = self._existing()
        if loop is not None and not loop.is_running() and asyncio.all_tasks(loop):
            loop.run_until_complete(_moment())

    def close(self) -> None:
        if (loop := self._existing()) is not None:
            loop.close()
        if self._is_current:
            asyncio.set_event_loop(None)
        self._is_current = False

    def _offered(self) -> asyncio.AbstractEventLoop | None:
        if threading.current_thread() is not threading.main_thread() or not self._in_cell():
            return None
        if (loop := self._existing()) is None:
            loop = async_helpers._asyncio_event_loop = asyncio.new_event_loop()
        return loop

    def _existing(self) -> asyncio.AbstractEventLoop | None:
        loop: asyncio.AbstractEventLoop | None = async_helpers._asyncio_event_loop
        return None if loop is None or loop.is_closed() else loop


def _is_library(file: str) -> bool:
    """Installed code, but for `asyncio`, which asks for the cell that called it."""
    return file.startswith(_INSTALLED) and not file.startswith(_ASYNCIO)


async def _moment() -> None:
    for _ in range(_ROUNDS):
        await asyncio.sleep(0)
