"""Hosts as text: every host has one spelling here, and what could be read in two ways is no host.

Resolvers take `127.1`, `0x7f.1` and `2130706433` for addresses, and some programs take look-alikes of ASCII for ASCII.
Neither passes: an address is four decimal numbers or IPv6 in brackets, a name is ASCII and does not end in a number.
"""

import re
from ipaddress import AddressValueError, IPv4Address, IPv6Address

Address = IPv4Address | IPv6Address

LONGEST = 253
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")


class BadHost(ValueError):
    """Not a host, or not in the one spelling. The text says why, for whoever wrote it."""


def canonical(text: str) -> str:
    """A name or an address (IPv6 without its brackets) as it is compared, logged and looked up.

    >>> canonical("API.Example.com.")
    'api.example.com'
    >>> canonical("[::0001]")
    '::1'
    """
    if text.startswith("["):
        return str(_ipv6(text))
    if ":" in text:
        raise BadHost("an IPv6 address is written in brackets")
    if not text.isascii():
        raise BadHost('a name is written in ASCII: international ones start with "xn--"')
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return str(_ipv4(name, text))
    if len(name) > LONGEST or not all(_LABEL.fullmatch(label) for label in labels):
        raise BadHost("it is not a host name")
    return name


def address_of(host: str) -> Address | None:
    """What a canonical host is, if it is an address."""
    if ":" in host:
        return IPv6Address(host)
    return IPv4Address(host) if _NUMBER.fullmatch(host.rpartition(".")[2]) else None


def split(authority: str, port: int | None = None) -> tuple[str, int]:
    """Host and port of `host:port`; `port` is what stands for none.

    >>> split("[::1]:8080")
    ('::1', 8080)
    """
    host, colon, number = authority.rpartition(":")
    if not colon or number.endswith("]"):
        host, number = authority, "" if port is None else str(port)
    if not _PORT.fullmatch(number) or int(number) > 65535:
        raise BadHost("a port is a number from 1 to 65535")
    return canonical(host), int(number)


def join(host: str, port: int) -> str:
    """
    >>> join("::1", 8080)
    '[::1]:8080'
    """
    return f"{bracketed(host)}:{port}"


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _ipv6(text: str) -> IPv6Address:
    try:
        if not text.endswith("]") or "%" in text:
            raise BadHost("an IPv6 address is written in brackets, without a zone")
        found = IPv6Address(text[1:-1])
    except AddressValueError:
        raise BadHost("what is in brackets is not an IPv6 address") from None
    if found.ipv4_mapped is not None:
        raise BadHost("an IPv4 address is written as one")
    return found


def _ipv4(name: str, text: str) -> IPv4Address:
    try:
        if text.endswith("."):
            raise BadHost("an address ends with a number")
        return IPv4Address(name)  # takes four decimal numbers without leading zeros, and nothing else
    except AddressValueError:
        raise BadHost("an IPv4 address is written as four decimal numbers") from None
