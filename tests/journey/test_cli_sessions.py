"""`holdfast ps`, `show`, `logs`, `reset`, `end`: beside a server, beside an owner that does not serve, and alone."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from tests.lean import lean_home
from typer.testing import CliRunner

from holdfast import Session
from holdfast.cli.main import app

COMMAND = [sys.executable, "-m", "holdfast.cli.main"]
Holdfast = Callable[..., Result]
KEEP_TWO = """if True:
    from holdfast import Session
    for cells in (
        [
            "open('tides.csv', 'w').write('high,low\\\\n')\\ndepth = 7",
            "import sys; print('out'); print('err', file=sys.stderr)",
        ],
        ["x = 1"],
    ):
        s = Session(memory="512M", mode="notebook")
        for cell in cells:
            s.run(cell)
        print(s.id)
        s.close(keep=True)
    """


def new_home(directory: Path) -> Path:
    return lean_home(directory / "home")


def command_in(home: Path) -> Holdfast:
    """The command without a process of its own: each would take longer to start than to do."""

    def run(*arguments: str | Path) -> Result:
        return CliRunner().invoke(
            app, [str(each) for each in arguments], env={"HOLDFAST_HOME": str(home), "COLUMNS": "200"}
        )

    return run


@pytest.fixture(scope="module")
def two_kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A home that nobody owns, and two sessions in it; the second is for whoever wants to delete one."""
    home = new_home(tmp_path_factory.mktemp("alone"))
    done = subprocess.run(
        [sys.executable, "-c", KEEP_TWO], capture_output=True, text=True, check=True, timeout=100,
        env=os.environ | {"HOLDFAST_HOME": str(home)},
    )  # fmt: skip
    kept, doomed = done.stdout.split()
    return home, kept, doomed


@pytest.fixture
def alone(two_kept: tuple[Path, str, str]) -> Path:
    return two_kept[0]


@pytest.fixture
def kept(two_kept: tuple[Path, str, str]) -> str:
    return two_kept[1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = new_home(tmp_path_factory.mktemp("served"))
    environment = os.environ | {"HOLDFAST_HOME": str(home)}
    with subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", "--json"], stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        assert json.loads(server.stdout.readline())["socket"] == str(home / "socket")
        yield home
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def test_an_export_names_what_tools_would_run_by_themselves(tmp_path: Path) -> None:
    home, holdfast = new_home(tmp_path), command_in(tmp_path / "home")
    cell = "import os; os.makedirs('.git'); open('.git/config', 'w').write('x'); open('fine.csv', 'w').write('1')"
    subprocess.run(
        [*COMMAND, "repl", "--keep"], input=cell, text=True, check=True, timeout=100, capture_output=True,
        env=os.environ | {"HOLDFAST_HOME": str(home)},
    )  # fmt: skip
    session = json.loads(holdfast("ps", "--json").stdout)[0]["id"]

    told = holdfast("export", session, tmp_path / "export").stdout.splitlines()[-1]
    assert told == "tools of yours run or obey these by themselves, look at them first: .git, .git/config"


# -- nobody owns the home --------------------------------------------------------------------------------------------


def test_a_kept_session_is_listed_and_shown(alone: Path, kept: str, tmp_path: Path) -> None:
    holdfast = command_in(alone)
    listed = json.loads(holdfast("ps", "--json").stdout)[0]
    shown, nothing = holdfast("ps").stdout, holdfast("ps", "--home", tmp_path / "new")
    standing = json.loads(holdfast("show", kept[:4], "--json").stdout)
    told = holdfast("show", kept[:4]).stdout

    assert (listed["state"], listed["version"], listed["halted"]) == ("kept", 2, "")
    assert (listed["memory_limit_bytes"], listed["memory_bytes"], listed["running"]) == (512 << 20, None, None)
    assert kept in shown
    assert listed["ckpt"] in shown
    assert nothing.stdout.startswith("no session is in ")
    assert not (tmp_path / "new").exists()
    assert [entry["status"] for entry in standing["history"]] == ["committed", "committed"]
    assert standing["files"][0]["path"] == "tides.csv"
    assert standing["names"]["depth"] == "int"
    assert "depth: int" in told
    assert "gone with its memory" in told
    assert "tides.csv" in told


def test_a_run_is_shown_with_card_outcome_outputs_and_receipt(alone: Path, kept: str) -> None:
    holdfast = command_in(alone)
    run = json.loads(holdfast("show", kept, "--json").stdout)["history"][0]["run"]
    shown, told = holdfast("show", kept, run[:8]).stdout, json.loads(holdfast("show", kept, run, "--json").stdout)

    assert shown.startswith(f"Run Card {run} · committed\n")
    assert "added    tides.csv · 9 bytes · sha256 " in shown
    assert "receipt  1 · sha256 " in shown
    assert shown.endswith("depth = 7\n")
    assert (told["card"]["run"], told["entry"]["version"], told["receipt"]["number"]) == (run, 1, 1)
    assert told["card"]["stage"] == "committed"


def test_what_a_run_printed_is_there_the_latest_by_default(alone: Path, kept: str) -> None:
    holdfast = command_in(alone)
    latest, told = holdfast("logs", kept), json.loads(holdfast("logs", kept, "--json").stdout)
    first = holdfast("logs", kept, json.loads(holdfast("show", kept, "--json").stdout)["history"][0]["run"])

    assert (latest.exit_code, latest.stdout, latest.stderr) == (0, "out\n", "err\n")
    assert (told["stdout"], told["stderr"], told["settled"]) == ("out\n", "err\n", True)
    assert (first.exit_code, first.stdout) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (["show", "zzzzzzzzzz"], "session_unknown", "the latest are"),
        (["logs", "KEPT", "run_nothing"], "run_unknown", "lists them"),
        (["end", "KEPT0"], "session_unknown", "did you mean KEPT?"),
    ],
)
def test_what_is_not_there_is_said_with_what_to_do(
    alone: Path, kept: str, arguments: list[str], code: str, hint: str
) -> None:
    done = command_in(alone)(*[each.replace("KEPT", kept) for each in arguments], "--json")

    assert done.exit_code == 3
    assert json.loads(done.stdout)["error"]["code"] == code
    assert hint.replace("KEPT", kept) in done.stderr


def test_the_shell_completes_ids(alone: Path, kept: str) -> None:
    environment = os.environ | {
        "HOLDFAST_HOME": str(alone), "_HOLDFAST_COMPLETE": "complete_bash", "COMP_CWORD": "2",
        "COMP_WORDS": f"holdfast show {kept[:3]}",
    }  # fmt: skip
    program = "import sys; sys.argv[0] = 'holdfast'; from holdfast.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)

    assert done.stdout.split() == [kept]


def test_a_kept_session_is_deleted_after_a_question_at_a_terminal(two_kept: tuple[Path, str, str]) -> None:
    alone, _, session = two_kept
    holdfast = command_in(alone)

    assert "nothing to reset" in holdfast("reset", session).stdout
    assert holdfast("end", session, "--keep").exit_code == 0
    assert at_a_terminal(alone, "end", session, answer="n") == 1
    assert (alone / "sessions" / session).exists()
    assert at_a_terminal(alone, "end", session, answer="y") == 0
    assert not (alone / "sessions" / session).exists()
    assert session not in holdfast("ps", "--json").stdout


def at_a_terminal(home: Path, *arguments: str, answer: str) -> int:
    master, slave = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, *arguments], stdin=slave, stdout=slave, stderr=slave, env=os.environ | {"HOLDFAST_HOME": str(home)}
    ) as process:
        os.close(slave)
        asked = b""
        while b"[y/N]" not in asked:
            asked += os.read(master, 1000)
        os.write(master, answer.encode() + b"\n")
        code = process.wait(60)
    os.close(master)
    return code


# -- a server owns it ------------------------------------------------------------------------------------------------


def test_live_sessions_are_listed_with_their_memory_reset_and_ended(served: Path) -> None:
    holdfast = command_in(served)
    with Session(url=f"unix:{served / 'socket'}", memory="256M") as session:
        session_id = session.id
        session.run("x = bytearray(30 << 20)")
        (listed,) = json.loads(holdfast("ps", "--json").stdout)
        reset = json.loads(holdfast("reset", session.id[:5], "--json").stdout)
        after = json.loads(holdfast("show", session.id, "--json").stdout)
        names = session.names()
        ended = holdfast("end", session.id, "--keep")
        kept = json.loads(holdfast("ps", "--json").stdout)[0]["state"]
        deleted = holdfast("end", session.id, "--json")

    assert (listed["state"], listed["id"]) == ("ready", session_id)
    assert 30 << 20 < listed["memory_bytes"] < listed["memory_limit_bytes"] == 256 << 20
    assert (reset["session"], reset["reset"]) == (session_id, True)
    assert (after["session"]["generation"], after["losses"][0]["cause"]) == (2, "reset by the caller")
    assert names == {}
    assert (ended.exit_code, kept) == (0, "kept")
    assert json.loads(deleted.stdout) == {"session": session_id, "kept": False}
    assert json.loads(holdfast("ps", "--json").stdout) == []


def test_a_run_under_way_is_named_and_followed(served: Path) -> None:
    holdfast = command_in(served)
    with Session(url=f"unix:{served / 'socket'}") as session:
        seen: list[str] = []
        follower: list[subprocess.Popen[str]] = []

        def follow(text: str) -> None:
            """The first line comes before anybody follows, the last when somebody does."""
            seen.append(text)
            if follower or "first\n" not in "".join(seen):
                return
            listed = json.loads(holdfast("ps", "--json").stdout)[0]
            assert (listed["state"], listed["running"].startswith("run_")) == ("running", True)
            follower.append(
                subprocess.Popen(
                    [*COMMAND, "logs", session.id, "--follow"], stdout=subprocess.PIPE, text=True,
                    env=os.environ | {"HOLDFAST_HOME": str(served)},
                )
            )  # fmt: skip
            assert follower[0].stdout is not None
            assert follower[0].stdout.readline() == "first\n"
            session.interrupt()

        session.run(
            "import time\nprint('first', flush=True)\ntry:\n    time.sleep(100)\nfinally:\n    print('last')",
            on_stdout=follow, timeout=100,
        )  # fmt: skip
        rest, _ = follower[0].communicate(timeout=30)

    assert rest == "last\n"
    assert follower[0].returncode == 0


# -- somebody owns it who does not serve -----------------------------------------------------------------------------


def test_beside_an_owner_that_does_not_serve_the_journal_is_read(tmp_path: Path) -> None:
    home = new_home(tmp_path)
    holdfast = command_in(home)
    program = (
        "import sys; from holdfast import Session; s = Session(); s.run('x = 1'); print(s.id, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"HOLDFAST_HOME": str(home)},
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        session = owner.stdout.readline().strip()
        listed, shown = holdfast("ps", "--json"), holdfast("show", session)
        reset, ended = holdfast("reset", session), holdfast("end", session, "--yes", "--json")
        owner.communicate("\n", timeout=60)

    assert json.loads(listed.stdout)[0]["state"] == "unknown"
    assert f"process {owner.pid} has this home open and does not serve it" in listed.stderr
    assert "x: int" in shown.stdout
    assert (reset.exit_code, ended.exit_code) == (3, 3)
    assert json.loads(ended.stdout)["error"]["code"] == "home_busy"
    assert "do it there" in reset.stderr
