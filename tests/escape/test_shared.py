"""A job in a directory of the user's: what it can reach of the host through it, and what it can do to it."""

import os
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
from tests.escape.conftest import PRELUDE

from holdfast import engine, jobs
from holdfast.config import Limits, Settings
from holdfast.errors import KernelStartFailed
from holdfast.kernel.wire import Script
from holdfast.model import Run

RunJob = Callable[..., Run]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """What is beside the directory, and none of the job's business."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret\n")
    return outside


@pytest.fixture
def directory(tmp_path: Path, outside: Path) -> Path:
    directory = tmp_path / "project"
    directory.mkdir()
    directory.chmod(0o755)
    (directory / "file").write_text("mine\n")
    (directory / "to-file").symlink_to(outside / "secret")
    (directory / "to-directory").symlink_to(outside)
    (directory / "up").symlink_to("..")
    os.link(outside / "secret", directory / "hard")
    return directory


@pytest.fixture
def run_job(tmp_path: Path, directory: Path, lean: Path) -> RunJob:
    """`swapped` is when somebody puts another directory in the place of the job's."""
    settings = Settings(home=tmp_path / "home")

    def run(code: str, swapped: str = "") -> Run:
        job = jobs.Job(
            code=PRELUDE + dedent(code), script=Script(file="/mnt/data/job.py"), env=lean,
            limits=Limits(memory_bytes=512 << 20, timeout_s=60),
        )  # fmt: skip
        opened = engine.wait(lambda: jobs.open_job(directory, job, settings=settings))
        try:
            engine.wait(opened.look)
            if swapped == "before it is mounted":
                put_another_in_its_place(directory)
            engine.wait(opened.plan)
            if swapped == "before it runs":
                put_another_in_its_place(directory)
            return engine.wait(lambda: opened.run(None))
        finally:
            engine.wait(opened.close)

    return run


def put_another_in_its_place(directory: Path) -> None:
    """With all that Holdfast keeps there."""
    moved = directory.rename(directory.with_name("moved"))
    directory.mkdir()
    (moved / ".holdfast").rename(directory / ".holdfast")


def test_links_lead_nowhere_outside_and_a_hard_link_is_let_go(run_job: RunJob, directory: Path, outside: Path) -> None:
    run = run_job("""
        print(tries(reads, "to-file"), tries(reads, "to-directory/secret"), tries(reads, "up/outside/secret"))
        print(tries(os.listdir, "to-directory"), sorted(os.listdir("up")), os.path.realpath("up"))
        print(tries(writes, "to-file"), tries(open, "to-directory/new", "w"))
        open("hard", "a").write("changed\\n")
    """)

    assert run.error is None, run.stderr
    assert run.stdout.splitlines() == ["ENOENT ENOENT ENOENT", "ENOENT ['data'] /mnt", "ENOENT ENOENT"]
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("secret", "secret\n")]
    assert (directory / "hard").read_text() == "secret\nchanged\n"
    assert os.readlink(directory / "to-file") == str(outside / "secret"), "the link itself stays"


def test_what_holdfast_keeps_does_not_exist_inside_and_cannot_be_made(run_job: RunJob, directory: Path) -> None:
    looked = run_job("""
        print(sorted(os.listdir(".")), tries(os.listdir, ".holdfast"), tries(os.rename, ".holdfast", "taken"))
        print(tries(reads, ".holdfast/journal.sqlite3"), tries(os.rmdir, ".holdfast"), tries(os.chmod, ".holdfast", 0))
        print([name for name in ("/.shared", "/.sessions") if os.path.exists(name) and os.listdir(name)])
        fd = os.open(".", os.O_RDONLY)
        print(tries(os.stat, ".holdfast", dir_fd=fd), call("umount2", b"/mnt/data", 2))
    """)
    made = run_job("""
        os.makedirs(".holdfast/sessions")
        open(".holdfast/journal.sqlite3", "w").write("forged")
        open("file", "w").write("not to be committed")
    """)
    removed = run_job("""
        os.mkdir(".holdfast")
        os.rmdir(".holdfast")
        print(tries(os.mknod, ".holdfast", 0o20000), tries(os.setxattr, ".", "trusted.overlay.opaque", b"y"))
        os.chmod(".", 0)
    """)

    names = ["file", "hard", "to-directory", "to-file", "up"]
    first, second, third, fourth = looked.stdout.splitlines()
    assert first == f"{names} ENOENT ENOENT"
    assert second == "ENOENT ENOENT ENOENT"
    assert third == "[]"
    assert fourth.startswith("ENOENT E")
    assert made.status == "rolled_back"
    assert made.error is not None
    assert ".holdfast is where Holdfast keeps its own" in made.error.message
    assert (directory / "file").read_text() == "mine\n"
    assert removed.stdout.split() == ["EPERM", "EPERM"]
    assert removed.outputs == []
    assert directory.stat().st_mode & 0o777 == 0o755, "the directory itself is not the job's to change"
    assert (directory / ".holdfast/journal.sqlite3").read_bytes()[:15] == b"SQLite format 3"


def test_a_directory_that_became_a_link_is_published_as_a_link_and_not_followed(
    run_job: RunJob, directory: Path, outside: Path
) -> None:
    (directory / "sub").mkdir()
    (directory / "sub/in").write_text("in\n")

    run = run_job(f"""
        os.remove("sub/in")
        os.rmdir("sub")
        os.symlink({str(outside)!r}, "sub")
        os.remove("to-directory")
        os.mkdir("to-directory")
        open("to-directory/secret", "w").write("not outside")
    """)

    assert run.error is None, run.stderr
    assert os.readlink(directory / "sub") == str(outside)
    assert (directory / "to-directory/secret").read_text() == "not outside"
    assert not (directory / "to-directory").is_symlink()
    assert (outside / "secret").read_text() == "secret\n"


def test_nothing_that_a_job_leaves_runs_as_the_directorys_owner(run_job: RunJob, directory: Path) -> None:
    (directory / "old").write_text("mine\n")

    run = run_job("""
        for name in ("new", "old", "file"):
            open(name, "a").write("#!/bin/sh\\n")
            os.chmod(name, 0o6755)
        os.link("new", "same")
        held = open("held", "w")
        os.chmod("held", 0o4755)
        os.mkdir("group")
        os.chmod("group", 0o2775)
        print([oct(os.stat(name).st_mode & 0o7777) for name in ("new", "file", "held", "group")])
    """)

    assert run.error is None, run.stderr
    assert run.stdout.strip() == "['0o6755', '0o6755', '0o4755', '0o2775']"
    published = {path.name: path.lstat() for path in directory.iterdir() if path.is_file() and not path.is_symlink()}
    assert published.keys() >= {"new", "same", "old", "file", "held"}
    assert {name: oct(status.st_mode & 0o6000) for name, status in published.items() if status.st_mode & 0o6000} == {}
    assert published["new"].st_uid == directory.stat().st_uid
    assert (directory / "group").stat().st_mode & 0o7777 == 0o2775
    assert {oct(change.mode) for change in run.outputs} == {"0o644"}


def test_a_directory_that_is_put_in_its_place_is_neither_shown_nor_written_to(run_job: RunJob, directory: Path) -> None:
    with pytest.raises(KernelStartFailed, match="another directory than it was"):
        run_job("print(os.listdir())", swapped="before it is mounted")
    assert [path.name for path in directory.iterdir()] == [".holdfast"]


def test_what_was_run_in_a_directory_is_not_published_to_another(run_job: RunJob, directory: Path) -> None:
    run = run_job("open('new', 'w').write('new')", swapped="before it runs")

    assert run.status == "rolled_back"
    assert run.error is not None
    assert "another directory than it was" in run.error.message
    assert [path.name for path in directory.iterdir()] == [".holdfast"]
    assert not (directory.with_name("moved") / "new").exists()


def test_what_the_caller_may_not_read_stays_unread(run_job: RunJob, directory: Path) -> None:
    (directory / "shut").write_text("shut\n")
    (directory / "shut").chmod(0)
    if os.geteuid() == 0:
        os.chown(directory / "shut", 61_236, 61_236)

    run = run_job(
        'print(tries(reads, "shut"), tries(os.chmod, "shut", 0o644) if os.stat("shut").st_uid != 1000 else "")'
    )

    assert run.stdout.split()[0] == "EACCES"
    assert "SUCCESS" not in run.stdout
    assert (directory / "shut").stat().st_mode & 0o777 == 0
