"""What can be said of a cell before it runs, from its text alone.

1. Nothing here runs the code, reads a file or raises: what cannot be understood is unknown, and says nothing.
2. A finding is only made where we are sure. A false alarm would cost the caller more than the error it warns of.
3. Code is hostile input. All work on it is counted (`steps`). What is more than an event loop has time for is read by
   a process of its own (`reader`). What is more than that process may spend is not looked at, and a finding says so.
"""

from collections.abc import Container, Mapping, Sequence

from holdfast.preflight.forecast import forecast
from holdfast.preflight.ledger import Forecast
from holdfast.preflight.names import Gone, explain_missing, likeness, missing_names
from holdfast.preflight.reader import read_aside
from holdfast.preflight.reading import Reading, read, read_here
from holdfast.preflight.steps import HINTS, Steps, TooManySteps
from holdfast.preflight.syntax import check_syntax
from holdfast.records import Finding, Lost
from holdfast.store.rows import NameRow

__all__ = [
    "HINTS", "Forecast", "Gone", "Reading", "Steps", "TooManySteps", "check_syntax", "examine", "explain_missing",
    "findings", "forecast", "likeness", "missing_names", "read_aside", "read_here",
]  # fmt: skip

_MOST_EXPLAINED = 100
"""Missing names that have a finding each; those after them have one together."""


def examine(
    code: str,
    *,
    live: Container[str],
    past: Mapping[str, NameRow],
    losses: Sequence[Lost] = (),
    generation: int = 1,
) -> list[Finding]:
    """All findings on a cell: the syntax error alone if it has one, else each name that the kernel lacks.

    >>> [finding.message for finding in examine("total = df.sum()", live={}, past={})]
    ['`df` is not in memory: no run has defined it']
    """
    try:
        reading = read(code, Steps(), live=live)
    except (TooManySteps, RecursionError):
        reading = Reading(unread="it is too much")
    return findings(reading, live=live, past=past, losses=losses, generation=generation)


def findings(
    reading: Reading, *, live: Container[str], past: Mapping[str, NameRow], losses: Sequence[Lost], generation: int
) -> list[Finding]:
    """The same of a text that is read."""
    if reading.unread:
        return [_not_looked_at(reading.unread)]
    if reading.syntax:
        return [reading.syntax]
    missing, steps = [name for name in reading.lacking if name not in live], Steps(HINTS)
    found = [
        explain_missing(name, past=past, losses=losses, generation=generation, steps=steps)
        for name in missing[:_MOST_EXPLAINED]
    ]
    return found + ([_more_missing(rest)] if (rest := missing[_MOST_EXPLAINED:]) else [])


def _not_looked_at(why: str) -> Finding:
    message = f"the cell was not looked at before it ran: {why}"
    hint = "put data in a file under /mnt/data, or split the cell"
    return Finding(code="not_looked_at", message=message, hint=hint)


def _more_missing(names: list[str]) -> Finding:
    message = f"{len(names):,} more names are not in memory, `{names[0]:.100}` is the first of them"
    return Finding(code="name_missing", message=message, hint="define them in this run", names=names)
