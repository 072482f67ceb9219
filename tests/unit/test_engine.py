"""The engine's loop: what it says of failures that nobody waits for."""

import asyncio

import pytest

from holdfast import engine


def fails() -> None:
    raise LookupError("a mistake")


def test_a_wait_that_was_cancelled_as_it_ended_is_no_failure_and_any_other_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def happens() -> None:
        loop = asyncio.get_running_loop()
        wait = loop.create_future()
        loop.call_soon(wait.set_result, None)  # as anyio has a socket end it
        wait.cancel()
        loop.call_soon(fails)

    engine.call(happens)
    engine.call(lambda: None)

    assert [str(record.exc_info and record.exc_info[1]) for record in caplog.records] == ["a mistake"]
