"""`holdfast run` and what goes with it, as people use them: real processes, real directories."""

import hashlib
import json
import os
import pty
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.lean import lean_home

from holdfast.evidence import read_key
from holdfast.home import JOURNAL
from holdfast.store.rows import KeyRow
from holdfast.store.sqlite import Store
from holdfast.verify import Report, check_in_home

COMMAND = [sys.executable, "-m", "holdfast.cli.main"]
Holdfast = Callable[..., "subprocess.CompletedProcess[str]"]
JOB = """
# Count the tides
import os, sys
print(sys.argv, __name__, __file__, os.getcwd())
tides = open("tides.csv").read()
os.makedirs("out", exist_ok=True)
open("out/count.txt", "w").write(str(len(tides.split())))
late = open("late.txt", "w")
late.write("never closed")
if os.path.exists("old.txt"):
    os.remove("old.txt")
"""
CHANGES = """
import os
for number in range(4):
    open(f"new-{number}.txt", "w").write(f"{number}\\n")
open("tides.csv", "w").write("changed\\n")
os.remove("old.txt")
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of its own: the test run itself may own the other one."""
    return lean_home(tmp_path_factory.mktemp("run") / "home")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory of the user's, with some files."""
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "tides.csv").write_text("high low\n")
    (directory / "tides.csv").chmod(0o600)
    (directory / "old.txt").write_text("old\n")
    return directory


@pytest.fixture
def holdfast(home: Path, directory: Path) -> Holdfast:
    def run(command: str, *arguments: str | Path, env: dict[str, str] | None = None, **more: Any) -> Any:
        environment = os.environ | {"HOLDFAST_HOME": str(home), "COLUMNS": "200"} | (env or {})
        return subprocess.run(
            [*COMMAND, command, *map(str, arguments)],
            capture_output=True, text=True, env=environment, timeout=100, check=False, **{"cwd": directory, **more},
        )  # fmt: skip

    return run


def files(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and ".holdfast" not in path.parts
    }


def job(directory: Path, code: str, name: str = "job.py") -> str:
    (directory / name).write_text(code)
    return name


def test_a_job_whose_words_nobody_reads_runs_and_commits_all_the_same(home: Path, directory: Path) -> None:
    """`2>&1 | head -3`, with a reader that has gone before anything was said."""
    (directory / "job.py").write_text("open('made', 'w').write('made')")
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as nobody:
        done = subprocess.run(
            [*COMMAND, "run", "job.py"], stdout=subprocess.PIPE, stderr=nobody, cwd=directory, timeout=100, check=False,
            env=os.environ | {"HOLDFAST_HOME": str(home)},
        )  # fmt: skip

    assert (done.returncode, done.stdout) == (0, b"")
    assert (directory / "made").read_text() == "made"


def test_a_job_changes_the_directory_all_at_once_and_only_once(holdfast: Holdfast, directory: Path) -> None:
    job(directory, JOB)

    done = holdfast(
        "run", "job.py", "2024", "--in", "tides.csv", "--out", "out/*.txt", "--undeclared", "keep", "--", "--fast"
    )
    again = holdfast("run", "job.py", "2024", "--fast", "--json", "--", "--fast")
    repeated = holdfast("run", "job.py", "2024", "--", "--fast")
    forced = holdfast("run", "job.py", "2024", "--force", "--json", "--", "--fast")

    sha256 = hashlib.sha256(b"2").hexdigest()
    said = "['/mnt/data/job.py', '2024', '--fast'] __main__ /mnt/data/job.py /mnt/data\n"
    assert (done.returncode, done.stdout) == (0, said), done.stderr
    assert done.stderr.startswith("Run Card run_")
    assert "goal     Count the tides" in done.stderr
    assert "inputs   tides.csv (9 bytes, " in done.stderr
    assert "found    3 files in the directory: job.py, old.txt, tides.csv" in done.stderr
    assert f"added    out/count.txt · 1 bytes · sha256 {sha256}" in done.stderr
    assert "removed  old.txt" in done.stderr
    assert done.stderr.index("\ncommitted · version 2") < done.stderr.index("\nstate    CKPT-")
    assert files(directory) == {
        "job.py": JOB, "late.txt": "never closed", "out/count.txt": "2", "tides.csv": "high low\n",
    }  # fmt: skip
    owners = {(path.stat().st_uid, path.stat().st_gid) for path in directory.rglob("*")}
    assert owners == {(directory.stat().st_uid, directory.stat().st_gid)}
    assert stat.S_IMODE((directory / "tides.csv").stat().st_mode) == 0o600
    assert again.returncode == 2
    assert repeated.stdout == said
    assert "already committed by run_" in repeated.stderr
    assert "receipt  2 · " in repeated.stderr
    assert (json.loads(forced.stdout)["version"], json.loads(forced.stdout)["replayed"]) == (3, False)


def test_a_job_that_fails_leaves_the_directory_untouched_and_says_what_to_do(
    holdfast: Holdfast, directory: Path
) -> None:
    job(directory, f"{CHANGES}\ndef divide(): return 1 / 0\ndivide()")
    before = files(directory)
    inodes = {path: path.stat().st_ino for path in directory.iterdir() if path.is_file()}

    done = holdfast("run", "job.py")

    assert done.returncode == 1
    assert 'File "/mnt/data/job.py", line 8, in divide' in done.stderr
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert "rolled_back · version 1" in done.stderr
    assert "Taken back: " in done.stderr
    assert "Next: change the code" in done.stderr
    assert files(directory) == before
    assert {path: path.stat().st_ino for path in inodes} == inodes


def test_a_job_that_fails_is_told_once(holdfast: Holdfast, directory: Path) -> None:
    (directory / "job.py").write_text("import time; time.sleep(60)")
    done = holdfast("run", "job.py", "--timeout", "1")

    assert done.returncode == 124
    assert done.stderr.count("the run was not done after 1 s") == 1
    assert "Next: " in done.stderr


def test_an_input_that_is_not_there_is_refused_before_anything_runs(holdfast: Holdfast, directory: Path) -> None:
    (directory / "job.py").write_text("open('ran', 'w')")
    done = holdfast("run", "job.py", "--in", "tide.csv", "--in", "*.csv")

    assert (done.returncode, (directory / "ran").exists(), done.stdout) == (3, False, "")
    assert "no file tide.csv is in" in done.stderr


def test_a_key_stands_for_a_job_that_was_committed_without_it(holdfast: Holdfast, directory: Path) -> None:
    """Asked again when the directory has changed, it must not commit a second time."""
    (directory / "job.py").write_text("open('count', 'a').write('x')")
    (directory / "other.py").write_text("print(1)")
    assert holdfast("run", "job.py").returncode == 0
    claimed = holdfast("run", "job.py", "--key", "k")
    (directory / "tides.csv").write_text("changed")
    again = holdfast("run", "job.py", "--key", "k")
    other = holdfast("run", "other.py", "--key", "k")

    assert [done.returncode for done in (claimed, again, other)] == [0, 0, 3]
    assert ["nothing was executed" in done.stderr for done in (claimed, again)] == [True, True]
    assert (directory / "count").read_text() == "x"
    assert "key_reused" in other.stderr
    assert holdfast("verify").returncode == 0
    with closing(sqlite3.connect(directory / ".holdfast" / JOURNAL)) as db, db:  # to the run that took the change in
        row = msgspec.msgpack.decode(db.execute("select body from keys where key = 'k'").fetchone()[0], type=KeyRow)
        (strange,) = db.execute("select id from runs where id != ? limit 1", (row.run,)).fetchone()
        forged = msgspec.msgpack.encode(msgspec.structs.replace(row, run=strange))
        db.execute("update keys set body = ? where key = 'k'", (forged,))
    verified, refused = holdfast("verify"), holdfast("run", "job.py", "--key", "k")
    assert (verified.returncode, refused.returncode) == (1, 3)
    assert "key 'k': nothing that this home signed" in verified.stdout
    assert "key_mismatch" in refused.stderr


SAVES = """
import time
from holdfast import kit
open('part', 'w').write('finished'); kit.save('part')
print('ready', flush=True)
"""


def test_a_job_that_saved_something_and_failed_is_run_again(holdfast: Holdfast, directory: Path) -> None:
    job(directory, f"{SAVES}\n1 / 0")
    failed, again = holdfast("run", "job.py"), holdfast("run", "job.py")

    assert (directory / "part").read_text() == "finished"
    assert [done.returncode for done in (failed, again)] == [1, 1]
    assert "nothing was executed" not in again.stderr


def test_the_key_of_a_job_that_failed_is_not_told_as_committed(holdfast: Holdfast, directory: Path) -> None:
    job(directory, f"{SAVES}\n1 / 0")
    failed, again = (holdfast("run", "job.py", "--key", "k") for _ in range(2))

    assert [done.returncode for done in (failed, again)] == [1, 1]
    assert "already rolled back in run_" in again.stderr
    assert "already committed" not in again.stderr


def test_a_job_that_saved_something_and_was_interrupted_is_run_again_with_its_key(
    home: Path, holdfast: Holdfast, directory: Path
) -> None:
    job(directory, f"{SAVES}\ntime.sleep(60)")
    with running(home, directory, "--key", "k") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    again = holdfast("run", "job.py", "--key", "k", "--timeout", "2", "--json")
    told = json.loads(again.stdout)

    assert (directory / "part").read_text() == "finished"
    assert (process.returncode, again.returncode) == (130, 124)
    assert (told["replayed"], told["error"]["code"], told["card"]["attempt"]) == (False, "timeout", 2)


def test_a_directory_that_jobs_were_run_in_is_shown(holdfast: Holdfast, directory: Path, tmp_path: Path) -> None:
    (directory / "job.py").write_text(JOB)
    ran = json.loads(holdfast("run", "job.py", "--json").stdout)
    standing = holdfast("show", directory, "--json", cwd=tmp_path)
    one = holdfast("show", ".", ran["id"])
    printed = holdfast("logs", ".")

    assert ran["id"] in [entry["run"] for entry in json.loads(standing.stdout)["history"]]
    assert "outcome  committed" in one.stdout
    assert printed.stdout == ran["stdout"]


def test_an_output_that_was_declared_and_not_made_is_1(holdfast: Holdfast, directory: Path) -> None:
    done = holdfast("run", job(directory, "open('tide.csv', 'w').write('x')"), "--out", "sums/*.csv", "--json")
    run = json.loads(done.stdout)

    assert done.returncode == 1
    assert (run["status"], run["error"]["code"]) == ("rolled_back", "verification")
    assert run["recovery"]["steps"][0]["action"] == "change"
    assert not (directory / "tide.csv").exists()


def test_a_rehearsal_says_what_would_change_and_changes_nothing(holdfast: Holdfast, directory: Path) -> None:
    job(directory, CHANGES)
    before = files(directory)

    done = holdfast("run", "job.py", "--rehearse")

    assert done.returncode == 0
    assert "would be removed  old.txt" in done.stderr
    assert "would be added    new-0.txt" in done.stderr
    assert files(directory) == before


def test_a_notebook_is_one_run_and_says_which_cell_failed(holdfast: Holdfast, directory: Path) -> None:
    cells = [
        "tides = open('tides.csv').read()",
        "open('new.txt', 'w').write(tides)\nlen(tides)",
        "%%bash\necho from bash",
    ]
    (directory / "good.ipynb").write_text(notebook(*cells))
    (directory / "bad.ipynb").write_text(notebook(*cells, "open('half.txt', 'w').write('x')", "tides.nothing", "1"))

    good = holdfast("run", "good.ipynb")
    bad = holdfast("run", "bad.ipynb")

    assert (good.returncode, good.stdout) == (0, "9\nfrom bash\n"), good.stderr
    assert (directory / "new.txt").read_text() == "high low\n"
    assert bad.returncode == 1
    assert "In code cell 5 of 6:" in bad.stderr
    assert "AttributeError: 'str' object has no attribute 'nothing'" in bad.stderr
    assert not (directory / "half.txt").exists()


def notebook(*cells: str) -> str:
    told = [{"cell_type": "code", "source": cell, "metadata": {}, "outputs": []} for cell in cells]
    text = {"cell_type": "markdown", "source": ["# Tides"], "metadata": {}}
    return json.dumps({"cells": [text, *told], "metadata": {"kernelspec": {"language": "python"}}, "nbformat": 4})


def test_a_notebook_ends_well_at_an_exit(holdfast: Holdfast, directory: Path) -> None:
    job(directory, notebook("import sys; open('one', 'w')", "sys.exit(0)", "open('two', 'w')"), "job.ipynb")

    done = holdfast("run", "job.ipynb", "--json")

    assert done.returncode == 0, done.stdout
    assert [change["path"] for change in json.loads(done.stdout)["outputs"]] == ["one"]


def test_threads_and_exit_handlers_end_as_in_a_process(holdfast: Holdfast, directory: Path) -> None:
    job(
        directory,
        """
import atexit, concurrent.futures, threading, time
def write(name):
    time.sleep(0.2)
    open(name, "w").write("done")
atexit.register(write, "atexit.txt")
threading.Thread(target=write, args=["thread.txt"]).start()
concurrent.futures.ThreadPoolExecutor().submit(write, "pool.txt")
""",
    )

    done = holdfast("run", "job.py", "--json")

    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["strays"] == []
    assert {path.name for path in directory.glob("*.txt")} == {"atexit.txt", "thread.txt", "pool.txt", "old.txt"}


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_pool_of_a_script_finds_the_functions_of_the_script(holdfast: Holdfast, directory: Path, method: str) -> None:
    job(
        directory,
        f"""
import multiprocessing
def double(number):
    return 2 * number
if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(1) as pool:
        print(pool.map(double, [4]))
""",
    )

    done = holdfast("run", "job.py", "--json")

    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["stdout"] == "[8]\n"


def test_what_somebody_else_changes_meanwhile_is_not_overwritten(home: Path, directory: Path) -> None:
    job(
        directory,
        """
print("ready", flush=True)
while open("tides.csv").read() == "high low\\n":
    pass
open("tides.csv", "w").write("the job's\\n")
open("new.txt", "w").write("new\\n")
""",
    )
    with running(home, directory) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (directory / "tides.csv").write_text("the user's\n")
        _, told = process.communicate(timeout=60)

    assert process.returncode == 1
    assert "changed by somebody else while it ran: tides.csv" in told
    assert (directory / "tides.csv").read_text() == "the user's\n"
    assert not (directory / "new.txt").exists()


def running(home: Path, directory: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, "run", "job.py", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=directory,
        env=os.environ | {"HOLDFAST_HOME": str(home)},
    )  # fmt: skip


@pytest.mark.parametrize(("point", "finisher"), [("publish.renamed:2", "run"), ("settle.published", "verify")])
def test_what_a_killed_job_had_begun_to_publish_is_finished_by_the_next_command(
    holdfast: Holdfast, directory: Path, point: str, finisher: str
) -> None:
    job(directory, CHANGES)

    killed = holdfast("run", "job.py", env={"HOLDFAST_CRASH_AT": point})
    left = files(directory)
    finished = holdfast(*(["run", "job.py", "--json"] if finisher == "run" else ["verify"]))
    verified = holdfast("verify", "--json")

    whole = {"job.py": CHANGES, "tides.csv": "changed\n", **{f"new-{n}.txt": f"{n}\n" for n in range(4)}}
    assert killed.returncode == -signal.SIGKILL
    assert (left == whole) == (point == "settle.published"), "it was killed in the middle"
    assert finished.returncode == 0, finished.stderr
    assert finisher == "verify" or json.loads(finished.stdout)["replayed"]
    assert files(directory) == whole
    assert json.loads(verified.stdout)["ok"]
    assert list(directory.glob(".holdfast/sessions/*/stages/*")) == []
    home_id = (directory / ".holdfast/id").read_text().strip()
    assert list(Path("/sys/fs/cgroup").glob(f"*/holdfast*/{home_id}/*")) == [], "and nothing of it is left frozen"


@pytest.mark.parametrize("finisher", ["ps", "doctor", "keys list", "show nothing"])
def test_any_command_anywhere_finishes_what_a_killed_job_had_begun_to_publish(
    holdfast: Holdfast, home: Path, directory: Path, tmp_path: Path, finisher: str
) -> None:
    job(directory, CHANGES)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    killed = holdfast("run", "job.py", env={"HOLDFAST_CRASH_AT": "publish.renamed:2"})
    left = files(directory)
    other = holdfast(*finisher.split(), cwd=elsewhere)
    found = files(directory)
    again = holdfast(*finisher.split(), cwd=elsewhere)

    whole = {"job.py": CHANGES, "tides.csv": "changed\n", **{f"new-{n}.txt": f"{n}\n" for n in range(4)}}
    assert killed.returncode == -signal.SIGKILL
    assert left != whole
    assert found == whole
    assert f"was killed in {directory}: finished now, committed" in other.stderr
    assert "killed" not in again.stderr
    assert list((home / "jobs").iterdir()) == []
    assert json.loads(holdfast("verify", "--json").stdout)["ok"]


def test_a_job_that_lives_is_left_alone_by_other_commands(holdfast: Holdfast, home: Path, directory: Path) -> None:
    job(directory, "import os, time\nopen('mine.txt', 'w').write('x')\nprint('here', flush=True)\ntime.sleep(4)")
    with running(home, directory) as process:
        assert process.stdout is not None
        process.stdout.readline()
        other = holdfast("ps")
        entries = len(list((home / "jobs").iterdir()))
        _, told = process.communicate(timeout=60)

    assert (other.returncode, other.stderr) == (0, "")
    assert entries == 1
    assert process.returncode == 0, told
    assert (directory / "mine.txt").exists()
    assert list((home / "jobs").iterdir()) == []


def test_a_job_whose_directory_is_away_is_finished_when_it_is_back(
    holdfast: Holdfast, home: Path, directory: Path, tmp_path: Path
) -> None:
    job(directory, "import os\nos.makedirs('into')\nopen('into/a.txt', 'w').write('whole')")
    killed = holdfast("run", "job.py", env={"HOLDFAST_CRASH_AT": "run.point_of_no_return"})
    moved = tmp_path / "moved"
    directory.rename(moved)

    away = holdfast("ps", cwd=tmp_path)
    moved.rename(directory)
    back = holdfast("ps", cwd=tmp_path)

    assert killed.returncode == -signal.SIGKILL
    assert (away.returncode, away.stderr) == (0, "")
    assert "finished now, committed" in back.stderr, "a disk that was not there is looked at again"
    assert (directory / "into/a.txt").read_text() == "whole"


def test_what_the_user_does_after_a_job_was_killed_is_not_undone_by_finishing_it(
    holdfast: Holdfast, directory: Path
) -> None:
    for name in ("gone/a.txt", "going/a.txt"):
        (directory / name).parent.mkdir()
        (directory / name).write_text("old\n")
    job(directory, CHANGES + "import shutil\nshutil.rmtree('gone')\nshutil.rmtree('going')\n")
    job(directory, "print('next')", "next.py")

    killed = holdfast("run", "job.py", env={"HOLDFAST_CRASH_AT": "run.point_of_no_return"})
    theirs = dict.fromkeys(["tides.csv", "new-0.txt", "going/b.txt"], "the user's\n")
    for name, text in theirs.items():
        (directory / name).write_text(text)
    finished = holdfast("run", "next.py")
    verified = holdfast("verify", "--json")

    assert killed.returncode == -signal.SIGKILL
    assert finished.returncode == 0, finished.stderr
    assert {name: text for name, text in files(directory).items() if not name.endswith(".py")} == {
        **theirs, **{f"new-{n}.txt": f"{n}\n" for n in range(1, 4)},
    }  # fmt: skip
    assert not (directory / "gone").exists()
    assert "3 files changed since the last job, and taken in" in finished.stderr
    assert json.loads(verified.stdout)["ok"]


def test_a_file_that_was_changed_since_is_named_by_verify_and_taken_in_by_the_next_job(
    holdfast: Holdfast, directory: Path
) -> None:
    job(directory, "print(open('tides.csv').read())")
    holdfast("run", "job.py")
    (directory / "tides.csv").write_text("tampered\n")

    wrong = holdfast("verify")
    done = holdfast("run", "job.py")
    right = holdfast("verify")

    assert (wrong.returncode, done.returncode, right.returncode) == (1, 0, 0)
    assert "tides.csv" in wrong.stdout
    assert "1 file changed since the last job, and taken in: tides.csv" in done.stderr
    assert done.stdout == "tampered\n\n"


MADE = """
import os
os.symlink('tides.csv', 'latest'); os.mkdir('empty', 0o755); os.mkfifo('pipe', 0o644)
open('tool.sh', 'w').write('#!/bin/sh'); os.chmod('tool.sh', 0o755)
"""
THEIR_CHANGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda at: relink(at / "latest", "x"), "symlink latest points to x"),
    (lambda at: (at / "latest").unlink(), "symlink latest is missing"),
    (lambda at: (at / "latest").touch(), "symlink latest is a file"),
    (lambda at: relink(at / "latest", "tides.csv"), ""),
    (lambda at: (at / "empty").chmod(0o777), "directory empty has the mode 0777"),
    (lambda at: (at / "empty").rmdir(), "directory empty is missing"),
    (lambda at: (at / "empty").mkdir(0o755), ""),
    (lambda at: (at / "pipe").unlink(), "fifo pipe is missing"),
    (lambda at: os.mkfifo(at / "pipe", 0o644), ""),
    (lambda at: (at / "tool.sh").chmod(0o777), "file tool.sh has the mode 0777"),
]


def relink(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def test_what_a_job_made_is_looked_at_whole_and_what_the_user_changed_of_it_is_taken_in(
    holdfast: Holdfast, home: Path, directory: Path
) -> None:
    def verified() -> Report:
        public = read_key(home / "keys/ed25519.pub.pem")
        with closing(Store(directory / ".holdfast" / JOURNAL, read_only=True)) as store:
            session = store.sessions()[0].id
            return check_in_home(store, session, directory / ".holdfast", public=public, shared=directory)

    job(directory, MADE)
    job(directory, "print('next')", "next.py")
    (directory / "mine").symlink_to("/etc/passwd")
    (directory / "my own").mkdir()
    (directory / "tides.csv").chmod(0o600)
    holdfast("run", "job.py")
    assert (verified().problem, verified().unstated) == ("", ["mine", "my own"])

    for change, named in THEIR_CHANGES:
        change(directory)
        problem = verified().problem
        assert problem.startswith(named)
        assert named or not problem
    relink(directory / "latest", "x")
    (directory / "pipe").unlink()
    (directory / "empty").rmdir()
    done = holdfast("run", "--force", "next.py")
    assert "4 files changed since the last job, and taken in" in done.stderr
    assert verified().problem == ""
    assert "taken in" not in holdfast("run", "--force", "next.py").stderr
    assert verified().problem == ""


def test_on_a_terminal_a_line_shows_time_and_memory(home: Path, directory: Path) -> None:
    job(directory, "import time\nprint('begun', flush=True)\ntime.sleep(1)\nprint('over')")
    screen, terminal = pty.openpty()
    seen: list[bytes] = []
    reader = threading.Thread(target=lambda: seen.extend(read_all(screen)))
    reader.start()

    done = subprocess.run(
        [*COMMAND, "run", "job.py"],
        stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, cwd=directory, timeout=100, check=False,
        env=os.environ | {"HOLDFAST_HOME": str(home)},
    )  # fmt: skip
    os.close(terminal)
    reader.join()
    os.close(screen)

    told = b"".join(seen).decode()
    assert done.returncode == 0, told
    assert " of 1,024 MiB" in told
    assert "begun\r\n" in told
    assert told.index("begun") < told.index(" of 1,024 MiB") < told.index("over") < told.index("committed")


def read_all(terminal: int) -> list[bytes]:
    pieces = []
    try:
        while piece := os.read(terminal, 4096):
            pieces.append(piece)
    except OSError:  # EIO: the other end is closed
        pass
    return pieces


def test_a_deadline_is_124(holdfast: Holdfast, directory: Path) -> None:
    done = holdfast("run", job(directory, "while True: pass"), "--timeout", "1s")

    assert done.returncode == 124
    assert "rolled_back" in done.stderr


def test_out_of_memory_is_137(holdfast: Holdfast, directory: Path) -> None:
    done = holdfast("run", job(directory, "x = []\nwhile True: x.append(bytearray(1 << 23))"), "--memory", "128M")

    assert done.returncode == 137
    assert "rolled_back" in done.stderr


def test_ctrl_c_rolls_back_and_is_130(home: Path, directory: Path) -> None:
    job(directory, "open('half', 'w').write('x')\nprint('ready', flush=True)\nimport time; time.sleep(60)")
    with running(home, directory) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)

    assert process.returncode == 130
    assert "rolled_back" in told
    assert not (directory / "half").exists()


def test_what_cannot_be_is_refused_before_anything_starts(holdfast: Holdfast, home: Path, directory: Path) -> None:
    script = directory / job(directory, "1")
    user = {"HOME": str(directory)}
    refused = [
        holdfast("run", script, "--workspace", "/", "--json"),
        holdfast("run", script, "--json", env=user),
        holdfast("run", script, "--workspace", home.parent, "--json"),
    ]
    missing = holdfast("run", "nowhere.py")

    assert [done.returncode for done in refused] == [3, 3, 3]
    assert {json.loads(done.stdout)["error"]["code"] for done in refused} == {"invalid_setting"}
    assert missing.returncode == 2
    assert not (directory / ".holdfast").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs jobs in other people's directories")
def test_root_leaves_files_to_whom_the_directory_belongs(holdfast: Holdfast, directory: Path) -> None:
    job(directory, "import os\nopen('tides.csv', 'a').write('x')\nopen('theirs', 'a').write('x')\nos.makedirs('d/e')")
    (directory / "theirs").write_text("theirs")
    (directory / "theirs").chmod(0o666)
    for path in (directory, *directory.iterdir()):
        os.chown(path, 61_234, 61_235)
    os.chown(directory / "theirs", 61_236, 61_236)

    done = holdfast("run", "job.py")

    owners = {path.name: (path.stat().st_uid, path.stat().st_gid) for path in directory.rglob("*")}
    assert done.returncode == 0, done.stderr
    assert [owners[name] for name in ("tides.csv", "theirs", "d", "e")] == [
        (61_234, 61_235), (61_236, 61_236), (61_234, 61_235), (61_234, 61_235),
    ]  # fmt: skip


# -- kept sessions -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(home: Path) -> str:
    """A session that has one committed run."""
    program = """if True:
        from holdfast import Session
        s = Session()
        s.write("tides.csv", "high,low\\n")
        print(s.id)
        s.close(keep=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, env=os.environ | {"HOLDFAST_HOME": str(home)}, timeout=100, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_a_directory_that_jobs_were_run_in_is_exported_as_its_receipts_say(
    holdfast: Holdfast, home: Path, directory: Path, tmp_path: Path
) -> None:
    job(directory, JOB)
    holdfast("run", "job.py")
    exported = holdfast("export", ".", tmp_path / "export", "--json")
    there = holdfast("verify", tmp_path / "export", "--public-key", home / "keys/ed25519.pub.pem", "--json")
    (directory / "tides.csv").write_text("changed since\n")
    changed = holdfast("export", directory, tmp_path / "other")

    assert exported.returncode == 0, exported.stderr
    assert (json.loads(exported.stdout)["files"], json.loads(there.stdout)["ok"]) == (4, True)
    assert files(tmp_path / "export/files") == {
        "job.py": JOB, "late.txt": "never closed", "out/count.txt": "2", "tides.csv": "high low\n",
    }  # fmt: skip
    assert changed.returncode == 3
    assert "tides.csv is not what its receipt says" in changed.stderr


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
