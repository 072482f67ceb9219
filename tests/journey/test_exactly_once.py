"""A key has one committed run, however many ask for it at once."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from typing import Any

import msgspec
import pytest

from holdfast import AsyncSession, Run, settling
from holdfast.config import default_home
from holdfast.errors import DiskFull, KeyMismatch, KeyReused
from holdfast.home import JOURNAL
from holdfast.store.rows import KeyRow
from holdfast.store.sqlite import Store
from holdfast.verify import check_in_home

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


FAILS = "from holdfast import kit\nopen('part', 'w').write('1')\nkit.save('part')\nprint('ran')\n1 / 0"


async def test_what_its_own_code_rolled_back_has_its_answer_unless_a_retry_is_wanted(session: AsyncSession) -> None:
    first, again = await session.run(FAILS, key="k"), await session.run(FAILS, key="k")

    assert (first.status, first.attempt, first.replayed) == ("rolled_back", 1, False)
    assert again == msgspec.structs.replace(first, replayed=True)  # its recovery, receipt and savepoints too
    assert (again.recovery is not None, again.saved, again.version) == (True, ["part"], 1)
    retried = await session.run(FAILS, key="k", retry=True)
    assert (retried.attempt, retried.replayed, retried.id != first.id) == (2, False, True)
    assert retried.receipt is not None
    assert (retried.receipt.facts().key, retried.receipt.facts().attempt) == ("k", 2)
    assert (await session.run(FAILS, key="k")).id == retried.id
    assert len(await session.history()) == 2


async def test_what_is_committed_is_not_tried_again_and_its_answer_has_the_present_ckpt(session: AsyncSession) -> None:
    first = await session.run(CODE, key="k")
    later = await session.run("x = 1")
    again = await session.run(CODE, key="k", retry=True)

    assert again == msgspec.structs.replace(first, replayed=True, ckpt=later.ckpt)


async def test_what_was_not_started_for_want_of_a_name_runs_when_the_name_is_there(session: AsyncSession) -> None:
    code = "open('count.txt', 'a').write(f'{n}\\n')"
    refused = [await session.run(code, key="k", preflight="block") for _ in range(2)]
    await session.run("n = 1")
    done, again = [await session.run(code, key="k", preflight="block") for _ in range(2)]

    assert [(run.status, run.attempt, run.replayed) for run in refused] == [
        ("rolled_back", 1, False), ("rolled_back", 2, False),
    ]  # fmt: skip
    assert refused[0].receipt is not None
    assert refused[0].receipt.facts().blame == "system"
    assert (done.status, done.attempt, done.replayed) == ("committed", 3, False)
    assert (again.id, again.replayed, await session.read("count.txt")) == (done.id, True, b"1\n")


async def test_what_was_interrupted_or_left_by_its_caller_runs_again_as_the_next_attempt(session: AsyncSession) -> None:
    code = "import time; open('f', 'a').write('x'); print('on', flush=True); time.sleep(SECONDS)"
    loop, begun = asyncio.get_running_loop(), asyncio.Event()
    await session.run("SECONDS = 60")
    left = asyncio.create_task(session.run(code, key="k", on_stdout=lambda _: loop.call_soon_threadsafe(begun.set)))
    await begun.wait()
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    while len(await session.history()) < 2:  # at a server it ends when that has heard of it
        await asyncio.sleep(0.05)
    begun.clear()
    left = asyncio.create_task(session.run(code, key="k", on_stdout=lambda _: loop.call_soon_threadsafe(begun.set)))
    await begun.wait()
    assert await session.interrupt()
    interrupted = await left
    await session.run("SECONDS = 0")
    again = await session.run(code, key="k")

    assert (interrupted.status, interrupted.attempt) == ("rolled_back", 2)
    assert (again.status, again.attempt, again.replayed) == ("committed", 3, False)
    assert await session.read("f") == b"x"


@pytest.mark.parametrize(
    "other", [{"inputs": ["a"]}, {"outputs": ["count.txt"]}, {"asserts": ["answer"]}, {"code": "1"}]
)
async def test_another_request_with_the_same_key_is_refused(session: AsyncSession, other: dict[str, Any]) -> None:
    await session.run(CODE, key="k")
    with pytest.raises(KeyReused) as refused:
        await session.run(other.get("code", CODE), key="k", **{n: v for n, v in other.items() if n != "code"})

    assert (refused.value.code, "another key" in refused.value.hint) == ("key_reused", True)
    assert session.version == 1


@pytest.mark.embedded("the disk is full in this process alone")
async def test_what_is_verified_and_found_no_room_is_committed_and_not_run_again(
    session: AsyncSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = settling.publish

    def full_once(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(settling, "publish", publish)
        raise DiskFull("the disk is full (rename)", hint="free space, then run it again")

    monkeypatch.setattr(settling, "publish", full_once)
    with pytest.raises(DiskFull, match="verified, and will be committed when there is room") as told:
        await session.run(CODE, key="k")
    again = await session.run(CODE, key="k")

    assert "do not run it again" in told.value.hint
    assert (again.status, again.attempt, again.replayed, again.version) == ("committed", 1, True, 1)
    assert again.receipt is not None
    assert await session.read("count.txt") == b"executed\n"
    assert [entry.run for entry in await session.history()] == [again.id]


# -- a journal that was changed by hand ----------------------------------------------------------------------------


def changed(**fields: object) -> Callable[[KeyRow, KeyRow], KeyRow]:
    return lambda own, other: msgspec.structs.replace(own, **fields)


ROWS: dict[str, Callable[[KeyRow, KeyRow], KeyRow]] = {
    "another run": lambda own, other: msgspec.structs.replace(own, run=other.run),
    "all of another row": lambda own, other: other,
    "all but the key": lambda own, other: msgspec.structs.replace(other, key=own.key),
    "a run without a key": changed(run="keyless"),
    "a run that never was": changed(run="run_000000000000"),
    "another request": lambda own, other: msgspec.structs.replace(own, request_sha256=other.request_sha256),
    "another attempt": changed(attempt=7),
    "another session": changed(session="0123456789"),
    "a claim": lambda own, other: msgspec.structs.replace(own, run=other.run, claim=b"{}"),
}


@pytest.mark.embedded("the server's own journal is changed")
@pytest.mark.parametrize("how", [*ROWS, "another answer", "no row", "another name"])
async def test_a_key_never_gets_the_answer_of_another_run(how: str) -> None:
    """Verify names it; and whoever asks is told, while the journal's owner is at work beside."""
    async with AsyncSession(memory="512M", timeout=60) as session:
        own = await session.run("open('own', 'w').write('1'); print('own')", key="own")
        other = await session.run("open('other', 'w').write('1'); print('other')", key="other")
        keyless = await session.run("print('keyless')")
        with closing(sqlite3.connect(default_home() / JOURNAL)) as db, db:
            row, told = (
                msgspec.msgpack.decode(db.execute(FIND, (session.id, key)).fetchone()[0], type=KeyRow)
                for key in ("own", "other")
            )
            if how in ROWS:
                made = ROWS[how](row, told)
                made = msgspec.structs.replace(made, run=keyless.id) if made.run == "keyless" else made
                db.execute("update keys set body = ? where session = ? and key = 'own'", (
                    msgspec.msgpack.encode(made), session.id,
                ))  # fmt: skip
            elif how == "another answer":
                swap = "update results set body = (select body from results where run = ?) where run = ?"
                db.execute(swap, (other.id, own.id))
            elif how == "no row":
                db.execute("delete from keys where session = ? and key = 'own'", (session.id,))
            else:
                db.execute("update keys set key = 'third' where session = ? and key = 'own'", (session.id,))

        with closing(Store(default_home() / JOURNAL, read_only=True)) as store:
            problem = check_in_home(store, session.id, default_home()).problem
        assert "key" in problem or "answer" in problem, problem
        if how != "no row":
            asked = "third" if how == "another name" else "own"
            with pytest.raises(KeyMismatch) as refused:
                await session.run("open('own', 'w').write('1'); print('own')", key=asked)
            assert session.id in refused.value.hint
        assert (await session.run("print('still here')")).stdout == "still here\n"


FIND = "select body from keys where session = ? and key = ?"
