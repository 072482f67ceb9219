"""Paces: how much of the event loop each session gets."""

import asyncio
import time

from holdfast import pace
from holdfast.pace import Pace


def work(for_s: float) -> None:
    until = time.thread_time() + for_s
    while time.thread_time() < until:
        pass


async def turns_of_the_loop(counted: list[int]) -> None:
    while True:
        counted[0] += 1
        await asyncio.sleep(0)


async def test_who_works_without_end_lets_the_loop_turn() -> None:
    one, counted = Pace(), [0]
    counting = asyncio.create_task(turns_of_the_loop(counted))
    for _ in range(40):
        await one.turn()
        with one.step(10 << 20):
            work(pace.TURN_S / 4)
    counting.cancel()

    assert counted[0] >= 8


async def test_tasks_of_one_session_share_its_turns() -> None:
    one, most, now = Pace(), 0, [0]

    async def count_turns() -> None:
        while True:
            now[0] = 0
            await asyncio.sleep(0)

    async def task() -> None:
        nonlocal most
        for _ in range(3):
            await one.turn()
            with one.step(10 << 20):
                work(2 * pace.TURN_S)
            now[0] += 1
            most = max(most, now[0])

    counting = asyncio.create_task(count_turns())
    await asyncio.gather(*(task() for _ in range(20)))
    counting.cancel()

    assert most <= 2


async def test_what_moves_little_gets_a_quarter_of_the_time(monkeypatch) -> None:
    monkeypatch.setattr(pace, "_BURST_S", 0.0)
    one, began, busy_s = Pace(), time.monotonic(), 0.0
    while (took_s := time.monotonic() - began) < 0.4:
        await one.turn()
        with one.step(1):
            work(0.001)
        busy_s += 0.001

    assert busy_s < 0.4 * took_s


async def test_what_moves_much_waits_for_nothing_but_a_turn() -> None:
    one = Pace()
    for _ in range(100):
        await one.turn()
        with one.step(1 << 20):
            work(0.0005)
    await one.turn()

    assert one._paid_at == 0.0


async def test_one_dear_step_is_not_waited_for_without_end() -> None:
    one = Pace()
    one.spend(100.0, 0)
    await asyncio.wait_for(one.turn(), 5)


async def test_who_is_cancelled_while_it_waits_holds_nobody_up() -> None:
    one = Pace()
    one.spend(0.05, 0)
    waiting = [asyncio.create_task(one.turn()) for _ in range(5)]
    await asyncio.sleep(0)
    for task in waiting[:-1]:
        task.cancel()
    await asyncio.wait_for(waiting[-1], 5)
    await asyncio.wait_for(one.turn(), 5)
