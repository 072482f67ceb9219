"""What is said about each attempt to get out. All text in it came from a guest: bounded, printable ASCII, one line."""

import re
from typing import Literal

import msgspec

MOST_REFUSALS = 100
"""Of one run; those past it are counted."""
LONGEST_TARGET = 500
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")

Reason = Literal[
    "not_allowed",       # host or port is not listed
    "withheld",          # nothing gets out of this run: it is a rehearsal
    "not_public",        # the name leads to an address that only a listed address may lead to
    "malformed",         # it is not HTTP as we read it, or a target that can be read in two ways
    "not_tls",           # a tunnel in which no TLS begins
    "wrong_name",        # a tunnel in which TLS begins for another host
    "too_large",         # the head of a request
    "too_slow",          # the head of a request, the beginning of TLS; or nothing moved at all
    "too_many",          # connections at once, or requests of one run
    "unknown_host",      # the name has no address
    "unreachable",       # no address of it takes a connection
    "not_noted",         # it could not be written down, so it did not leave
    "broken_upstream",   # the answer is not HTTP, or ends before its end
]  # fmt: skip


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """A request, or a tunnel, that is about to leave. Noted before its first byte does."""

    run: str
    at: float
    method: str
    """`CONNECT` for a tunnel: what is asked for inside is encrypted."""
    target: str
    """`http://host/path` without its query (it may hold secrets; "?..." stands for it), or `host:port` of a tunnel."""
    host: str
    port: int


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that came to nothing. If it had left before (`broken_upstream`), it is noted as well."""

    run: str
    at: float
    reason: Reason
    method: str = ""
    """Empty where none was understood."""
    target: str = ""


class Log:
    """Of one run. Read it when the run's `Proxy.open` has been left; before that it grows."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.sent = 0
        """Requests and tunnels that were noted."""
        self.bytes_out = 0
        self.bytes_in = 0
        """Bodies, and all that went through tunnels."""
        self.refusals: list[Refusal] = []
        self.refused = 0
        """All of them, also those that are not kept."""

    def refuse(self, refusal: Refusal) -> None:
        self.refused += 1
        if len(self.refusals) < MOST_REFUSALS:
            self.refusals.append(refusal)


def printable(text: str, longest: int = LONGEST_TARGET) -> str:
    """
    >>> printable("http://a/ b\\n")
    'http://a/%20b%0A'
    """
    cut = text[: longest + 1]
    escaped = _UNPRINTABLE.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode(errors="replace")), cut)
    return escaped if len(escaped) <= longest else escaped[: longest - 3] + "..."
