"""Trying what a caller declared of a run's outputs, where the run itself was: inside.

1. One answer per probe, in order: why it failed, in words, or nothing. What ends a cell that the host stops ends them
   all: an interrupt, and memory that runs short.
2. Files are opened as what they must be: regular files of the workspace, never through a link, never blocking.
3. Assertions run over a copy of the user's names. The values are not copied: an assertion can change them, and can
   write files, so the host hashes after this and not before.
"""

import ast
import os
import stat
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from holdfast import paths
from holdfast.guest.formats import CHECKS, Unfit
from holdfast.kernel import wire

_MAX_FAILURE = 500
_WHERE = "<assertion>"
_PLAIN = (bool, int, float, str, bytes, type(None), list, tuple, dict, set, frozenset)


def run(probes: Sequence[wire.Probe], namespace: dict[str, Any], *, root: bytes = b"/mnt/data") -> Iterator[str]:
    """Try each."""
    for probe in probes:
        try:
            _try(probe, namespace, root)
            failure = ""
        except Unfit as error:
            failure = _words(str(error))
        except (KeyboardInterrupt, MemoryError):  # out of time or room, and so are all the others
            raise
        except BaseException as error:  # code of the user's, and libraries on broken files, raise what they like
            failure = _words(_summary(error))
        yield failure


def _try(probe: wire.Probe, namespace: dict[str, Any], root: bytes) -> None:
    if not probe.format:
        return _assert(probe.code, dict(namespace))
    if probe.format not in CHECKS:
        raise Unfit(f"nobody here can check {probe.format!r}")
    with open(_open(probe.path, root), "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise Unfit("it is empty")
        CHECKS[probe.format](file, probe)


def _open(path: str, root: bytes) -> int:
    # Not blocking: nobody may ever write to what turns out to be a FIFO.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(os.path.join(root, paths.to_bytes(path)), flags)
    except OSError as error:
        raise Unfit(f"cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Unfit("it is not a regular file")
    return fd


def _assert(code: str, names: dict[str, Any]) -> None:
    """Statements must not raise; a last expression must also be true."""
    statements, last = _compiled(code)
    exec(statements, names)  # noqa: S102 (this is the sandbox)
    if last is not None:
        value = eval(last, names)  # noqa: S307
        if not value:
            raise Unfit(f"it is {_shown(value)}")


def _compiled(code: str) -> tuple[CodeType, CodeType | None]:
    tree = ast.parse(code.strip(), _WHERE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    statements = compile(tree, _WHERE, "exec")
    if not isinstance(last, ast.Expr):
        return statements, None
    return statements, compile(ast.Expression(last.value), _WHERE, "eval")


def _shown(value: Any) -> str:
    """Only what is falsy comes here, so that of plain types little is to be shown."""
    return repr(value) if type(value) in _PLAIN else f"a {type(value).__name__} that is false"


def _summary(error: BaseException) -> str:
    name = type(error).__name__
    try:
        message = str(error)
    except BaseException:  # a `__str__` of the user's
        message = ""
    if message:
        return f"{name}: {message}"
    return "it does not hold" if isinstance(error, AssertionError) else name


def _words(message: str) -> str:
    """Bounded, never empty, and without the lone surrogates that no encoder takes."""
    return (message.encode(errors="replace").decode().strip() or "it failed")[:_MAX_FAILURE]
