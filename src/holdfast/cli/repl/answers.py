"""`input()` of a cell, answered at the terminal.

It is read in a thread of its own while the main one shows output. The cell may end first (Ctrl-C, its deadline): then
nobody must be left there who waits for a line, for it would be the next cell's.
"""

import contextlib
import os
import select
import sys
import termios
import threading
from collections.abc import Iterator
from typing import Self

from holdfast.cli.screen import Screen

_MOST_BYTES = 1 << 16


class Answers:
    """Answers one run; `with` ends the waiting."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._terminal = sys.stdin.fileno()
        self._over, self._end = os.pipe()
        self._asking = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        os.close(self._end)
        with self._asking:  # whoever waits has heard it
            os.close(self._over)
            self._over = -1

    def ask(self, prompt: str, password: bool) -> str:
        """One line. End of input is an empty answer, as is the end of the run, which nobody reads any more."""
        with self._asking:
            if self._over < 0:
                return ""
            self._screen.stdout(prompt)
            with _unseen(self._terminal) if password else contextlib.nullcontext():
                ready, _, _ = select.select([self._terminal, self._over], [], [])
                line = os.read(self._terminal, _MOST_BYTES) if self._over not in ready else b""
        if password or not line.endswith(b"\n"):
            self._screen.stdout("\n")
        return line.decode(errors="replace").rstrip("\r\n")


@contextlib.contextmanager
def _unseen(terminal: int) -> Iterator[None]:
    before = termios.tcgetattr(terminal)
    hidden = [*before]
    hidden[3] = before[3] & ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSADRAIN, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
