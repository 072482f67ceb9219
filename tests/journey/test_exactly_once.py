"""A key has one committed run, however many ask for it at once."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from holdfast import AsyncSession, Run

pytestmark = pytest.mark.anyio
TRANSPORTS = True
TASKS, RUNS = 50, 1_000
CODE = "open('count.txt', 'a').write('executed\\n')\nanswer = 6 * 7\nanswer"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def session(where: dict[str, Any]) -> AsyncIterator[AsyncSession]:
    async with AsyncSession(memory="512M", timeout=60, **where) as session:
        yield session


async def test_a_thousand_runs_with_one_key_are_one_execution(session: AsyncSession, where: dict[str, Any]) -> None:
    runs = RUNS // 4 if where else RUNS

    async def ask() -> list[Run]:
        return [await session.run(CODE, key="once") for _ in range(runs // TASKS)]

    answers = [run for told in await asyncio.gather(*(ask() for _ in range(TASKS))) for run in told]

    assert len(answers) == runs
    assert sum(not run.replayed for run in answers) == 1
    assert {msgspec.json.encode(msgspec.structs.replace(run, replayed=True)) for run in answers} == {
        msgspec.json.encode(msgspec.structs.replace(answers[0], replayed=True))
    }
    assert answers[0].receipt is not None
    assert await session.read("count.txt") == b"executed\n"
    assert [entry.receipt_sha256 for entry in await session.history()] == [answers[0].receipt.sha256]
