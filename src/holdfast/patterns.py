"""Finds the files that declared paths, patterns and forecasts mean, within a budget of steps.

1. `*`, `?` and `[…]` stay within one component of a path, and `**` stands for any number of components.
2. A file that has the very name of a pattern is what the pattern means.
3. Callers choose patterns and guests choose file names. So all work is counted: a pattern is compiled once, most files
   are ruled out by one comparison, and `PatternsTooCostly` ends what takes more steps than the budget has.

Paths and patterns are text as `paths.to_text` writes it.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import translate

from holdfast import paths
from holdfast.errors import PatternsTooCostly

HINT = "declare fewer patterns, or name the directory that the files are in: plots/*.png, not **/*.png"
MOST_STEPS = 3_000_000
"""For all patterns of one request against all files: about two seconds of a thread."""
IN_LOOP = 10_000
"""What the event loop gives: a few milliseconds."""
_AT_A_STRETCH = 1_000
"""Steps between two moments at which other threads go on: less than a millisecond. Python itself makes a thread give
way after five, and a run of another session waits for that dozens of times."""
_GIVES_WAY_S = 0.0001
"""Time enough for another thread to take Python's lock."""
_MARKS = "*?["
_ANY = "**"
_COPIED = 64
"""Characters that are split or searched in the time of one step."""
_COMPARED = 4
"""Paths whose ends are compared in the time of one step."""
_LOOKED_AT = 2
_COMPILED = 4
"""Steps to compile one character of a regular expression."""
_TRIED = 100
"""Pairs of characters that a regular expression tries in the time of one step."""

Matches = Callable[[str], bool]


def is_pattern(text: str) -> bool:
    """
    >>> is_pattern("plots/*.png"), is_pattern("plots/a.png")
    (True, False)
    """
    return any(mark in text for mark in _MARKS)


class Files:
    """The files of one moment. All that is asked of them takes from one budget."""

    def __init__(self, files: Iterable[str], *, most_steps: int = MOST_STEPS) -> None:
        self._files = files if isinstance(files, Mapping) else dict.fromkeys(files)
        self._left = most_steps
        self._gives_way_at = most_steps - IN_LOOP  # what takes no more may be done in the event loop
        self._by_name: dict[str, list[str]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def take(self, steps: int = 1) -> None:
        """Count work on these files. Raises PatternsTooCostly when the budget is used up."""
        self._left -= steps
        if self._left < 0:
            raise PatternsTooCostly(
                f"the patterns take more than {MOST_STEPS:,} comparisons with the {len(self._files):,} files there are",
                hint=HINT,
            )
        if self._left < self._gives_way_at:
            self._gives_way_at = self._left - _AT_A_STRETCH
            time.sleep(_GIVES_WAY_S)

    def meant_by(self, pattern: str) -> list[str]:
        """The files that a declared path or pattern means, in their order.

        >>> Files(["plots/a.png", "plots/old/b.png", "a.png"]).meant_by("plots/*.png")
        ['plots/a.png']
        >>> Files(["a1.csv", "a[1].csv"]).meant_by("a[1].csv")
        ['a[1].csv']
        """
        if pattern in self._files:
            return [pattern]
        if not is_pattern(pattern):
            return []
        wanted = _Pattern(pattern, self.take)
        return [path for path in self._candidates(wanted) if wanted.covers(path)]

    def foreseen_by(self, forecast: str) -> list[str]:
        """The files that a forecast path means. Its `*` is what the code computes, "/" included.

        >>> Files(["plots/old/b.png", "a.csv"]).foreseen_by("*.png")
        ['plots/old/b.png']
        """
        if forecast in self._files:
            return [forecast]
        if "*" not in forecast:
            return []
        matches = _matcher(forecast.replace("[", "[[]") if "?" in forecast else forecast, self.take, is_class="?")
        return [path for path in self._files if matches(path)]

    def _candidates(self, wanted: "_Pattern") -> list[str]:
        """What is left when the text before and after the wildcards is compared, which is quick."""
        among = self._named(wanted.name) if wanted.name else self._files
        self.take(len(among) // _COMPARED)
        head, tail = wanted.head, wanted.tail
        return [path for path in among if path.startswith(head) and path.endswith(tail)]

    def _named(self, name: str) -> list[str]:
        if not self._by_name:
            self.take(len(self._files))
            for path in self._files:
                self._by_name.setdefault(path.rpartition("/")[2], []).append(path)
        return self._by_name.get(name, [])


class _Pattern:
    """One pattern, compiled."""

    def __init__(self, pattern: str, take: Callable[[int], None]) -> None:
        components = _without_repeats(pattern.split("/"))
        self.head, self.tail = _ends(pattern)
        self.name = "" if is_pattern(components[-1]) else components[-1]
        self._take = take
        self._slashes = None if _ANY in components else len(components) - 1
        self._components = [None if each == _ANY else _matcher(_name(each), take) for each in components]

    def covers(self, path: str) -> bool:
        """Looks at the number of components and at the last one first: that rules out most files."""
        self._take(_LOOKED_AT)
        if self._slashes is not None and path.count("/") != self._slashes:
            return False
        last = self._components[-1]
        if last is not None and not last(_name(path.rpartition("/")[2])):
            return False
        return len(self._components) == 1 or self._covers(path)

    def _covers(self, path: str) -> bool:
        """Goes through pattern and path together, and back to the last `**` alone: no pattern makes this slow."""
        self._take(1 + len(path) // _COPIED)
        pattern, names = self._components, _name(path).split("/")
        at, here, star, after = 0, 0, -1, 0
        while here < len(names):
            self._take(1)
            matches = pattern[at] if at < len(pattern) else _never
            if matches is None:
                at, star, after = at + 1, at, here
                if at == len(pattern):
                    return True
            elif matches(names[here]):
                at, here = at + 1, here + 1
            elif star >= 0:
                at, here, after = star + 1, after + 1, after + 1
            else:
                return False
        return all(each is None for each in pattern[at:])


def _ends(pattern: str) -> tuple[str, str]:
    """The text before the first wildcard and after the last one. `**` may stand for nothing, so a slash beside it is
    not part of them."""
    first = min(at for mark in _MARKS if (at := pattern.find(mark)) >= 0)
    last = max(pattern.rfind(mark) for mark in _MARKS)
    tail = "" if "[" in pattern else pattern[last + 1 :]
    return pattern[:first].removesuffix("/"), tail.removeprefix("/")


def _never(name: str) -> bool:
    return False


def _without_repeats(components: list[str]) -> list[str]:
    return [each for at, each in enumerate(components) if at == 0 or each != _ANY or components[at - 1] != _ANY]


def _name(text: str) -> str:
    """The name itself: an escape is one character to a pattern, not four."""
    return text if "\\" not in text else os.fsdecode(paths.to_bytes(text))


def _matcher(pattern: str, take: Callable[[int], None], *, is_class: str = "?[") -> Matches:
    """A function that tells whether a name fits. Only classes of characters need a regular expression."""
    if any(mark in pattern for mark in is_class):
        return _by_expression(pattern, take)
    return _by_stars(pattern, take) if "*" in pattern else pattern.__eq__


def _by_expression(pattern: str, take: Callable[[int], None]) -> Matches:
    take(_COMPILED * len(pattern))
    expression = re.compile(translate(pattern))

    def matches(name: str) -> bool:
        take(2 + len(name) * len(pattern) // _TRIED)
        return expression.match(name) is not None

    return matches


def _by_stars(pattern: str, take: Callable[[int], None]) -> Matches:
    first, *between, last = pattern.split("*")
    pieces = [piece for piece in between if piece]
    least = len(first) + len(last) + sum(map(len, pieces))

    def matches(name: str) -> bool:
        if len(name) < least or not name.startswith(first) or not name.endswith(last):
            return False
        at, end = len(first), len(name) - len(last)
        for piece in pieces:
            take(1 + len(name) // _COPIED)
            if (found := name.find(piece, at, end)) < 0:
                return False
            at = found + len(piece)
        return True

    return matches
