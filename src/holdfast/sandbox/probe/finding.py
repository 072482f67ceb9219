"""What a probe says about one primitive."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One primitive."""

    name: str
    required: bool
    ok: bool | None
    detail: str
    """What was seen."""
    why: str
    """What it is for, or what is lost without it."""
    remedy: str = ""
    """The command that brings it, where it is missing."""
