"""`holdfast run` and what goes with it, as people use them: real processes, one home."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "holdfast.cli.main"]
Holdfast = Callable[..., "subprocess.CompletedProcess[str]"]
JOB = "# Count the tides\nopen('tides.csv', 'w').write('high,low\\n')\nprint('counted')\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of its own with the shared environments: the test run itself may own the other one."""
    home = tmp_path_factory.mktemp("run") / "home"
    home.mkdir()
    (home / "envs").symlink_to(Path(os.environ["HOLDFAST_HOME"]) / "envs")
    return home


@pytest.fixture
def holdfast(home: Path) -> Holdfast:
    def run(*arguments: str | Path, **more: Any) -> "subprocess.CompletedProcess[str]":
        environment = os.environ | {"HOLDFAST_HOME": str(home), "COLUMNS": "200"}
        return subprocess.run(
            [*COMMAND, *map(str, arguments)],
            capture_output=True, text=True, env=environment, timeout=100, check=False, **more,
        )  # fmt: skip

    return run


@pytest.fixture
def job(tmp_path: Path) -> Callable[[str], Path]:
    def write(code: str) -> Path:
        path = tmp_path / "job.py"
        path.write_text(code)
        return path

    return write


@pytest.fixture(scope="module")
def kept(home: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A session that has one committed run, with the key `tides`."""
    path = tmp_path_factory.mktemp("kept") / "job.py"
    path.write_text(JOB)
    done = subprocess.run(
        [*COMMAND, "run", str(path), "--json", "--keep", "--key", "tides", "--output", "tides.csv"],
        capture_output=True, text=True, env=os.environ | {"HOLDFAST_HOME": str(home)}, timeout=100, check=True,
    )  # fmt: skip
    session: str = json.loads(done.stdout)["session"]
    return session


def test_the_card_comes_first_and_the_outcome_last(holdfast: Holdfast, job: Callable[[str], Path]) -> None:
    done = holdfast("run", job(JOB), "--output", "tides.csv")

    sha256 = hashlib.sha256(b"high,low\n").hexdigest()
    assert (done.returncode, done.stdout) == (0, "counted\n")
    assert done.stderr.startswith("Run Card run_")
    assert "goal     Count the tides" in done.stderr
    assert f"added    tides.csv · 9 bytes · sha256 {sha256}" in done.stderr
    assert done.stderr.index("\ncommitted · version 1") < done.stderr.index("\nstate    CKPT-")
    assert "receipt  1 · sha256 " in done.stderr
    assert "its files with it; --keep keeps them" in done.stderr


def test_a_job_that_fails_leaves_nothing_and_says_what_to_do(
    holdfast: Holdfast, job: Callable[[str], Path], kept: str
) -> None:
    done = holdfast("run", job("open('half.csv', 'w').write('a,b')\n1 / 0"), "--session", kept)

    assert done.returncode == 1
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert "rolled_back · version 1" in done.stderr
    assert "Files: as committed at version 1" in done.stderr
    assert "Next: change the code" in done.stderr


def test_an_output_that_was_declared_and_not_made_is_1(holdfast: Holdfast, job: Callable[[str], Path]) -> None:
    done = holdfast("run", job("print('nothing to see')"), "--output", "tides.csv", "--json")
    run = json.loads(done.stdout)

    assert done.returncode == 1
    assert (run["status"], run["error"]["code"]) == ("rolled_back", "verification")
    assert run["recovery"]["steps"][0]["action"] == "change"


def test_a_key_runs_once_also_in_another_process(holdfast: Holdfast, job: Callable[[str], Path], kept: str) -> None:
    again = holdfast("run", job(JOB), "--session", kept, "--key", "tides", "--output", "tides.csv")
    other = holdfast("run", job("1"), "--session", kept, "--key", "tides")

    assert (again.returncode, again.stdout) == (0, "counted\n")
    assert "nothing was executed" in again.stderr
    assert "receipt  1 · " in again.stderr
    assert other.returncode == 3
    assert "[key_reused]" in other.stderr


def test_a_deadline_is_124(holdfast: Holdfast, job: Callable[[str], Path]) -> None:
    done = holdfast("run", job("while True: pass"), "--timeout", "1s")

    assert done.returncode == 124
    assert "rolled_back" in done.stderr


def test_out_of_memory_is_137(holdfast: Holdfast, job: Callable[[str], Path]) -> None:
    done = holdfast("run", job("x = []\nwhile True: x.append(bytearray(1 << 23))"), "--memory", "128M")

    assert done.returncode == 137
    assert "rolled_back" in done.stderr


def test_ctrl_c_rolls_back_and_is_130(home: Path, job: Callable[[str], Path]) -> None:
    path = job("open('half', 'w').write('x')\nprint('ready', flush=True)\nimport time; time.sleep(60)")
    environment = os.environ | {"HOLDFAST_HOME": str(home)}
    with subprocess.Popen(
        [*COMMAND, "run", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)

    assert process.returncode == 130
    assert "rolled_back" in told


def test_what_cannot_be_is_refused_before_anything_starts(
    holdfast: Holdfast, job: Callable[[str], Path], kept: str
) -> None:
    limits = holdfast("run", job("1"), "--session", kept, "--memory", "2G")
    missing = holdfast("run", "nowhere.py")
    unknown = holdfast("run", job("1"), "--session", "0000000000", "--json")

    assert (limits.returncode, missing.returncode, unknown.returncode) == (2, 2, 3)
    assert "--memory is for a new session" in limits.stderr
    assert json.loads(unknown.stdout)["error"]["code"] == "session_unknown"


def test_sessions_are_listed(holdfast: Holdfast, kept: str, tmp_path: Path) -> None:
    listed = {one["id"]: one for one in json.loads(holdfast("sessions", "--json").stdout)}
    shown = holdfast("sessions").stdout
    nothing = holdfast("sessions", "--home", tmp_path / "new")

    assert listed.keys() == {kept}, "those that were not kept are gone"
    assert (listed[kept]["version"], listed[kept]["halted"]) == (1, "")
    assert listed[kept]["ckpt"] in shown
    assert nothing.stdout.startswith("no session is kept in ")
    assert not (tmp_path / "new").exists()


def test_a_kept_session_is_verified_and_exported(holdfast: Holdfast, home: Path, kept: str, tmp_path: Path) -> None:
    here = holdfast("verify", kept)
    exported = holdfast("export", kept, tmp_path / "export")
    there = holdfast("verify", tmp_path / "export", "--public-key", home / "keys/ed25519.pub.pem", "--json")
    by_hand = subprocess.run(
        ["sha256sum", "-c", "../manifest-sha256.txt"],
        cwd=tmp_path / "export/files", capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert (here.returncode, exported.returncode, there.returncode) == (0, 0, 0)
    assert json.loads(there.stdout)["session"] == kept
    assert by_hand.stdout == "tides.csv: OK\n"


def test_a_file_that_was_touched_is_named(holdfast: Holdfast, kept: str, tmp_path: Path) -> None:
    holdfast("export", kept, tmp_path / "export")
    (tmp_path / "export/files/tides.csv").write_text("high,LOW\n")

    done = holdfast("verify", tmp_path / "export")

    assert done.returncode == 1
    assert "tides.csv" in done.stdout
