"""Everything that a cell's text alone shows, within a budget of steps.

The event loop of the host reads small texts itself (`read_here`). All others are read by a process that can be killed
(`reader`). What neither has read is not looked at, and the reading says why.
"""

import re
from collections.abc import Container

import msgspec

from holdfast.preflight import ipython
from holdfast.preflight.forecast import forecast_of
from holdfast.preflight.ledger import Forecast
from holdfast.preflight.names import lacking_names
from holdfast.preflight.scopes import cell_bindings
from holdfast.preflight.steps import IN_LOOP, Steps, TooManySteps
from holdfast.preflight.syntax import check_syntax
from holdfast.records import Finding, Noun

_FREE = 250
"""Characters that are too few for any harm."""
_MOST_CHARACTERS, _MOST_TOKENS = 20_000, 2_000
"""Of a text that the event loop parses and compiles: the parser and the compiler count no steps. The worst texts of
this size take them some 30 ms."""
_MOST_FINALLY, _MOST_TOKENS_WITH_FINALLY = 3, 500
"""Python compiles the body of a `finally` twice, and once more for each `return` out of its `try`: twenty of them,
nested, in 600 characters, take it seconds."""
_TOKEN = re.compile(r"\w+|-{3,}|={3,}|#{3,}|[^\w\s]|\n")


class Reading(Noun, frozen=True, kw_only=True):
    """What the text shows."""

    syntax: Finding | None = None
    lacking: list[str] = msgspec.field(default_factory=list)
    """Names that it looks up, and that neither it nor Python binds."""
    binds: list[str] = msgspec.field(default_factory=list)
    forecast: Forecast = msgspec.field(default_factory=Forecast)
    unread: str = ""
    """Why it was not looked at; then all else is empty."""


def read(code: str, steps: Steps, *, live: Container[str] = ()) -> Reading:
    """Raises `TooManySteps` or `RecursionError` where the text is too much. Names that are live are not lacking.

    >>> reading = read("total = price * count", Steps(), live={"price"})
    >>> reading.lacking, reading.binds
    (['count'], ['total'])
    """
    if len(code) > ipython.MOST_CHARACTERS:
        return Reading(unread=f"it has {len(code):,} characters, and at most {ipython.MOST_CHARACTERS:,} are read")
    cell = ipython.read(code)
    syntax = check_syntax(code)
    return Reading(
        syntax=syntax,
        lacking=[] if syntax else lacking_names(cell, live, steps),
        binds=sorted(cell_bindings(cell.tree, steps)) if cell.tree else [],
        forecast=forecast_of(cell, steps),
    )


def read_here(code: str, *, live: Container[str] = ()) -> Reading | None:
    """The reading of a small text; None: it is more than an event loop has time for."""
    if len(code) > ipython.MOST_CHARACTERS:
        return read(code, Steps())
    if not _is_small(code):
        return None
    try:
        return read(code, Steps(IN_LOOP), live=live)
    except (TooManySteps, RecursionError):
        return None


def _is_small(code: str) -> bool:
    if len(code) <= _FREE:
        return True
    finallys = code.count("finally")
    most = _MOST_TOKENS_WITH_FINALLY if finallys else _MOST_TOKENS
    if len(code) > _MOST_CHARACTERS or finallys > _MOST_FINALLY:
        return False
    return len(code) <= most or sum(1 for _ in _TOKEN.finditer(code)) <= most
