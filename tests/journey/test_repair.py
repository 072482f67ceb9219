"""What could be computed again is not a loss: manifests that were deleted or damaged come back from the receipts."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.lean import lean_home

from holdfast.cli.repair import repair_sessions
from holdfast.errors import HomeBusy, SessionUnknown
from holdfast.evidence import read_key
from holdfast.home import JOURNAL, acquire
from holdfast.store.sqlite import Store
from holdfast.verify import check_in_home

COMMAND = [sys.executable, "-m", "holdfast.cli.main"]
VERSIONS = 5


WRITE = f"""
with Session(memory="512M", timeout=30, versions={VERSIONS}) as session:
    told = {{}}
    for number in range(1, {VERSIONS} + 3):
        session.write(f"f{{number % 3}}", f"{{number}}")
        told[session.ckpt] = {{each.path: session.read(each.path).decode() for each in session.files()}}
    print(json.dumps([session.id, told]))
    session.close(keep=True)
"""
RESTORE = """
with Session(resume=sys.argv[1]) as session:
    for ckpt, files in json.loads(sys.argv[2]).items():
        session.restore(ckpt)
        assert {each.path: session.read(each.path).decode() for each in session.files()} == files
    session.close(keep=True)
"""


def play(home: Path, script: str, *arguments: str) -> Any:
    """In a process of its own, which lets go of the home when it ends."""
    return subprocess.run(
        [sys.executable, "-c", f"import json, sys\nfrom holdfast import Session\n{script}", *arguments],
        capture_output=True, text=True, check=True, env=os.environ | {"HOLDFAST_HOME": str(home)},
    )  # fmt: skip


class Kept:
    """A session that was closed, and what it had at each of its versions."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.id, self.contents = json.loads(play(home, WRITE).stdout)
        self.manifests = home / "sessions" / self.id / "manifests"

    def problem(self) -> str:
        with closing(Store(self.home / JOURNAL, read_only=True)) as store:
            return check_in_home(store, self.id, self.home).problem

    def restore_each(self) -> str:
        """Returns what the start had to say."""
        kept = dict([*self.contents.items()][-VERSIONS:])
        return str(play(self.home, RESTORE, self.id, json.dumps(kept)).stderr)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(lean_home(tmp_path / "home"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def one(damage: Callable[[Path], object], number: int) -> Callable[[Path], object]:
    return lambda manifests: damage(sorted(manifests.iterdir())[number])


def each(damage: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda manifests: [damage(path) for path in sorted(manifests.iterdir())]


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: (path.unlink(), make(path))


ACCIDENTS: dict[str, Callable[[Path], object]] = {
    "one is gone": one(Path.unlink, 0),
    "some are gone": lambda manifests: [path.unlink() for path in sorted(manifests.iterdir())[::2]],
    "all are gone": each(Path.unlink),
    "with their directory": shutil.rmtree,
    "one was cut off": one(truncate, 1),
    "all were cut off": each(truncate),
    "emptied": each(lambda path: path.write_bytes(b"")),
    "another text": each(lambda path: path.write_bytes(b"a" * 64 + b"  f1\n")),
    "a directory": one(replace_by(Path.mkdir), 2),
    "a link": one(replace_by(lambda path: path.symlink_to("/etc/passwd")), 2),
    "a FIFO": one(replace_by(os.mkfifo), 2),
    "both": lambda manifests: (one(Path.unlink, 0)(manifests), one(truncate, 1)(manifests)),
}


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """One session for all accidents: what is repaired is as it was."""
    return Kept(lean_home(tmp_path_factory.mktemp("repair") / "home"))


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_manifests_that_were_deleted_or_damaged_are_rendered_again(
    spoiled: Kept, accident: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name: path.read_bytes() for path in spoiled.manifests.iterdir()}
    assert len(before) >= VERSIONS
    ACCIDENTS[accident](spoiled.manifests)
    assert "manifest" in spoiled.problem()

    assert repair_sessions(spoiled.id, home=spoiled.home, dry_run=True, as_json=False) == 0
    assert "would be rendered again" in capsys.readouterr().out
    assert "manifest" in spoiled.problem()
    assert repair_sessions(spoiled.id, home=spoiled.home, dry_run=False, as_json=True) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["missing"] or told["damaged"]
    assert spoiled.problem() == ""
    assert {path.name: path.read_bytes() for path in spoiled.manifests.iterdir()} == before
    assert repair_sessions(None, home=spoiled.home, dry_run=False, as_json=False) == 0
    assert (
        capsys.readouterr().out == "0 of 1 sessions had something to repair; 1 of them all are as their receipts say\n"
    )


def test_every_kept_version_can_be_restored_after_a_repair(kept: Kept) -> None:
    shutil.rmtree(kept.manifests)

    assert repair_sessions(kept.id, home=kept.home, dry_run=False, as_json=False) == 0

    kept.restore_each()
    assert kept.problem() == ""


def test_a_start_says_what_it_found_and_a_session_goes_on_all_the_same(kept: Kept) -> None:
    shutil.rmtree(kept.manifests)

    assert f"`holdfast repair {kept.id}` renders them again" in kept.restore_each()

    assert repair_sessions(kept.id, home=kept.home, dry_run=False, as_json=False) == 0
    assert kept.problem() == ""
    assert play(kept.home, "with Session(resume=sys.argv[1]): pass", kept.id).stderr == ""


BEYOND_REPAIR: dict[str, tuple[Callable[[Kept], object], str]] = {
    "a file": (lambda kept: (kept.manifests.parent / "files/data/f1").write_bytes(b"x"), "file f1 "),
    "a file that is gone": (lambda kept: (kept.manifests.parent / "files/data/f1").unlink(), "file f1 is missing"),
    "a receipt": (lambda kept: _spoil_receipt(kept), "receipt 2"),
}


def _spoil_receipt(kept: Kept) -> None:
    with closing(sqlite3.connect(kept.home / JOURNAL)) as db, db:
        db.execute("delete from receipts where number = 2")


@pytest.mark.parametrize("what", BEYOND_REPAIR)
def test_what_cannot_be_repaired_is_named(kept: Kept, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, named = BEYOND_REPAIR[what]
    spoil(kept)
    one(Path.unlink, 0)(kept.manifests)

    for dry_run in (True, False):
        assert repair_sessions(None, home=kept.home, dry_run=dry_run, as_json=False) == 1
        assert f"cannot be repaired: {named}" in capsys.readouterr().out


def test_only_the_owner_of_the_home_repairs(spoiled: Kept) -> None:
    home = acquire(spoiled.home)
    try:
        with pytest.raises(HomeBusy, match=f"in use by process {os.getpid()}"):
            repair_sessions(spoiled.id, home=spoiled.home, dry_run=False, as_json=False)
        assert repair_sessions(spoiled.id, home=spoiled.home, dry_run=True, as_json=False) == 0
    finally:
        home.release()
    with pytest.raises(SessionUnknown):
        repair_sessions("nosuch", home=spoiled.home, dry_run=False, as_json=False)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    home, directory = lean_home(tmp_path / "home"), tmp_path / "project"
    directory.mkdir()
    (directory / "job.py").write_text("open('out.txt', 'a').write('1')")

    def run(*arguments: str, env: dict[str, str] | None = None) -> Any:
        environment = os.environ | {"HOLDFAST_HOME": str(home)} | (env or {})
        return subprocess.run(
            [*COMMAND, *arguments], cwd=directory, capture_output=True, text=True, env=environment, check=False
        )

    return run


def test_a_directory_that_jobs_ran_in_is_repaired_too(run: Callable[..., Any], tmp_path: Path) -> None:
    assert run("run", "job.py").returncode == 0
    assert run("run", "--force", "job.py").returncode == 0
    (manifests,) = (tmp_path / "project/.holdfast/sessions").glob("*/manifests")
    for damage in (each(truncate), shutil.rmtree):
        damage(manifests)
        assert run("verify").returncode == 1
        done = run("repair")
        assert (done.returncode, "rendered again" in done.stdout) == (0, True), done.stderr
        assert run("verify").returncode == 0


def test_no_manifest_stays_of_a_version_that_a_crash_kept_from_coming(run: Callable[..., Any], tmp_path: Path) -> None:
    assert run("run", "job.py").returncode == 0
    (tmp_path / "project/mine.txt").write_text("changed outside")
    assert run("run", "--force", "job.py", env={"HOLDFAST_CRASH_AT": "journal.Planned.before"}).returncode < 0
    (manifests,) = (tmp_path / "project/.holdfast/sessions").glob("*/manifests")
    written = {path.name for path in manifests.iterdir()}
    (tmp_path / "project/mine.txt").unlink()
    with closing(Store(tmp_path / "project/.holdfast" / JOURNAL, read_only=True)) as store:
        (session,) = store.sessions()
        known = {row.manifest_sha256 for row in store.versions(session.id)}
        assert written - known
        public = read_key(tmp_path / "home/keys/ed25519.pub.pem")
        report = check_in_home(
            store, session.id, tmp_path / "project/.holdfast", public=public, shared=tmp_path / "project"
        )
    assert (report.problem, report.manifests) == ("", len(written & known))

    assert run("run", "--force", "job.py").returncode == 0

    with closing(Store(tmp_path / "project/.holdfast" / JOURNAL, read_only=True)) as store:
        known = {row.manifest_sha256 for row in store.versions(session.id)}
    assert {path.name for path in manifests.iterdir()} <= known
