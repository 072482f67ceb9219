"""What a guest is told when something does not get out. No word of how the host's network looks."""

import re

from holdfast.egress.allowed import AllowList
from holdfast.egress.log import Reason, printable

_STATUSES: dict[Reason, int] = {
    "not_allowed": 403,
    "withheld": 403,
    "not_public": 403,
    "malformed": 400,
    "not_tls": 400,
    "wrong_name": 403,
    "too_large": 431,
    "too_slow": 408,
    "too_many": 503,
    "unknown_host": 502,
    "unreachable": 502,
    "not_noted": 503,
    "broken_upstream": 502,
}
_SHOWN = 20
_CONTROL = re.compile(r"[^\x20-\x7e]")


class Refused(Exception):
    """It does not get out, or no answer comes back."""

    def __init__(self, reason: Reason, text: str, *, status: int | None = None) -> None:
        super().__init__(text)
        self.reason: Reason = reason
        self.text = text
        """One sentence in ASCII; it goes into the status line too, which is all that many clients show of a tunnel."""
        self.status = status or _STATUSES[reason]


def not_allowed(allowed: AllowList, authority: str) -> Refused:
    """With how to allow it: whoever reads this is often a model, and can ask for it."""
    listed = allowed.texts()
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return Refused(
        "not_allowed",
        f"{printable(authority)} is not in this session's egress list. Allowed: {', '.join(listed[:_SHOWN])}{more}. "
        f'Whoever opens the session can allow a host: egress=["api.example.com"]',
    )


def answer(refused: Refused) -> bytes:
    text = _CONTROL.sub("?", refused.text)
    phrase = f"{refused.reason}: {text}"[:200]
    body = f"{text} [{refused.reason}]\n".encode()
    return (
        f"HTTP/1.1 {refused.status} {phrase}\r\n"
        f"X-Holdfast-Egress: {refused.reason}\r\n"
        "Content-Type: text/plain\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    ).encode() + body


def alert(refused: Refused) -> bytes:
    """The same inside a tunnel, where only TLS is understood: internal_error, access_denied or unrecognized_name."""
    description = {"wrong_name": 112, "unreachable": 80, "not_noted": 80}.get(refused.reason, 49)
    return bytes([21, 3, 1, 0, 2, 2, description])
