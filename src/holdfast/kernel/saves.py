"""What a cell saves on the way: one after the other, beside the reading; a copy takes as long as its file is large.

1. Nothing is saved of a run whose plan is not made yet: until then it waits here.
2. What began before the end of the code is saved, or is not, before the run ends. A thread that saves later is refused,
   so that it cannot keep the run from its end; between two runs it waits for the next.
"""

import asyncio
from collections.abc import Awaitable, Callable

from holdfast.kernel import wire

IsOver = Callable[[], bool]
OnSave = Callable[[wire.Saving, IsOver], Awaitable[str]]
"""Keeps what a cell saves on the way, unless that is over before it is done; returns why not, or nothing."""
TOO_LATE = "the run's code has ended: save while it runs, or in the next run"

_MOST = 2
"""An honest kernel asks for the next when the one before is answered."""


class Saves:
    """Those of one request."""

    def __init__(self, on_save: OnSave | None, reply: Callable[[wire.Message], Awaitable[None]]) -> None:
        self.on_save = on_save
        self._reply = reply
        self._waiting: list[tuple[wire.Saving, IsOver]] = []
        self._task: asyncio.Task[None] | None = None
        self._may_begin = False

    def __bool__(self) -> bool:
        """Whether there is something that is not saved yet."""
        return bool(self._waiting or self._task)

    def add(self, saving: wire.Saving, is_over: IsOver) -> bool:
        """False: there are too many."""
        if len(self._waiting) >= _MOST:
            return False
        self._waiting.append((saving, is_over))
        self.begin(self._may_begin)
        return True

    def begin(self, may: bool = True) -> None:
        """The run's plan is made."""
        self._may_begin = may
        if may and self._waiting and self._task is None:
            self._task = asyncio.create_task(self._save_all())

    def look(self) -> None:
        """Raises what went wrong with them that is no word for the guest."""
        if self._task is not None and self._task.done():
            failed, self._task = self._task, None
            failed.result()

    async def stop(self) -> None:
        """What was being saved is, or is not, when this returns."""
        self._waiting = []
        saving, self._task = self._task, None
        if saving is not None:
            await asyncio.wait([saving])
            saving.result()

    async def _save_all(self) -> None:
        while self._waiting:
            saving, is_over = self._waiting.pop(0)
            refused = "nothing is saved here" if self.on_save is None else await self.on_save(saving, is_over)
            await self._reply(wire.SavedReply(refused=refused))
        self._task = None
