"""What can be said of a cell before it runs, from its text alone.

1. Nothing here runs the code, reads a file or raises: what cannot be understood is unknown, and says nothing.
2. A finding is only made where we are sure. A false alarm would cost the caller more than the error it warns of.
3. Code is hostile input. Work is bounded by its length; what is longer than `ipython.MOST_CHARACTERS` is not read.
"""

from collections.abc import Container, Mapping, Sequence

from holdfast.preflight.forecast import forecast
from holdfast.preflight.ledger import Forecast
from holdfast.preflight.names import Gone, explain_missing, missing_names
from holdfast.preflight.syntax import check_syntax
from holdfast.records import Finding, Lost
from holdfast.store.rows import NameRow

__all__ = ["Forecast", "Gone", "check_syntax", "examine", "explain_missing", "forecast", "missing_names"]


def examine(
    code: str,
    *,
    live: Container[str],
    past: Mapping[str, NameRow],
    losses: Sequence[Lost] = (),
    generation: int = 1,
    python: str = "",
) -> list[Finding]:
    """All findings on a cell: the syntax error alone if it has one, else each name that the kernel lacks.

    >>> [finding.message for finding in examine("total = df.sum()", live={}, past={})]
    ['`df` is not in memory: no run has defined it']
    """
    broken = check_syntax(code, python=python)
    if broken:
        return [broken]
    missing = missing_names(code, live)
    return [explain_missing(name, past=past, losses=losses, generation=generation) for name in missing]
