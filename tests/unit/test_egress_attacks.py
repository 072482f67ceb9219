"""What a guest may try. None of it reaches a server, and none of it is noted; it is told why, and it is in the log."""

import socket

import anyio
import pytest

from holdfast.egress import answers
from holdfast.egress.heads import HEAD_BYTES
from holdfast.egress.log import LONGEST_TARGET, MOST_REFUSALS

from .wayout import NAME, answering, to, way_out

GET = "GET {} HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize(
    "target",
    [
        "http://user:password@{here}/", "http://evil.example@{here}/", "http://{here}@evil.example/", "http://@{here}/",
        "http://{here}\\@evil.example/", "http://{here}\\.evil.example/", "http://{here}#@evil.example/",
        "http://{here}/#fragment", "http:///{here}/", "http:{here}/", "http:/{here}/", "https://{here}/",
        "ftp://{here}/", "//{here}/", "/", "*", "{here}", "http://", "http://:{port}/", "http://127.0.0.1:/",
        "http://127.0.0.1:0/", "http://127.0.0.1:65536/", "http://127.0.0.1:{port}1/", "http://127.0.0.1:0{port}/",
        "http://127.0.0.1:+{port}/", "http://127.0.0.1:{port}:{port}/", "http://2130706433:{port}/",
        "http://0x7f000001:{port}/", "http://0x7f.1:{port}/", "http://0x7f.0.0.1:{port}/", "http://127.1:{port}/",
        "http://127.0.1:{port}/", "http://0177.0.0.1:{port}/", "http://127.0.0.01:{port}/", "http://127.0.0.1.:{port}/",
        "http://127.0.0.1%2e:{port}/", "http://%31%32%37.0.0.1:{port}/", "http://[127.0.0.1]:{port}/",
        "http://[::ffff:127.0.0.1]:{port}/", "http://[::ffff:7f00:1]:{port}/", "http://[::1%25lo]:{port}/",
        "http://::1:{port}/", "http://api..example.com/", "http://api.example.com../", "http://.api.example.com/",
        "http://api_.example.com%00.evil.org/", "http://-api.example.com/",
    ],
)  # fmt: skip
async def test_targets_that_could_be_read_in_two_ways_are_read_in_none(target: str) -> None:
    async with answering() as upstream, way_out(upstream.here, NAME, resolve=to("127.0.0.1")) as way:
        written = target.format(here=upstream.here, port=upstream.port)
        answer = await way.say(GET.format(written).encode())

    assert answer.split(b":")[0] in (b"HTTP/1.1 400 malformed", b"HTTP/1.1 403 not_allowed")
    assert upstream.connections == 0
    assert not way.noted
    assert len(way.reasons) == 1


@pytest.mark.parametrize(
    "target",
    [
        "http://evil.example/", "http://api.example.com.evil.example/", "http://evilapi.example.com/",
        "http://api.example.com:8080/", "http://localhost:{port}/", "http://[::1]:{port}/", "http://0.0.0.0:{port}/",
        "http://127.0.0.2:{port}/", "http://xn--pi-7ba.example.com/", "http://127.0.0.1/", "http://169.254.169.254/",
    ],
)  # fmt: skip
async def test_what_is_not_listed_does_not_get_out(target: str) -> None:
    async with answering() as upstream, way_out(upstream.here, NAME, resolve=to("127.0.0.1")) as way:
        written = target.format(port=upstream.port)
        plain = await way.say(GET.format(written).encode())
        authority = written.removeprefix("http://").removesuffix("/")
        tunnel = await way.say(
            f"CONNECT {authority}{'' if authority[-1].isdigit() and ':' in authority else ':443'} HTTP/1.1\r\n"
            "Host: x\r\n\r\n".encode()
        )

    assert plain.startswith(b"HTTP/1.1 403 not_allowed: ")
    assert tunnel.startswith(b"HTTP/1.1 403 not_allowed: ")
    assert upstream.connections == 0
    assert not way.noted
    assert way.reasons == ["not_allowed", "not_allowed"]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "10.0.0.1", "172.17.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "224.0.0.1", "255.255.255.255", "168.63.129.16", "::1", "::", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "fd00::1",
        "fe80::1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "ff02::1",
    ],
)  # fmt: skip
async def test_a_name_never_leads_to_an_address_that_is_not_public(address: str) -> None:
    async with answering() as upstream, way_out(f"{NAME}:{upstream.port}", resolve=to(address)) as way:
        plain = await way.say(GET.format(f"http://{NAME}:{upstream.port}/").encode())
        tunnel = await way.say(f"CONNECT {NAME}:{upstream.port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    for answer in (plain, tunnel):
        assert answer.startswith(b"HTTP/1.1 403 not_public: ")
        assert address.encode() not in answer or len(address) < 3
    assert upstream.connections == 0
    assert not way.noted
    assert way.reasons == ["not_public", "not_public"]


@pytest.mark.parametrize(
    "head",
    [
        "POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST {} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
        "POST {} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        "POST {} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        "POST {} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        "POST {} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        "POST {} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        "POST {} HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nbody",
        "POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: 4, 5\r\n\r\nbody",
        "POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: +4\r\n\r\nbody",
        "POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: 0x4\r\n\r\nbody",
        "POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: -4\r\n\r\nbody",
        "POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: " + "9" * 30 + "\r\n\r\nbody",
        "GET {} HTTP/1.1\r\nHost: x\r\nX-A: 1\r\n folded\r\n\r\n",
        "GET {} HTTP/1.1\r\nHost: x\r\n\tX-A: 1\r\n\r\n",
        "GET {} HTTP/1.1\r\n X-A: 1\r\nHost: x\r\n\r\n",
        "GET {} HTTP/1.1\nHost: x\n\n\r\n\r\n",
        "GET {} HTTP/1.1\r\nHost: x\nX-A: 1\r\n\r\n",
        "GET {} HTTP/1.1\r\nHost: x\r\nX-A: 1\rX-B: 2\r\n\r\n",
        "GET {} HTTP/1.1\r\nHost: x\r\nX-A: \x00\r\n\r\n",
        "GET {} HTTP/1.1\r\nHost: x\r\nX-A: \x1b[31m\r\n\r\n",
        "GET {} HTTP/1.1\r\nHost: x\r\nX-A\r\n\r\n",
        "GET {} HTTP/1.1\r\nHost: x\r\n: 1\r\n\r\n",
        "GET {} HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        "GET {} HTTP/1.1\r\n\r\n",
        "GET {} HTTP/2.0\r\nHost: x\r\n\r\n",
        "GET {} HTTP/0.9\r\n\r\n",
        "GET {}\r\n\r\n",
        "GET  {} HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET {} evil HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET {}%0d%0a\r\nHost: x HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET {}\u00e9 HTTP/1.1\r\nHost: x\r\n\r\n",
        "\r\nGET {} HTTP/1.1\r\nHost: x\r\n\r\n",
        "G(T {} HTTP/1.1\r\nHost: x\r\n\r\n",
        "M" * 33 + " {} HTTP/1.1\r\nHost: x\r\n\r\n",
        "\x16\x03\x01\x00\x05hello\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "CONNECT {here} HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody",
        "CONNECT {here} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "CONNECT {} HTTP/1.1\r\nHost: x\r\n\r\n",
        "CONNECT 127.0.0.1 HTTP/1.1\r\nHost: x\r\n\r\n",
        "CONNECT 127.0.0.1:0 HTTP/1.1\r\nHost: x\r\n\r\n",
        "CONNECT user@{here} HTTP/1.1\r\nHost: x\r\n\r\n",
        "CONNECT /{here} HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_what_is_not_one_clear_request_is_none(head: str) -> None:
    async with answering() as upstream, way_out(upstream.here) as way:
        written = head.replace("{here}", upstream.here).replace("{}", f"http://{upstream.here}/")
        answer = await way.say(written.encode("latin-1"))

    assert answer.startswith(b"HTTP/1.1 400 malformed: ")
    assert b"X-Holdfast-Egress: malformed\r\n" in answer
    assert upstream.connections == 0
    assert not way.noted
    assert way.reasons == ["malformed"]


@pytest.mark.parametrize(
    "body",
    [
        b"z\r\nbody\r\n0\r\n\r\n",
        b"4\nbody\n0\n\n\r\n",
        b"4\r\nbodyXX0\r\n\r\n",
        b"-4\r\nbody\r\n0\r\n\r\n",
        b"0x4\r\nbody\r\n0\r\n\r\n",
        b"4;" + b"x" * 100_000,
        b"0\r\nX: " + b"x" * 100_000,
        b"f" * 21 + b"\r\n",
    ],
    ids=["no number", "bare ends", "no end", "minus", "hex", "extension", "trailer", "too long"],
)
async def test_a_body_that_is_not_framed_as_it_says_never_ends_well(body: bytes) -> None:
    async with answering(wants=b"0\r\n\r\n") as upstream, way_out(upstream.here) as way:
        head = f"POST http://{upstream.here}/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer = await way.say(head.encode() + body)

    assert answer.startswith(b"HTTP/1.1 400 malformed: ")
    assert way.reasons == ["malformed"]
    assert not upstream.received.endswith(b"0\r\n\r\n")


async def test_what_is_smuggled_behind_a_request_is_dropped() -> None:
    """Neither a second request, nor a body that nobody announced, nor trailers get to the server."""
    async with answering(wants=b"0\r\n\r\n") as upstream, way_out(upstream.here) as way:
        here = f"http://{upstream.here}/"
        second = f"GET {here}second HTTP/1.1\r\nHost: x\r\n\r\n"
        await way.say(
            f"POST {here}first HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTrailer: X-Evil\r\n\r\n"
            f"4;ext=1\r\nbody\r\n0\r\nX-Evil: 1\r\nContent-Length: 1\r\n\r\n{second}".encode()
        )

    assert (
        upstream.received
        == (
            f"POST /first HTTP/1.1\r\nHost: {upstream.here}\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            "4\r\nbody\r\n0\r\n\r\n"
        ).encode()
    )
    assert len(way.noted) == 1


async def test_large_heads_and_many_headers_are_refused() -> None:
    async with answering() as upstream, way_out(upstream.here) as way:
        here = f"http://{upstream.here}/"
        for head in (
            f"GET {here} HTTP/1.1\r\nHost: x\r\nX: {'x' * HEAD_BYTES}\r\n\r\n",
            f"GET {here}{'x' * HEAD_BYTES} HTTP/1.1\r\nHost: x\r\n\r\n",
            "x" * (HEAD_BYTES * 4),
            f"GET {here} HTTP/1.1\r\nHost: x\r\n" + "X: 1\r\n" * 100 + "\r\n",
        ):
            assert (await way.say(head.encode())).startswith(b"HTTP/1.1 431 too_large: ")

        assert upstream.connections == 0
        assert way.reasons == ["too_large"] * 4
        fits = f"GET {here} HTTP/1.1\r\nHost: x\r\n" + "X: 1\r\n" * 99 + "\r\n"
        assert (await way.say(fits.encode())).endswith(b"ok")


async def test_a_head_that_dribbles_is_not_waited_for() -> None:
    async with answering() as upstream, way_out(upstream.here, head_s=0.5) as way:
        reader, writer = await way.connect()
        with anyio.move_on_after(60) as patience:
            async with anyio.create_task_group() as tasks:

                async def dribble() -> None:
                    writer.write(f"GET http://{upstream.here}/ HTTP/1.1\r\n".encode())
                    while True:
                        writer.write(b"X: 1\r\n")
                        await anyio.sleep(0.02)

                tasks.start_soon(dribble)
                answer = await reader.read()
                tasks.cancel_scope.cancel()
        writer.close()

    assert not patience.cancelled_caught
    assert answer.startswith(b"HTTP/1.1 408 too_slow: ")
    assert way.reasons == ["too_slow"]


async def test_connections_that_say_nothing_are_nothing() -> None:
    async with way_out(NAME) as way:
        for _ in range(5):
            _, writer = await way.connect()
            writer.close()
            await writer.wait_closed()
        assert (await way.say(GET.format("http://evil.example/").encode())).startswith(b"HTTP/1.1 403")

    assert way.reasons == ["not_allowed"]


async def test_too_many_connections_are_told_so_and_room_is_made_again() -> None:
    async with answering() as upstream, way_out(upstream.here, connections=3) as way:
        request = GET.format(f"http://{upstream.here}/").encode()
        held = [await way.connect() for _ in range(3)]
        for _, writer in held:
            writer.write(b"G")
            await writer.drain()
        refused = await way.say(request)
        assert refused.startswith(b"HTTP/1.1 503 too_many: ")
        for _, writer in held:
            writer.close()
        while not (answer := await way.say(request)).endswith(b"ok"):
            assert answer.startswith(b"HTTP/1.1 503 too_many: ")


async def test_a_run_sends_so_many_requests_and_no_more() -> None:
    async with answering() as upstream, way_out(upstream.here, sent=3) as way:
        request = GET.format(f"http://{upstream.here}/").encode()
        answers_seen = [await way.say(request) for _ in range(5)]

    assert [answer.split()[1] for answer in answers_seen] == [b"200"] * 3 + [b"429"] * 2
    assert (len(way.noted), upstream.connections, way.reasons) == (3, 3, ["too_many", "too_many"])


async def test_the_log_is_bounded_whatever_is_tried() -> None:
    async with way_out(NAME) as way:
        for number in range(MOST_REFUSALS + 10):
            await way.say(GET.format(f"http://evil{number}.example/{'x' * 20_000}").encode())

    assert len(way.log.refusals) == MOST_REFUSALS
    assert way.log.refused == MOST_REFUSALS + 10
    assert all(len(refusal.target) <= LONGEST_TARGET and refusal.target.isprintable() for refusal in way.log.refusals)


def test_what_a_guest_is_told_is_one_status_line_whatever_is_in_it() -> None:
    told = answers.answer(answers.Refused("malformed", "a\r\nSet-Cookie: x\r\n\r\n\x1b[31mé" + "x" * 1000))
    head, _, body = told.partition(b"\r\n\r\n")

    assert len(head.split(b"\r\n")) == 5
    assert b"Set-Cookie" not in head.split(b"\r\n", 1)[1]
    assert told.isascii()
    assert f"Content-Length: {len(body)}".encode() in head


async def test_a_guest_that_never_reads_is_no_burden() -> None:
    """It asks for an answer that is refused, does not read it, and goes: the next one is served."""
    async with answering() as upstream, way_out(upstream.here, connections=2) as way:
        request = GET.format(f"http://{upstream.here}/").encode()
        for _ in range(10):
            with socket.create_connection(("127.0.0.1", way.port)) as rude:
                rude.sendall(b"nonsense\r\n\r\n" * 1000)
        while not (await way.say(request)).endswith(b"ok"):
            pass
