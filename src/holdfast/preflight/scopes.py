"""Which names a piece of code binds, and which ones a function will look up outside of itself."""

import ast
from collections.abc import Iterable, Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def bindings(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that the code binds in its own scope; what nested scopes bind for themselves is not among them."""
    bound: set[str] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        bound.update(_bound_by(node))
        waiting.extend(_in_same_scope(node))
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


def _in_same_scope(node: ast.AST) -> list[ast.AST]:
    """The children whose bindings are made in the same scope."""
    if isinstance(node, _DEFINITIONS):
        return list(evaluated_at_definition(node))
    if isinstance(node, ast.Lambda):
        return list(node.args.defaults)
    if isinstance(node, COMPREHENSIONS):  # only `:=` reaches out of it
        return [inner.target for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)]
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


def declared_global(tree: ast.AST) -> set[str]:
    """Names that some function means when it says `global`."""
    return {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}


def looked_up(node: Function, outer: frozenset[str] = frozenset()) -> Iterator[ast.Name]:
    """Names that the function will look up outside of itself, and outside of the functions around it, when called."""
    body: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else list(node.body)
    own = {argument.arg for argument in _arguments(node)} | bindings(body) | type_parameters(node)
    declared = {name for inner in body for name in _says_global(inner)}
    inside = (outer | own) - declared
    for statement in body:
        yield from _loads(statement, inside, inside)


def looked_up_by_generator(node: ast.GeneratorExp, outer: frozenset[str]) -> Iterator[ast.Name]:
    """The same of a generator expression, which evaluates only its first iterable where it stands."""
    inside = outer | comprehension_targets(node)
    first, *others = node.generators
    for part in [first.target, *first.ifs, *others, node.elt]:
        yield from _loads(part, inside, inside)


def type_parameters(node: ast.AST) -> set[str]:
    """`T` of `def f[T](x: T)`."""
    return {parameter.name for parameter in getattr(node, "type_params", [])}


def _says_global(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Global):
        yield from node.names
    elif not isinstance(node, _DEFINITIONS):
        for child in ast.iter_child_nodes(node):
            yield from _says_global(child)


def _arguments(node: Function) -> list[ast.arg]:
    arguments = node.args
    packed = [packed for packed in (arguments.vararg, arguments.kwarg) if packed]
    return arguments.posonlyargs + arguments.args + arguments.kwonlyargs + packed


def _loads(node: ast.AST, here: frozenset[str], nested: frozenset[str]) -> Iterator[ast.Name]:
    """Names that are neither bound here nor, for the functions in it, in the scopes around them.

    The two differ in a class: its names are seen by its own statements, and not by its methods.
    """
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Store) and node.id not in here:
            yield node
    elif isinstance(node, Function):
        for expression in evaluated_at_definition(node):
            yield from _loads(expression, here, nested)
        yield from looked_up(node, nested)
    elif isinstance(node, ast.ClassDef):
        for expression in evaluated_at_definition(node):
            yield from _loads(expression, here, nested)
        yield from _class_loads(node, nested)
    else:
        targets = comprehension_targets(node)
        for child in ast.iter_child_nodes(node):
            yield from _loads(child, here | targets, nested | targets)


def _class_loads(node: ast.ClassDef, nested: frozenset[str]) -> Iterator[ast.Name]:
    inside = nested | bindings(node.body) | type_parameters(node)
    for statement in node.body:
        yield from _loads(statement, inside, nested | {"__class__"} | type_parameters(node))


def comprehension_targets(node: ast.AST) -> set[str]:
    """`x` of `[x for x in xs]`; nothing if it is no comprehension."""
    if not isinstance(node, COMPREHENSIONS):
        return set()
    return bindings(generator.target for generator in node.generators)
