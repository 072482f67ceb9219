"""Syntax errors, found before anything starts."""

import ast
import sys

from holdfast.preflight import ipython
from holdfast.records import Finding

_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_MOST_SHOWN = 120


def check_syntax(code: str, *, python: str = "") -> Finding | None:
    """The syntax error that would keep the cell from running; None if there is none, or if it cannot be told.

    `python` is the version that will run the code. Where it is newer than ours, what we take for an error may be
    syntax that we do not know yet.

    >>> check_syntax("x = 1\\nif x\\n    y").line
    2
    >>> check_syntax("%%bash\\nfor f in *; do echo $f; done")
    """
    cell = ipython.read(code)
    error = cell.error or _compile_error(cell.tree)
    if error is None or _is_newer(python):
        return None
    return Finding(code="syntax", message=_message(error), line=error.lineno, hint=_hint(error, code))


def _compile_error(tree: ast.Module | None) -> SyntaxError | None:
    """What the grammar allows and the compiler does not: `return` outside of a function, `break` without a loop."""
    if tree is None:
        return None
    try:
        compile(tree, ipython.CELL_NAME, "exec", _FLAGS, dont_inherit=True)
    except SyntaxError as error:
        return error
    except (RecursionError, MemoryError, ValueError, TypeError):
        return None
    return None


def _is_newer(python: str) -> bool:
    parts = python.split(".")[:2]
    return all(part.isdecimal() for part in parts) and tuple(map(int, parts)) > sys.version_info[: len(parts)]


def _message(error: SyntaxError) -> str:
    where = f" in line {error.lineno}" if error.lineno else ""
    return f"{type(error).__name__}{where}: {error.msg}; nothing was started"


def _hint(error: SyntaxError, code: str) -> str:
    lines = code.split("\n")
    if not error.lineno or error.lineno > len(lines):
        return "the code ends too early: a bracket, a string or a block is still open"
    return f"line {error.lineno} reads: {lines[error.lineno - 1].strip()[:_MOST_SHOWN]}"
