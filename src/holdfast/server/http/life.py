"""What happens to a session, told as it happens: runs that begin and settle, memory that is lost, the end."""

import asyncio
import time
from collections.abc import AsyncGenerator

from holdfast import api
from holdfast.records import Lost, Planned, Settled
from holdfast.server.http.bodies import sse
from holdfast.sessions import LiveSession

_MOST = 1_000
"""Events that wait for a slow reader. With one more the stream ends: it would not be whole."""
_BREATH = b": alive\n\n"


async def told(session: LiveSession, stopping: asyncio.Event, *, breath_s: float) -> AsyncGenerator[bytes, None]:
    """As Server-Sent Events, from now on."""
    news: asyncio.Queue[api.SessionEvent | None] = asyncio.Queue(_MOST)

    def hear(what: Planned | Settled | Lost) -> None:
        if not news.full():
            news.put_nowait(_event(what) if news.qsize() < _MOST - 1 else None)

    ends = [asyncio.create_task(_ended(session, news)), asyncio.create_task(_stopped(stopping, news))]
    session.books.watchers.append(hear)
    try:
        yield _BREATH
        while True:
            try:
                event = await asyncio.wait_for(news.get(), breath_s)
            except TimeoutError:
                yield _BREATH
                continue
            if event is None:
                return
            yield sse(event, name=str(event.__struct_config__.tag))
    finally:
        session.books.watchers.remove(hear)
        for task in ends:
            task.cancel()


async def _ended(session: LiveSession, news: "asyncio.Queue[api.SessionEvent | None]") -> None:
    await session.ended.wait()
    await news.put(api.SessionEnded(at=time.time()))
    await news.put(None)


async def _stopped(stopping: asyncio.Event, news: "asyncio.Queue[api.SessionEvent | None]") -> None:
    await stopping.wait()
    await news.put(None)


def _event(what: Planned | Settled | Lost) -> api.SessionEvent:
    match what:
        case Planned():
            return api.RunBegan(at=what.at, run=what.run, kind=what.kind, goal=what.card.goal)
        case Settled():
            return api.RunSettled(
                at=what.at, run=what.run, status=what.status, version=what.version, ckpt=what.ckpt, reason=what.reason
            )
        case Lost():
            return api.MemoryLost(at=what.at, generation=what.generation, cause=what.cause, run=what.run)
