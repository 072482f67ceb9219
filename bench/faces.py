"""What each face adds to a trivial run, beside ipykernel through jupyter_client and through a Jupyter kernel gateway.

    python -m bench.faces [--quick] [--json FILE]

All of them are asked in turns, `1+1` each time, with a moment of thought before it. Each of ours is a whole
transaction, with a journal entry and a signed receipt; the peers run the cell.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from rich.console import Console
from websockets.sync.client import connect

from bench import machine
from bench.figures import show, timed
from bench.jupyter import JupyterKernel
from bench.serving import HOLDFAST, own_home, server
from holdfast import Session, engine
from holdfast.jupyter import spec

THINKING_S = 0.05
Ask = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="20 repetitions instead of 100")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    found = machine.describe()
    try:
        figures = measure(20 if options.quick else 100)
    finally:
        engine.shut_down()
    for line in found.lines():
        console.print(line, style="dim", highlight=False)
    show("A trivial run through each face, medians in ms", figures, console)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(repetitions: int) -> dict[str, float]:
    with ExitStack() as stack:
        enter = stack.enter_context
        home = enter(own_home())
        url, token = enter(server(home))
        faces: dict[str, Ask] = {
            "Python, embedded": _python(enter(Session())),
            "Python, over HTTP": _python(enter(Session(url=url, token=token))),
            "Python, over the home's socket": _python(enter(Session(url=f"unix:{home / 'socket'}"))),
            "HTTP, one JSON answer": enter(_curl(url, token)),
            "MCP over HTTP": enter(_mcp(lambda: _over_http(f"{url}/mcp", token))),
            "MCP over stdio": enter(_mcp(lambda: _over_stdio(home))),
            "Jupyter kernel": enter(_jupyter(home)),
            "ipykernel, jupyter_client": enter(_ipykernel()),
            "ipykernel, kernel gateway": enter(_gateway()),
        }
        samples: dict[str, list[float]] = {name: [] for name in faces}
        for number in range(repetitions + 3):
            for name, ask in faces.items():
                time.sleep(THINKING_S)
                taken = timed(ask)
                if number >= 3:  # the first ones fill caches
                    samples[name].append(taken)
    return {name: statistics.median(times) for name, times in samples.items()}


# -- our faces -----------------------------------------------------------------------------------------------------


def _python(session: Session) -> Ask:
    def ask() -> None:
        assert session.run("1+1").text == "2"

    return ask


@contextmanager
def _curl(url: str, token: str) -> Iterator[Ask]:
    with httpx2.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=60) as client:
        session = client.post("/v1/sessions", json={}).raise_for_status().json()["id"]

        def ask() -> None:
            body, accept = {"code": "1+1"}, {"accept": "application/json"}
            assert client.post(f"/v1/sessions/{session}/runs", json=body, headers=accept).json()["text"] == "2"

        yield ask
        client.delete(f"/v1/sessions/{session}")


@contextmanager
def _mcp(connected: Callable[[], Any]) -> Iterator[Ask]:
    """The official client, in a loop of its own."""
    loop = asyncio.new_event_loop()
    ending, ready = asyncio.Event(), loop.create_future()

    async def live() -> None:
        async with connected() as client:
            ready.set_result(client)
            await ending.wait()

    task = loop.create_task(live())
    client = loop.run_until_complete(ready)

    def ask() -> None:
        answer = loop.run_until_complete(client.call_tool("run_code", {"code": "1+1"}))
        assert not answer.is_error

    yield ask
    ending.set()
    loop.run_until_complete(task)
    loop.close()


@asynccontextmanager
async def _over_http(url: str, token: str) -> AsyncIterator[Client]:
    async with (
        create_mcp_http_client({"authorization": f"Bearer {token}"}) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        yield client


def _over_stdio(home: Path) -> Client:
    command, *rest = [*HOLDFAST, "mcp"]
    environment = {**os.environ, "HOLDFAST_HOME": str(home)}
    return Client(StdioServerParameters(command=command, args=rest, env=environment))


@contextmanager
def _jupyter(home: Path) -> Iterator[Ask]:
    """Our kernelspec through jupyter_client, as every front end drives it."""
    with tempfile.TemporaryDirectory() as directory:
        spec.install(prefix=directory)
        found = KernelSpecManager(kernel_dirs=[str(Path(directory, "share/jupyter/kernels"))])
        kernel = JupyterKernel(KernelManager(kernel_name="holdfast", kernel_spec_manager=found))
        with _environment(HOLDFAST_HOME=str(home)):
            kernel.start()
        try:
            yield lambda: _expect(kernel.run("1+1"))
        finally:
            kernel.close()


# -- the peers -----------------------------------------------------------------------------------------------------


@contextmanager
def _ipykernel() -> Iterator[Ask]:
    kernel = JupyterKernel().start()
    try:
        yield lambda: _expect(kernel.run("1+1"))
    finally:
        kernel.close()


@contextmanager
def _gateway() -> Iterator[Ask]:
    """Its own process, its HTTP and WebSocket API, its ipykernel."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "kernel_gateway", f"--KernelGatewayApp.port={port}",
        "--KernelGatewayApp.ip=127.0.0.1", "--log-level=ERROR",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            kernel = _start_kernel(f"http://127.0.0.1:{port}")
            with connect(f"ws://127.0.0.1:{port}/api/kernels/{kernel}/channels", max_size=None) as channel:
                yield lambda: _expect(_run_over(channel, "1+1"))
        finally:
            process.terminate()
            process.wait(timeout=30)


def _start_kernel(url: str) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(httpx2.TransportError):
            return str(httpx2.post(f"{url}/api/kernels", json={}, timeout=60).raise_for_status().json()["id"])
        time.sleep(0.1)
    raise TimeoutError("the kernel gateway does not answer")


_requests = iter(range(1 << 60))


def _run_over(channel: Any, code: str) -> str | None:
    """One execute_request: its result, its idle status, its reply."""
    number, text, waiting = f"request-{next(_requests)}", None, {"idle", "reply"}
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    header = {
        "msg_id": number, "msg_type": "execute_request", "username": "", "session": "bench", "date": "",
        "version": "5.3",
    }  # fmt: skip
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    channel.send(json.dumps(message))
    while waiting:
        heard = json.loads(channel.recv(timeout=60))
        if heard["parent_header"].get("msg_id") != number:
            continue
        if heard["msg_type"] == "execute_result":
            text = heard["content"]["data"]["text/plain"]
        elif heard["msg_type"] == "execute_reply":
            waiting.discard("reply")
        elif heard["msg_type"] == "status" and heard["content"]["execution_state"] == "idle":
            waiting.discard("idle")
    return text


def _expect(text: str | None) -> None:
    assert text == "2", text


@contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    main()
