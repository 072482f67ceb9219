"""What a request did to a session's computer, and what became of memory when it was taken back."""

import msgspec

from holdfast.kernel.conduct import Conduct, Outcome
from holdfast.model import Memory, RunError, Stray


class Aftermath(msgspec.Struct, frozen=True, kw_only=True):
    """What became of memory."""

    memory: Memory
    discarded: list[str] = []
    not_restored: list[str] = []
    unprotected: str | None = None


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """What a request did, before anybody has decided what becomes of it."""

    conduct: Conduct
    outcome: Outcome
    error: RunError | None
    strays: list[Stray]
    peak_bytes: int | None
    given_up: BaseException | None
    """The caller is gone (cancelled), or its callback failed: the cell ended with it."""
