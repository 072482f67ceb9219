"""Waiting for a kernel: what every run does most, in as few steps as it can be done."""

import asyncio
import select
import time


async def readable(fd: int, timeout_s: float | None) -> None:
    """Until there is something to read, or the time is over. As anyio would wait, in a tenth of the steps."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    timer = None if timeout_s is None else loop.call_later(timeout_s, _end_wait, over)
    loop.add_reader(fd, _end_wait, over)
    try:
        await over
    finally:
        loop.remove_reader(fd)
        if timer is not None:
            timer.cancel()


def _end_wait(over: "asyncio.Future[None]") -> None:
    if not over.done():
        over.set_result(None)


def watch(epoll: select.epoll, for_s: float) -> bool:
    """Whether there is something, looking on: to fall asleep and be woken takes as long as many a cell."""
    until = time.monotonic() + for_s
    while not epoll.poll(0):
        if time.monotonic() >= until:
            return False
    return True
