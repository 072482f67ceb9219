"""One question, one answer: also after an answer that nobody waited for any more."""

import os
import socket
from collections.abc import AsyncIterator

import pytest

from holdfast.errors import KernelStartFailed
from holdfast.kernel import framing, wire
from holdfast.nodes.lines import Line

pytestmark = pytest.mark.anyio
QUESTION = wire.Stage(directory="/sessions/s", stage="t1")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Line, socket.socket]]:
    """The host's end, and the keeper's."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line = Line(here)
    with there:
        yield line, there
    line.close()


async def test_an_answer_that_came_too_late_is_not_the_next_ones(ends: tuple[Line, socket.socket]) -> None:
    line, keeper = ends
    with pytest.raises(TimeoutError):
        await line.ask(QUESTION, [], timeout_s=0.01)
    framing.send_with_fds(keeper, wire.Staged(), [])
    framing.send_with_fds(keeper, wire.Refused(reason="no such layer"), [])

    with pytest.raises(KernelStartFailed, match="no such layer"):
        await line.ask(QUESTION, [], timeout_s=10)


async def test_a_refusal_that_came_too_late_refuses_nothing_else(ends: tuple[Line, socket.socket]) -> None:
    line, keeper = ends
    with pytest.raises(TimeoutError):
        await line.ask(QUESTION, [], timeout_s=0.01)
    framing.send_with_fds(keeper, wire.Refused(reason="no such layer"), [])
    framing.send_with_fds(keeper, wire.Staged(), [])

    assert await line.ask(QUESTION, [], timeout_s=10) == []


async def test_nothing_is_asked_before_the_late_answer_is_there(ends: tuple[Line, socket.socket]) -> None:
    """Who answers may be a child of the one that was asked: two at once could answer in any order."""
    line, keeper = ends
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await line.ask(QUESTION, [], timeout_s=0.01)
    keeper.setblocking(False)

    assert framing.receive_with_fds(keeper)[0]
    with pytest.raises(BlockingIOError):
        framing.receive_with_fds(keeper)


async def test_descriptors_that_came_too_late_are_closed(ends: tuple[Line, socket.socket]) -> None:
    line, keeper = ends
    with pytest.raises(TimeoutError):
        await line.ask(QUESTION, [], timeout_s=0.01)
    before = set(os.listdir("/proc/self/fd"))
    framing.send_with_fds(keeper, wire.Forked(pid=1), [keeper.fileno()])
    framing.send_with_fds(keeper, wire.Staged(), [])
    await line.ask(QUESTION, [], timeout_s=10)

    assert set(os.listdir("/proc/self/fd")) == before


async def test_a_line_that_is_closed_is_closed_though_a_forked_child_has_a_copy(
    ends: tuple[Line, socket.socket],
) -> None:
    """Else the keeper would live as long as whatever the application forked."""
    line, keeper = ends
    copy = os.dup(line._sock.fileno())
    try:
        line.close()
        keeper.settimeout(10)
        assert keeper.recv(1) == b""
    finally:
        os.close(copy)
