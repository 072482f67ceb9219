"""Whom a TLS connection is meant for. The hellos are those of a real client; the attacks are made of them."""

import random
import ssl

import pytest

from holdfast.egress.hello import MOST_BYTES, Hello, HelloReader, NotTls


def hello_of(name: str | None, *, alpn: int = 0) -> bytes:
    """What OpenSSL says first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if alpn:
        context.set_alpn_protocols([f"{number:0200}" for number in range(alpn)])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


def read(data: bytes) -> Hello | None:
    return HelloReader().feed(data)


def in_records(message: bytes, *sizes: int) -> bytes:
    """The same handshake message cut into records."""
    out, at = b"", 0
    for size in (*sizes, len(message)):
        part = message[at : at + size]
        at += size
        if part:
            out += b"\x16\x03\x01" + len(part).to_bytes(2) + part
    return out


def message(*extensions: tuple[int, bytes], tail: bytes = b"", session: bytes = b"") -> bytes:
    """A hello by hand."""
    written = b"".join(kind.to_bytes(2) + len(data).to_bytes(2) + data for kind, data in extensions)
    body = b"\x03\x03" + bytes(32) + bytes([len(session)]) + session + b"\x00\x02\x13\x01" + b"\x01\x00"
    body += len(written).to_bytes(2) + written + tail
    return b"\x01" + len(body).to_bytes(3) + body


def sni(*names: bytes, kind: int = 0) -> tuple[int, bytes]:
    entries = b"".join(bytes([kind]) + len(name).to_bytes(2) + name for name in names)
    return 0, len(entries).to_bytes(2) + entries


def test_a_real_hello_names_its_host() -> None:
    assert read(hello_of("api.example.com")) == Hello("api.example.com", False)
    assert read(hello_of(None)) == Hello(None, False)
    assert read(hello_of("127.0.0.1")) == Hello(None, False)  # addresses are not sent as names
    assert read(in_records(message(sni(b"API.Example.COM")))) == Hello("api.example.com", False)
    assert read(in_records(message(sni(b"a.example"), (0xFE0D, b"\0\0\0")))) == Hello("a.example", True)
    assert read(in_records(message(sni(b"a.example"), (0xFFCE, b"")))) == Hello("a.example", True)


def test_however_it_is_cut_it_says_the_same() -> None:
    """In segments and in records, at any place; and what comes behind it is kept as it came."""
    dice = random.Random(20)
    for alpn in (0, 1, 20, 80):
        whole = hello_of("api.example.com", alpn=alpn)
        plain = b"".join(_payloads(whole))
        for _ in range(100):
            sizes = [dice.randrange(1, 400) for _ in range(dice.randrange(6))]
            data = in_records(plain, *sizes) + dice.randbytes(dice.randrange(50))
            reader, at, found = HelloReader(), 0, None
            while found is None:
                assert at < len(data)
                step = dice.choice((1, 5, 17, 300, 5000))
                found = reader.feed(data[at : at + step])
                at += step
            assert found == Hello("api.example.com", False)
            assert bytes(reader.taken) == data[:at]


def _payloads(data: bytes) -> list[bytes]:
    found = []
    while data:
        length = int.from_bytes(data[3:5])
        found.append(data[5 : 5 + length])
        data = data[5 + length :]
    return found


def test_damage_is_noticed_or_harmless_and_nothing_else_is_raised() -> None:
    """Ten thousand damaged hellos: each is refused, waits for more, or says exactly one well-formed name."""
    dice = random.Random(21)
    whole = hello_of("api.example.com")
    outcomes = set()
    for _ in range(10_000):
        data = bytearray(whole)
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(data))
            match dice.randrange(3):
                case 0:
                    data[at] = dice.randrange(256)
                case 1:
                    del data[at : at + dice.randrange(1, 5)]
                case _:
                    data[at:at] = dice.randbytes(dice.randrange(1, 5))
        try:
            found = read(bytes(data))
        except NotTls:
            outcomes.add("refused")
        else:
            outcomes.add("waits" if found is None else "read")
            assert found is None or found.name is None or (found.name.isascii() and found.name)
    assert outcomes == {"refused", "waits", "read"}


def test_noise_is_not_tls() -> None:
    dice = random.Random(22)
    for _ in range(2000):
        data = dice.randbytes(dice.randrange(1, 200))
        if data[0] != 22:
            with pytest.raises(NotTls):
                read(data)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x80\x2e\x01\x03\x01",  # SSL 2
        b"\x16\x02",  # a version that never was
        b"\x15\x03\x01\x00\x02\x02\x28",  # an alert
        b"\x17\x03\x03\x00\x05hello",
        b"\x16\x03\x01\x00\x00",  # an empty record
        b"\x16\x03\x01\x40\x01",  # one that is too large
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",  # a ServerHello
        in_records(b"\x01\xff\xff\xff" + bytes(100)),
        in_records(message(sni(b"a.example"), sni(b"b.example"))),  # twice
        in_records(message(sni(b"a.example", b"b.example"))),  # two names
        in_records(message(sni(b"a.example", kind=1))),
        in_records(message(sni(b""))),
        in_records(message((0, b""))),
        in_records(message((0, sni(b"a.example")[1] + b"x"))),  # bytes that nobody counted
        in_records(message(sni(b"a.example"), tail=b"x")),
        in_records(message(sni("bücher.example".encode()))),
        in_records(message(sni(b"a.example"), session=bytes(33))),
        in_records(message(sni(b"a.example")) + b"\x01"),  # more behind it, in its own record
    ],
)
def test_what_two_readers_could_understand_differently_is_not_understood(data: bytes) -> None:
    with pytest.raises(NotTls):
        read(data)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"\x16\x03\x01\x40\x00\x01\x00\x7f\x00", bytes(16)),
        (b"\x16\x03\x01\x00\x01\x01", b"\x16\x03\x01\x00\x01\x00"),  # a byte of it in each record
    ],
)
def test_a_hello_that_never_ends_is_given_up(first: bytes, then: bytes) -> None:
    reader = HelloReader()
    assert reader.feed(first) is None

    with pytest.raises(NotTls):
        any(reader.feed(then) for _ in range(MOST_BYTES))
    assert len(reader.taken) <= MOST_BYTES + len(then)
