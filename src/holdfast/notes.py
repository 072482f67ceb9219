"""What a run under way wants to be durable before it goes on: its `Saved`, `Sent` and `Unsent` records.

Several may wait at once, for a run saves in one thread and sends in others: what waits is one write, and there is one
write at a time. If it fails, the books go by what the journal has: what was refused is not applied later, and what was
acknowledged before stays.
"""

import asyncio
from collections.abc import Awaitable, Callable

from holdfast.books import Books
from holdfast.records import Saved, Sent, Unsent, requests_sent

Note = Saved | Sent | Unsent
Recall = Callable[[], Awaitable[object]]
"""Has the books go by what the journal has of the run (`plans.Plan.recall`)."""


class Notes:
    """Guards the order in which one run's records are written."""

    def __init__(self, books: Books, *, recall: Recall) -> None:
        self._books = books
        self._recall = recall
        self._waiting: list[tuple[Note, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def write(self, record: Note) -> None:
        """Durable when this returns. Who goes away meanwhile has written it all the same."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((record, done))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        await asyncio.shield(done)

    def sent(self, run: str) -> list[str]:
        """What has left of a run that is not settled yet, when nothing is on its way any more."""
        return requests_sent(self._books.open.get(run, ()))

    async def wait_written(self) -> None:
        """Nothing is on its way any more."""
        while self._writing is not None:
            await asyncio.wait([self._writing])

    async def _write_all(self) -> None:
        """A task of its own: whoever waits for a part of it may be cancelled, and the others are still told."""
        while self._waiting:
            together, self._waiting = self._waiting, []
            failure = await self._write_together([record for record, _ in together])
            for _, done in together:
                if done.done():
                    continue
                if failure is None:
                    done.set_result(None)
                else:
                    done.set_exception(failure)
        self._writing = None

    async def _write_together(self, records: list[Note]) -> Exception | None:
        try:
            await self._books.journal.append(*self._books.note(*records))
        except Exception as error:  # whatever it was, everyone who waits must hear of it
            try:
                await self._recall()
            except Exception as again:
                return again
            return error
        return None
