"""Waiting for a kernel: what every run does most, in as few steps as it can be done."""

import asyncio


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
