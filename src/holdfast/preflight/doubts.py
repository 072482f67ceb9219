"""What makes it uncertain whether a name is missing: guards that the code has itself, and names bound out of sight."""

import ast
from collections.abc import Iterable, Iterator

from holdfast.preflight.scopes import bindings
from holdfast.preflight.steps import Steps

_NAMESPACES = frozenset({"globals", "locals", "vars", "dir"})
_BROAD = frozenset({"Exception", "BaseException"})


def binds_unseen(tree: ast.Module, steps: Steps) -> bool:
    """Whether names may be bound in a way that the text does not show: `import *`, `exec`, `globals()[…] = …`."""
    looked_into = {id(call) for node in steps.walk(tree) for call in _looked_into(node, steps)}
    return any(_binds_unseen(node) and id(node) not in looked_into for node in steps.walk(tree))


def _binds_unseen(node: ast.AST) -> bool:
    match node:
        case ast.ImportFrom(names=[ast.alias(name="*")]):
            return True
        case ast.Call(func=ast.Name(id="exec" | "get_ipython")):
            return True
        case ast.Call(func=ast.Name(id="globals" | "locals" | "vars"), args=[]):
            return True
    return False


def _looked_into(node: ast.AST, steps: Steps) -> Iterator[ast.AST]:
    """Namespaces that are only read: `"df" in globals()`, `globals().get("df")`, `globals()["df"]`."""
    match node:
        case ast.Compare(comparators=comparators):
            for comparator in comparators:
                yield from steps.walk(comparator)
        case ast.Attribute(value=ast.Call() as call, attr="get" | "keys" | "items" | "values"):
            yield call
        case ast.Subscript(value=ast.Call() as call, ctx=ast.Load()):
            yield call


def guarded_names(tree: ast.Module, steps: Steps) -> set[str]:
    """Names whose absence the code reckons with."""
    return {name for node in steps.walk(tree) for name in _guarded_by(node, steps)}


def _guarded_by(node: ast.AST, steps: Steps) -> Iterable[str]:
    match node:
        case ast.Compare(left=ast.Constant(value=str(name)), ops=[ast.In() | ast.NotIn()], comparators=[where]):
            return [name] if _is_namespace(where, steps) else []
        case ast.Call(func=ast.Attribute(value=where, attr="get"), args=[ast.Constant(value=str(name)), *_]):
            return [name] if _is_namespace(where, steps) else []
        case ast.Try(body=body, handlers=handlers):
            return _guarded_by_handlers(body, handlers, steps)
        case ast.With(items=[ast.withitem(context_expr=ast.Call(func=function, args=caught))], body=body):
            is_guard = _last_name(function) == "suppress" and _catches_names(caught, steps)
            return _loaded(body, steps) if is_guard else []
    return []


def _guarded_by_handlers(body: list[ast.stmt], handlers: list[ast.ExceptHandler], steps: Steps) -> set[str]:
    if any(handler.type and _catches_names([handler.type], steps) for handler in handlers):
        return _loaded(body, steps)
    # `except Exception` is meant for anything: a guard only if it makes up for the name.
    broad = [handler for handler in handlers if handler.type is None or _last_name(handler.type) in _BROAD]
    return _loaded(body, steps) & bindings(broad, steps)


def _catches_names(types: list[ast.expr], steps: Steps) -> bool:
    return any(_last_name(node) == "NameError" for kind in types for node in steps.walk(kind))


def _loaded(body: list[ast.stmt], steps: Steps) -> set[str]:
    return {node.id for statement in body for node in steps.walk(statement) if isinstance(node, ast.Name)}


def _is_namespace(node: ast.expr, steps: Steps) -> bool:
    """`globals()`, also `globals().keys()` and `list(globals())`."""
    return any(isinstance(inner, ast.Name) and inner.id in _NAMESPACES for inner in steps.walk(node))


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
