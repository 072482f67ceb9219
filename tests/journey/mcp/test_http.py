"""MCP over HTTP: clients that come back, several at once, and those that are gone. The tools are in `test_tools`."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp.types import CallToolResult

Connect = Callable[..., Any]
Run = Callable[..., Any]
Text = Callable[[CallToolResult], str]
JSON_OR_EVENTS = {"accept": "application/json, text/event-stream", "content-type": "application/json"}


@pytest.fixture(scope="module")
def served(homes: Callable[[], Path], serving: Callable[..., Any]) -> Iterator[Any]:
    with serving(homes()) as served:
        yield served


async def test_a_client_that_comes_back_has_its_variables(served: Any, over_http: Connect, run: Run) -> None:
    async with over_http(served.url, served.keys[0], leave=False) as client:
        first = await run(client, "x = 41")
    async with over_http(served.url, served.keys[0]) as client:
        again = await run(client, "x + 1")
    async with over_http(served.url, served.keys[0], mode="2026-07-28") as client:
        modern = await run(client, "x + 2")

    assert {answer.structured_content["session"] for answer in (first, again, modern)} == {
        first.structured_content["session"]
    }
    assert (again.structured_content["result"], modern.structured_content["result"]) == ("42", "43")


async def test_two_clients_at_once_have_a_session_each_if_they_say_so(
    served: Any, over_http: Connect, run: Run
) -> None:
    async with (
        over_http(f"{served.url}?session=a&memory=256M", served.keys[0]) as one,
        over_http(f"{served.url}?session=b", served.keys[0]) as other,
    ):
        await run(one, "mine = 1")
        seen = await run(other, "'mine' in globals()")
        status = await one.call_tool("status", {})

    assert seen.structured_content["result"] == "False"
    assert status.structured_content["names"]["mine"]["type"] == "int"
    assert status.structured_content["memory_cap_bytes"] == 256 << 20


async def test_another_key_has_sessions_of_its_own_and_cannot_enter_ours(
    served: Any, over_http: Connect, run: Run
) -> None:
    url = f"{served.url}?session=vault"
    async with over_http(url, served.keys[0]) as ada, over_http(url, served.keys[1]) as bob:
        await run(ada, "secret = 7")
        seen = await run(bob, "'secret' in globals()")
    async with conversation(served, served.keys[0]) as (http, head):
        stolen = await http.post(served.url, headers=head | bearer(served.keys[1]), json=call(5, "1"))
        nobody = await http.post(served.url, headers=head | bearer("x" * 32), json=call(6, "1"))

    assert seen.structured_content["result"] == "False"
    assert (stolen.status_code, nobody.status_code) == (404, 401)


async def test_a_client_that_hangs_up_has_its_run_interrupted(served: Any, over_http: Connect, run: Run) -> None:
    sleeping = "import time\nprint('asleep', flush=True)\ntime.sleep(600)"
    async with conversation(served, served.keys[1]) as (http, head):
        async with http.stream("POST", served.url, headers=head, json=call(2, sleeping, timeout=600)) as response:
            async for line in response.aiter_lines():
                if "asleep" in line:
                    break
        # The connection is gone, and nobody said that the call is cancelled.
        with anyio.fail_after(60):
            answer = await http.post(served.url, headers=head, json=call(3, "'free'", timeout=60))
            history = await http.post(served.url, headers=head, json=call(4, tool="status"))

    assert facts_of(answer)["result"] == "'free'"
    assert facts_of(history)["runs"][-2]["status"] == "kept"


async def test_a_session_that_nobody_uses_ends_and_comes_back_with_its_files(
    homes: Callable[[], Path], serving: Callable[..., Any], over_http: Connect, run: Run, text: Text
) -> None:
    home = homes()
    with serving(home, idle_s=0.5) as served:
        ada = served.keys[0]
        async with over_http(served.url, ada, mode="2026-07-28") as client:
            first = await run(client, "x = 1\nopen('tides.txt', 'w').write('12')")
            session = first.structured_content["session"]
            await no_kernel(home / "sessions" / session)
        async with over_http(served.url, ada, mode="2026-07-28") as client:
            back = await run(client, "import os; os.listdir()")
            recovery = await client.call_tool("recover", {})
    with serving(home) as served:  # another server, on the same home
        async with over_http(served.url, ada, mode="2026-07-28") as client:
            again = await client.call_tool("recover", {})

    assert back.structured_content["session"] == session
    assert back.structured_content["result"] == "['tides.txt']"
    assert "call recover" in text(back)
    assert recovery.structured_content["names"]["x"] == "recomputable"
    assert again.structured_content["ckpt"].startswith(f"CKPT-{session}-")


async def test_a_session_that_its_owner_uses_over_rest_is_not_idle(
    homes: Callable[[], Path], serving: Callable[..., Any], over_http: Connect, run: Run
) -> None:
    with serving(homes(), idle_s=1) as served:
        ada = served.keys[0]
        async with over_http(served.url, ada, mode="2026-07-28") as client, httpx2.AsyncClient(timeout=60) as http:
            session = (await run(client, "x = 1")).structured_content["session"]
            at = f"{served.url.removesuffix('/mcp')}/v1/sessions/{session}/runs"
            asked = {"code": "import time; time.sleep(4); x", "timeout": 30}
            head = bearer(ada) | {"accept": "application/json"}
            answer = await http.post(at, headers=head, json=asked)

    assert answer.status_code == 200, answer.text
    assert answer.json()["text"] == "1"


async def no_kernel(session: Path) -> None:
    """Until it has no stage any more; between two runs it has none for a moment, too."""
    looks = 0
    with anyio.fail_after(60):
        while looks < 20:
            await anyio.sleep(0.05)
            looks = 0 if any((session / "stages").iterdir()) else looks + 1


# -- HTTP by hand --------------------------------------------------------------------------------------------------


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def call(number: int, code: str = "", *, tool: str = "run_code", timeout: float = 30) -> dict[str, Any]:
    arguments = {"code": code, "timeout": timeout} if tool == "run_code" else {}
    params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": number}}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


def facts_of(response: httpx2.Response) -> Any:
    """What the last event of an answer holds."""
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return events[-1]["result"]["structuredContent"]


@asynccontextmanager
async def conversation(served: Any, token: str) -> AsyncIterator[tuple[httpx2.AsyncClient, dict[str, str]]]:
    """An HTTP client that has introduced itself, and the headers that it goes on with."""
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "by hand", "version": "1"}}
    head = JSON_OR_EVENTS | bearer(token)
    async with httpx2.AsyncClient(timeout=120) as http:
        hello = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
        begun = await http.post(served.url, headers=head, json=hello)
        head |= {"mcp-session-id": begun.headers["mcp-session-id"], "mcp-protocol-version": "2025-06-18"}
        await http.post(served.url, headers=head, json={"jsonrpc": "2.0", "method": "notifications/initialized"})
        yield http, head
