"""A key has one committed run, however many ask for it at once."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from holdfast import AsyncSession, Run

pytestmark = pytest.mark.anyio
TASKS, RUNS = 50, 1_000
CODE = "open('count.txt', 'a').write('executed\\n')\nanswer = 6 * 7\nanswer"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def session() -> AsyncIterator[AsyncSession]:
    async with AsyncSession(memory="512M", timeout=60) as session:
        yield session


async def test_a_thousand_runs_with_one_key_are_one_execution(session: AsyncSession) -> None:
    async def ask() -> list[Run]:
        return [await session.run(CODE, key="once") for _ in range(RUNS // TASKS)]

    answers = [run for runs in await asyncio.gather(*(ask() for _ in range(TASKS))) for run in runs]

    assert len(answers) == RUNS
    assert sum(not run.replayed for run in answers) == 1
    assert {msgspec.json.encode(msgspec.structs.replace(run, replayed=True)) for run in answers} == {
        msgspec.json.encode(msgspec.structs.replace(answers[0], replayed=True))
    }
    assert answers[0].receipt is not None
    assert await session.read("count.txt") == b"executed\n"
    assert [entry.receipt_sha256 for entry in await session.history()] == [answers[0].receipt.sha256]
