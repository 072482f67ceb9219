"""Which hosts a session may speak to, as the user lists them."""

from collections.abc import Sequence
from typing import Self

import msgspec

from holdfast.egress.names import LONGEST, BadHost, address_of, bracketed, canonical, split
from holdfast.errors import BadEgress

WEB: tuple[int, ...] = (80, 443)
"""The ports of an entry that names none."""
MOST = 200
_HINT = 'write hosts: "api.example.com", "*.example.org" (its subdomains), "api.example.com:8443", "10.1.2.3:8080"'


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list."""

    host: str
    """Canonical; of a wildcard what comes behind `*.`."""
    ports: tuple[int, ...] = WEB
    below: bool = False
    """A wildcard: all that is below the host, and not the host."""

    def allows(self, host: str, port: int) -> bool:
        named = host.endswith(f".{self.host}") if self.below else host == self.host
        return named and port in self.ports

    def __str__(self) -> str:
        host = f"*.{self.host}" if self.below else bracketed(self.host)
        return host if self.ports == WEB else f"{host}:{self.ports[0]}"


class AllowList(msgspec.Struct, frozen=True):
    """What is not listed does not get out. An empty list lets nothing out.

    >>> allowed = AllowList.parse(["api.example.com", "*.example.org:8443"])
    >>> allowed.allows("api.example.com", 443), allowed.allows("example.org", 8443), allowed.allows("10.1.2.3", 80)
    (True, False, False)
    """

    entries: tuple[Entry, ...] = ()

    @classmethod
    def parse(cls, entries: Sequence[str]) -> Self:
        """`BadEgress` names the first entry that cannot be used, and says how to write it."""
        if isinstance(entries, str):
            raise BadEgress(f"egress={entries[:LONGEST]!r} is not a list", hint=f'write egress=["{entries[:LONGEST]}"]')
        if len(entries) > MOST:
            raise BadEgress(f"egress has {len(entries)} entries", hint=f"list at most {MOST}; a wildcard takes many")
        return cls(tuple(dict.fromkeys(_parse(entry) for entry in entries)))

    def allows(self, host: str, port: int) -> bool:
        """`host` in any spelling that `names.canonical` takes (IPv6 in brackets, or canonical already)."""
        try:
            known = canonical(bracketed(host) if not host.startswith("[") else host)
        except BadHost:
            return False
        return any(entry.allows(known, port) for entry in self.entries)

    def texts(self) -> list[str]:
        """The entries in one spelling each; `parse` takes them back."""
        return [str(entry) for entry in self.entries]


def _parse(entry: object) -> Entry:
    if not isinstance(entry, str):
        raise BadEgress(f"egress has an entry of type {type(entry).__name__}", hint=_HINT)
    try:
        return _read(entry)
    except BadHost as error:
        raise BadEgress(f"egress entry {entry[:LONGEST]!r}: {error}", hint=_HINT) from None


def _read(entry: str) -> Entry:
    if "/" in entry or "@" in entry:
        raise BadHost("it is a URL, or a part of one; only the host is listed, and a port if it is not 80 or 443")
    below = entry.startswith("*.")
    if "*" in entry.removeprefix("*."):
        raise BadHost('a wildcard stands for all that is below a name: "*.example.org"')
    written = entry.removeprefix("*.")
    ports = WEB
    if ":" in written and not written.endswith("]"):
        host, port = split(written)
        ports = (port,)
    else:
        host = canonical(written)
    if below and (address_of(host) is not None or "." not in host):
        raise BadHost("a wildcard stands before a name of at least two parts")
    if host == "localhost" or host.endswith(".localhost"):
        raise BadHost('names never lead to this machine itself; an address that is listed does: "127.0.0.1:8080"')
    return Entry(host=host, ports=ports, below=below)
