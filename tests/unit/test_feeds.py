"""The numbered events of a run: who reads when, what is kept, who waits."""

import asyncio
import time
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from holdfast import api
from holdfast.errors import EventsGone
from holdfast.model import Display, Run
from holdfast.records import Change, RunCard
from holdfast.server.http.feeds import Feed


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def printed(number: int, size: int = 100) -> api.Printed:
    return api.Printed(number=number, stream="stdout", text="x" * size)


def a_run(**more: Any) -> Run:
    plain = Run(
        id="run_a", session="s", status="committed", version=1, ckpt="CKPT-1", receipt=None, outputs=[], names={},
        card=RunCard(run="run_a", session="s", goal="", code_sha256="", base="CKPT-0"), checks=[], recovery=None,
        findings=[], saved=[], outside=[], attempt=1, replayed=False, generation=1, memory="kept", discarded=[],
        not_restored=[], unprotected=None, count=1, exit_code=None, text=None, stdout="", stderr="", dropped_bytes=0,
        displays=[], dropped_displays=0, error=None, strays=[], duration_s=0.1, peak_memory_bytes=None,
        memory_cap="cgroup",
    )  # fmt: skip
    return msgspec.structs.replace(plain, **more)


def filled(*, events: int, **bounds: int) -> Feed:
    feed = Feed(**bounds)
    for number in range(events):
        feed.add(printed(number))
    return feed


async def taken(feed: Feed, number: int, count: int) -> list[int]:
    found: list[int] = []
    async with aclosing(feed.read(number)) as events:
        async for event in events:
            found.append(event.number)
            if len(found) == count:
                break
    return found


async def test_events_are_kept_within_bounds_and_what_is_gone_is_said_to_be() -> None:
    feed = filled(events=10, most_events=4)

    assert (feed.first, feed.next) == (6, 10)
    assert await taken(feed, 6, 4) == [6, 7, 8, 9]
    feed.refuse_if_gone(6)
    with pytest.raises(EventsGone, match="before number 6"):
        feed.refuse_if_gone(5)


async def test_bytes_bound_them_too() -> None:
    feed = filled(events=10, most_bytes=1000)  # each counts 300

    assert feed.first == 7
    feed.add(printed(10, size=5000))  # larger than all that may be kept
    assert (feed.first, feed.size_bytes) == (10, 5200)


async def test_the_run_waits_for_the_slowest_reader() -> None:
    feed, later = filled(events=3, most_events=3), time.monotonic() + 60
    async with aclosing(feed.read(0)) as slow, aclosing(feed.read(0)) as fast:
        await anext(slow)
        assert [(await anext(fast)).number for _ in range(3)] == [0, 1, 2]
        room = asyncio.create_task(feed.wait_room(printed(3), attended=lambda: True, until=later))
        await asyncio.sleep(0.05)
        assert not room.done()

        await anext(slow)  # it comes for the next: the first is read
        await asyncio.wait_for(room, 10)
        feed.add(printed(3))
        assert (feed.first, [(await anext(slow)).number for _ in range(2)]) == (1, [2, 3])


async def test_nobody_is_waited_for_past_the_deadline_or_after_an_interrupt() -> None:
    feed = filled(events=3, most_events=3)
    await asyncio.wait_for(feed.wait_room(printed(3), attended=lambda: False, until=time.monotonic() + 0.05), 10)
    waiting = asyncio.create_task(feed.wait_room(printed(3), attended=lambda: False, until=time.monotonic() + 60))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    feed.let_go()
    await asyncio.wait_for(waiting, 10)


async def test_who_waits_for_the_result_alone_holds_nothing_back() -> None:
    feed = filled(events=3, most_events=3)
    await asyncio.wait_for(feed.wait_room(printed(3), attended=lambda: True, until=time.monotonic() + 60), 10)


async def test_a_reader_that_was_passed_over_sees_a_gap_and_the_end() -> None:
    feed = filled(events=2, most_events=3)
    reading = feed.read(0)
    assert (await anext(reading)).number == 0
    for number in range(2, 8):
        feed.add(printed(number))
    feed.add(api.Refused(number=8, problem={}))

    assert [event.number async for event in reading] == [6, 7, 8]
    assert (await feed.wait_end()).number == 8


async def test_all_that_a_result_holds_is_counted() -> None:
    """Files by the ten thousand, names and recoveries are as large as any output."""
    large = [Change(path=f"{number:06}" * 10, action="added", sha256="0" * 64) for number in range(1000)]
    sizes = []
    for run in (a_run(), a_run(outputs=large), a_run(names={"n" * 100_000: "int"}), a_run(discarded=["x" * 100_000])):
        feed = Feed()
        feed.add(api.Settled(number=0, run=run))
        sizes.append(feed.size_bytes)

    small, *others = sizes
    assert all(size > small + 100_000 for size in others)


@pytest.mark.parametrize("display", [Display(data={"x" * 9_000: ""}), Display(data={}, display_id="x" * 9_000)])
def test_what_names_a_display_counts_as_what_it_shows(display: Display) -> None:
    feed = Feed()
    feed.add(api.Shown(number=0, display=display))

    assert feed.size_bytes > 9_000


def test_what_is_said_of_a_display_counts_as_the_objects_that_it_is() -> None:
    display = Display(data={}, metadata={"a": [[] for _ in range(10_000)]})
    shown, ended, asked = Feed(), Feed(), Feed()
    shown.add(api.Shown(number=0, display=display))
    ended.add(api.Settled(number=0, run=a_run(displays=[display])))
    asked.add(api.Asked(number=0, prompt="😀" * 10_000, password=False))

    assert min(shown.size_bytes, ended.size_bytes) > 10_000 * 64
    assert asked.size_bytes > 40_000
