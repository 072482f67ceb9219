"""What may be listed, and what a listed entry allows; which addresses a name may lead to."""

import doctest
from ipaddress import ip_address

import msgspec
import pytest

from holdfast.egress import addresses, allowed, log, names
from holdfast.egress.addresses import is_public
from holdfast.egress.allowed import MOST, AllowList
from holdfast.errors import BadEgress


@pytest.mark.parametrize("module", [addresses, allowed, log, names], ids=lambda module: module.__name__)
def test_the_examples_hold(module: object) -> None:
    done = doctest.testmod(module)  # type: ignore[arg-type]

    assert done.attempted > 0
    assert done.failed == 0


@pytest.mark.parametrize(
    ("entry", "host", "port"),
    [
        ("api.example.com", "api.example.com", 80),
        ("api.example.com", "api.example.com", 443),
        ("api.example.com", "API.Example.COM", 443),
        ("api.example.com", "api.example.com.", 443),
        ("Api.Example.Com.", "api.example.com", 443),
        ("api.example.com:8443", "api.example.com", 8443),
        ("*.example.org", "a.example.org", 443),
        ("*.example.org", "a.b.c.example.org", 80),
        ("*.example.org:8443", "a.example.org", 8443),
        ("xn--bcher-kva.example", "xn--bcher-kva.example", 443),
        ("under_score.example.com", "under_score.example.com", 443),
        ("intranet", "intranet", 443),
        ("10.1.2.3:8080", "10.1.2.3", 8080),
        ("127.0.0.1", "127.0.0.1", 80),
        ("[::1]:8080", "::1", 8080),
        ("[::1]:8080", "[0:0::1]", 8080),
        ("[2001:db8::a]", "2001:DB8:0::A", 443),
    ],
)
def test_what_is_listed_is_allowed(entry: str, host: str, port: int) -> None:
    assert AllowList.parse([entry]).allows(host, port)


@pytest.mark.parametrize(
    ("entry", "host", "port"),
    [
        ("api.example.com", "api.example.com", 8443),
        ("api.example.com:8443", "api.example.com", 443),
        ("api.example.com", "xapi.example.com", 443),
        ("api.example.com", "a.api.example.com", 443),
        ("api.example.com", "api.example.com.evil.org", 443),
        ("api.example.com", "api.example.com..", 443),
        ("api.example.com", "api.example.com\0.evil.org", 443),
        ("api.example.com", "api.example.com\n", 443),
        ("api.example.com", "ａpi.example.com", 443),
        ("api.example.com", "api。example.com", 443),
        ("*.example.org", "example.org", 443),
        ("*.example.org", ".example.org", 443),
        ("*.example.org", "evilexample.org", 443),
        ("*.example.org", "a.example.org", 8443),
        ("kelvin.example", "\u212aelvin.example", 443),
        ("10.1.2.3:8080", "10.1.2.3", 80),
        ("127.0.0.1", "127.1", 80),
        ("127.0.0.1", "2130706433", 80),
        ("127.0.0.1", "0x7f.0.0.1", 80),
        ("127.0.0.1", "0x7f000001", 80),
        ("127.0.0.1", "0177.0.0.1", 80),
        ("127.0.0.1", "127.0.0.01", 80),
        ("127.0.0.1", "127.0.0.1.", 80),
        ("127.0.0.1", "::ffff:127.0.0.1", 80),
        ("127.0.0.1", "[::ffff:7f00:1]", 80),
        ("127.0.0.1", "localhost", 80),
        ("[::1]", "[::1%lo]", 80),
        ("api.example.com", "", 443),
    ],
)
def test_what_is_not_listed_is_not_allowed(entry: str, host: str, port: int) -> None:
    assert not AllowList.parse([entry]).allows(host, port)


def test_an_empty_list_allows_nothing() -> None:
    assert not AllowList.parse([]).allows("example.com", 443)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("*", "wildcard"),
        ("*.", "not a host name"),
        ("*.*.example.org", "wildcard"),
        ("a.*.example.org", "wildcard"),
        ("a*.example.org", "wildcard"),
        ("*.com", "at least two parts"),
        ("*.10.1.2.3", "at least two parts"),
        ("*:443", "wildcard"),
        ("https://example.com", "URL"),
        ("example.com/path", "URL"),
        ("user@example.com", "URL"),
        ("example.com:", "port"),
        ("example.com:0", "port"),
        ("example.com:65536", "port"),
        ("example.com:https", "port"),
        ("example.com:+80", "port"),
        ("example.com:080", "port"),
        ("example.com:8 0", "port"),
        ("example.com:\u0661", "port"),
        ("", "not a host name"),
        (".", "not a host name"),
        ("example..com", "not a host name"),
        ("-a.example.com", "not a host name"),
        ("a-.example.com", "not a host name"),
        ("exa mple.com", "not a host name"),
        ("example.com\n", "not a host name"),
        (" example.com", "not a host name"),
        ("a" * 64 + ".example.com", "not a host name"),
        ("a." * 127 + "com", "not a host name"),
        ("bücher.example", "xn--"),
        ("ex\u0430mple.com", "xn--"),
        ("127.1", "four decimal numbers"),
        ("2130706433", "four decimal numbers"),
        ("0x7f.1", "four decimal numbers"),
        ("1.2.3.0x4", "four decimal numbers"),
        ("010.1.2.3", "four decimal numbers"),
        ("256.1.2.3", "four decimal numbers"),
        ("10.1.2.3.", "ends with a number"),
        ("10.0.0.0/8", "URL"),
        ("::1", "brackets"),
        ("[::1", "brackets"),
        ("[::1%eth0]:80", "zone"),
        ("[::ffff:10.1.2.3]:80", "IPv4"),
        ("[example.com]:80", "IPv6"),
        ("localhost", "127.0.0.1:8080"),
        ("localhost:8080", "127.0.0.1:8080"),
        ("a.localhost", "127.0.0.1:8080"),
    ],
)
def test_what_could_mean_something_else_is_no_entry_and_the_hint_says_how_to_write_one(entry: str, why: str) -> None:
    with pytest.raises(BadEgress) as caught:
        AllowList.parse(["fine.example.com", entry])

    assert caught.value.code == "bad_egress"
    assert why in caught.value.message
    assert repr(entry)[:50] in caught.value.message
    assert '"*.example.org"' in caught.value.hint


def test_what_is_not_a_list_of_strings_is_refused() -> None:
    for entries, hint in (
        ("example.com", 'egress=["example.com"]'),
        ([443], "api.example.com"),
        (["a.example.com"] * (MOST + 1), "at most"),
    ):
        with pytest.raises(BadEgress) as caught:
            AllowList.parse(entries)  # type: ignore[arg-type]
        assert hint in caught.value.hint


def test_a_list_is_written_in_one_way_and_read_back_from_it() -> None:
    written = [
        "Api.Example.com",
        "*.example.org:8443",
        "10.1.2.3:8080",
        "[0::1]:81",
        "api.example.com",
        "[2001:db8::1]",
    ]
    parsed = AllowList.parse(written)

    assert parsed.texts() == [
        "api.example.com", "*.example.org:8443", "10.1.2.3:8080", "[::1]:81", "[2001:db8::1]",
    ]  # fmt: skip
    assert AllowList.parse(parsed.texts()) == parsed
    assert msgspec.json.decode(msgspec.json.encode(parsed), type=AllowList) == parsed


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254",
        "168.63.129.16", "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.88.99.1",
        "192.168.1.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1",
        "255.255.255.255",
        "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1", "64:ff9b::127.0.0.1",
        "64:ff9b::169.254.169.254", "64:ff9b:1::8.8.8.8", "100::1", "2001::1", "2001:0:7f00:1::", "2001:db8::1",
        "2002:7f00:1::", "2002:808:808::1", "3fff::1", "4000::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fd20:ce::254",
        "fe80::1", "fe80::1%1", "2606:4700::1111%1", "fec0::1", "ff02::1",
    ],
)  # fmt: skip
def test_addresses_that_a_name_must_not_lead_to(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "2a00:1450:4001::1", "64:ff9b::1.1.1.1"]
)
def test_public_addresses(address: str) -> None:
    assert is_public(ip_address(address))


def test_what_is_logged_is_one_bounded_line_of_ascii() -> None:
    assert log.printable("http://a/\r\nX: y\x00\x1b[31m\u2028é") == "http://a/%0D%0AX:%20y%00%1B[31m%E2%80%A8%C3%A9"
    for text in ("x" * 10_000, "\n" * 10_000, "\U0001f600" * 10_000, "\ud800" * 10_000):
        written = log.printable(text)
        assert len(written) == log.LONGEST_TARGET
        assert written.isascii()
        assert written.isprintable()
