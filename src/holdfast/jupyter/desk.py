"""The kernel's one session. It is opened ahead of the first cell; if that fails, each cell tries again and is told."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast import engine
from holdfast.client import AsyncSession
from holdfast.errors import SessionClosed
from holdfast.jupyter.settings import Chosen

_AGAIN_S = 0.01


async def open_session(chosen: Chosen) -> AsyncSession:
    """The one place where a notebook gets its session: at the home's own server, which all notebooks share."""
    session = await AsyncSession(**chosen.options, keep=chosen.keep, shared=True).open()
    try:
        for source, path in _beside_the_notebook(chosen.upload):
            await session.upload(source, path)
    except BaseException:
        await session.close()
        raise
    return session


def _beside_the_notebook(patterns: list[str]) -> Iterator[tuple[Path, str]]:
    """Jupyter starts a kernel in the notebook's directory. What a link there leads to elsewhere is not taken along."""
    here = Path.cwd().resolve()
    found = {path for pattern in patterns for path in here.glob(pattern) if path.is_file()}
    for path in sorted(found):
        if path.resolve().is_relative_to(here):
            yield path, str(path.relative_to(here))


class Desk:
    """All of it is called in the kernel's main thread."""

    def __init__(self, chosen: Chosen) -> None:
        self.chosen = chosen
        self._opening = asyncio.Lock()
        self._session: AsyncSession | None = None
        self._ahead: asyncio.Task[AsyncSession] | None = None
        self._at_work: object = None
        self._ending: asyncio.Task[None] | None = None

    def open_ahead(self) -> None:
        """While the front end introduces itself."""
        self._ahead = asyncio.create_task(self.session())

    async def session(self) -> AsyncSession:
        async with self._opening:
            if self._ending is not None:
                raise SessionClosed("this kernel is shutting down", hint="restart it")
            if self._session is None:
                self._session = await open_session(self.chosen)
            return self._session

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Around each cell: what an interrupt is meant for."""
        self._at_work = object()
        try:
            yield
        finally:
            self._at_work = None

    async def interrupt(self) -> None:
        """End the cell that is under way, also one that has not quite begun."""
        cell = self._at_work
        while cell is not None and cell is self._at_work:
            if self._session is not None and await self._session.interrupt():
                return
            await asyncio.sleep(_AGAIN_S)

    async def close(self) -> None:
        """End the session and all that it was made of. Asked twice, it is done once."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._close())
        await asyncio.shield(self._ending)

    async def _close(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)  # had it failed, each cell was told
        session, self._session = self._session, None
        try:
            if session is not None:
                await session.close(keep=self.chosen.keep)
        finally:
            await asyncio.to_thread(engine.shut_down)
