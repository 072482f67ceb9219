"""`input()` and `getpass` where a face offers somebody to answer; and every way in which no answer comes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from holdfast import AsyncSession


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def session(anyio_backend: str) -> AsyncIterator[AsyncSession]:
    async with AsyncSession(memory="512M", timeout=30, mode="notebook") as session:
        yield session


class Nobody:
    """Is asked and never answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def __call__(self, prompt: str, password: bool) -> str:
        self._loop.call_soon_threadsafe(self.asked.set)
        await anyio.sleep_forever()
        raise AssertionError


async def test_both_are_answered_and_a_password_is_told_from_the_rest(session: AsyncSession) -> None:
    questions: list[tuple[str, bool]] = []

    async def answer(prompt: str, password: bool) -> str:
        questions.append((prompt, password))
        return f"answer {len(questions)}"

    run = await session.run("import getpass\n(input('a? '), getpass.getpass('b? ', None), input())", on_input=answer)

    assert run.text == "('answer 1', 'answer 2', 'answer 3')"
    assert questions == [("a? ", False), ("b? ", True), ("", False)]


async def test_questions_of_threads_are_answered_one_after_the_other(session: AsyncSession) -> None:
    async def answer(prompt: str, password: bool) -> str:
        await anyio.sleep(0.01)
        return prompt

    run = await session.run(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as pool: said = sorted(pool.map(input, 'abcd'))\nsaid",
        on_input=answer,
    )

    assert run.text == "['a', 'b', 'c', 'd']"


async def test_an_interrupt_ends_the_wait_and_what_the_cell_did_stays(session: AsyncSession) -> None:
    nobody = Nobody()
    running = asyncio.create_task(session.run("done = 1\ninput()", on_input=nobody))
    await nobody.asked.wait()
    assert await session.interrupt()
    run = await running

    assert (run.status, run.error and run.error.code) == ("kept", "interrupted")
    assert (await session.run("done")).text == "1"


async def test_the_deadline_holds_while_an_answer_is_waited_for(session: AsyncSession) -> None:
    run = await session.run("input()", on_input=Nobody(), timeout=1)

    assert run.error is not None
    assert run.error.code == "timeout"


async def test_a_caller_who_goes_away_while_he_is_asked_leaves_a_session_that_works(session: AsyncSession) -> None:
    nobody = Nobody()
    running = asyncio.create_task(session.run("gone = 1\ninput()", on_input=nobody))
    await nobody.asked.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert (await session.run("6 * 7")).text == "42"


async def test_a_face_that_fails_to_ask_is_told_and_the_session_works(session: AsyncSession) -> None:
    async def fail(prompt: str, password: bool) -> str:
        raise LookupError("no terminal")

    with pytest.raises(LookupError, match="no terminal"):
        await session.run("input()", on_input=fail)

    assert (await session.run("6 * 7")).text == "42"


async def test_an_answer_that_is_broken_off_by_an_interrupt_does_not_cost_memory(session: AsyncSession) -> None:
    await session.run("kept = 7")
    reached: Any = session._transport
    sending = reached._session.computer.kernel._sending

    async def answer(prompt: str, password: bool) -> str:
        asyncio.get_running_loop().create_task(interrupt())
        return "y" * (60 << 20)

    async def interrupt() -> None:
        while not sending.locked():
            await anyio.sleep(0.001)
        reached._session.interrupt()

    run = await session.run("len(input())", on_input=answer)

    assert run.error is None or run.error.code == "interrupted"
    assert (await session.run("kept")).text == "7"
