"""A session whose /mnt/data is a directory of the user's, run after run: what `holdfast run` builds on."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import engine, jobs, verbs
from holdfast.config import Limits, Settings
from holdfast.jobs import OpenJob
from holdfast.kernel.wire import Script
from holdfast.model import Run
from holdfast.planning import RunRequest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "log").write_text("mine\n")
    return directory


@pytest.fixture
def opened(tmp_path: Path, directory: Path, guest_environment: Path) -> Iterator[OpenJob]:
    job = jobs.Job(
        code="", script=Script(file="/mnt/data/job.py"), env=guest_environment,
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
