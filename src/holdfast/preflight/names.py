"""Names that a cell needs and the kernel lacks.

The cell is followed in the order in which it runs. A name is missing where it is looked up and nothing before can have
bound it: neither the cell on any path to there, nor an earlier run, nor Python or IPython themselves. What functions
look up when they are called counts only if nothing in the cell binds it at all. Wherever the text leaves a doubt
(`doubts`), nothing is missing.
"""

import ast
import builtins
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from difflib import SequenceMatcher
from itertools import islice

from holdfast.preflight import doubts, ipython, scopes
from holdfast.preflight.steps import HINTS, Steps, TooManySteps
from holdfast.records import Finding, Lost, Noun
from holdfast.store.rows import NameRow

# Site's additions are named: a host started with -S has none of them.
_KNOWN = frozenset(dir(builtins)) | frozenset(
    re.findall(
        r"\w+",
        "__annotations__ __builtin__ __builtins__ __class__ __doc__ __loader__ __module__ __name__ __package__ "
        "__qualname__ __spec__ copyright credits display exit get_ipython help license quit PythonFinalizationError "
        "In Out _ __ ___ _i _ii _iii _ih _oh _dh _exit_code",
    )
)
_COMPARED = 10
"""Pairs of characters that are compared in the time of one step."""
_COPIED = 50
"""Names of a set that are copied in the time of one step."""
_HISTORY = re.compile(r"_i?\d+")  # IPython's `_12` and `_i12`


def missing_names(code: str, live: Container[str]) -> list[str]:
    """Names that the cell looks up and that nothing has bound, in the order of their first use.

    >>> missing_names("total = price * count", live={"price"})
    ['count']
    """
    with suppress(TooManySteps, RecursionError):
        return lacking_names(ipython.read(code), live, Steps())
    return []


def lacking_names(cell: ipython.Cell, live: Container[str], steps: Steps) -> list[str]:
    """The same of a cell that is read; raises where it is too much."""
    return [] if cell.tree is None or cell.binds_unseen else _missing(cell.tree, live, steps)


def _missing(tree: ast.Module, live: Container[str], steps: Steps) -> list[str]:
    flow = _Flow(steps)
    flow.block(tree.body)
    needed = [name for name in flow.needed if not _is_there(name.id, live)]
    deferred = [name for name in flow.deferred if not _is_there(name.id, live)]
    # Most cells lack nothing, and end here: what follows reads the whole cell again.
    if not (needed or deferred) or doubts.binds_unseen(tree, steps):
        return []
    anywhere = scopes.bindings(tree.body, steps)
    excused = doubts.guarded_names(tree, steps) | scopes.declared_global(tree, steps)
    lacking = needed + [name for name in deferred if name.id not in anywhere]
    in_order = sorted(lacking, key=lambda name: (name.lineno, name.col_offset))
    return list(dict.fromkeys(name.id for name in in_order if name.id not in excused))


def _is_there(name: str, live: Container[str]) -> bool:
    return name in live or _is_known(name)


def _is_known(name: str) -> bool:
    return name in _KNOWN or _HISTORY.fullmatch(name) is not None


class _Flow(ast.NodeVisitor):
    """Goes through a cell in the order in which it runs; `bound` are the names that may be bound by then."""

    def __init__(self, steps: Steps) -> None:
        self.bound: set[str] = set()
        self.needed: list[ast.Name] = []
        self.deferred: list[ast.Name] = []
        """Looked up only when a function is called."""
        self._steps = steps
        self._loop: frozenset[str] = frozenset()
        """Names that an earlier round of the loops around may have bound."""
        self._straight = True
        """Whether what stands here is sure to run, and runs once."""
        self._targets: frozenset[str] = frozenset()
        """Names of the comprehensions around."""
        self._annotations_run = True

    def visit(self, node: ast.AST) -> None:
        """As `ast.NodeVisitor` does it, with one frame for each node instead of two, and counted."""
        self._steps.take()
        visitor = getattr(self, "visit_" + type(node).__name__, None)
        if visitor is not None:
            visitor(node)
            return
        for child in ast.iter_child_nodes(node):
            self.visit(child)

    def block(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _branches(self, *blocks: Sequence[ast.AST]) -> None:
        before, straight = self.bound, self._straight
        self._straight = False
        for block in blocks:
            self._steps.take(len(before) // _COPIED)
            self.bound = before | self._loop
            self.block(block)
        # Not what the branches saw: that earlier rounds of a loop bound a name helps only inside of them.
        self._steps.take(len(before) // _COPIED)
        self.bound = before | scopes.bindings((node for block in blocks for node in block), self._steps)
        self._straight = straight

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)
            return
        if node.id not in self.bound:
            self.needed.append(node)
        if isinstance(node.ctx, ast.Del) and self._straight:
            self.bound.discard(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.block([node.value, *node.targets])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name) and node.target.id not in self.bound:
            self.needed.append(node.target)
        self.block([node.value, node.target])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._defer_annotations([node.annotation])
        if node.value or not isinstance(node.target, ast.Name):  # `x: int` alone binds nothing
            self.block([*([node.value] if node.value else []), node.target])

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.block([node.value, node.target])

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._branches(node.body, node.orelse)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._rounds([node.target], node.body)
        self._branches(node.orelse)

    visit_AsyncFor = visit_For

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._rounds([], node.body)
        self._branches(node.orelse)

    def _rounds(self, targets: list[ast.expr], body: list[ast.stmt]) -> None:
        """A loop's body. Its first round meets what stands in it unconditionally, unless a `continue` came before."""
        loop, straight = self._loop, self._straight
        self._steps.take(len(loop) // _COPIED)
        self._loop, self._straight = loop | scopes.bindings(body, self._steps), False
        self.block(targets)
        if any(isinstance(node, ast.Continue) for statement in body for node in self._steps.walk(statement)):
            self.bound |= self._loop
        self.block(body)
        self._loop, self._straight = loop, straight

    def visit_Try(self, node: ast.Try) -> None:
        self._branches(node.body)
        self._branches(*([handler] for handler in node.handlers), node.orelse)
        self.block(node.finalbody)

    visit_TryStar = visit_Try  # type: ignore[assignment]

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type:
            self.visit(node.type)
        if node.name:
            self.bound.add(node.name)
        self.block(node.body)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        self._branches(*([case] for case in node.cases))

    def visit_match_case(self, node: ast.match_case) -> None:
        self.bound |= scopes.bindings([node.pattern], self._steps)
        self.block(ast.iter_child_nodes(node))

    def visit_alias(self, node: ast.alias) -> None:
        self.bound.add(scopes.bound_by_import(node))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module == "__future__" and any(alias.name == "annotations" for alias in node.names):
            self._annotations_run = False
        self.block(node.names)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.block(scopes.evaluated_at_definition(node))
        self._defer_annotations(scopes.annotations(node), scopes.type_parameters(node))
        self.deferred.extend(scopes.looked_up(node, self._steps))
        self.bound.add(node.name)

    visit_AsyncFunctionDef = visit_FunctionDef

    def _defer_annotations(self, annotations: Iterable[ast.expr], parameters: Container[str] = ()) -> None:
        """Newer Pythons evaluate them only when asked: so they count as what a function does."""
        nodes = [node for annotation in annotations for node in self._steps.walk(annotation) if self._annotations_run]
        names = (node for node in nodes if isinstance(node, ast.Name))
        self.deferred.extend(name for name in names if name.id not in parameters and name.id not in self.bound)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.block(scopes.evaluated_at_definition(node))
        self.deferred.extend(scopes.looked_up(node, self._steps, self._targets))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.block(scopes.evaluated_at_definition(node))
        self._steps.take(len(self.bound) // _COPIED)
        outside = set(self.bound)
        self.bound |= scopes.type_parameters(node)
        self.block(node.body)
        self.bound = outside | {node.name}

    def visit_TypeAlias(self, node: ast.AST) -> None:
        self.bound |= scopes.bindings([node], self._steps)  # its value is evaluated when asked for

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.DictComp) -> None:
        targets, outer = scopes.comprehension_targets(node, self._steps), self._targets
        self._steps.take(len(outer) // _COPIED)
        shadowing = targets - self.bound
        self._targets = outer | targets
        self.block(node.generators)
        self.block([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])
        self._targets = outer
        self.bound -= shadowing

    visit_SetComp = visit_DictComp = visit_ListComp

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.block([node.iter, node.target, *node.ifs])

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self.visit(node.generators[0].iter)
        self.deferred.extend(scopes.looked_up_by_generator(node, self._steps, self._targets))
        self.bound |= scopes.bindings([node], self._steps)  # by `:=`


# -- explaining ---------------------------------------------------------------------------------------------------

_USUAL = {
    "pd": "import pandas as pd", "np": "import numpy as np", "plt": "import matplotlib.pyplot as plt",
    "pl": "import polars as pl", "sns": "import seaborn as sns", "pa": "import pyarrow as pa",
    "Path": "from pathlib import Path", "datetime": "from datetime import datetime",
    **{name: f"import {name}" for name in ("os", "sys", "re", "json", "math", "time", "random", "csv", "duckdb")},
}  # fmt: skip
_MOST_COMPARED = 1_000
_MOST_SIMILAR, _ALIKE = 80, 0.75
"""Characters of a name that is compared with others."""


class Gone(Noun, frozen=True, kw_only=True):
    """A name that a run took away."""

    by: str
    is_deletion: bool
    """Otherwise that run went back to an earlier version, whose memory had no such name."""
    run: str = ""
    """That had bound it; empty: so long ago that nobody looked."""


def explain_missing(
    name: str,
    *,
    past: Mapping[str, NameRow],
    losses: Sequence[Lost],
    generation: int,
    gone: Gone | None = None,
    way_back: str = "",
    looked_back: int | None = None,
    steps: Steps | None = None,
) -> Finding:
    """Why a name is not there, from what the journal knows, and what brings it back: a run, or `way_back`, the CKPT of
    a version whose memory has it. `looked_back` is how many runs were asked, if it was not all. `steps` is what may be
    spent on finding a similar name.

    >>> explain_missing("pd", past={}, losses=[], generation=1).hint
    'add `import pandas as pd`'
    """
    row = past.get(name)
    if row is not None:
        run, story = row.run, f"was defined by run {row.run} in generation {row.generation}; {_loss(row, losses)}"
    elif gone is not None:
        run, story = gone.run, _taken_away(gone)
    else:
        told = f"none of the last {looked_back:,} runs has defined it" if looked_back else "no run has defined it"
        hint = _hint_unknown(name, past, generation, steps or Steps(HINTS))
        return _missing_name(name, f"`{name}` is not in memory: {told}", hint)
    advice = " or ".join([*([f"re-run {run}"] if run else []), *([f"restore {way_back}"] if way_back else [])])
    message = f"`{name}` {story}; {advice}" if advice else f"`{name}` {story}"
    return _missing_name(name, message, advice or "define it in this run")


def _missing_name(name: str, message: str, hint: str) -> Finding:
    return Finding(code="name_missing", message=message, hint=hint, names=[name])


def _taken_away(gone: Gone) -> str:
    defined = f"was defined by run {gone.run}, and " if gone.run else "was "
    how = (
        f"deleted by run {gone.by}" if gone.is_deletion else f"taken back by {gone.by}, which restored an earlier state"
    )
    return f"{defined}{how}"


def _loss(row: NameRow, losses: Sequence[Lost]) -> str:
    """What took the generation away that had the name."""
    after = [lost for lost in losses if lost.generation > row.generation]
    if not after:
        return "memory was lost since"
    lost = min(after, key=lambda lost: lost.generation)
    return f"memory was lost at {datetime.fromtimestamp(lost.at, UTC):%H:%M} UTC, {lost.cause}"


def _hint_unknown(name: str, past: Mapping[str, NameRow], generation: int, steps: Steps) -> str:
    if name in _USUAL:
        return f"add `{_USUAL[name]}`"
    live = (other for other, row in past.items() if row.generation >= generation)
    close = similar(name, islice(live, _MOST_COMPARED), steps)
    return f"did you mean `{close}`?" if close else "define or import it in this run"


def similar(name: str, known: Iterable[str], steps: Steps) -> str:
    """The known name that is most like this one; empty where none is, or where no steps are left to find it.

    >>> similar("salse", ["price", "sales"], Steps())
    'sales'
    """
    best, ratio = "", _ALIKE
    with suppress(TooManySteps):
        for other in known if len(name) <= _MOST_SIMILAR else ():
            steps.take()
            if 2 * min(len(name), len(other)) >= ratio * (len(name) + len(other)):
                found = likeness(name, other, steps)
                best, ratio = (other, found) if found > ratio or (found == ratio and not best) else (best, ratio)
    return best


def likeness(name: str, other: str, steps: Steps) -> float:
    """`SequenceMatcher.ratio`, of what is left between a common beginning and a common end: the part whose cost grows
    with the square of its length, and more."""
    start = _alike(name, other)
    end = _alike(name[start:][::-1], other[start:][::-1])
    rest, of_other = name[start : len(name) - end], other[start : len(other) - end]
    steps.take(1 + len(rest) * len(of_other) // _COMPARED)
    matched = SequenceMatcher(None, rest, of_other, autojunk=False).ratio() * (len(rest) + len(of_other)) / 2
    return 2 * (start + end + matched) / (len(name) + len(other))


def _alike(name: str, other: str) -> int:
    """Characters at the beginning that are the same in both."""
    pairs = enumerate(zip(name, other, strict=False))
    return next((at for at, (one, another) in pairs if one != another), min(len(name), len(other)))
