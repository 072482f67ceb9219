"""A session whose /mnt/data is a directory of the user's, run after run: what `holdfast run` builds on."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import engine, jobs, settling, verbs
from holdfast.config import Limits, Settings
from holdfast.jobs import OpenJob
from holdfast.kernel.wire import Script
from holdfast.model import Run
from holdfast.requests import RunRequest
from holdfast.resources.publish import publish


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "log").write_text("mine\n")
    return directory


@pytest.fixture
def opened(tmp_path: Path, directory: Path, lean: Path) -> Iterator[OpenJob]:
    job = jobs.Job(
        code="", script=Script(file="/mnt/data/job.py"), env=lean,
        limits=Limits(memory_bytes=512 << 20, timeout_s=60),
    )  # fmt: skip
    opened = engine.wait(lambda: jobs.open_job(directory, job, settings=Settings(home=tmp_path / "home")))
    try:
        engine.wait(opened.look)
        engine.wait(opened.plan)
        yield opened
    finally:
        engine.wait(opened.close)


@pytest.fixture
def run(opened: OpenJob) -> Callable[[str], Run]:
    session = opened._session
    assert session is not None
    session.single_use = False
    return lambda code: engine.wait(lambda: verbs.run(session, RunRequest(code=code)))


def let_next_be_last(opened: OpenJob, is_last: bool = True) -> None:
    """As the one run of a job is."""
    assert opened._session is not None
    engine.wait(opened._session.wait_settled)
    opened._session.single_use = is_last


def test_runs_follow_each_other_in_a_directory_with_memory_and_open_files(
    run: Callable[[str], Run], directory: Path
) -> None:
    first = run("log = open('log', 'a'); log.write('first\\n'); log.flush(); open('/tmp/t', 'w').write('t'); x = 1")
    (directory / "log").read_text()
    second = run("log.write('second\\n'); log.flush(); x += 1; open('new', 'w').write(open('log').read())")
    failed = run("x = 'spoilt'; log.write('never\\n'); log.flush(); open('half', 'w').write('x'); 1 / 0")
    last = run("log.write('last\\n'); log.flush(); x")

    assert [each.status for each in (first, second, failed, last)] == [
        "committed", "committed", "rolled_back", "committed",
    ]  # fmt: skip
    assert (failed.memory, last.text) == ("restored", "2")
    assert (directory / "log").read_text() == "mine\nfirst\nsecond\nlast\n"
    assert (directory / "new").read_text() == "mine\nfirst\nsecond\n"
    assert sorted(path.name for path in directory.iterdir()) == [".holdfast", "log", "new"]


@pytest.mark.parametrize("is_last", [True, False])
def test_a_backup_of_hard_links_is_not_written_through(
    opened: OpenJob, run: Callable[[str], Run], directory: Path, tmp_path: Path, is_last: bool
) -> None:
    """Also not by way of a database whose connection is left open."""
    make = "import sqlite3; db = sqlite3.connect('a.db'); db.execute('create table t (x)'); db.commit()"
    assert run(f"{make}; db.close()").status == "committed"
    (tmp_path / "backup.db").hardlink_to(directory / "a.db")
    before = (tmp_path / "backup.db").read_bytes()
    let_next_be_last(opened, is_last)
    done = run("db = sqlite3.connect('a.db'); db.execute('insert into t values (1)'); db.commit()")

    assert (done.status, [change.path for change in done.outputs]) == ("committed", ["a.db"])
    assert (tmp_path / "backup.db").read_bytes() == before
    assert (directory / "a.db").read_bytes() != before


def test_a_jobs_last_run_replaces_each_file(opened: OpenJob, run: Callable[[str], Run], directory: Path) -> None:
    """Nobody goes on with its connections: no file need keep its inode, and each appears by one rename."""
    make = "import sqlite3; db = sqlite3.connect('a.db'); db.execute('create table t (x)'); db.commit()"
    assert run(make).status == "committed"
    inode = (directory / "a.db").stat().st_ino
    insert = "db.execute('insert into t values (1)'); db.commit()"
    assert run(insert).status == "committed"
    assert (directory / "a.db").stat().st_ino == inode
    let_next_be_last(opened)
    assert run(insert).status == "committed"
    assert (directory / "a.db").stat().st_ino != inode


def test_what_a_job_saves_on_the_way_is_kept_though_it_fails(opened: OpenJob, directory: Path) -> None:
    session = opened._session
    assert session is not None
    code = "from holdfast.kit import save\nopen('done', 'w').write('done')\nsave('done')\nopen('half', 'w')\n1 / 0"

    request = RunRequest(code=code, script=Script(file="/mnt/data/job.py"))
    run = engine.wait(lambda: verbs.run(session, request))

    assert (run.status, run.saved) == ("rolled_back", ["done"])
    assert (directory / "done").read_text() == "done"
    assert (directory / "done").stat().st_uid == directory.stat().st_uid
    assert not (directory / "half").exists()


def test_what_the_user_writes_as_the_files_appear_is_not_overwritten_and_is_told(
    run: Callable[[str], Run], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*arguments: Any, **more: Any) -> list[str]:
        """Somebody writes after all was verified."""
        (directory / "log").write_text("the user's\n")
        (directory / "new").write_text("the user's\n")
        return publish(*arguments, **more)

    monkeypatch.setattr(settling, "publish", late)
    done = run("for name in ('log', 'new', 'other'): open(name, 'w').write('the run\\'s')")

    found = {path.name: path.read_text() for path in directory.iterdir() if path.is_file()}
    assert done.status == "committed", "it was past the point of no return"
    assert found == {"log": "the user's\n", "new": "the user's\n", "other": "the run's"}
    (told,) = [check.detail for check in done.checks if check.name == "outside"]
    assert told.startswith("changed by somebody else as the files appeared: log, new.")


def test_what_the_user_writes_as_saved_files_appear_is_not_overwritten_and_is_told(
    run: Callable[[str], Run], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*arguments: Any, **more: Any) -> list[str]:
        (directory / "part").write_text("the user's\n")
        return publish(*arguments, **more)

    monkeypatch.setattr(settling, "publish", late)
    save = "from holdfast.kit import save\nfor name in ('part', 'other'): open(name, 'w').write('saved')\n"
    done = run(f"{save}save('part', 'other')\n1 / 0")

    assert (done.status, done.saved) == ("rolled_back", ["other"])
    assert ((directory / "part").read_text(), (directory / "other").read_text()) == ("the user's\n", "saved")
    (told,) = [check.detail for check in done.checks if check.name == "outside"]
    assert told.startswith("changed by somebody else as the files appeared: part.")
    assert done.recovery is not None
    assert done.recovery.files.endswith("kept: other")
