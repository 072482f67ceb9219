"""The journal: durable when it says so, in order, many at one go, and every failure told to whom it concerns."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import anyio
import pytest

from holdfast.errors import DiskFull
from holdfast.journal import Journal
from holdfast.records import AnyRecord, Executed, Planned, RunCard, Settled
from holdfast.store.rows import Append, PutResult
from holdfast.store.sqlite import Store

from .watched import WatchedDisk, watch

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def watched_disk(tmp_path_factory: pytest.TempPathFactory) -> WatchedDisk:
    return watch(tmp_path_factory)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite3"


@pytest.fixture
async def journal(path: Path) -> AsyncIterator[Journal]:
    journal = Journal(path)
    yield journal
    await journal.close()


def planned(run: str, session: str = "s1") -> Append:
    card = RunCard(run=run, session=session, goal="", code_sha256="", base="")
    return Append(session=session, record=Planned(run=run, at=1.0, card=card, code="1+1"))


def executed(run: str, session: str = "s1") -> Append:
    return Append(session=session, record=Executed(run=run, at=2.0, error_code=None, duration_s=0.1))


def settled(run: str, session: str = "s1") -> Append:
    return Append(session=session, record=Settled(run=run, at=3.0, status="rolled_back", version=0, ckpt=""))


def tags(records: list[AnyRecord]) -> list[str]:
    return [type(record).__name__ for record in records]


async def test_what_was_appended_is_read_at_once(journal: Journal) -> None:
    await journal.append(planned("r1"), executed("r1"))

    assert tags(await journal.read(lambda store: store.records("r1"))) == ["Planned", "Executed"]


async def test_what_was_appended_is_on_disk_for_others(journal: Journal, path: Path) -> None:
    await journal.append(planned("r1"))

    other = Store(path, read_only=True)
    assert other.unsettled() == [("s1", "r1")]
    other.close()


async def test_a_query_sees_one_state_and_its_failure_is_its_callers(journal: Journal) -> None:
    def fail(store: Store) -> None:
        raise LookupError(store.runs("s1"))

    with pytest.raises(LookupError):
        await journal.read(fail)
    await journal.append(planned("r1"))
    assert await journal.read(lambda store: store.runs("s1")) == ["r1"]


async def test_an_illegal_record_fails_its_own_caller_only(journal: Journal) -> None:
    outcomes = await asyncio.gather(
        journal.append(planned("r1")),
        journal.append(settled("unknown")),
        journal.append(planned("r2"), planned("r2")),
        journal.append(executed("r1")),
        return_exceptions=True,
    )

    assert [type(outcome) for outcome in outcomes] == [type(None), ValueError, ValueError, type(None)]
    assert await journal.read(lambda store: store.runs("s1")) == ["r1"]


async def test_many_appends_share_a_commit_and_keep_their_order(journal: Journal, path: Path) -> None:
    async def runs(session: str) -> None:
        for number in range(20):
            run = f"{session}-{number}"
            journal.append_nowait(planned(run, session))
            await journal.append(executed(run, session), settled(run, session))

    await asyncio.gather(*(runs(f"s{number}") for number in range(50)))

    for session in (f"s{number}" for number in range(50)):
        expected = [f"{session}-{number}" for number in range(20)]
        assert await journal.read(lambda store, session=session: store.runs(session)) == expected
    assert await journal.read(Store.unsettled) == []


async def test_what_may_linger_is_in_one_commit_with_what_comes_next(watched_disk: WatchedDisk, path: Path) -> None:
    watched_disk.run(
        PRELUDE
        + """
async def main():
    journal = Journal(Path(sys.argv[1]))
    for n in range(100):
        journal.append_soon(PutResult(session="s", run=f"a{n}", body=b"x"))
        await journal.append(PutResult(session="s", run=f"b{n}", body=b"x"))
    os._exit(0)
asyncio.run(main())
""",
        path,
    )

    commits = [step for step in watched_disk.steps(path.parent) if step.endswith("-wal")]
    assert len(commits) < 150  # and not two for each


async def test_what_lingers_for_long_is_written_without_company(journal: Journal, path: Path) -> None:
    journal.append_soon(planned("r1"))
    other = Store(path, read_only=True)
    with anyio.fail_after(10):
        while not other.unsettled():
            await asyncio.sleep(0.005)
    other.close()


async def test_what_lingers_keeps_its_place(journal: Journal) -> None:
    journal.append_soon(planned("r1"))
    journal.append_nowait(executed("r1"))
    journal.append_soon(settled("r1"))
    await journal.wait_written("s1")

    assert tags(await journal.read(lambda store: store.records("r1"))) == ["Planned", "Executed", "Settled"]


async def test_a_close_writes_what_lingers(path: Path) -> None:
    journal = Journal(path)
    journal.append_soon(planned("r1"))
    await journal.close()
    other = Store(path, read_only=True)
    assert other.unsettled() == [("s1", "r1")]
    other.close()


async def test_what_lingered_and_failed_is_told_with_the_next(journal: Journal) -> None:
    journal.append_soon(settled("unknown"))
    with pytest.raises(ValueError, match="unknown"):
        await journal.append(planned("r1"))


async def test_what_lingers_is_staged_at_once_and_nobody_sees_it_before_its_commit(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.journal._LINGER_S", 60.0)
    journal.append_soon(planned("r1"))

    assert journal._store.runs("s1") == ["r1"]
    assert await journal.read(lambda store: store.runs("s1")) == []

    await journal.append(executed("r1"))
    assert tags(await journal.read(lambda store: store.records("r1"))) == ["Planned", "Executed"]


async def test_a_disk_that_is_full_when_something_is_staged_fails_all_of_that_commit_and_none_after_it(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> NoReturn:
        raise DiskFull("the disk is full (journal)", hint="free space")

    journal.append_soon(planned("r1", "s1"))
    with monkeypatch.context() as patched:
        patched.setattr(journal._store, "_apply_whole", fails)
        journal.append_soon(planned("r2", "s2"))
    for session in ("s1", "s2"):
        with pytest.raises(DiskFull):
            await journal.wait_written(session)

    await journal.append(planned("r3", "s1"))
    assert await journal.read(lambda store: store.runs("s1") + store.runs("s2")) == ["r3"]


async def test_whatever_ends_the_staging_of_one_is_told_to_all_that_were_staged_before_it(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    journal.append_soon(planned("r1", "s1"))
    with monkeypatch.context() as patched:
        patched.setattr(journal._store, "_apply_whole", is_interrupted)
        with pytest.raises(KeyboardInterrupt):
            journal.append_soon(planned("r2", "s2"))
    for session in ("s1", "s2"):
        with pytest.raises(KeyboardInterrupt):
            await journal.wait_written(session)


async def test_fifty_at_once_are_synced_far_less_often_than_one_by_one(watched_disk: WatchedDisk, path: Path) -> None:
    watched_disk.run(
        PRELUDE
        + """
async def main():
    journal = Journal(Path(sys.argv[1]))
    await asyncio.gather(*(journal.append(PutResult(session="s", run=f"r{n}", body=b"x")) for n in range(500)))
    os._exit(0)
asyncio.run(main())
""",
        path,
    )

    commits = [step for step in watched_disk.steps(path.parent) if step.endswith("-wal")]
    assert len(commits) < 100


async def test_a_queued_append_comes_before_later_ones(journal: Journal) -> None:
    journal.append_nowait(planned("r1"))
    journal.append_nowait(executed("r1"))
    await journal.append(settled("r1"))

    assert tags(await journal.read(lambda store: store.records("r1"))) == ["Planned", "Executed", "Settled"]


async def test_a_queued_append_that_fails_fails_the_sessions_next_and_that_is_not_written(journal: Journal) -> None:
    journal.append_nowait(settled("unknown", "s1"))
    await journal.append(planned("r2", "s2"))
    with pytest.raises(ValueError, match="run unknown"):
        await journal.append(planned("r1", "s1"))
    await journal.append(planned("r3", "s1"))

    assert await journal.read(lambda store: store.runs("s1")) == ["r3"]
    assert await journal.read(lambda store: store.runs("s2")) == ["r2"]


async def test_a_queued_append_behind_a_failed_one_fails_with_it(journal: Journal) -> None:
    journal.append_nowait(settled("unknown"))
    journal.append_nowait(planned("r1"))
    with pytest.raises(ValueError, match="run unknown"):
        await journal.append(planned("r2"))

    assert await journal.read(lambda store: store.runs("s1")) == []


async def test_who_waits_for_what_is_queued_is_told_of_his_own_failure_once_and_of_no_other(
    journal: Journal,
) -> None:
    journal.append_nowait(planned("r1"))
    journal.append_nowait(settled("unknown", "s2"))
    await journal.wait_written("s1")
    with pytest.raises(ValueError, match="run unknown"):
        await journal.wait_written("s2")
    await journal.wait_written("s2")

    journal.append_nowait(planned("r1"))
    with pytest.raises(ValueError, match="run r1"):
        await journal.wait_written("s1")
    await journal.append(executed("r1"))


async def test_who_only_waits_does_not_fail_with_what_another_writes(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> NoReturn:
        raise DiskFull("the disk is full (journal)", hint="free space")

    with monkeypatch.context() as patched:
        patched.setattr(journal._store, "commit", fails)
        with journal._writing:  # so that one commit has all of it
            journal.append_nowait(planned("r1", "s1"))
            waiting = [asyncio.create_task(journal.wait_written(session)) for session in ("s1", "s2")]
            await asyncio.sleep(0.05)
        failed, fine = await asyncio.gather(*waiting, return_exceptions=True)

    assert (type(failed), fine) == (DiskFull, None)


async def test_who_asks_what_became_of_a_sessions_writes_has_all_of_them_tried_and_takes_the_failure(
    journal: Journal,
) -> None:
    journal.append_soon(planned("r1"))
    await journal.wait_tried("s1")
    assert tags(await journal.read(lambda store: store.records("r1"))) == ["Planned"]

    journal.append_nowait(settled("unknown", "s2"))
    journal.append_nowait(settled("unknown", "s1"))
    await journal.wait_tried("s1")
    await journal.append(executed("r1"))
    with pytest.raises(ValueError, match="run unknown"):
        await journal.append(planned("r2", "s2"))


async def test_a_caller_who_gives_up_has_written_all_the_same(journal: Journal) -> None:
    waiting = asyncio.create_task(journal.append(planned("r1")))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await journal.wait_written("s1")

    assert await journal.read(lambda store: store.runs("s1")) == ["r1"]


async def test_closing_writes_what_is_queued_and_folds_the_log(path: Path) -> None:
    journal = Journal(path)
    journal.append_nowait(planned("r1"))
    await journal.close()
    await journal.close()

    assert sorted(os.listdir(path.parent)) == ["journal.seen", path.name]
    store = Store(path)
    assert store.runs("s1") == ["r1"]
    store.close()


async def test_a_closed_journal_takes_nothing(path: Path) -> None:
    journal = Journal(path)
    await journal.close()

    with pytest.raises(RuntimeError, match="closed"):
        await journal.append(planned("r1"))


async def test_what_a_crashed_owner_wrote_is_there_for_the_next(journal: Journal, path: Path) -> None:
    await journal.append(PutResult(session="s1", run="r1", body=b"x" * 100_000))
    again = Store(path)
    assert len(again.result("r1") or b"") == 100_000
    again.close()


PRELUDE = """
import asyncio, os, sys
from pathlib import Path
from typing import NoReturn
from holdfast.errors import DiskFailed
from holdfast.errors import DiskFull
from holdfast.journal import Journal
from holdfast.records import Executed, Planned, RunCard
from holdfast.store.rows import Append, PutResult
card = RunCard(run="r1", session="s1", goal="", code_sha256="", base="")
planned = Append(session="s1", record=Planned(run="r1", at=1.0, card=card, code=""))
executed = Append(session="s1", record=Executed(run="r1", at=1.0, error_code=None, duration_s=0.1))
"""


@pytest.mark.parametrize(
    ("point", "kept"),
    [
        ("journal.Planned.before", []),
        ("journal.Planned.after", ["Planned"]),
        ("journal.Executed.before", ["Planned"]),
        ("journal.Executed.after", ["Planned", "Executed"]),
    ],
)
def test_a_crash_around_a_commit_leaves_it_whole_or_not_at_all(path: Path, point: str, kept: list[str]) -> None:
    code = """
async def main():
    journal = Journal(Path(sys.argv[1]))
    await journal.append(planned)
    print("planned", flush=True)
    await journal.append(executed)
    print("executed", flush=True)
asyncio.run(main())
"""
    child = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, path],
        env=os.environ | {"HOLDFAST_CRASH_AT": point},
        capture_output=True,
        text=True,
    )

    store = Store(path)
    assert child.returncode == -signal.SIGKILL
    assert tags(store.records("r1")) == kept
    assert child.stdout.split() == (["planned"] if "Executed" in point else [])
    store.close()


def test_a_new_journal_has_a_durable_name_before_anything_is_in_it(watched_disk: WatchedDisk, path: Path) -> None:
    watched_disk.run(PRELUDE + "Journal(Path(sys.argv[1])); os._exit(0)", path)

    assert watched_disk.steps(path.parent)[0] == "fsync ."


def test_after_a_sync_that_failed_nothing_more_is_taken(watched_disk: WatchedDisk, path: Path) -> None:
    code = """
async def main():
    journal = Journal(Path(sys.argv[1]))
    await journal.append(planned)
    Path(sys.argv[2]).touch()
    other = PutResult(session="s2", run="r2", body=b"")
    results = await asyncio.gather(journal.append(executed), journal.append(other), return_exceptions=True)
    os.unlink(sys.argv[2])
    results += await asyncio.gather(journal.append(executed), return_exceptions=True)
    print([isinstance(each, DiskFailed) for each in results])
    await journal.close()
asyncio.run(main())
"""
    said = watched_disk.run(PRELUDE + code, path, watched_disk.failing)

    store = Store(path)
    assert said.strip() == "[True, True, True]"
    assert tags(store.records("r1")) == ["Planned"]
    store.close()


AT_EXIT = """
import asyncio, atexit, sys, threading
from pathlib import Path
from holdfast.journal import Journal

loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()

def there(verb):
    return asyncio.run_coroutine_threadsafe(verb, loop).result(30)

async def opened():
    return Journal(Path(sys.argv[1]))

journal = there(opened())

def at_exit():
    print(there(journal.read(lambda store: store.unsettled())))
    there(journal.close())

atexit.register(at_exit)
"""


def test_it_can_be_read_when_the_process_ends(path: Path) -> None:
    """Then sessions are closed that nobody has closed, and a pool of `concurrent.futures` takes no work any more."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, path], capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


async def test_who_reads_a_journal_that_was_closed_is_told(path: Path) -> None:
    journal = Journal(path)
    await journal.close()

    with pytest.raises(RuntimeError, match="closed"):
        await journal.read(lambda store: store.unsettled())
