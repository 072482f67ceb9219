"""Where a cell ends: while it is typed, and in a text of cells.

As in IPython: what Python could still go on with is not complete, a block ends with an empty line, and so does a
`%%cell`. Magics, `!commands` and `name?` are statements like any other.
"""

import ast
import codeop
import re
from collections.abc import Iterator

from holdfast.preflight.ipython import as_python, ignore_warnings, parse

_MARK = re.compile(r"^# ?%%.*$", re.MULTILINE)
_GOES_ON = re.compile(r"[ \t]|(else|elif|except|finally|case)\b")
"""A line that belongs to the block before it, also after an empty one."""
_LEAVES = re.compile(r"\s*(return|pass|raise|break|continue)\b")
_STEP = "    "

_compile = codeop.CommandCompiler()
_compile.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def is_complete(text: str) -> bool:
    """Whether Enter should run it. What is wrong is complete: running it says what is wrong.

    >>> is_complete("for x in range(3):"), is_complete("x = (1,"), is_complete("!ls"), is_complete("1 +* 2")
    (False, False, True, True)
    """
    stripped = text.strip()
    if not stripped or is_command(text):
        return True
    ended = not text[text.rfind("\n") + 1 :].strip()
    if stripped.startswith("%%"):
        return ended
    python = as_python(text)
    ignore_warnings()
    try:
        if _compile(python, symbol="exec") is None:
            return False
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return True
    return ended or not _ends_in_block(python)


def is_command(text: str) -> bool:
    """Ours (`:status`), not Python."""
    return text.lstrip().startswith(":")


def is_end(text: str) -> bool:
    """What people type to leave; inside it would only end a cell."""
    return text.strip().removesuffix("()") in ("exit", "quit")


def indentation(text: str) -> str:
    """What the line after this text begins with.

    >>> indentation("def f(x):"), indentation("def f(x):\\n    return x")
    ('    ', '')
    """
    line = text[text.rfind("\n") + 1 :]
    indent = line[: len(line) - len(line.lstrip())]
    if line.split("#")[0].rstrip().endswith(":") and not is_command(line):
        return indent + _STEP
    return indent.removesuffix(_STEP) if _LEAVES.match(line) else indent


def split(text: str) -> list[str]:
    """The cells of a text: between `# %%` lines where there are any, else between empty lines.

    >>> split("x = 1\\n\\ndef f():\\n    y\\n\\n    z\\n\\nf()")
    ['x = 1', 'def f():\\n    y\\n\\n    z', 'f()']
    """
    pieces = _MARK.split(text) if _MARK.search(text) else list(_paragraphs(text))
    return [piece.strip("\n") for piece in pieces if piece.strip()]


def _paragraphs(text: str) -> Iterator[str]:
    """Empty lines within a block, a bracket or a string separate nothing."""
    cell = ""
    for paragraph in re.split(r"\n(?:[ \t]*\n)+", text.replace("\r\n", "\n")):
        if cell and not _GOES_ON.match(paragraph) and is_complete(cell + "\n"):
            yield cell
            cell = ""
        cell = f"{cell}\n\n{paragraph}" if cell else paragraph
    yield cell


def _ends_in_block(python: str) -> bool:
    tree, _ = parse(python)
    last = tree.body[-1] if tree and tree.body else None
    return isinstance(getattr(last, "body", None), list) and last is not None and last.end_lineno != last.lineno
