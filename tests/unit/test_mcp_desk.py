"""A client's session that is opened when it is needed, and again when it is gone."""

from typing import Any

import anyio
import pytest

from holdfast.errors import HomeBusy, SessionClosed
from holdfast.server.mcp.desk import Desk
from holdfast.server.mcp.tools import Recover


class GoneSeat:
    """A session that somebody has ended meanwhile."""

    remark = "you are back"

    def __init__(self) -> None:
        self.left = 0
        self.closed = 0

    async def do(self, verb: Any) -> Any:
        await anyio.sleep(0)
        raise SessionClosed("the session has ended", hint="open a new one")

    async def close(self) -> None:
        self.closed += 1

    async def leave(self) -> None:
        self.left += 1


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_session_that_cannot_be_opened_is_told_and_tried_again() -> None:
    tries: list[int] = []

    async def busy() -> GoneSeat:
        tries.append(1)
        raise HomeBusy("in use", hint="use another")

    desk = Desk(busy)
    told = [(await desk.answer(Recover())).facts["error"]["code"] for _ in range(2)]
    await desk.close()

    assert told == ["home_busy", "home_busy"]
    assert len(tries) == 2


async def test_a_session_that_is_gone_is_left_once_and_opened_anew() -> None:
    seats: list[GoneSeat] = []

    async def open_seat() -> GoneSeat:
        assert all(seat.left for seat in seats), "the one before is left first"
        seats.append(GoneSeat())
        return seats[-1]

    desk = Desk(open_seat)
    async with anyio.create_task_group() as calls:
        for _ in range(3):  # all of them find it gone
            calls.start_soon(desk.answer, Recover())
    again = await desk.answer(Recover())
    await desk.close()

    assert again.facts["error"]["code"] == "session_closed"
    assert "note: you are back" in again.text
    assert [(seat.left, seat.closed) for seat in seats] == [(1, 0), (1, 0)]
