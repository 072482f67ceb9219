"""Budget of steps: what reading a text may cost, counted and not timed, so that it is the same on every machine.

A step is a node that is looked at, or a copy of about as much work: 0.5 to 2 microseconds. Everything in this package
that walks, joins or scans takes its steps before it does so.
"""

import ast
from collections.abc import Iterator

IN_LOOP = 30_000
"""What the event loop gives a text. A cell of 200 ordinary lines takes half of it."""
ASIDE = 2_000_000
"""What the process for large texts gives: some two seconds."""
HINTS = 10_000
"""For names that are like those that a cell lacks."""


class TooManySteps(Exception):
    """The budget is used up: what was being looked at is not looked at."""


class Steps:
    """Guards the steps that are left."""

    __slots__ = ("left",)

    def __init__(self, most: int = ASIDE) -> None:
        self.left = most

    def take(self, number: int = 1) -> None:
        self.left -= number
        if self.left < 0:
            raise TooManySteps

    def walk(self, node: ast.AST) -> Iterator[ast.AST]:
        """`ast.walk`, counted."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            yield node
            children = list(ast.iter_child_nodes(node))
            self.take(1 + len(children))
            waiting.extend(reversed(children))
