"""Many MCP clients over HTTP: no key takes the room of the others, and the owner always has some."""

from typing import Any

import httpx2
import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from holdfast.access import OWNER, Principal
from holdfast.errors import TooManySessions
from holdfast.server.mcp.http import McpApp, _Desks
from holdfast.server.mcp.late import McpSettings

ANN, BOB, EVE = (Principal(name, name) for name in ("ann", "bob", "eve"))
NONE: Any = None
"""The service: nobody gets as far as to need one."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def asking(principal: Principal, name: str) -> Request:
    query = f"session={name}".encode()
    return Request({"type": "http", "query_string": query, "headers": [], "state": {"principal": principal}})


def test_a_key_has_as_many_clients_as_it_may_have_sessions_and_the_owner_any_number() -> None:
    desks = _Desks(NONE, McpSettings(clients=4, sessions_per_key=2))
    first = desks._desk(asking(ANN, "a"), NONE)
    desks._desk(asking(ANN, "b"), NONE)
    with pytest.raises(TooManySessions, match="2 of your clients"):
        desks._desk(asking(ANN, "c"), NONE)
    assert desks._desk(asking(ANN, "a"), NONE) is first

    desks._desk(asking(BOB, "a"), NONE)
    desks._desk(asking(BOB, "b"), NONE)
    with pytest.raises(TooManySessions, match="4 clients"):
        desks._desk(asking(EVE, "a"), NONE)
    assert len({desks._desk(asking(OWNER, str(n)), NONE) for n in range(3)}) == 3


async def test_conversations_that_one_key_begins_leave_room_for_others() -> None:
    app = McpApp(NONE, McpSettings(clients=8))
    async with app.run():
        assert [await begun(app, ANN) for _ in range(3)] == [200, 200, 503]
        assert [await begun(app, BOB) for _ in range(3)] == [200, 200, 503]
        assert [await begun(app, OWNER) for _ in range(6)] == [200] * 6
        assert await begun(app, EVE) == 503


async def begun(app: McpApp, principal: Principal) -> int:
    async def behind_the_door(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {"principal": principal}}, receive, send)

    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "by hand", "version": "1"}}
    hello = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
    transport = httpx2.ASGITransport(behind_the_door)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8765") as http:
        accept = {"accept": "application/json, text/event-stream"}
        return (await http.post("/mcp", json=hello, headers=accept)).status_code
