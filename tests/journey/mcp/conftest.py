"""Homes, servers and the official client, over every transport that it has."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.types import CallToolResult, TextContent
from tests.lean import lean_home

from holdfast.access import KeyRing

HOLDFAST = [sys.executable, "-m", "holdfast.cli.main"]


class Served(NamedTuple):
    """An HTTP server under test."""

    home: Path
    url: str
    token: str
    keys: list[str]


Connect = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """Homes of their own. A server that a client started there is ended at last."""
    made: list[Path] = []

    def make(*, whole: bool = False) -> Path:
        made.append(tmp_path_factory.mktemp("mcp") / "home")
        if whole:
            made[-1].mkdir()
            (made[-1] / "envs").symlink_to(Path(os.environ["HOLDFAST_HOME"]) / "envs")
        else:
            lean_home(made[-1])
        return made[-1]

    yield make
    for home in made:
        for server in servers_of(home):
            os.kill(server, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while any(servers_of(home) for home in made):
        assert time.monotonic() < deadline, "a server does not end"
        time.sleep(0.05)


def servers_of(home: Path) -> list[int]:
    """Those that a client started for itself."""
    commands = {path: _read(path).split(b"\0") for path in Path("/proc").glob("[0-9]*/cmdline")}
    wanted = {b"serve", b"--on-demand", str(home).encode()}
    return [int(path.parent.name) for path, command in commands.items() if wanted <= set(command)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


@pytest.fixture(scope="module")
def serving() -> Callable[..., Any]:
    @contextmanager
    def serve(home: Path, *, idle_s: float | None = None) -> Iterator[Served]:
        """`holdfast serve`; `idle_s` is for sessions that end soon."""
        command = [*HOLDFAST, "serve", "--port", "0", "--json", "--home", home]
        if idle_s is not None:
            command += ["--mcp-idle", f"{idle_s}s"]
        keys = [KeyRing(home / "keys").add(name)[1] for name in ("ada", "bob")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            try:
                yield Served(home, f"{told['url']}/mcp", told["token"], keys)
            finally:
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=60) == 0

    return serve


@pytest.fixture(scope="module")
def over_stdio() -> Connect:
    def connect(home: Path, *arguments: str, mode: str = "legacy") -> Client:
        command, *rest = [*HOLDFAST, "mcp"]
        env = {"HOLDFAST_HOME": str(home)}
        return Client(StdioServerParameters(command=command, args=[*rest, *arguments], env=env), mode=mode)

    return connect


@pytest.fixture(scope="module")
def over_http() -> Connect:
    @asynccontextmanager
    async def connect(url: str, token: str, *, mode: str = "legacy", leave: bool = True) -> AsyncIterator[Client]:
        async with create_mcp_http_client({"authorization": f"Bearer {token}"}) as http:
            transport = streamable_http_client(url, http_client=http, terminate_on_close=leave)
            async with Client(transport, mode=mode) as client:
                yield client

    return connect


def text_of(result: CallToolResult) -> str:
    return "\n".join(content.text for content in result.content if isinstance(content, TextContent))


@pytest.fixture(scope="session")
def text() -> Callable[[CallToolResult], str]:
    """All that a model reads of an answer."""
    return text_of


@pytest.fixture(scope="session")
def run() -> Callable[..., Any]:
    async def run_code(client: Client, code: str, **arguments: Any) -> CallToolResult:
        return await client.call_tool("run_code", {"code": code, **arguments})

    return run_code
