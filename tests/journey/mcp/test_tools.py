"""The tools as models meet them: the official client, real servers; one story over stdio and over streamable HTTP."""

import base64
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.types import CallToolResult, ImageContent, TextContent

Run = Callable[..., Any]
Text = Callable[[CallToolResult], str]

TOOLS = {
    "plan", "run_code", "rehearse", "status", "recover", "restore", "list_files", "read_file", "write_file", "reset",
}  # fmt: skip


@pytest.fixture(scope="module", params=["stdio", "http", "http without sessions"])
async def client(
    request: pytest.FixtureRequest,
    homes: Callable[..., Path],
    serving: Callable[..., Any],
    over_stdio: Callable[..., Any],
    over_http: Callable[..., Any],
    anyio_backend: str,
) -> AsyncIterator[Client]:
    """One server for the tests that need nothing special: its session goes on from test to test."""
    if request.param == "stdio":
        async with over_stdio(homes(whole=True), "--memory", "512M") as client:
            yield client
    else:
        mode = "legacy" if request.param == "http" else "2026-07-28"
        with serving(homes(whole=True)) as served:
            async with over_http(f"{served.url}?memory=512M", served.token, mode=mode) as client:
                yield client


async def test_the_tools_explain_themselves(client: Client) -> None:
    tools = {tool.name: tool for tool in (await client.list_tools()).tools}

    assert tools.keys() == TOOLS
    assert tools["run_code"].input_schema["required"] == ["code"]
    assert tools["run_code"].input_schema["properties"].keys() == {"code", "timeout", "key", "expect", "outputs"}
    hints = {name: tool.annotations for name, tool in tools.items()}
    assert {name for name, hint in hints.items() if hint and hint.read_only_hint} == {
        "plan", "rehearse", "status", "recover", "list_files", "read_file"
    }  # fmt: skip
    assert {name for name, hint in hints.items() if hint and not hint.idempotent_hint} == {"run_code"}
    assert all(len(tool.description or "") > 50 for tool in tools.values())


async def test_variables_stay_and_the_footer_comes_last(client: Client, run: Run) -> None:
    await run(client, "x = 21")
    answer = await run(client, "print('twice')\nx * 2")
    said, footer = answer.content

    assert isinstance(said, TextContent)
    assert isinstance(footer, TextContent)
    assert said.text == "twice\n42"
    assert footer.text.startswith("[committed · run_")
    facts = answer.structured_content
    assert not answer.is_error
    assert (facts["status"], facts["result"], facts["stdout"]) == ("committed", "42", "twice\n")
    assert f"CKPT: {facts['ckpt']}" in footer.text
    assert "next: " in footer.text
    assert len(facts["receipt"]["sha256"]) == 64


async def test_an_exit_is_an_error_and_what_the_code_did_stays(client: Client, run: Run, text: Text) -> None:
    answer = await run(client, "gone = 5\nimport sys; sys.exit()")
    facts = answer.structured_content

    assert (facts["status"], facts["error"]["name"], facts["exit_code"]) == ("kept", "SystemExit", 0)
    assert "SystemExit" in text(answer)
    assert (await run(client, "gone")).structured_content["result"] == "5"


async def test_a_figure_comes_as_an_image_before_the_footer(client: Client, run: Run, text: Text) -> None:
    answer = await run(client, "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.savefig('p.png'); plt.show()")
    seen = await client.call_tool("read_file", {"path": "p.png"})
    image, footer = answer.content[-2:]

    assert isinstance(image, ImageContent)
    assert isinstance(footer, TextContent)
    assert image.mime_type == "image/png"
    assert base64.b64decode(image.data).startswith(b"\x89PNG")
    assert "<Figure" not in text(answer)
    assert isinstance(seen.content[0], ImageContent)
    assert seen.structured_content["sha256"] == answer.structured_content["outputs"][0]["sha256"]


async def test_code_that_raises_is_an_answer_and_what_it_did_stays(client: Client, run: Run, text: Text) -> None:
    answer = await run(client, "before = 1\nopen('half.csv', 'w').write('a')\n1 / 0")
    after = await run(client, "before")

    assert not answer.is_error
    assert answer.structured_content["status"] == "kept"
    assert answer.structured_content["error"]["name"] == "ZeroDivisionError"
    assert "ZeroDivisionError: division by zero" in text(answer)
    assert "stays" in text(answer)
    assert after.structured_content["result"] == "1"


async def test_a_crash_is_rolled_back_and_says_what_to_do(client: Client, run: Run, text: Text) -> None:
    await run(client, "safe = 7")
    answer = await run(client, "open('crash.csv', 'w').write('a')\nimport os; os._exit(9)")
    after = await run(client, "import os; safe, os.path.exists('crash.csv')")

    assert not answer.is_error
    assert answer.structured_content["status"] == "rolled_back"
    assert "exit code 9" in text(answer)
    assert "Next: " in text(answer)
    assert answer.structured_content["recovery"]["steps"]
    assert after.structured_content["result"] == "(7, False)"


async def test_a_deadline_holds(client: Client, run: Run) -> None:
    answer = await run(client, "while True: pass", timeout=0.5)

    assert answer.structured_content["error"]["code"] == "timeout"
    assert answer.structured_content["status"] == "rolled_back"


async def test_an_output_that_is_missing_rolls_back_and_one_that_is_there_has_its_sha256(
    client: Client, run: Run, text: Text
) -> None:
    missing = await run(client, "pass", outputs=["never.csv"])
    made = await run(client, "open('t.csv', 'w').write('a,b\\n1,2\\n')", outputs={"t.csv": {"columns": ["a", "b"]}})

    assert missing.structured_content["status"] == "rolled_back"
    assert "never.csv" in text(missing)
    output = made.structured_content["outputs"][0]
    assert output["path"] == "t.csv"
    assert f"files: added t.csv (8 bytes, sha256 {output['sha256']})" in text(made)


async def test_a_key_runs_once(client: Client, run: Run, text: Text) -> None:
    await run(client, "count = 0")
    first = await run(client, "count += 1\ncount", key="once")
    again = await run(client, "count += 1\ncount", key="once")
    count = await run(client, "count")

    assert (first.structured_content["replayed"], again.structured_content["replayed"]) == (False, True)
    assert again.structured_content["receipt"] == first.structured_content["receipt"]
    assert "nothing was executed" in text(again)
    assert count.structured_content["result"] == "1"


async def test_a_plan_runs_nothing_and_a_rehearsal_leaves_nothing(client: Client, run: Run, text: Text) -> None:
    code = "open('bold.txt', 'w').write('x')\nbold = 1"
    planned = await client.call_tool("plan", {"code": code + "\nprint(never_bound)"})
    rehearsed = await client.call_tool("rehearse", {"code": code})
    after = await run(client, "import os; 'bold' in globals(), os.path.exists('bold.txt')")

    assert "bold.txt" in text(planned)
    assert "never_bound" in text(planned)
    assert planned.structured_content["card"]["forecast_outputs"] == ["bold.txt"]
    assert rehearsed.structured_content["status"] == "rehearsed"
    assert "would change: added bold.txt" in text(rehearsed)
    assert "run_code with the same code" in text(rehearsed)
    assert after.structured_content["result"] == "(False, False)"


async def test_our_refusals_are_errors_with_code_hint_and_the_way_back(client: Client, run: Run, text: Text) -> None:
    ckpt = (await run(client, "moved = 1")).structured_content["ckpt"]
    await run(client, "moved = 2; open('moved.csv', 'w').write('x')")
    moved = await run(client, "moved", expect=ckpt)
    nonsense = await client.call_tool("run_code", {"code": "1", "timeout": "soon"})
    unknown = await client.call_tool("frobnicate", {})

    assert (moved.is_error, nonsense.is_error, unknown.is_error) == (True, True, True)
    error = moved.structured_content["error"]
    assert (error["code"], error["differs"]["files"]) == ("state_moved", ["moved.csv"])
    assert "hint: " in text(moved)
    assert "State now: CKPT-" in text(moved)
    assert "$.timeout" in text(nonsense)
    assert "run_code, rehearse" in text(unknown)


async def test_output_that_is_too_long_leaves_its_middle_out(client: Client, run: Run, text: Text) -> None:
    answer = await run(client, "print('x' * 1_000_000); print('the end')")

    assert len(text(answer)) < 25_000
    assert "characters left out" in text(answer)
    assert "the end\n[committed" in text(answer)


async def test_the_status_says_where_the_session_stands(client: Client, run: Run, text: Text) -> None:
    done = await run(client, "level = 3.5\nopen('level.txt', 'w').write('3.5')")
    status = await client.call_tool("status", {})

    facts = status.structured_content
    assert facts["ckpt"] == done.structured_content["ckpt"]
    assert facts["names"]["level"]["type"] == "float"
    assert "level.txt" in [file["path"] for file in facts["files"]]
    assert facts["runs"][-1]["run"] == done.structured_content["run"]
    assert f"CKPT: {facts['ckpt']}" in text(status)
    assert "level (float, " in text(status)
    assert "of 512 MiB" in text(status)


async def test_files_are_written_listed_read_and_brought_back(client: Client, text: Text) -> None:
    first = await client.call_tool("write_file", {"path": "notes/a.txt", "content": "one\ntwo\nthree\n"})
    await client.call_tool(
        "write_file", {"path": "notes/a.txt", "content": base64.b64encode(b"changed").decode(), "encoding": "base64"}
    )
    changed = await client.call_tool("read_file", {"path": "notes/a.txt"})
    restored = await client.call_tool("restore", {"ckpt": first.structured_content["ckpt"]})
    listed = await client.call_tool("list_files", {"pattern": "notes/*"})
    part = await client.call_tool("read_file", {"path": "/mnt/data/notes/a.txt", "start_line": 2, "end_line": 2})

    assert first.structured_content["status"] == "committed"
    assert text(changed).startswith("changed\n[notes/a.txt")
    assert restored.structured_content["status"] == "committed"
    assert [file["path"] for file in listed.structured_content["files"]] == ["notes/a.txt"]
    assert text(part).startswith("two\n")
    assert "lines 2 to 2 of 3" in text(part)
    assert "go on with start_line=3" in text(part)


async def test_what_cannot_be_shown_is_refused_with_advice(client: Client, run: Run, text: Text) -> None:
    await run(client, "import pandas as pd\npd.DataFrame({'a': [1]}).to_parquet('t.parquet')")
    binary = await client.call_tool("read_file", {"path": "t.parquet"})
    missing = await client.call_tool("read_file", {"path": "../../etc/passwd"})
    absent = await client.call_tool("read_file", {"path": "never.txt"})

    assert (binary.is_error, missing.is_error, absent.is_error) == (True, True, True)
    assert "pd.read_parquet('t.parquet')" in text(binary)
    assert missing.structured_content["error"]["code"] == "invalid_setting"
    assert absent.structured_content["error"]["code"] == "file_unknown"


async def test_while_code_runs_its_output_comes_and_the_status_does_not_wait(client: Client, text: Text) -> None:
    seen: list[tuple[float, str]] = []
    came = anyio.Event()

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, message or ""))
        came.set()

    code = (
        "import os, time\nprint('rising', flush=True)\nbegan = time.monotonic()\n"
        "while time.monotonic() < began + 60: time.sleep(0.01)"
    )
    async with anyio.create_task_group() as tasks:

        async def call() -> None:
            await client.call_tool("run_code", {"code": code, "timeout": 60}, progress_callback=hear)

        tasks.start_soon(call)
        with anyio.fail_after(30):
            await came.wait()
            status = await client.call_tool("status", {})
        tasks.cancel_scope.cancel()

    assert "rising" in "".join(message for _, message in seen)
    assert "under way: run_" in text(status)
    assert "ago: import os, time" in text(status)
    assert status.structured_content["names"] is None


async def test_a_call_that_is_given_up_is_interrupted_and_settled(client: Client, run: Run) -> None:
    started = anyio.Event()

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        started.set()

    async with anyio.create_task_group() as tasks:

        async def call() -> None:
            code = "steady = 2\nprint('asleep', flush=True)\nimport time; time.sleep(600)"
            await client.call_tool("run_code", {"code": code, "timeout": 600}, progress_callback=hear)

        tasks.start_soon(call)
        with anyio.fail_after(30):
            await started.wait()
        tasks.cancel_scope.cancel()
    began = time.monotonic()
    await run(client, "after = 1")
    status = await client.call_tool("status", {})

    assert time.monotonic() - began < 30
    assert status.structured_content["runs"][-2]["status"] == "kept", "as an interrupt in a notebook"
    assert status.structured_content["names"]["steady"]["type"] == "int"


async def test_after_a_reset_the_recovery_has_the_code_that_computes_it_again(
    client: Client, run: Run, text: Text
) -> None:
    ran = await run(client, "tides = [1, 2]")
    reset = await client.call_tool("reset", {})
    recovery = await client.call_tool("recover", {})
    again = await run(client, recovery.structured_content["codes"][ran.structured_content["run"]] + "\ntides")

    assert "reset by the caller" in text(reset)
    assert recovery.structured_content["names"]["tides"] == "recomputable"
    assert "tides = [1, 2]" in text(recovery)
    assert again.structured_content["result"] == "[1, 2]"
