"""`CONNECT` through the proxy: TLS for the host that was asked for, and nothing else."""

import asyncio
import hashlib
import http.client
import socket
import ssl
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from holdfast.egress.log import Outgoing
from holdfast.egress.tunnels import ESTABLISHED

from .test_egress_hello import hello_of, in_records, message, sni
from .wayout import NAME, Upstream, answering, break_off, certify, to_a_name, way_out

MIB = 1 << 20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def keeping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads to the end, then says how much it was, and its digest."""
    seen, size = hashlib.sha256(), 0
    while data := await reader.read(65536):
        seen.update(data)
        size += len(data)
    writer.write(f"{size} {seen.hexdigest()}".encode() + bytes(MIB))
    await writer.drain()


def connect(authority: str) -> bytes:
    return f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode()


async def test_https_gets_through_and_is_noted_as_a_tunnel(tmp_path: Path) -> None:
    server, trusting = certify(tmp_path)
    upstream = answering()
    upstream._tls = server
    async with upstream, to_a_name(upstream) as way, way.client(trusting) as client:
        answer = await client.get(f"https://{NAME}:{upstream.port}/a?q=secret")

    assert (answer.status_code, answer.text) == (200, "ok")
    assert upstream.received.startswith(b"GET /a?q=secret HTTP/1.1\r\n")
    [outgoing] = way.noted
    assert (outgoing.method, outgoing.target) == ("CONNECT", f"{NAME}:{upstream.port}")
    assert way.log.bytes_out > 100
    assert way.log.bytes_in > 100


async def test_the_standard_library_gets_through_as_it_is(tmp_path: Path) -> None:
    """Its tunnels are asked for in HTTP/1.0, without a Host."""
    server, trusting = certify(tmp_path)
    upstream = answering()
    upstream._tls = server
    async with upstream, to_a_name(upstream) as way:

        def ask() -> bytes:
            with closing(http.client.HTTPSConnection("127.0.0.1", way.port, context=trusting, timeout=60)) as client:
                client.set_tunnel(NAME, upstream.port)
                client.request("GET", "/")
                return client.getresponse().read()

        assert await asyncio.to_thread(ask) == b"ok"


async def test_a_listed_address_needs_no_name_in_tls(tmp_path: Path) -> None:
    server, trusting = certify(tmp_path)
    upstream = answering()
    upstream._tls = server
    async with upstream, way_out(upstream.here) as way, way.client(trusting) as client:
        assert (await client.get(f"https://{upstream.here}/")).text == "ok"


async def test_a_tunnel_takes_much_both_ways_and_each_side_may_end_first(tmp_path: Path) -> None:
    sent = hello_of(NAME) + bytes(8 * MIB)
    async with Upstream(keeping) as upstream, to_a_name(upstream) as way:
        reader, writer = await way.connect()
        writer.write(connect(f"{NAME}:{upstream.port}"))
        assert await reader.readexactly(len(ESTABLISHED)) == ESTABLISHED
        for at in range(0, len(sent), 100_000):
            writer.write(sent[at : at + 100_000])
            await writer.drain()
        writer.write_eof()  # and only then it is answered
        answer = await reader.read()
        writer.close()

    assert answer.startswith(f"{len(sent)} {hashlib.sha256(sent).hexdigest()}".encode())
    assert answer.endswith(bytes(MIB))
    assert way.log.bytes_out == len(sent)
    assert way.log.bytes_in == len(answer)


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_a_hello_in_many_segments_gets_through(size: int) -> None:
    sent = hello_of(NAME)
    async with Upstream(keeping) as upstream, to_a_name(upstream) as way:
        reader, writer = await way.connect()
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        writer.write(connect(f"{NAME}:{upstream.port}") + sent[:size])  # the first of it with the request
        for at in range(size, len(sent), size):
            writer.write(sent[at : at + size])
            await writer.drain()
        writer.write_eof()
        answer = await reader.read()
        writer.close()

    assert answer.startswith(ESTABLISHED + f"{len(sent)} {hashlib.sha256(sent).hexdigest()}".encode())


UNRECOGNIZED = bytes([21, 3, 1, 0, 2, 2, 112])
DENIED = bytes([21, 3, 1, 0, 2, 2, 49])


@pytest.mark.parametrize(
    ("first", "said", "reason"),
    [
        (hello_of("other.example.com"), UNRECOGNIZED, "wrong_name"),
        (hello_of(f"{NAME}.evil.example"), UNRECOGNIZED, "wrong_name"),
        (hello_of(f"x.{NAME}"), UNRECOGNIZED, "wrong_name"),
        (hello_of(None), UNRECOGNIZED, "wrong_name"),
        (in_records(message(sni(NAME.encode() + b"."))), UNRECOGNIZED, "wrong_name"),
        (in_records(message(sni(NAME.encode() + b"\0"))), UNRECOGNIZED, "wrong_name"),
        (in_records(message(sni(b"front.example"), (0xFE0D, b"\0"))), UNRECOGNIZED, "wrong_name"),
        (in_records(message(sni(NAME.encode()), (0xFE0D, b"\0"))), UNRECOGNIZED, "wrong_name"),
        (in_records(message(sni(NAME.encode()), sni(b"evil.example"))), DENIED, "not_tls"),
        (in_records(message(sni(NAME.encode(), b"evil.example"))), DENIED, "not_tls"),
        (b"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n", DENIED, "not_tls"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", DENIED, "not_tls"),
        (b"\x16\x03\x01\x40\x00\x01\x00\x7f\xff" + bytes(100_000), DENIED, "not_tls"),
    ],
    ids=["another", "longer", "below", "none", "dot", "nul", "ech", "decoy", "twice", "two", "http", "ssh", "huge"],
)
async def test_a_tunnel_for_one_host_is_none_for_another(first: bytes, said: bytes, reason: str) -> None:
    async with Upstream(keeping) as upstream, to_a_name(upstream) as way:
        answer = await way.say(connect(f"{NAME}:{upstream.port}") + first)

    assert answer == ESTABLISHED + said
    assert upstream.connections == 0
    assert not way.noted
    assert [(refusal.reason, refusal.target) for refusal in way.log.refusals] == [(reason, f"{NAME}:{upstream.port}")]


async def test_a_tunnel_to_an_address_is_none_for_a_name() -> None:
    async with Upstream(keeping) as upstream, way_out(upstream.here) as way:
        answer = await way.say(connect(upstream.here) + hello_of("evil.example"))

    assert answer == ESTABLISHED + UNRECOGNIZED
    assert upstream.connections == 0
    assert not way.noted


async def test_openssl_says_what_went_wrong(tmp_path: Path) -> None:
    """A client that names another host in TLS than in its tunnel reads that the name is not known."""
    _, trusting = certify(tmp_path)
    async with Upstream(keeping) as upstream, to_a_name(upstream) as way:

        def ask() -> None:
            with socket.create_connection(("127.0.0.1", way.port), 60) as plain:
                plain.sendall(connect(f"{NAME}:{upstream.port}"))
                assert plain.recv(len(ESTABLISHED), socket.MSG_WAITALL) == ESTABLISHED
                trusting.wrap_socket(plain, server_hostname="evil.example.com")

        with pytest.raises(ssl.SSLError, match=r"(?i)unrecognized.name"):
            await asyncio.to_thread(ask)


@pytest.mark.parametrize("first", [b"", hello_of(NAME)[:100]], ids=["nothing", "half a hello"])
async def test_a_hello_that_does_not_come_is_not_waited_for(first: bytes) -> None:
    async with Upstream(keeping) as upstream, to_a_name(upstream, head_s=0.5) as way:
        answer = await way.say(connect(f"{NAME}:{upstream.port}") + first)

    assert answer == ESTABLISHED + DENIED
    assert way.reasons == ["too_slow"]
    assert upstream.connections == 0


async def test_a_tunnel_is_noted_before_anything_leaves() -> None:
    noted, go_on = anyio.Event(), anyio.Event()

    async def note(outgoing: Outgoing) -> None:
        noted.set()
        await go_on.wait()
        raise OSError("no room")

    async with Upstream(keeping) as upstream, to_a_name(upstream, note=note) as way:
        reader, writer = await way.connect()
        writer.write(connect(f"{NAME}:{upstream.port}") + hello_of(NAME))
        await noted.wait()
        assert upstream.connections == 0
        go_on.set()
        answer = await reader.read()
        writer.close()

    assert answer == ESTABLISHED + bytes([21, 3, 1, 0, 2, 2, 80])
    assert (upstream.connections, way.reasons) == (0, ["not_noted"])


async def test_a_server_that_is_not_there_ends_the_tunnel() -> None:
    async with Upstream(keeping) as upstream:
        pass
    async with to_a_name(upstream) as way:
        answer = await way.say(connect(f"{NAME}:{upstream.port}") + hello_of(NAME))

    assert answer == ESTABLISHED + bytes([21, 3, 1, 0, 2, 2, 80])
    assert way.reasons == ["unreachable"]
    assert len(way.noted) == 1  # nobody knew before
    assert way.withdrawn == way.noted


async def test_when_the_server_breaks_off_the_guest_notices_and_the_other_way_round() -> None:
    reset = anyio.Event()

    async def breaking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        break_off(writer)

    async def waiting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read()
        except ConnectionResetError:
            reset.set()

    async with Upstream(breaking) as upstream, to_a_name(upstream) as way:
        reader, writer = await way.connect()
        writer.write(connect(f"{NAME}:{upstream.port}") + hello_of(NAME))
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
    async with Upstream(waiting) as upstream, to_a_name(upstream) as way:
        reader, writer = await way.connect()
        writer.write(connect(f"{NAME}:{upstream.port}") + hello_of(NAME))
        while not way.log.bytes_out:
            await anyio.sleep(0.01)
        break_off(writer)
        await reset.wait()


async def test_a_tunnel_in_which_little_moves_one_way_is_not_ended() -> None:
    async def trickling(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(30):
            writer.write(b".")
            await anyio.sleep(0.1)

    async with Upstream(trickling) as upstream, to_a_name(upstream, idle_s=2.0) as way:
        reader, writer = await way.connect()
        writer.write(connect(f"{NAME}:{upstream.port}") + hello_of(NAME))
        assert await reader.read() == ESTABLISHED + b"." * 30
        writer.close()
    assert not way.reasons


async def test_a_tunnel_in_which_nothing_moves_is_ended() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            pass

    async with Upstream(silent) as upstream, to_a_name(upstream, idle_s=0.5) as way:
        reader, writer = await way.connect()
        writer.write(connect(f"{NAME}:{upstream.port}") + hello_of(NAME))
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
    assert way.reasons == ["too_slow"]
