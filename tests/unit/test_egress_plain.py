"""`GET http://…` through the proxy: what arrives, what comes back, and what happens when either side breaks off."""

import asyncio
import hashlib
import tracemalloc
import urllib.request

import anyio
import httpx2
import pytest

from holdfast.egress.log import Outgoing

from .wayout import NAME, Upstream, answering, serving, to, to_a_name, way_out

MIB = 1 << 20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_request_leaves_as_ours_and_not_as_the_guests() -> None:
    async with answering() as upstream, way_out(upstream.here) as way:
        answer = await way.say(
            f"GET HTTP://{upstream.here}/a/b?q=secret HTTP/1.1\r\n"
            "Host: elsewhere.example\r\n"
            "Accept: */*\r\n"
            "X-Token: 1\r\n"
            "Connection: keep-alive, X-Drop, Content-Length\r\n"
            "X-Drop: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
            "Proxy-Authorization: Basic eA==\r\nProxy-Connection: keep-alive\r\n\r\n".encode()
        )

    assert upstream.received == (
        f"GET /a/b?q=secret HTTP/1.1\r\nHost: {upstream.here}\r\nAccept: */*\r\nX-Token: 1\r\nConnection: close\r\n\r\n"
    ).encode()  # fmt: skip
    assert answer == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    [outgoing] = way.noted
    assert (outgoing.run, outgoing.method, outgoing.target) == ("run_1", "GET", f"http://{upstream.here}/a/b?...")
    assert (outgoing.host, outgoing.port) == ("127.0.0.1", upstream.port)
    assert (way.log.sent, way.log.refused, way.log.bytes_in) == (1, 0, 2)


async def test_clients_as_people_use_them_get_through() -> None:
    async with answering() as upstream, to_a_name(upstream) as way:
        async with way.client() as client:
            for _ in range(3):
                answer = await client.get(f"http://{NAME}:{upstream.port}/x")
                assert (answer.status_code, answer.text) == (200, "ok")

        def ask() -> bytes:
            handler = urllib.request.ProxyHandler({"http": f"http://127.0.0.1:{way.port}"})
            with urllib.request.build_opener(handler).open(f"http://{NAME}:{upstream.port}/y", timeout=60) as answer:
                found: bytes = answer.read()
                return found

        assert await asyncio.to_thread(ask) == b"ok"

    assert [outgoing.target.rpartition("/")[2] for outgoing in way.noted] == ["x", "x", "x", "y"]


async def test_nothing_leaves_before_it_is_noted() -> None:
    asked, go_on = anyio.Event(), anyio.Event()

    async def note(outgoing: Outgoing) -> None:
        asked.set()
        await go_on.wait()

    async with answering() as upstream, way_out(upstream.here, note=note) as way, anyio.create_task_group() as tasks:
        answers: list[bytes] = []

        async def ask() -> None:
            answers.append(await way.say(f"GET http://{upstream.here}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode()))

        tasks.start_soon(ask)
        await asked.wait()
        for _ in range(100):
            await anyio.sleep(0)
        assert upstream.connections == 0
        go_on.set()

    assert answers[0].endswith(b"ok")
    assert upstream.connections == 1


async def test_what_cannot_be_noted_does_not_leave() -> None:
    async def note(outgoing: Outgoing) -> None:
        raise OSError("the disk of the host is full at /var/lib")

    async with answering() as upstream, way_out(upstream.here, note=note) as way:
        answer = await way.say(f"GET http://{upstream.here}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    assert answer.startswith(b"HTTP/1.1 503 not_noted")
    assert b"/var/lib" not in answer
    assert (upstream.connections, way.log.sent, way.reasons) == (0, 0, ["not_noted"])


async def echoing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says the digest of a chunked body, and sends as much back."""
    await reader.readuntil(b"\r\n\r\n")
    seen, size = hashlib.sha256(), 0
    while length := int(await reader.readuntil(b"\r\n"), 16):
        seen.update(await reader.readexactly(length))
        await reader.readexactly(2)
        size += length
    await reader.readuntil(b"\r\n")
    writer.write(f"HTTP/1.1 200 OK\r\nX-Digest: {seen.hexdigest()}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    for _ in range(size // 65536):
        writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def test_bodies_go_through_in_steps_and_are_never_held() -> None:
    size = 32 * MIB

    async def body() -> object:
        for _ in range(size // 65536):
            yield bytes(65536)

    async with Upstream(echoing) as upstream, way_out(upstream.here) as way, way.client() as client:
        tracemalloc.start()
        try:
            async with client.stream("POST", f"http://{upstream.here}/", content=body()) as answer:
                received = 0
                async for part in answer.aiter_raw():
                    received += len(part)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert received == size
    assert answer.headers["x-digest"] == hashlib.sha256(bytes(size)).hexdigest()
    assert (way.log.bytes_out, way.log.bytes_in) == (size, size)
    assert peak_bytes < 16 * MIB  # of both ends and the proxy between them


async def test_a_server_that_does_not_read_stops_the_guest_and_not_the_host() -> None:
    read_on = anyio.Event()
    size = 64 * MIB

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await read_on.wait()
        await reader.readexactly(size)
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    async with Upstream(handler) as upstream, way_out(upstream.here) as way:
        reader, writer = await way.connect()
        writer.write(f"PUT http://{upstream.here}/ HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode())
        writer.write(bytes(size))
        seen = -1
        while seen != way.log.bytes_out or seen <= 0:  # it goes on for as long as there is room in the kernel
            seen = way.log.bytes_out
            await anyio.sleep(0.5)
        assert seen < size
        read_on.set()
        assert (await reader.read()).startswith(b"HTTP/1.1 204")
        writer.close()

    assert way.log.bytes_out == size


@pytest.mark.parametrize(
    ("answer", "request_head", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "HEAD {} HTTP/1.1\r\nHost: x", b"Content-Length: 5"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "DELETE {} HTTP/1.1\r\nHost: x", b"HTTP/1.1 204 No Content"),
        (b"HTTP/1.1 304 Not Modified\r\nETag: a\r\n\r\n", "GET {} HTTP/1.1\r\nHost: x", b"ETag: a"),
        (
            b"HTTP/1.1 103 Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
            "GET {} HTTP/1.1\r\nHost: x",
            b"\r\n\r\nx",
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n", "GET {} HTTP/1.0", b"\r\n\r\nx"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil its end", "GET {} HTTP/1.1\r\nHost: x", b"\r\nd\r\nuntil its end\r\n0\r\n\r\n"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nX-Holdfast-Egress: not_allowed\r\nProxy-Authenticate: x\r\n\r\nx",
            "GET {} HTTP/1.1\r\nHost: x",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx",
        ),
    ],
    ids=["head", "no content", "not modified", "early hints", "old client", "old server", "what is ours to say"],
)  # fmt: skip
async def test_answers_of_every_kind_arrive(answer: bytes, request_head: str, expected: bytes) -> None:
    async with answering(answer) as upstream, way_out(upstream.here) as way:
        got = await way.say(request_head.format(f"http://{upstream.here}/").encode() + b"\r\n\r\n")

    assert expected in got
    assert not way.reasons


async def test_a_client_that_waits_to_be_told_to_go_on_is_told() -> None:
    async with answering(wants=b"body") as upstream, way_out(upstream.here) as way:
        reader, writer = await way.connect()
        head = f"POST http://{upstream.here}/ HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"
        writer.write(head.encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 \r\n\r\n"
        writer.write(b"body")
        assert (await reader.read()).endswith(b"ok")
        writer.close()

    assert b"Expect" not in upstream.received


async def test_an_answer_that_comes_before_the_body_has_ended_arrives() -> None:
    refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 4\r\nConnection: close\r\n\r\nmuch"
    async with answering(refusal) as upstream, way_out(upstream.here) as way:
        reader, writer = await way.connect()
        writer.write(f"PUT http://{upstream.here}/ HTTP/1.1\r\nHost: x\r\nContent-Length: {MIB}\r\n\r\n".encode())
        writer.write(bytes(1000))
        assert (await reader.read()).endswith(b"much")
        writer.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    ],
    ids=["sized", "chunked"],
)
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_half_an_answer_is_never_a_whole_one(answer: bytes, version: str) -> None:
    async with answering(answer) as upstream, way_out(upstream.here) as way:
        reader, writer = await way.connect()
        writer.write(f"GET http://{upstream.here}/ HTTP/{version}\r\nHost: x\r\n\r\n".encode())
        got = b""
        try:
            while data := await reader.read(1000):
                got += data
            broke = False
        except ConnectionResetError:
            broke = True
        writer.close()

    assert broke
    assert not got.endswith(b"0\r\n\r\n")
    assert way.reasons == ["broken_upstream"]


async def test_a_guest_that_goes_in_the_middle_of_its_body_leaves_no_whole_request() -> None:
    ended = anyio.Event()
    outcome: list[object] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            while data := await reader.read(1000):
                outcome.append(data)
            outcome.append("end")
        except ConnectionResetError:
            outcome.append("reset")
        ended.set()

    async with Upstream(handler) as upstream, way_out(upstream.here) as way:
        _, writer = await way.connect()
        head = f"PUT http://{upstream.here}/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode() + b"4\r\nhalf\r\n")
        while b"half" not in b"".join(part for part in outcome if isinstance(part, bytes)):
            await anyio.sleep(0.01)
        writer.close()
        await ended.wait()

    assert outcome[-1] == "reset"
    assert b"0\r\n\r\n" not in b"".join(part for part in outcome if isinstance(part, bytes))


async def test_a_guest_that_does_not_wait_for_its_answer_is_noticed() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        try:
            await reader.read()
        except ConnectionResetError:
            given_up.set()

    asked, given_up = anyio.Event(), anyio.Event()
    async with Upstream(never) as upstream, way_out(upstream.here) as way:
        _, writer = await way.connect()
        writer.write(f"GET http://{upstream.here}/ HTTP/1.1\r\nHost: x\r\n\r\nand more".encode())
        await asked.wait()
        writer.close()
        await given_up.wait()

    assert len(way.noted) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\nraw",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + b"X: 1\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    ],
    ids=[
        "nothing",
        "not http",
        "two framings",
        "upgrade",
        "endless head",
        "many headers",
        "endless patience",
        "bad length",
    ],
)
async def test_a_server_that_does_not_speak_http_is_a_bad_gateway(answer: bytes) -> None:
    async with answering(answer) as upstream, way_out(upstream.here) as way:
        got = await way.say(f"GET http://{upstream.here}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    assert got.startswith(b"HTTP/1.1 502 broken_upstream")
    assert b"X-Holdfast-Egress: broken_upstream\r\n" in got
    assert way.reasons == ["broken_upstream"]


async def test_what_cannot_be_reached_is_said_without_a_word_about_the_hosts_network() -> None:
    async def none(name: str) -> list[object]:
        raise OSError("no server at 10.0.0.53 answers")

    async def never(name: str) -> list[object]:
        await anyio.sleep_forever()
        raise AssertionError

    async with answering() as upstream:
        gone = upstream.here
    for resolve, target, status in (
        (none, NAME, b"502 unknown_host"),
        (never, NAME, b"504 unknown_host"),
        (none, gone, b"502 unreachable"),
    ):
        async with way_out(NAME, gone, resolve=resolve, connect_s=0.2) as way:  # type: ignore[arg-type]
            got = await way.say(f"GET http://{target}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert got.startswith(b"HTTP/1.1 " + status)
        assert b"10.0.0.53" not in got
        assert b"refused" not in got


async def test_many_tiny_parts_do_not_keep_others_waiting() -> None:
    """A body of a hundred thousand chunks is on its way; somebody else's request is answered before it has ended."""
    async with (
        Upstream(echoing) as slow,
        answering() as upstream,
        way_out(slow.here, upstream.here) as way,
        anyio.create_task_group() as tasks,
    ):
        ended: list[bytes] = []

        async def ask_slowly() -> None:
            head = f"POST http://{slow.here}/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            ended.append(await way.say(head.encode() + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n"))

        tasks.start_soon(ask_slowly)
        while way.log.bytes_out < 10:
            await anyio.sleep(0)
        answer = await way.say(f"GET http://{upstream.here}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert answer.endswith(b"ok")
        assert way.log.bytes_out < 100_000
        assert not ended

    assert ended[0].startswith(b"HTTP/1.1 200 OK")
    assert way.log.bytes_out == 100_000


async def test_a_name_is_looked_up_once_and_leads_to_what_was_checked() -> None:
    looked_up = []

    async with answering() as upstream:

        async def rebinding(name: str) -> object:
            looked_up.append(name)
            return await to("10.9.8.7", "127.0.0.1", "::1" if len(looked_up) == 1 else "169.254.169.254")(name)

        async with way_out(f"{NAME}:{upstream.port}", upstream.here, resolve=rebinding) as way:  # type: ignore[arg-type]
            answer = await way.say(f"GET http://{NAME}.:{upstream.port}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    assert answer.endswith(b"ok")
    assert looked_up == [NAME]
    assert f"Host: {NAME}:{upstream.port}\r\n".encode() in upstream.received


async def test_a_client_without_a_list_is_told_what_to_do() -> None:
    async with serving("*.example.org", NAME) as way, way.proxy.open("run_7") as way.log, way.client() as client:
        answer = await client.get("http://packages.example/simple/?token=secret")
        with pytest.raises(httpx2.ProxyError, match=r"not_allowed: packages\.example:443 is not in this"):
            await client.get("https://packages.example/simple/")

    assert (answer.status_code, answer.headers["x-holdfast-egress"]) == (403, "not_allowed")
    assert "Allowed: *.example.org, api.example.com." in answer.text
    assert 'egress=["api.example.com"]' in answer.text
    assert [(refusal.run, refusal.reason, refusal.target) for refusal in way.log.refusals] == [
        ("run_7", "not_allowed", "http://packages.example/simple/?..."),
        ("run_7", "not_allowed", "packages.example:443"),
    ]
    assert not way.noted
