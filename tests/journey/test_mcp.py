"""`holdfast mcp` as clients use it: the official client, a real server process, stdio."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult, ImageContent, TextContent

from holdfast.home import acquire

ARGUMENTS = ["-m", "holdfast.cli.main", "mcp"]
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}
INITIALIZED = {"jsonrpc": "2.0", "method": "notifications/initialized"}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Homes of their own with the shared environments."""

    def make() -> Path:
        home = tmp_path_factory.mktemp("mcp") / "home"
        home.mkdir()
        (home / "envs").symlink_to(Path(os.environ["HOLDFAST_HOME"]) / "envs")
        return home

    return make


def connected(home: Path, *arguments: str) -> Client:
    return Client(
        StdioServerParameters(
            command=sys.executable, args=[*ARGUMENTS, *arguments], env={"HOLDFAST_HOME": str(home)}
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
async def client(homes: Callable[[], Path], anyio_backend: str) -> AsyncIterator[Client]:
    """One server for the tests that need nothing special: its session goes on from test to test."""
    async with connected(homes(), "--memory", "512M") as client:
        yield client


def text_of(result: CallToolResult) -> str:
    first = result.content[0]
    assert isinstance(first, TextContent)
    return first.text


async def run(client: Client, code: str, **arguments: Any) -> CallToolResult:
    return await client.call_tool("run_code", {"code": code, **arguments})


def processes_of(home: Path) -> list[int]:
    """The server and its keeper, which carry the home's name in their environment: all else ends with the keeper."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:  # it has ended meanwhile
                continue
            if str(home).encode() in environment:
                found.append(int(entry.name))
    return found


async def test_the_tools_explain_themselves(client: Client) -> None:
    tools = {tool.name: tool for tool in (await client.list_tools()).tools}

    assert tools.keys() == {"run_code", "status", "recover"}
    assert tools["run_code"].input_schema["required"] == ["code"]
    assert tools["run_code"].input_schema["properties"].keys() == {"code", "timeout", "key", "expect", "outputs"}
    assert tools["status"].annotations is not None
    assert tools["status"].annotations.read_only_hint
    assert "transaction" in (client.instructions or "")


async def test_variables_stay_and_the_last_expression_is_shown(client: Client) -> None:
    await run(client, "x = 21")
    answer = await run(client, "print('twice')\nx * 2")

    assert not answer.is_error
    assert text_of(answer).startswith("twice\n42\n[committed · run_")
    facts = answer.structured_content
    assert (facts["status"], facts["result"], facts["stdout"]) == ("committed", "42", "twice\n")
    assert f"CKPT: {facts['ckpt']}" in text_of(answer)
    assert len(facts["receipt"]["sha256"]) == 64


async def test_a_figure_comes_as_an_image(client: Client) -> None:
    answer = await run(client, "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()")
    images = [content for content in answer.content if isinstance(content, ImageContent)]

    assert [image.mime_type for image in images] == ["image/png"]
    assert base64.b64decode(images[0].data).startswith(b"\x89PNG")
    assert "<Figure" not in text_of(answer)


async def test_code_that_raises_is_an_answer_and_what_it_did_stays(client: Client) -> None:
    answer = await run(client, "before = 1\nopen('half.csv', 'w').write('a')\n1 / 0")
    after = await run(client, "before")

    assert not answer.is_error
    assert answer.structured_content["status"] == "kept"
    assert answer.structured_content["error"]["name"] == "ZeroDivisionError"
    assert "ZeroDivisionError: division by zero" in text_of(answer)
    assert "stays" in text_of(answer)
    assert after.structured_content["result"] == "1"


async def test_a_crash_is_rolled_back_and_says_what_to_do(client: Client) -> None:
    await run(client, "safe = 7")
    answer = await run(client, "open('crash.csv', 'w').write('a')\nimport os; os._exit(9)")
    after = await run(client, "import os; safe, os.path.exists('crash.csv')")

    assert not answer.is_error
    assert answer.structured_content["status"] == "rolled_back"
    assert "exit code 9" in text_of(answer)
    assert "Next: " in text_of(answer)
    assert answer.structured_content["recovery"]["steps"]
    assert after.structured_content["result"] == "(7, False)"


async def test_a_deadline_holds(client: Client) -> None:
    answer = await run(client, "while True: pass", timeout=1)

    assert answer.structured_content["error"]["code"] == "timeout"
    assert answer.structured_content["status"] == "rolled_back"


async def test_an_output_that_is_missing_rolls_back(client: Client) -> None:
    missing = await run(client, "pass", outputs=["never.csv"])
    made = await run(client, "open('t.csv', 'w').write('a,b\\n1,2\\n')", outputs={"t.csv": {"columns": ["a", "b"]}})

    assert missing.structured_content["status"] == "rolled_back"
    assert "never.csv" in text_of(missing)
    assert made.structured_content["outputs"][0]["path"] == "t.csv"
    assert "files: added t.csv (8 bytes, sha256 " in text_of(made)


async def test_a_key_runs_once(client: Client) -> None:
    await run(client, "count = 0")
    first = await run(client, "count += 1\ncount", key="once")
    again = await run(client, "count += 1\ncount", key="once")
    count = await run(client, "count")

    assert (first.structured_content["replayed"], again.structured_content["replayed"]) == (False, True)
    assert again.structured_content["receipt"] == first.structured_content["receipt"]
    assert count.structured_content["result"] == "1"


async def test_our_refusals_are_errors_of_the_tool_with_code_and_hint(client: Client) -> None:
    ckpt = (await run(client, "moved = 1")).structured_content["ckpt"]
    await run(client, "moved = 2; open('moved.csv', 'w').write('x')")
    moved = await run(client, "moved", expect=ckpt)
    nonsense = await client.call_tool("run_code", {"code": "1", "timeout": "soon"})
    unknown = await client.call_tool("frobnicate", {})

    assert (moved.is_error, nonsense.is_error, unknown.is_error) == (True, True, True)
    error = moved.structured_content["error"]
    assert (error["code"], error["differs"]["files"]) == ("state_moved", ["moved.csv"])
    assert "hint: " in text_of(moved)
    assert "$.timeout" in text_of(nonsense)
    assert "run_code, status, recover" in text_of(unknown)


async def test_output_that_is_too_long_leaves_its_middle_out(client: Client) -> None:
    answer = await run(client, "print('x' * 1_000_000); print('the end')")

    assert len(text_of(answer)) < 25_000
    assert "characters left out" in text_of(answer)
    assert "the end\n[committed" in text_of(answer)


async def test_the_status_says_where_the_session_stands(client: Client) -> None:
    done = await run(client, "level = 3.5\nopen('level.txt', 'w').write('3.5')")
    status = await client.call_tool("status", {})

    facts = status.structured_content
    assert facts["ckpt"] == done.structured_content["ckpt"]
    assert facts["names"]["level"]["type"] == "float"
    assert "level.txt" in [file["path"] for file in facts["files"]]
    assert facts["runs"][-1]["run"] == done.structured_content["run"]
    assert f"CKPT: {facts['ckpt']}" in text_of(status)
    assert "level (float, " in text_of(status)


async def test_output_is_passed_on_while_the_code_runs(client: Client) -> None:
    seen: list[tuple[float, str]] = []
    came = anyio.Event()

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, message or ""))
        came.set()

    code = "import time\nprint('rising', flush=True)\nwhile not os.path.exists('/tmp/ebb'): time.sleep(0.05)"
    async with anyio.create_task_group() as tasks:

        async def call() -> None:
            await client.call_tool("run_code", {"code": code, "timeout": 3}, progress_callback=hear)

        tasks.start_soon(call)
        with anyio.fail_after(30):
            await came.wait()

    assert "".join(message for _, message in seen) == "rising\n"
    assert seen[-1][0] == 7.0, "characters so far"


async def test_a_call_that_is_given_up_is_interrupted_and_the_status_has_it(client: Client) -> None:
    with anyio.move_on_after(2):
        await run(client, "steady = 2\nimport time; time.sleep(60)")
    began = time.monotonic()
    status = await client.call_tool("status", {})

    assert time.monotonic() - began < 30
    assert status.structured_content["runs"][-1]["status"] == "kept", "as an interrupt in a notebook"
    assert status.structured_content["names"]["steady"]["type"] == "int"


# -- beginnings and ends -------------------------------------------------------------------------------------------


async def test_a_kept_session_comes_back_with_its_files_and_the_way_to_its_names(homes: Callable[[], Path]) -> None:
    home = homes()
    async with connected(home, "--keep") as client:
        first = await run(client, "tides = [1, 2]\nopen('tides.txt', 'w').write('12')")
    session, ran = first.structured_content["session"], first.structured_content["run"]
    async with connected(home, "--session", session) as client:
        status = await client.call_tool("status", {})
        recovery = await client.call_tool("recover", {})
        again = await client.call_tool("recover", {})

    assert [file["path"] for file in status.structured_content["files"]] == ["tides.txt"]
    assert status.structured_content["names"] == {}
    assert recovery.structured_content["names"] == {"tides": "recomputable"}
    assert recovery.structured_content["codes"].keys() == {ran}
    assert "tides = [1, 2]" in text_of(recovery)
    assert text_of(again) == text_of(recovery)


async def test_a_home_that_is_in_use_is_told_at_each_call_until_it_is_free(homes: Callable[[], Path]) -> None:
    home = homes()
    owner = acquire(home)
    async with connected(home) as client:
        refused = await run(client, "1")
        owner.release()
        answered = await run(client, "1")

    assert refused.is_error
    assert refused.structured_content["error"]["code"] == "home_busy"
    assert answered.structured_content["status"] == "committed"


def started(home: Path) -> "AbstractContextManager[subprocess.Popen[str]]":
    return subprocess.Popen(
        [sys.executable, *ARGUMENTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"HOLDFAST_HOME": str(home)},
    )  # fmt: skip


def say(process: "subprocess.Popen[str]", *messages: dict[str, Any]) -> None:
    assert process.stdin is not None
    for message in messages:
        process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def call(number: int, code: str) -> dict[str, Any]:
    params = {"name": "run_code", "arguments": {"code": code}, "_meta": {"progressToken": number}}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


@pytest.mark.parametrize(
    ("number", "code"), [(None, 0), (signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_however_it_ends_nothing_is_left(homes: Callable[[], Path], number: signal.Signals | None, code: int) -> None:
    home = homes()
    sleeping = "import time\nprint('asleep', flush=True)\ntime.sleep(60)"
    with started(home) as process:
        say(process, INITIALIZE, INITIALIZED, call(1, sleeping))
        assert process.stdout is not None
        assert process.stdin is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert "asleep" in lines[-1]
        assert len(processes_of(home)) > 1
        began = time.monotonic()
        if number is None:
            process.stdin.close()
        else:
            process.send_signal(number)
        process.wait(timeout=30)
        took_s = time.monotonic() - began
        lines += process.stdout.readlines()

    assert process.returncode == code
    assert processes_of(home) == []
    assert list((home / "sessions").iterdir()) == []
    assert all(json.loads(line)["jsonrpc"] == "2.0" for line in lines)
    assert took_s < 10


def test_a_client_that_leaves_at_once_leaves_nothing(homes: Callable[[], Path]) -> None:
    home = homes()
    with started(home) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.close()
        process.wait(timeout=60)
        assert process.stdout.read() == ""
        assert "Traceback" not in process.stderr.read()

    assert process.returncode == 0
    assert processes_of(home) == []


def test_stdout_carries_nothing_but_the_protocol(homes: Callable[[], Path]) -> None:
    shouting = "import os, subprocess\nos.write(1, b'fd 1\\n'); subprocess.run(['echo', 'child']); print('print')"
    with started(homes()) as process:
        say(process, INITIALIZE, INITIALIZED, call(1, shouting))
        assert process.stdout is not None
        assert process.stdin is not None
        lines = [process.stdout.readline()]
        while json.loads(lines[-1]).get("id") != 1:
            lines.append(process.stdout.readline())
        process.stdin.close()
        process.wait(timeout=30)
        lines += process.stdout.readlines()

    told = json.loads(next(line for line in lines if json.loads(line).get("id") == 1))["result"]
    assert {json.loads(line)["jsonrpc"] for line in lines} == {"2.0"}
    assert "print" in told["structuredContent"]["stdout"]
