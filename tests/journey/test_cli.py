"""The command as people use it: real processes, real sandboxes, exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.lean import lean_home

COMMAND = [sys.executable, "-m", "holdfast.cli.main"]
Holdfast = Callable[..., "subprocess.CompletedProcess[str]"]
DEMO_S = 180
"""Three minutes at most: so it is promised to those who watch it."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of its own: the test run itself may own the other one."""
    return lean_home(tmp_path_factory.mktemp("cli") / "home")


@pytest.fixture
def holdfast(home: Path) -> Holdfast:
    def run(*arguments: str, **more: Any) -> "subprocess.CompletedProcess[str]":
        environment = os.environ | {"HOLDFAST_HOME": str(home), "COLUMNS": "200"}
        return subprocess.run(
            [*COMMAND, *arguments], capture_output=True, text=True, env=environment, timeout=DEMO_S, check=False, **more
        )

    return run


def test_output_streams_and_the_last_expression_is_printed(holdfast: Holdfast) -> None:
    done = holdfast("exec", "import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")

    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n42\n", "err\n")


@pytest.mark.parametrize("arguments", [["exec"], ["exec", "-"]])
def test_code_comes_from_stdin(holdfast: Holdfast, arguments: list[str]) -> None:
    done = holdfast(*arguments, input="x = 20\nx + 1")

    assert (done.returncode, done.stdout) == (0, "21\n")


def test_code_comes_from_a_file_and_images_go_to_a_directory(
    holdfast: Holdfast, guest_environment: Path, tmp_path: Path
) -> None:
    (tmp_path / "plot.py").write_text("import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()")

    where = ["--file", str(tmp_path / "plot.py"), "--save", str(tmp_path / "plots")]
    done = holdfast("exec", "--env", str(guest_environment), *where)

    assert done.returncode == 0
    assert (tmp_path / "plots/display-1.png").read_bytes().startswith(b"\x89PNG")
    assert "display-1.png" in done.stderr


def test_json_is_the_whole_run(holdfast: Holdfast) -> None:
    done = holdfast("exec", "--json", "print('hello')\n1 / 0")
    run = json.loads(done.stdout)

    assert done.returncode == 1
    assert (run["status"], run["stdout"], run["error"]["name"]) == ("rolled_back", "hello\n", "ZeroDivisionError")
    assert (run["memory"], run["generation"], run["memory_cap"]) == ("restored", 1, "cgroup")


def test_code_that_fails_is_1_and_shows_its_traceback(holdfast: Holdfast) -> None:
    done = holdfast("exec", "def f():\n    return {}['key']\nf()")

    assert (done.returncode, done.stdout) == (1, "")
    assert "KeyError: 'key'" in done.stderr
    assert "holdfast/" not in done.stderr


def test_a_deadline_is_124_and_says_what_to_do(holdfast: Holdfast) -> None:
    done = holdfast("exec", "--timeout", "1s", "while True: pass")

    assert done.returncode == 124
    assert "Timeout: the run was not done after 1 s" in done.stderr
    assert "hint: " in done.stderr


def test_out_of_memory_is_137_and_names_the_cap(holdfast: Holdfast) -> None:
    done = holdfast("exec", "--memory", "128M", "x = []\nwhile True: x.append(bytearray(1 << 23))")

    assert done.returncode == 137
    assert "128 MiB" in done.stderr


def test_what_the_cell_left_running_is_named(holdfast: Holdfast) -> None:
    done = holdfast("exec", "import subprocess; subprocess.Popen(['sleep', '1000']);")

    assert done.returncode == 0
    assert "killed: process sleep 1000" in done.stderr


def test_our_own_failure_is_3_with_a_hint_and_no_traceback(holdfast: Holdfast) -> None:
    done = holdfast("exec", "--json", "--env", "/nonexistent", "1")

    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["code"] == "environment_unusable"
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_cell_in_order(home: Path, number: int, code: int) -> None:
    cell = "import time\nprint('ready', flush=True)\ntime.sleep(60)"
    environment = os.environ | {"HOLDFAST_HOME": str(home)}
    with subprocess.Popen(
        [*COMMAND, "exec", cell], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, told = process.communicate(timeout=45)  # the cell would sleep for longer

    assert process.returncode == code
    assert "interrupted" in told
    assert list((home / "sessions").iterdir()) == []


def test_a_reader_that_has_seen_enough_ends_the_cell(home: Path) -> None:
    environment = os.environ | {"HOLDFAST_HOME": str(home)}
    with subprocess.Popen(
        [*COMMAND, "exec", "while True: print('tide')"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"tide\n"
        process.stdout.close()
        assert process.wait(timeout=30) == 141
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


def test_the_doctor_finds_a_strict_sandbox_possible(holdfast: Holdfast) -> None:
    done = holdfast("doctor")

    assert done.returncode == 0, done.stdout
    assert "A strict sandbox is possible" in done.stdout
    assert "memory cap" in done.stdout


def test_the_doctor_speaks_json(holdfast: Holdfast) -> None:
    told = json.loads(holdfast("doctor", "--json").stdout)

    assert told["strict_sandbox"] is True
    names = {finding["name"] for finding in told["findings"]}
    assert {"user namespace", "overlayfs", "seccomp", "uv", "guests' environment", "AppArmor"} <= names


def test_the_doctor_and_the_refusal_tell_the_same_where_namespaces_are_used_up(home: Path) -> None:
    program = """if True:
        import os, sys
        from pathlib import Path
        from holdfast.sandbox import linux
        uid, gid = os.geteuid(), os.getegid()
        linux.unshare(linux.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"1000 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"1000 {gid} 1")
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
        from holdfast.cli.main import main
        sys.argv[0] = "holdfast"
        main()
        """
    environment = os.environ | {"HOLDFAST_HOME": str(home), "COLUMNS": "200"}
    doctor, refusal = (
        subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True, text=True, env=environment, timeout=60, check=False,
        )
        for arguments in (["doctor"], ["exec", "--memory-cap", "watchdog", "1"])
    )  # fmt: skip

    assert doctor.returncode == 1
    assert "No strict sandbox" in doctor.stdout
    assert "sysctl -w user.max_user_namespaces=" in doctor.stdout
    assert refusal.returncode == 3
    assert "sandbox_unavailable" in refusal.stderr
    assert "holdfast doctor" in refusal.stderr


@pytest.mark.timeout(DEMO_S + 60)
def test_the_demo_keeps_every_promise_and_leaves_nothing_behind(
    holdfast: Holdfast, guest_environment: Path, home: Path, tmp_path: Path
) -> None:
    began = time.monotonic()
    done = holdfast("demo", "--env", str(guest_environment), "--save", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "every promise was kept" in done.stdout
    assert "✗" not in done.stdout
    assert done.stdout.count("all of it is back") == 4
    back = r"and every variable and file is back +✓ +rolled_back; memory restored in \d+ ms, generation 1"
    assert len(re.findall(back, done.stdout)) == 3
    assert "Cause: KernelKilled: the kernel died: signal 11 (SIGSEGV)" in done.stdout
    assert "asked twice: 1 row, one receipt" in done.stdout
    assert "1000 rows, 1000 different" in done.stdout
    assert "Traceback" not in done.stderr
    assert (tmp_path / "tides.png").stat().st_size > 10_000
    assert list(home.joinpath("sessions").iterdir()) == list(home.glob("demo-*")) == []
    assert time.monotonic() - began < DEMO_S


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "missing.py", "--json"], "missing.py"),
        (["exec", "--memory", "lots", "--json", "1"], "lots"),
        (["show", "--json"], "SESSION"),
        (["ps", "--json", "--nonsense"], "--nonsense"),
    ],
)
def test_wrong_usage_is_json_too_where_it_was_asked_for(holdfast: Holdfast, arguments: list[str], told: str) -> None:
    done = holdfast(*arguments)

    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (2, "wrong_usage")
    assert told in error["message"]
    assert f"`holdfast {arguments[0]} --help`" in error["hint"]
    assert "Traceback" not in done.stderr


def test_what_the_system_refuses_is_told_with_what_to_do_next(holdfast: Holdfast, tmp_path: Path) -> None:
    job, gone = tmp_path / "job.py", tmp_path / "gone"
    job.write_text("1")
    gone.mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, sys.argv[1:])"
    nowhere = subprocess.run(
        [sys.executable, "-c", code, *COMMAND, "run", job], cwd=gone, capture_output=True, text=True, check=False
    )
    no_home = holdfast("run", "job.py", "--home", "/proc/nowhere", cwd=tmp_path)

    for done in (nowhere, no_home):
        assert (done.returncode, "Traceback" in done.stderr) == (3, False), done.stderr
        assert "[invalid_setting]\nhint: " in done.stderr


@pytest.mark.timeout(DEMO_S + 60)
def test_the_demo_as_json_is_the_table_of_promises_and_nothing_else(
    holdfast: Holdfast, guest_environment: Path
) -> None:
    done = holdfast("demo", "--env", str(guest_environment), "--json")

    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    assert (told["kept"], {promise["kept"] for promise in told["promises"]}) == (True, {True})
    assert len(told["promises"]) > 10
    assert told["seconds"] < DEMO_S
    assert "Traceback" not in done.stderr


def test_mcp_as_json_says_how_to_connect_and_what_it_says_works(holdfast: Holdfast, home: Path) -> None:
    options = ["--name", "the test's", "--keep", "--memory", "256M"]
    told = json.loads(holdfast("mcp", *options, "--json").stdout)
    refused = holdfast("mcp", "--name", "\n", "--json")

    assert told["transport"] == "stdio"
    assert told["args"][-8:] == ["mcp", *options, "--home", str(home)]
    assert told["config"] == {"mcpServers": {"holdfast": {"command": told["command"], "args": told["args"]}}}
    assert (told["home"], told["name"], told["session"]) == (str(home), "the test's", None)
    assert "run_code" in told["tools"]
    assert (refused.returncode, json.loads(refused.stdout)["error"]["code"]) == (3, "invalid_setting")

    client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    calls = [
        {"id": 1, "method": "initialize", "params": client},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "status", "arguments": {}}},
    ]
    with subprocess.Popen(
        [told["command"], *told["args"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for call in calls:
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **call}) + "\n")
        process.stdin.flush()
        introduced, status = (json.loads(process.stdout.readline()) for _ in range(2))
    assert introduced["result"]["serverInfo"]["name"] == "holdfast"
    again = json.loads(holdfast("mcp", *options, "--json").stdout)
    assert again["session"] == status["result"]["structuredContent"]["session"], (
        "a client of that name comes back to it"
    )
