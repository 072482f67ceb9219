"""What this kernel ran, for the front end's history: kept in memory, and gone with the kernel."""

import fnmatch
from typing import Any, NamedTuple

_SESSION = 1
_MOST = 10_000


class Line(NamedTuple):
    number: int
    code: str
    output: str | None


class History:
    def __init__(self) -> None:
        self._lines: list[Line] = []

    def add(self, number: int, code: str, output: str | None) -> None:
        self._lines.append(Line(number, code, output))
        del self._lines[:-_MOST]

    def tail(self, n: int | None) -> list[Line]:
        return self._lines[-n:] if n else list(self._lines)

    def range(self, start: int | None, stop: int | None) -> list[Line]:
        """By the cells' numbers, `stop` excluded. (Lines of an earlier session: there is none.)"""
        return [
            line for line in self._lines if line.number >= (start or 0) and (stop is None or line.number < stop)
        ]  # fmt: skip

    def search(self, pattern: str | None, n: int | None, *, unique: bool) -> list[Line]:
        """Those that a glob fits, the latest `n` of them; if unique, of equal ones the latest."""
        found = [line for line in self._lines if fnmatch.fnmatchcase(line.code, pattern or "*")]
        if unique:
            found = sorted({line.code: line for line in found}.values(), key=self._lines.index)
        return found[-n:] if n else found


def told(lines: list[Line], *, output: bool) -> list[Any]:
    """As the protocol has it."""
    return [
        (_SESSION, line.number, (line.code, line.output) if output else line.code) for line in lines
    ]  # fmt: skip
