"""Which files of the workspace a cell will read and write, and which feeds which, as far as its text shows.

The cell is walked once, in order. Each name is given the texts that it can stand for (`folding`), the input files that
its value comes from, and, if it is an open file, the outputs that what is written to it ends in. A call that reads
adds inputs, a call that writes joins all that its arguments come from to its outputs. It is a forecast: branches that
will not be taken are in it, and files whose paths are computed are not.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from holdfast.preflight import ipython, languages
from holdfast.preflight.effects import dotted_name, effect_of
from holdfast.preflight.folding import UNKNOWN, Names, Value, either, fold
from holdfast.preflight.ledger import Forecast, Ledger
from holdfast.preflight.steps import Steps, TooManySteps

_SHELLS = frozenset({"bash", "sh", "script", "system", "sx", "!"})
_DRAWING = frozenset({"plot", "hist", "boxplot", "scatter", "bar", "pie"})
_PLOTTER = "plt"
_NONE: Mapping[str, str] = {}
_KNOWN: Mapping[str, Value] = {}


def forecast(code: str, values: Mapping[str, str] = _NONE) -> Forecast:
    """What the cell will read and write; `values` are texts that live names are known to hold.

    >>> forecast("df = pd.read_csv('in.csv')\\ndf.head().to_parquet(f'{day}.parquet')").flows
    [Flow(output='*.parquet', inputs=['in.csv'])]
    """
    known = {name: Value(texts=(text,)) for name, text in values.items()}
    with suppress(TooManySteps, RecursionError):
        return forecast_of(ipython.read(code), Steps(), known)
    return Forecast()


def forecast_of(cell: ipython.Cell, steps: Steps, known: Mapping[str, Value] = _KNOWN) -> Forecast:
    """The same of a cell that is read; raises where it is too much."""
    walk = _Walk(Names(known, steps=steps))
    walk.cell(cell)
    return walk.ledger.forecast()


class _Walk(ast.NodeVisitor):
    """One walk through a cell."""

    def __init__(self, names: Names) -> None:
        self.ledger = Ledger(names.steps)
        self._steps = names.steps
        self._names = names
        self._sources: dict[str, dict[str, None]] = {}
        """Name -> inputs that its value comes from. Names bound together (`fig, ax = …`) share one dict."""
        self._sinks: dict[str, list[str]] = {}
        """Name of an open file, or of a function -> outputs that it writes."""
        self._imports: dict[str, str] = {}
        self._calls: dict[str, list[ast.Call]] = {}
        self._read_by: dict[ast.AST, list[str]] = {}
        self._written_by: dict[ast.AST, list[str]] = {}
        self._comes_to: dict[ast.AST, dict[str, None]] = {}
        """Call -> the inputs that its value comes from: found once, from those of the calls in it."""
        self._sure = True
        """Whether what stands here is sure to run, so that a name's earlier value is gone."""

    def visit(self, node: ast.AST) -> None:
        """As `ast.NodeVisitor` does it, with one frame for each node instead of two, and counted."""
        self._steps.take()
        visitor = getattr(self, "visit_" + type(node).__name__, None)
        if visitor is not None:
            visitor(node)
            return
        for child in ast.iter_child_nodes(node):
            self.visit(child)

    def cell(self, cell: ipython.Cell) -> None:
        if cell.magic in ("writefile", "file"):
            self.ledger.write([cell.arguments.removeprefix("-a").strip().strip("'\"")])
        for script in [cell.body] * (cell.magic in _SHELLS) + cell.commands:
            sources, outputs = self.ledger.record(languages.shell(script, self._steps))
            self.ledger.flow(sources, outputs)
        for name, arguments in cell.line_magics:
            if name in ("cd", "pushd", "popd"):
                self.ledger.change_directory(Value(texts=(arguments,)) if name == "cd" else UNKNOWN)
        if cell.tree:
            self._collect_calls(cell.tree)
            self.visit(cell.tree)

    def _collect_calls(self, tree: ast.Module) -> None:
        for node in self._steps.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                self._calls.setdefault(node.func.id, []).append(node)

    # -- calls ---------------------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> None:
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        dotted = dotted_name(node.func, self._imports)
        if dotted == "os.chdir" and node.args:
            self.ledger.change_directory(fold(node.args[0], self._names))
        self._read_by[node], outputs = self.ledger.record(effect_of(node, self._names, self._imports))
        self._written_by[node] = self._among([*outputs, *self._ends_in(node)])
        comes_from = self._comes_to[node] = self._comes_from(node)
        self.ledger.flow(comes_from, self._written_by[node])
        if dotted.rpartition(".")[2] in _DRAWING or dotted.startswith("seaborn."):
            self._add_sources(_PLOTTER, comes_from)

    def _among(self, paths: list[str]) -> list[str]:
        self._steps.take(len(paths))
        return list(dict.fromkeys(paths))

    def _parts(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes of a value; of the calls in it, those alone: what is in them is known of them already."""
        waiting = [node]
        while waiting:
            inner = waiting.pop()
            yield inner
            if inner is node or inner not in self._written_by:
                children = list(ast.iter_child_nodes(inner))
                self._steps.take(1 + len(children))
                waiting.extend(reversed(children))

    def _comes_from(self, node: ast.AST) -> dict[str, None]:
        """The inputs that a value comes from."""
        if node in self._comes_to:
            self._steps.take(len(self._comes_to[node]))
            return dict(self._comes_to[node])
        inputs: dict[str, None] = {}
        for inner in self._parts(node) if self.ledger.has_inputs else ():
            known = self._sources.get(inner.id, ()) if isinstance(inner, ast.Name) else self._comes_to.get(inner, ())
            self._steps.take(len(known))
            inputs.update(dict.fromkeys([*self._read_by.get(inner, ()), *known]))
        return inputs

    def _ends_in(self, node: ast.Call) -> Iterator[str]:
        """The outputs that a call's arguments are written to: by open files and functions among them."""
        for inner in self._parts(node) if self.ledger.has_outputs else ():
            yield from self._written_by.get(inner, ())
            if isinstance(inner, ast.Name):
                yield from self._sinks.get(inner.id, ())

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call whose result nobody keeps is made for what it does to its object: `rows.append(row)`."""
        self.visit(node.value)
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
            self._change(node.value.func, self._comes_from(node.value))
            for keyword in node.value.keywords:
                if keyword.arg == "ax":
                    self._change(keyword.value, self._comes_from(node.value))

    def _change(self, node: ast.AST, comes_from: dict[str, None]) -> None:
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        if isinstance(node, ast.Name) and dotted_name(node, self._imports) in (node.id, "duckdb", "matplotlib.pyplot"):
            self._add_sources(node.id, comes_from)

    def _add_sources(self, name: str, comes_from: dict[str, None]) -> None:
        self._steps.take(len(comes_from))
        self._sources.setdefault(name, {}).update(comes_from)

    # -- bindings ------------------------------------------------------------------------------------------------

    def _bind(self, target: ast.AST, value: Value, comes_from: dict[str, None], sinks: list[str]) -> None:
        if isinstance(target, ast.Name):
            earlier = UNKNOWN if self._sure else self._names.get(target.id, UNKNOWN)
            self._names[target.id] = either([earlier, value])
            if not self._sure:
                earlier_sources = self._sources.get(target.id, {})
                self._steps.take(len(earlier_sources))
                comes_from.update(earlier_sources)
            self._sources[target.id] = comes_from
            self._sinks[target.id] = sinks
        elif isinstance(target, ast.Tuple | ast.List):
            for item in target.elts:
                self._bind(item, UNKNOWN, comes_from, sinks)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, UNKNOWN, comes_from, sinks)
        else:
            self.visit(target)
            self._change(target, comes_from)

    def _assign(self, target: ast.AST, node: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(node, ast.Tuple) and len(target.elts) == len(node.elts):
            for item, part in zip(target.elts, node.elts, strict=True):
                self._assign(item, part)
            return
        sinks = self._written_by.get(node, []) if isinstance(node, ast.Call) else []
        self._bind(target, fold(node, self._names), self._comes_from(node), sinks)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign | ast.NamedExpr) -> None:
        if node.value:
            self.visit(node.value)
            self._assign(node.target, node.value)

    visit_NamedExpr = visit_AnnAssign

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        both = ast.BinOp(left=node.target, op=node.op, right=node.value)
        self._bind(node.target, fold(both, self._names), self._comes_from(both), [])

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._assign(node.target, node.iter)
        self._unsure(node.body + node.orelse)

    visit_AsyncFor = visit_For

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit(node.iter)
        self._assign(node.target, node.iter)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self._visit_all([*node.generators, node.elt])

    visit_SetComp = visit_GeneratorExp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._visit_all([*node.generators, node.key, node.value])

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars:
                self._assign(item.optional_vars, item.context_expr)
        self._visit_all(node.body)

    visit_AsyncWith = visit_With

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._imports[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    # -- what may not run ----------------------------------------------------------------------------------------

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _unsure(self, nodes: Iterable[ast.AST]) -> None:
        sure, self._sure = self._sure, False
        self._visit_all(nodes)
        self._sure = sure

    def visit_If(self, node: ast.If | ast.While) -> None:
        self.visit(node.test)
        self._unsure(node.body + node.orelse)

    visit_While = visit_If

    def visit_Try(self, node: ast.Try) -> None:
        self._visit_all(node.body)
        self._unsure([*node.handlers, *node.orelse, *node.finalbody])

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """What a function does is forecast if the cell calls it, with the arguments of those calls."""
        calls = self._calls.get(node.name, [])
        if not calls:
            return
        outside = self._names.copy()
        for position, argument in enumerate(node.args.args):
            self._steps.take(len(calls))
            given = [value for call in calls for value in _given(call, position, argument.arg)]
            self._names[argument.arg] = either(fold(value, outside) for value in given)
        self._visit_all(node.body)
        self._names = outside
        inside = [part for statement in node.body for part in self._steps.walk(statement) if part in self._written_by]
        self._sources[node.name] = dict.fromkeys(self._among([p for part in inside for p in self._read_by[part]]))
        self._sinks[node.name] = self._among([path for part in inside for path in self._written_by[part]])

    visit_AsyncFunctionDef = visit_FunctionDef


def _given(call: ast.Call, position: int, name: str) -> list[ast.expr]:
    """What a call gives for a parameter."""
    return call.args[position : position + 1] or [word.value for word in call.keywords if word.arg == name]
