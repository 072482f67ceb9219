"""`holdfast mcp` as clients start it: how it begins, comes back, and ends. The tools themselves are in `test_tools`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from mcp.types import CallToolResult
from tests.upstream import serving

from holdfast import Session
from holdfast.home import acquire
from holdfast.store.rows import SessionRow
from holdfast.store.sqlite import Store

COMMAND = [sys.executable, "-m", "holdfast.cli.main", "mcp"]
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}
INITIALIZED = {"jsonrpc": "2.0", "method": "notifications/initialized"}
SLEEPING = (
    "import os, subprocess, time\n"
    "os.write(1, b'fd 1\\n'); subprocess.run(['echo', 'child']); print('asleep', flush=True)\n"
    "time.sleep(600)"
)
Connect = Callable[..., Any]
Run = Callable[..., Any]
Text = Callable[[CallToolResult], str]


@pytest.fixture(scope="module")
def home(homes: Callable[[], Path]) -> Path:
    """One for most of the tests: its server stays warm."""
    return homes()


def sessions_of(home: Path) -> list[SessionRow]:
    store = Store(home / "journal.sqlite3", read_only=True)
    try:
        return store.sessions()
    finally:
        store.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# -- beginnings ----------------------------------------------------------------------------------------------------


async def test_it_introduces_itself_and_a_session_that_is_kept_comes_back(
    home: Path, over_stdio: Connect, run: Run, text: Text
) -> None:
    async with over_stdio(home, "--keep") as client:
        introduced = client.instructions or ""
        first = await run(client, "tides = [1, 2]\nopen('tides.txt', 'w').write('12')")
    session, ran = first.structured_content["session"], first.structured_content["run"]
    async with over_stdio(home, "--session", session) as client:
        status = await client.call_tool("status", {})
        recovery = await client.call_tool("recover", {})
        again = await client.call_tool("recover", {})

    assert "every run is a transaction" in introduced
    assert [file["path"] for file in status.structured_content["files"]] == ["tides.txt"]
    assert status.structured_content["names"] == {}
    assert "call recover" in text(status)
    assert recovery.structured_content["names"] == {"tides": "recomputable"}
    assert recovery.structured_content["codes"].keys() == {ran}
    assert "tides = [1, 2]" in text(recovery)
    assert text(again) == text(recovery)


async def test_two_clients_of_a_home_have_a_session_each_and_come_back_to_it(
    home: Path, over_stdio: Connect, run: Run
) -> None:
    async with over_stdio(home, "--name", "ada") as one, over_stdio(home, "--name", "ada") as other:
        first = await run(one, "open('mine.txt', 'w').write('12')")
        second = await run(other, "import os; os.listdir()")
    async with over_stdio(home, "--name", "ada") as one:
        again = await run(one, "import os; os.listdir()")

    ids = [answer.structured_content["session"] for answer in (first, second, again)]
    assert ids[0] == ids[2] != ids[1]
    assert (second.structured_content["result"], again.structured_content["result"]) == ("[]", "['mine.txt']")
    assert "call recover" in again.structured_content["note"]
    assert "note" not in second.structured_content


async def test_whoever_starts_it_says_what_is_reached_and_takes_it_back_by_leaving_it_out(
    home: Path, over_stdio: Connect, run: Run, text: Text
) -> None:
    get = "import urllib.request; urllib.request.urlopen('http://{0}/data').status"
    with serving() as upstream:
        get = get.format(upstream.at)
        with started(home, "--name", "eve", "--egress", upstream.at, "--egress", "127.0.0.1:1") as process:
            say(process, INITIALIZE, INITIALIZED, call(1, get))
            first = answer_to(process, 1)["structuredContent"]
            process.kill()  # and so the session is still open when the next comes
        async with over_stdio(home, "--name", "eve", "--egress", "127.0.0.1:1") as client:
            less = await run(client, get)
            status = await client.call_tool("status", {})
        async with over_stdio(home, "--name", "eve") as client:
            nothing = await run(client, get)

    sent = f"GET http://{upstream.at}/data"
    assert (first["result"], first["egress"], upstream.seen) == ("200", [sent], ["GET /data"])
    assert less.structured_content["egress"] == [f"refused: {sent} (not allowed)"]
    assert f"egress: refused: {sent} (not allowed)" in text(less)
    assert "may reach: 127.0.0.1:1" in text(status)
    assert nothing.structured_content["egress"] == []
    assert "egress" in nothing.structured_content["error"]["hint"]
    assert {answer.structured_content["session"] for answer in (less, nothing)} == {first["session"]}


async def test_a_named_session_outlives_a_kill_and_a_name_whose_session_is_gone_gets_another(
    home: Path, over_stdio: Connect, run: Run
) -> None:
    with started(home, "--name", "bob") as process:
        say(process, INITIALIZE, INITIALIZED, call(1, "open('safe.txt', 'w').write('12')"))
        session = answer_to(process, 1)["structuredContent"]["session"]
        process.kill()
    async with over_stdio(home, "--name", "bob") as client:
        again = await run(client, "import os; os.listdir()")
    with Session(home=home, resume=session):
        pass  # which ends it for good
    async with over_stdio(home, "--name", "bob") as client:
        anew = await run(client, "import os; os.listdir()")

    assert (again.structured_content["session"], again.structured_content["result"]) == (session, "['safe.txt']")
    assert anew.structured_content["session"] != session
    assert anew.structured_content["result"] == "[]"
    assert "new and empty" in anew.structured_content["note"]


async def test_a_home_that_is_in_use_is_told_at_each_call_until_it_is_free(
    homes: Callable[[], Path], over_stdio: Connect, run: Run
) -> None:
    home = homes()
    owner = acquire(home)
    async with over_stdio(home) as client:
        refused = await run(client, "1")
        owner.release()
        answered = await run(client, "1")

    assert refused.is_error
    assert refused.structured_content["error"]["code"] == "home_busy"
    assert answered.structured_content["status"] == "committed"


async def test_a_client_goes_on_in_its_session_after_the_server_was_killed_and_is_told_what_is_lost(
    homes: Callable[[], Path], over_stdio: Connect, run: Run, text: Text
) -> None:
    home = homes()
    async with over_stdio(home) as client:
        first = await run(client, "x = 1; open('safe.txt', 'w').write('12')")
        server = owner_of(home)
        async with anyio.create_task_group() as tasks:
            answers: list[CallToolResult] = []

            async def long_run() -> None:
                answers.append(await run(client, "open('half.txt', 'w').close(); import time; time.sleep(60)"))

            tasks.start_soon(long_run)
            await anyio.to_thread.run_sync(wait_until, lambda: len(unsettled(home)) == 1)
            os.kill(server, signal.SIGKILL)
        after = await run(client, "import os; sorted(os.listdir()), 'x' in globals()")
        recovery = await client.call_tool("recover", {})

    (cut_off,) = answers
    ids = {answer.structured_content["session"] for answer in (first, after)}
    assert ids == {first.structured_content["session"]}, "it is the session that it was"
    assert cut_off.is_error
    assert cut_off.structured_content["error"]["code"] == "server_unreachable"
    assert (after.structured_content["result"], after.structured_content["status"]) == (
        "(['safe.txt'], False)",
        "committed",
    )
    assert "its variables may not be; call recover" in after.structured_content["note"]
    assert recovery.structured_content["names"]["x"] == "recomputable"
    assert owner_of(home) != server


def owner_of(home: Path) -> int:
    return int((home / "lock").read_text().split()[1])


def unsettled(home: Path) -> list[tuple[str, str]]:
    store = Store(home / "journal.sqlite3", read_only=True)
    try:
        return store.unsettled()
    finally:
        store.close()


# -- ends ----------------------------------------------------------------------------------------------------------


@contextmanager
def started(home: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [*COMMAND, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"HOLDFAST_HOME": str(home)},
    ) as process:  # fmt: skip
        yield process


def say(process: "subprocess.Popen[str]", *messages: dict[str, Any]) -> None:
    assert process.stdin is not None
    for message in messages:
        process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def call(number: int, code: str) -> dict[str, Any]:
    params = {"name": "run_code", "arguments": {"code": code}, "_meta": {"progressToken": number}}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


def heard(process: "subprocess.Popen[str]", wanted: Callable[[Any], bool]) -> list[Any]:
    """What it says, up to what is waited for. Every line is the protocol's."""
    assert process.stdout is not None
    lines = [json.loads(process.stdout.readline())]
    while not wanted(lines[-1]):
        lines.append(json.loads(process.stdout.readline()))
    assert {line["jsonrpc"] for line in lines} == {"2.0"}
    return lines


def answer_to(process: "subprocess.Popen[str]", number: int) -> Any:
    return heard(process, lambda line: line.get("id") == number)[-1]["result"]


@pytest.mark.parametrize(
    ("number", "code"), [(None, 0), (signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_however_it_ends_its_session_does_and_stdout_was_the_protocols(
    home: Path, number: signal.Signals | None, code: int
) -> None:
    before = len(sessions_of(home)) if (home / "journal.sqlite3").exists() else 0
    with started(home) as process:
        say(process, INITIALIZE, INITIALIZED, call(1, SLEEPING))
        heard(process, lambda line: "asleep" in json.dumps(line))
        wait_until(lambda: len(sessions_of(home)) == before + 1)
        began = time.monotonic()
        if number is None:
            assert process.stdin is not None
            process.stdin.close()
        else:
            process.send_signal(number)
        process.wait(timeout=60)
        took_s = time.monotonic() - began
        rest = process.stdout.readlines() if process.stdout else []

    assert process.returncode == code
    assert all(json.loads(line)["jsonrpc"] == "2.0" for line in rest)
    wait_until(lambda: len(sessions_of(home)) == before)
    assert took_s < 20


def test_one_that_owns_its_home_leaves_no_process(homes: Callable[[], Path]) -> None:
    home = homes()
    with started(home, "--memory-cap", "watchdog") as process:
        say(process, INITIALIZE, INITIALIZED, call(1, SLEEPING))
        heard(process, lambda line: "asleep" in json.dumps(line))
        assert len(processes_of(home)) > 1
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)

    assert process.returncode == 0
    assert processes_of(home) == []
    assert list((home / "sessions").iterdir()) == []


def processes_of(home: Path) -> list[int]:
    """The server and its keeper, which carry the home's name in their environment: all else ends with the keeper."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = entry.read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if str(home).encode() in environment:
            found.append(int(entry.parent.name))
    return found


def test_a_client_that_leaves_at_once_leaves_nothing(home: Path) -> None:
    with started(home) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.close()
        process.wait(timeout=60)
        assert process.stdout.read() == ""
        assert "Traceback" not in process.stderr.read()

    assert process.returncode == 0
