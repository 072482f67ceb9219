"""Which names a piece of code binds, and which ones a function will look up outside of itself."""

import ast
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager

from holdfast.preflight.steps import Steps

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def cell_bindings(tree: ast.Module, steps: Steps) -> set[str]:
    """Names that a cell leaves bound, as far as its text shows: all that is known of it when its kernel is dead."""
    return {name for name in bindings(tree.body, steps) if not name.startswith("_") and name != "*"}


def bindings(nodes: Iterable[ast.AST], steps: Steps) -> set[str]:
    """Names that the code binds in its own scope; what nested scopes bind for themselves is not among them."""
    bound: set[str] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        steps.take()
        bound.update(_bound_by(node))
        waiting.extend(_in_same_scope(node, steps))
    return bound


def _bound_by(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.alias():
            yield bound_by_import(node)
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case ast.MatchMapping(rest=str(name)):
            yield name


def bound_by_import(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _in_same_scope(node: ast.AST, steps: Steps) -> list[ast.AST]:
    """The children whose bindings are made in the same scope."""
    if isinstance(node, _DEFINITIONS):
        return list(evaluated_at_definition(node))
    if isinstance(node, ast.Lambda):
        return list(node.args.defaults)
    if isinstance(node, COMPREHENSIONS):  # only `:=` reaches out of it
        return [inner.target for inner in steps.walk(node) if isinstance(inner, ast.NamedExpr)]
    return list(ast.iter_child_nodes(node))


def evaluated_at_definition(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions that a `def`, `class` or `lambda` evaluates where it stands; annotations are not among them."""
    if isinstance(node, _DEFINITIONS):
        yield from node.decorator_list
    if isinstance(node, ast.ClassDef):
        yield from node.bases
        yield from (keyword.value for keyword in node.keywords)
    else:
        arguments: ast.arguments = node.args  # type: ignore[attr-defined]
        yield from arguments.defaults
        yield from (default for default in arguments.kw_defaults if default)


def annotations(node: ast.AST) -> Iterator[ast.expr]:
    """Of a function's arguments and result."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from (argument.annotation for argument in _arguments(node) if argument.annotation)
        if node.returns:
            yield node.returns


def declared_global(tree: ast.AST, steps: Steps) -> set[str]:
    """Names that some function means when it says `global`."""
    return {name for node in steps.walk(tree) if isinstance(node, ast.Global) for name in node.names}


def looked_up(node: Function, steps: Steps, outer: Container[str] = ()) -> Iterator[ast.Name]:
    """Names that the function will look up outside of itself, and outside of the functions around it, when called."""
    return (name for name in _Lookups(steps).of_function(node) if name.id not in outer)


def looked_up_by_generator(node: ast.GeneratorExp, steps: Steps, outer: Container[str]) -> Iterator[ast.Name]:
    """The same of a generator expression, which evaluates only its first iterable where it stands."""
    return (name for name in _Lookups(steps).of_generator(node) if name.id not in outer)


def type_parameters(node: ast.AST) -> set[str]:
    """`T` of `def f[T](x: T)`."""
    return {parameter.name for parameter in getattr(node, "type_params", [])}


def _declared(body: list[ast.stmt], steps: Steps) -> set[str]:
    """Names that a function's own statements declare global."""
    declared: set[str] = set()
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        steps.take()
        if isinstance(node, ast.Global):
            declared.update(node.names)
        elif not isinstance(node, (*_DEFINITIONS, ast.expr)):
            waiting.extend(ast.iter_child_nodes(node))
    return declared


def _arguments(node: Function) -> list[ast.arg]:
    arguments = node.args
    packed = [packed for packed in (arguments.vararg, arguments.kwarg) if packed]
    return arguments.posonlyargs + arguments.args + arguments.kwonlyargs + packed


class _Lookups:
    """Collects names that are bound neither where they are looked up nor in the functions around.

    The scopes around are one table of counts, changed on the way into a scope and back on the way out: a copy for each
    node would cost the names times the nodes. A class's own names are apart: its statements see them, and its methods
    do not.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._bound: Counter[str] = Counter()
        self._of_class: Container[str] = ()
        self._found: list[ast.Name] = []

    def of_function(self, node: Function) -> list[ast.Name]:
        self._function(node)
        return self._found

    def of_generator(self, node: ast.GeneratorExp) -> list[ast.Name]:
        first, *others = node.generators
        with self._binding(comprehension_targets(node, self._steps)):
            self._all([first.target, *first.ifs, *others, node.elt])
        return self._found

    def _all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self._look(node)

    def _look(self, node: ast.AST) -> None:
        self._steps.take()
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Store) and not self._bound[node.id] and node.id not in self._of_class:
                self._found.append(node)
        elif isinstance(node, Function):
            self._all(evaluated_at_definition(node))
            self._function(node)
        elif isinstance(node, ast.ClassDef):
            self._all(evaluated_at_definition(node))
            self._class(node)
        elif isinstance(node, COMPREHENSIONS):
            with self._binding(comprehension_targets(node, self._steps)):
                self._all(ast.iter_child_nodes(node))
        else:
            for child in ast.iter_child_nodes(node):  # not by `_all`: deep texts need every frame
                self._look(child)

    def _function(self, node: Function) -> None:
        body: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else list(node.body)
        own = {argument.arg for argument in _arguments(node)} | bindings(body, self._steps) | type_parameters(node)
        declared = set() if isinstance(node, ast.Lambda) else _declared(node.body, self._steps)
        with self._in_class(()), self._binding(own - declared), self._hiding(declared):
            self._all(body)

    def _class(self, node: ast.ClassDef) -> None:
        own = bindings(node.body, self._steps)
        with self._in_class(own), self._binding({"__class__"} | type_parameters(node)):
            self._all(node.body)

    @contextmanager
    def _binding(self, names: set[str]) -> Iterator[None]:
        self._steps.take(len(names))
        self._bound.update(names)
        yield
        self._bound.subtract(names)

    @contextmanager
    def _hiding(self, names: set[str]) -> Iterator[None]:
        """`global` goes past all functions around."""
        hidden = {name: self._bound.pop(name, 0) for name in names}
        yield
        self._bound.update(hidden)

    @contextmanager
    def _in_class(self, names: Container[str]) -> Iterator[None]:
        around, self._of_class = self._of_class, names
        yield
        self._of_class = around


def comprehension_targets(node: ast.AST, steps: Steps) -> set[str]:
    """`x` of `[x for x in xs]`; nothing if it is no comprehension."""
    if not isinstance(node, COMPREHENSIONS):
        return set()
    return bindings((generator.target for generator in node.generators), steps)
