"""Writing to a person's terminal, where untrusted text must stay text.

A guest's output may hold escape sequences: to a terminal they are commands (set the title, write the clipboard,
answer as if typed). Colours pass; the rest is shown, not obeyed. A pipe or a file gets every byte as it is.

That is for what the guest prints. What we say ourselves goes through `visible` first, on a terminal and in a pipe.
"""

import contextlib
import io
import re
import sys
from typing import TextIO

import msgspec
from rich.console import Console

from holdfast.visible import visible_json

_PLAIN_WIDTH = 110
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_UNFINISHED = re.compile(r"\x1b(\[[0-9;:]{0,32})?\Z")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """
    >>> harmless("\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07") == "\\x1b[31mred\\x1b[0m ␛]0;title␇"
    True
    """
    parts, end = [], 0
    for colour in _COLOUR.finditer(text):
        parts += [_shown(text[end : colour.start()]), colour[0]]
        end = colour.end()
    return "".join([*parts, _shown(text[end:])])


def _shown(text: str) -> str:
    return _CONTROL.sub(lambda found: chr(0x2400 + ord(found[0])) if found[0] < " " else "�", text)


class Writer:
    """One of our standard streams, as the place where a guest's output goes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._guarded = stream.isatty()
        self._held = ""
        self._column = 0
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> None:
        """As it comes: flushed at once."""
        if self._guarded:
            text, self._held = self._held + text, ""
            if cut := _UNFINISHED.search(text):  # a colour may come in two pieces
                text, self._held = text[: cut.start()], cut[0]
            text = harmless(text)
        if text:
            self._column = len(text) - 1 - text.rfind("\n")
            self._stream.write(text)
            self._stream.flush()

    @property
    def at_line_start(self) -> bool:
        """What comes next begins a line, or another stream than the terminal's is meant."""
        return not (self._guarded and self._column)

    def line(self, text: str) -> None:
        """A line of its own, whatever was written before."""
        self.write(("\n" if self._column else "") + text.rstrip("\n") + "\n")


def console(*, stderr: bool = False) -> Console:
    """For what we say ourselves. Where nobody tells us a width (a log, a pipe), lines are of a readable length."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    made = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not made.is_terminal:
        made.width = _PLAIN_WIDTH
    return made


def print_json(value: object) -> None:
    """One line on stdout. Names in it are the guest's, so what cannot be seen is escaped: it means the same."""
    sys.stdout.write(visible_json(msgspec.json.encode(value).decode()) + "\n")
    sys.stdout.flush()


def silence(stream: TextIO) -> None:
    """After a broken pipe: Python's own flush at exit is not to complain as well."""
    with contextlib.suppress(OSError, ValueError):
        stream.close()
