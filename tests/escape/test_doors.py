"""Attacks on the server's door, byte by byte over real sockets: a real uvicorn, a small application behind the door.

Path traversal and other people's sessions need the real application: they are in the tests of the HTTP face.
"""

import asyncio
import ctypes
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from holdfast.access import Access, KeyRing
from holdfast.sandbox.syscalls import NUMBERS
from holdfast.server.doors import DoorSettings, Hosts, Limits, Metrics, exchange, guarded
from holdfast.server.doors.connections import Patience, uvicorn_options
from holdfast.server.doors.problems import HANDLERS

PATIENT_S = 30
SMALL_BYTES = 4096
SOON = Patience(headers_wait_s=1, answer_wait_s=1, connections=20)


class Behind:
    """The application, and what reached it."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self.streaming_ended = threading.Event()
        routes = [
            Route("/v1/health", self.who), Route("/v1/who", self.who), Route("/v1/size", self.size, methods=["POST"]),
            Route("/v1/deaf", self.who, methods=["POST"]), Route("/v1/flood", self.flood), Route("/docs", self.who),
            Route("/v1/letter", self.letter), Route("/v1/breaks", self.breaks), Route("/v1/reflects", self.reflects),
            Route("/v1/sessions/{id}/files/{path:path}", self.size, methods=["PUT"]),
        ]  # fmt: skip
        self._routes = Starlette(routes=routes, exception_handlers=HANDLERS)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._routes(scope, receive, send)
        finally:
            if scope["path"] == "/v1/flood":
                self.streaming_ended.set()

    async def who(self, request: Request) -> Response:
        self.reached.append(request.url.path)
        return JSONResponse(request.state.principal.id)

    async def size(self, request: Request) -> Response:
        self.reached.append(request.url.path)
        return JSONResponse(sum([len(chunk) async for chunk in request.stream()]))

    async def flood(self, request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 65_536

        return StreamingResponse(pieces())

    async def letter(self, request: Request) -> Response:
        return Response(b"x" * 50_000)

    async def breaks(self, request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"half"
            raise ZeroDivisionError("a secret of ours")

        return StreamingResponse(pieces(), headers={"content-length": "8"})

    async def reflects(self, request: Request) -> Response:
        """What no route should do: a value of the request in a header of the answer."""
        return JSONResponse(1, headers={"x-name": request.query_params["name"]})


class Target:
    """A server under attack."""

    def __init__(self, behind: Behind, home: Path, address: tuple[str, int] | str) -> None:
        self.behind, self.home, self.address = behind, home, address
        self.access = Access(KeyRing(home / "keys"))
        self.metrics = Metrics()
        self.connections: set[Any] = set()
        """What the server holds open."""

    @property
    def host(self) -> str:
        return "localhost" if isinstance(self.address, str) else f"127.0.0.1:{self.address[1]}"

    def connect(self, *, receives: int | None = None) -> socket.socket:
        family = socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET
        peer = socket.socket(family, socket.SOCK_STREAM)
        peer.settimeout(PATIENT_S)
        if receives:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        try:
            peer.connect(self.address)
        except OSError:
            peer.close()
            raise
        return peer

    def head(self, method: str, path: str, *headers: str, token: str | None = "", host: str | None = None) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host or self.host}", *headers]
        if token is not None:
            lines.append(f"Authorization: Bearer {token or self.access.token}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def ask(self, *parts: bytes) -> "Answer":
        """Send all of it, then read one answer."""
        with self.connect() as peer:
            for part in parts:
                try:
                    peer.sendall(part)
                except (BrokenPipeError, ConnectionResetError):
                    break  # refused while we were sending; the answer is there
            return read_answer(peer)


class Answer:
    def __init__(self, raw_head: bytes, body: bytes) -> None:
        first, *lines = raw_head.decode("latin-1").split("\r\n")
        self.status = int(first.split()[1])
        self.headers = [tuple(line.lower().split(": ", 1)) for line in lines]
        self.body = body

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["code"])


def read_answer(peer: socket.socket) -> Answer:
    """One answer with a Content-Length, or until the end."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _more(peer)
    head, _, body = data.partition(b"\r\n\r\n")
    answer = Answer(head, body)
    length = next((int(value) for name, value in answer.headers if name == "content-length"), None)
    while length is None or len(answer.body) < length:
        chunk = peer.recv(65_536)
        if not chunk:
            break
        answer.body += chunk
    return answer


def _more(peer: socket.socket) -> bytes:
    chunk = peer.recv(65_536)
    assert chunk, "the server closed without an answer"
    return chunk


def closed_after(peer: socket.socket) -> float:
    """Seconds until the server ends the connection."""
    began = time.monotonic()
    try:
        while peer.recv(65_536):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - began


@contextmanager
def serving(
    tmp_path: Path, *, uds: bool = False, also_uds: bool = False, patience: Patience | None = None, **limits: Any
) -> Iterator[Target]:
    behind = Behind()
    listener = socket.socket(socket.AF_UNIX if uds else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "socket") if uds else ("127.0.0.1", 0))
    listener.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BYTES
    )  # so that what is unread stays with the server
    listener.listen(100)
    listeners, address = [listener], listener.getsockname()
    if also_uds:
        listeners.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listeners[-1].bind(str(tmp_path / "socket"))
        listeners[-1].listen(100)
    target = Target(behind, tmp_path, address)
    names = Hosts(port=None if uds else address[1])
    settings = DoorSettings(access=target.access, hosts=names, limits=Limits(**limits), metrics=target.metrics)
    options = uvicorn_options(patience or Patience(), header_bytes=settings.limits.header_bytes)
    config = uvicorn.Config(guarded(behind.app, settings), log_config=None, lifespan="off", **options)
    server = uvicorn.Server(config)
    target.connections = server.server_state.connections
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=listeners)), daemon=True)
    thread.start()
    try:
        yield target
        assert target.ask(target.head("GET", "/v1/health", token=None)).status == 200, "the server did not survive"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(PATIENT_S)
        for each in listeners:
            each.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    place = tmp_path_factory.mktemp("target")
    with serving(place, json_bytes=100_000, upload_bytes=lambda session: 300_000) as target:
        yield target


@pytest.fixture
def target(one_server: Target) -> Iterator[Target]:
    """A server for attacks that leave nothing behind; it must work after each."""
    one_server.behind.reached.clear()
    yield one_server
    assert one_server.ask(one_server.head("GET", "/v1/who")).body == b'"owner"'


@contextmanager
def drops(peer: socket.socket) -> Iterator[None]:
    """A byte now and then, so that the connection is never silent."""
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.1):
            try:
                peer.sendall(b"x")
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def test_honest_work_passes(target: Target) -> None:
    body = b'{"code": "1"}'
    head = target.head("POST", "/v1/size", "Content-Type: application/json", f"Content-Length: {len(body)}")

    with target.connect() as peer:
        for _ in range(3):  # on one connection
            peer.sendall(head + body)
            answer = read_answer(peer)
            assert (answer.status, answer.body) == (200, b"13")
    assert ("x-content-type-options", "nosniff") in answer.headers
    assert not [value for name, value in answer.headers if name in ("server", "connection")]


# -- bodies --------------------------------------------------------------------------------------------------------


def test_a_body_past_the_limit_is_refused_by_what_it_says(target: Target) -> None:
    huge = target.head("PUT", "/v1/sessions/a/files/b", "Content-Length: 99999999999")

    answer = target.ask(huge, b"x" * 1000)

    assert (answer.status, answer.code) == (413, "too_large")
    assert ("connection", "close") in answer.headers
    assert target.behind.reached == []


def test_a_client_that_sends_all_before_it_reads_is_not_cut_off_before_the_answer(target: Target) -> None:
    size = 8 << 20  # more than sockets hold, so that it is still being sent when the answer is written
    with target.connect() as peer:
        peer.sendall(target.head("PUT", "/v1/sessions/a/files/b", f"Content-Length: {size}") + b"x" * size)
        answer = read_answer(peer)
        assert (answer.status, answer.code) == (413, "too_large")
        assert closed_after(peer) < PATIENT_S


def test_a_chunked_body_past_the_limit_is_refused_when_it_gets_there(target: Target) -> None:
    head = target.head("PUT", "/v1/sessions/a/files/b", "Transfer-Encoding: chunked")
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"

    answer = target.ask(head, *[chunk] * 200)

    assert (answer.status, answer.code) == (413, "too_large")
    assert target.behind.reached == ["/v1/sessions/a/files/b"]
    assert target.ask(head, chunk * 4, b"0\r\n\r\n").body == str(4 * 0x10000).encode()


def test_a_client_that_asks_for_leave_first_never_sends_what_is_refused(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "LINGER_S", 2 * PATIENT_S)
    with target.connect() as peer:
        peer.sendall(target.head("PUT", "/v1/sessions/a/files/b", "Content-Length: 99999999", "Expect: 100-continue"))
        answer = read_answer(peer)
        assert (answer.status, answer.code) == (413, "too_large")
        assert closed_after(peer) < PATIENT_S / 2  # there is nothing to wait for


@pytest.mark.parametrize(
    "header",
    ["Content-Length: -1", "Content-Length: 1e3", "Content-Length: 0x10", "Content-Length: +5", "Content-Length: ٣",
     "Content-Length: 5, 6", "Content-Length: 5\r\nContent-Length: 6", "Content-Length: " + "9" * 50,
     "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: chunked, identity", "Transfer-Encoding: xchunked",
     "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", "Content-Length : 5", " Content-Length: 5"],
)  # fmt: skip
def test_a_malformed_length_is_refused_and_the_connection_closed(target: Target, header: str) -> None:
    with target.connect() as peer:
        peer.sendall(
            target.head("POST", "/v1/size").replace(b"\r\nHost", b"\r\n" + header.encode() + b"\r\nHost") + b"12345"
        )
        assert read_answer(peer).status in (400, 413)
        assert closed_after(peer) < PATIENT_S
    assert target.behind.reached == []


def test_a_request_with_two_lengths_smuggles_nothing(target: Target) -> None:
    inner = target.head("GET", "/v1/who")
    headers = ["Content-Type: application/json", "Transfer-Encoding: chunked", f"Content-Length: {5 + len(inner)}"]

    with target.connect() as peer:
        peer.sendall(target.head("POST", "/v1/size", *headers) + b"0\r\n\r\n" + inner)
        answer = read_answer(peer)
        assert (answer.status, answer.code) == (400, "malformed")
        assert closed_after(peer) < PATIENT_S
    assert target.behind.reached == []


@pytest.mark.parametrize("refused", [True, False])
def test_a_body_that_nobody_reads_is_never_taken_for_the_next_request(target: Target, refused: bool) -> None:
    inner = target.head("GET", "/v1/who")
    token = "wrong" if refused else ""
    head = target.head("POST", "/v1/deaf", "Content-Type: application/json", "Content-Length: 99999", token=token)

    with target.connect() as peer:
        peer.sendall(head + inner * 2)
        assert read_answer(peer).status == (401 if refused else 200)
        assert closed_after(peer) < PATIENT_S
    assert "/v1/who" not in target.behind.reached


@pytest.mark.parametrize("chunks", [b"zz\r\nabc\r\n", b"-5\r\nabcde\r\n", b"5\r\nabcdefgh\r\n0\r\n\r\n", b"f" * 50_000])
def test_broken_chunks_end_the_request(target: Target, chunks: bytes) -> None:
    with target.connect() as peer:
        peer.sendall(
            target.head("PUT", "/v1/sessions/a/files/b", "Transfer-Encoding: chunked") + b"2\r\nok\r\n" + chunks
        )
        assert b" 200 " not in peer.recv(100)
        assert closed_after(peer) < PATIENT_S


# -- slow clients --------------------------------------------------------------------------------------------------


def test_headers_that_never_end_are_not_waited_for(tmp_path: Path) -> None:
    with serving(tmp_path, patience=SOON) as target, target.connect() as silent, target.connect() as dripping:
        began = time.monotonic()
        dripping.sendall(b"GET /v1/who HTTP/1.1\r\nHost: ")
        with drops(dripping):
            closed_after(dripping)
        closed_after(silent)
        assert 0.8 < time.monotonic() - began < PATIENT_S


def test_the_second_request_of_a_connection_is_not_waited_for_either(tmp_path: Path) -> None:
    with serving(tmp_path, patience=SOON) as target, target.connect() as peer:
        peer.sendall(target.head("GET", "/v1/who"))
        assert read_answer(peer).status == 200
        peer.sendall(b"GET /v1/who HTTP/1.1\r\n")
        assert closed_after(peer) < PATIENT_S


def test_connections_that_only_stay_do_not_keep_others_out(tmp_path: Path) -> None:
    with serving(tmp_path, patience=SOON) as target:
        idle = [target.connect() for _ in range(60)]  # the cap is 20
        for one in idle:
            closed_after(one)
            one.close()
        assert target.ask(target.head("GET", "/v1/who")).status == 200


def test_connections_far_past_the_cap_are_closed_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, patience=Patience(connections=5, headers_wait_s=2 * PATIENT_S)) as target:
        idle = [target.connect() for _ in range(30)]
        assert closed_after(idle[-1]) < PATIENT_S
        assert len(target.connections) <= 10
        for one in idle:
            one.close()
        wait_for(lambda: not target.connections)


def test_whatever_comes_over_the_network_the_owner_gets_in_by_his_own_socket(tmp_path: Path) -> None:
    patience = Patience(connections=5, headers_wait_s=2 * PATIENT_S)
    with serving(tmp_path, patience=patience, also_uds=True) as target:
        idle = [target.connect() for _ in range(7)]
        assert target.ask(target.head("GET", "/v1/who")).status == 503
        idle += [target.connect() for _ in range(23)]
        closed_after(idle[-1])
        own = Target(target.behind, tmp_path, str(tmp_path / "socket"))
        held = [own.connect() for _ in range(15)]
        answers = [own.ask(own.head("GET", "/v1/who", token=None)) for _ in range(3)]
        assert [(one.status, one.body) for one in answers] == [(200, b'"owner"')] * 3
        for one in (*idle, *held):
            one.close()
        wait_for(lambda: not target.connections)


def test_one_key_s_streams_leave_room_for_others(tmp_path: Path) -> None:
    with serving(tmp_path, requests_under_way=2) as target:
        ann, bob = (target.access.ring.add(name)[1] for name in ("ann", "bob"))
        streams = [target.connect() for _ in range(2)]
        for stream in streams:
            stream.sendall(target.head("GET", "/v1/flood", token=ann))
            assert stream.recv(1)
        refused = target.ask(target.head("GET", "/v1/who", token=ann))
        assert (refused.status, refused.code) == (429, "rate_limited")
        assert target.ask(target.head("GET", "/v1/who", token=bob)).status == 200
        assert target.ask(target.head("GET", "/v1/who")).status == 200
        for stream in streams:
            stream.close()
        wait_for(lambda: target.ask(target.head("GET", "/v1/who", token=ann)).status == 200)


def test_a_body_that_stops_or_drips_is_given_up(tmp_path: Path) -> None:
    head_of = ("PUT", "/v1/sessions/a/files/b", "Content-Length: 1000000")
    with serving(tmp_path, body_wait_s=1, body_bytes_per_s=1000) as target, target.connect() as peer:
        peer.sendall(target.head(*head_of) + b"some")
        with drops(peer):
            answer = read_answer(peer)
            assert (answer.status, answer.code) == (408, "slow_client")
            closed_after(peer)


def test_a_body_at_a_steady_pace_may_take_longer_than_the_wait(tmp_path: Path) -> None:
    with serving(tmp_path, body_wait_s=2.5, body_bytes_per_s=5_000) as target, target.connect() as peer:
        peer.sendall(target.head("PUT", "/v1/sessions/a/files/b", "Content-Length: 100000"))
        for _ in range(10):
            time.sleep(0.3)  # a slow client is what this is about
            peer.sendall(b"x" * 10_000)
        assert read_answer(peer).body == b"100000"


def test_a_client_that_does_not_read_is_cut_off(tmp_path: Path) -> None:
    with serving(tmp_path, patience=SOON) as target, target.connect() as peer:
        peer.sendall(target.head("GET", "/v1/flood"))
        assert target.behind.streaming_ended.wait(PATIENT_S)
        assert closed_after(peer) < PATIENT_S


def test_nor_may_it_leave_the_end_unread(tmp_path: Path) -> None:
    with serving(tmp_path, patience=SOON) as target, target.connect(receives=SMALL_BYTES) as peer:
        peer.sendall(target.head("GET", "/v1/letter", "Connection: close"))
        assert peer.recv(1)
        wait_for(lambda: not target.connections)  # it is done with the request long before; the rest is ours to read


def test_a_client_that_reads_slowly_is_not(tmp_path: Path) -> None:
    with serving(tmp_path, patience=SOON) as target, target.connect() as peer:
        peer.sendall(target.head("GET", "/v1/flood"))
        until = time.monotonic() + 3
        while time.monotonic() < until:
            assert len(peer.recv(1 << 20)) > 0
            time.sleep(0.02)
        assert not target.behind.streaming_ended.is_set()
        peer.close()
        assert target.behind.streaming_ended.wait(PATIENT_S)


def test_an_answer_that_breaks_off_does_not_look_whole(target: Target) -> None:
    with target.connect() as peer:
        peer.sendall(target.head("GET", "/v1/breaks"))
        data = b""
        try:
            while chunk := peer.recv(1000):
                data += chunk
        except ConnectionResetError:
            pass
    assert b"content-length: 8" in data
    assert data.endswith((b"\r\n\r\nhalf", b"\r\n\r\n"))
    assert b"secret" not in data


# -- headers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["a%0d%0aX-Evil:%201", "a%0aX-Evil:%201", "a%00b", "a%0dX-Evil:%201"])
def test_what_is_reflected_into_a_header_makes_no_second_one(target: Target, value: str) -> None:
    with target.connect() as peer:
        peer.sendall(target.head("GET", f"/v1/reflects?name={value}"))
        received = b""
        try:
            while chunk := peer.recv(65_536):
                received += chunk
                if b"\r\n\r\n" in received:
                    break
        except ConnectionResetError:
            pass
    assert b"\r\nx-evil" not in received.lower()
    assert b" 200 " not in received


@pytest.mark.parametrize("line", ["X-A: b\x00c", "X-A: b\rc", "X A: b", "X-A", ": b", "X-Ä: b"])
def test_malformed_headers_are_refused(target: Target, line: str) -> None:
    with target.connect() as peer:
        peer.sendall(target.head("GET", "/v1/who", line))
        assert read_answer(peer).status == 400
        assert closed_after(peer) < PATIENT_S
    assert target.behind.reached == []


def test_headers_without_end_are_refused(target: Target) -> None:
    many = target.ask(target.head("GET", "/v1/who", *[f"X-{n}: 1" for n in range(200)]))
    long = target.ask(target.head("GET", "/v1/who", "X-A: " + "a" * 40_000))

    assert (many.status, many.code) == (431, "headers_too_large")
    assert long.status in (400, 431)  # by the parser if they come in pieces, else by the door
    with target.connect() as endless:
        endless.sendall(b"GET /v1/who HTTP/1.1\r\nX-A: " + b"a" * 40_000)
        assert read_answer(endless).status == 400
    assert target.behind.reached == []


# -- pages of other sites --------------------------------------------------------------------------------------------


def test_a_name_that_was_made_to_point_here_gets_nothing(target: Target) -> None:
    port = target.host.rpartition(":")[2]
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1:1"):
        assert target.ask(target.head("GET", "/v1/who", host=host)).status == 421
        assert target.ask(target.head("GET", f"http://{target.host}/v1/who", host=host)).status in (404, 421)
    assert target.ask(target.head("GET", "/v1/who", "Host: evil.example")).status == 400
    assert target.ask(b"GET /v1/who HTTP/1.0\r\n\r\n").status == 421
    assert target.behind.reached == []


def test_a_form_on_a_page_starts_nothing(target: Target) -> None:
    body = b'{"code": "import os", "x": "=1"}'
    page = ["Origin: https://evil.example", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate"]
    for how in (page, page[:1], page[1:], []):
        head = target.head("POST", "/v1/size", "Content-Type: text/plain", f"Content-Length: {len(body)}", *how)
        assert target.ask(head + body).status == (403 if how else 415)
    assert target.behind.reached == []


# -- tokens --------------------------------------------------------------------------------------------------------


def test_a_revoked_key_is_worth_nothing_even_on_an_open_connection(target: Target) -> None:
    made, key = target.access.ring.add("laptop")
    with target.connect() as peer:
        peer.sendall(target.head("GET", "/v1/who", token=key))
        assert read_answer(peer).body == json.dumps(made.id).encode()
        revoke = [sys.executable, "-m", "holdfast.cli.main", "keys", "revoke", made.id, "--home", target.home]
        assert subprocess.run(revoke, check=False).returncode == 0
        peer.sendall(target.head("GET", "/v1/who", token=key))
        assert read_answer(peer).status == 401


def test_a_token_of_another_server_is_worth_nothing_here(target: Target, tmp_path: Path) -> None:
    with serving(tmp_path) as other:
        _, key = other.access.ring.add("laptop")
        for stolen in (other.access.token, key):
            assert other.ask(other.head("GET", "/v1/who", token=stolen)).status == 200
            assert target.ask(target.head("GET", "/v1/who", token=stolen)).status == 401


def test_no_log_has_a_token(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert target.ask(target.head("GET", f"/docs?token={target.access.token}", token=None)).status == 200
        assert target.ask(target.head("GET", f"/v1/who?token={target.access.token}", token=None)).status == 401
        assert (
            target.ask(target.head("GET", f"/docs?token={target.access.token}", token=None, host="evil")).status == 421
        )
        assert target.ask(target.head("GET", "/v1/who", token="x" + target.access.token)).status == 401
    wait_for(lambda: caplog.text.count("GET /docs") == 2)

    assert target.access.token not in caplog.text


def test_an_address_that_guesses_is_slowed_down(tmp_path: Path) -> None:
    with serving(tmp_path, failures_at_once=5, failures_per_s=0.001) as target:
        guesses = [
            target.ask(target.head("GET", "/v1/who", f"X-Forwarded-For: 10.0.0.{n}", token="guess")) for n in range(8)
        ]

        assert [guess.status for guess in guesses] == [401] * 5 + [429] * 3
        assert target.ask(target.head("GET", "/v1/who")).status == 200


# -- the Unix socket -------------------------------------------------------------------------------------------------


def test_on_the_unix_socket_the_kernel_says_who_it_is(tmp_path: Path) -> None:
    with serving(tmp_path, uds=True) as target:
        assert target.ask(target.head("GET", "/v1/who", token=None)).body == b'"owner"'
        assert target.ask(target.head("GET", "/v1/who", token=None, host="localhost:9000")).status == 200
        assert target.ask(target.head("GET", "/v1/who", token=None, host="evil.example")).status == 421
        page = ["Origin: https://evil.example", "Content-Type: application/json", "Content-Length: 1"]
        assert target.ask(target.head("POST", "/v1/size", *page, token=None) + b"1").status == 403


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_on_the_unix_socket_needs_a_token() -> None:
    answers = []

    def ask_as_another() -> None:
        # The bare system call changes this one thread, and with it whom the kernel takes the connection for.
        number = NUMBERS[platform.machine()]["setresuid"]
        assert ctypes.CDLL(None).syscall(number, -1, 61_235, -1) == 0
        with target.connect() as peer:
            peer.sendall(target.head("GET", "/v1/who", token=None))
            answers.append(read_answer(peer).status)

    with tempfile.TemporaryDirectory() as place, serving(Path(place), uds=True) as target:
        Path(place).chmod(0o711)
        Path(place, "socket").chmod(0o666)
        thread = threading.Thread(target=ask_as_another)
        thread.start()
        thread.join(PATIENT_S)
        assert answers == [401]
