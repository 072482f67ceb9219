"""The texts that an expression can stand for, as far as the code shows: how paths are put together.

A value is a set of alternatives: a branch, a loop over a list and the list itself all make several. `*` stands for
what only a run knows; an expression of which nothing at all is known has no alternatives.
"""

import ast
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping

from holdfast.preflight.steps import Steps
from holdfast.records import Noun

_MOST_ALTERNATIVES = 16
_MOST_CHARACTERS = 16_384
_JOINED = 500
"""Characters that are joined in the time of one step."""
_REPLACED = 10
"""The same where each may be replaced."""
_PATH_CLASSES = frozenset({"Path", "PurePath", "PosixPath", "PurePosixPath"})
_FIELD = re.compile(r"%[-+ #0]*+\d*+(?:\.\d++)?[a-zA-Z]|%\(\w++\)[-+ #0]*+\d*+[a-zA-Z]|\{[^{}]*+\}")


class Value(Noun, frozen=True, kw_only=True):
    texts: tuple[str, ...] = ()
    is_path: bool = False
    """A `pathlib.Path`, whose methods read and write files."""

    def __bool__(self) -> bool:
        return bool(self.texts)


UNKNOWN = Value()


class Names(dict[str, Value]):
    """What each name can stand for, and the budget of whoever asks."""

    def __init__(self, known: Mapping[str, Value] | None = None, *, steps: Steps | None = None) -> None:
        super().__init__(known or {})
        self.steps = steps or Steps()

    def copy(self) -> "Names":
        self.steps.take(len(self))
        return Names(self, steps=self.steps)


def either(values: Iterable[Value]) -> Value:
    """All alternatives of all of them."""
    values = list(values)
    texts = dict.fromkeys(text for value in values for text in value.texts)
    return _value(texts, is_path=any(value.is_path for value in values))


def fold(node: ast.AST, names: Names) -> Value:
    """
    >>> fold(ast.parse("f'out/{day}.csv'", mode="eval").body, Names()).texts
    ('out/*.csv',)
    """
    names.steps.take()
    match node:
        case ast.Constant(value=str(text)):
            return _value([text])
        case ast.Constant(value=int(number)) if abs(number) < 10**9:
            return _value([str(number)])
        case ast.Name(id=name):
            return names.get(name, UNKNOWN)
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return either(fold(item, names) for item in items)
        case ast.JoinedStr(values=parts):
            return _join([fold(part, names) for part in parts], names.steps)
        case ast.FormattedValue(value=inner, format_spec=None):
            return fold(inner, names)
        case ast.IfExp(body=body, orelse=orelse):
            return either([fold(body, names), fold(orelse, names)])
        case ast.NamedExpr(value=inner) | ast.Subscript(value=ast.List() | ast.Tuple() | ast.Name() as inner):
            return fold(inner, names)
    return _fold_operation(node, names)


def _fold_operation(node: ast.AST, names: Names) -> Value:
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _sum(left, right, names)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _path([fold(left, names), fold(right, names)], names.steps)
        case ast.BinOp(left=ast.Constant(value=str(template)), op=ast.Mod()):
            return _value([_without_fields(template, names.steps)])
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(template)), attr="format")):
            return _value([_without_fields(template, names.steps)])
        case ast.Call(func=ast.Attribute(value=receiver, attr=method), args=args):
            return _fold_method(receiver, method, args, names)
        case ast.Call(func=ast.Name(id=function), args=args):
            return _fold_call(function, [fold(arg, names) for arg in args], names.steps)
        case ast.Attribute(value=receiver, attr="parent"):
            return _each(fold(receiver, names), posixpath.dirname, names.steps)
    return UNKNOWN


def _fold_call(function: str, args: list[Value], steps: Steps) -> Value:
    if function in _PATH_CLASSES:
        return _path(args, steps) if args else _value(["."], is_path=True)
    if function in ("str", "sorted", "list", "tuple", "set", "reversed", "iter", "glob", "iglob", "fspath"):
        return _value(args[0].texts) if args else UNKNOWN
    return _path(args, steps, is_path=False) if function == "join" else UNKNOWN


def _fold_method(receiver: ast.expr, method: str, args: list[ast.expr], names: Names) -> Value:
    """Methods of paths, and functions of `os.path`, `glob` and `pathlib` by their dotted names."""
    values, base = [fold(arg, names) for arg in args], fold(receiver, names)
    if not base:
        return _fold_call(method, values, names.steps)
    if method in ("glob", "rglob", "iterdir", "joinpath"):
        return _path([base, *(values or [_value(["*"])])], names.steps)
    if method == "with_suffix" and values:
        stem = _each(base, lambda text: posixpath.splitext(text)[0], names.steps)
        return _join([stem, values[0]], names.steps, is_path=True)
    if method == "with_name" and values:
        return _path([_each(base, posixpath.dirname, names.steps), *values], names.steps)
    if method == "format":
        return _each(base, lambda text: _without_fields(text, names.steps), names.steps)
    return base if method in ("resolve", "absolute", "expanduser", "as_posix", "strip", "copy") else UNKNOWN


def _sum(left: ast.expr, right: ast.expr, names: Names) -> Value:
    values = [fold(left, names), fold(right, names)]
    if isinstance(left, ast.List) or isinstance(right, ast.List):
        return either(values)
    return _join(values, names.steps) if any(values) else UNKNOWN


def _join(
    values: list[Value], steps: Steps, *, how: Callable[[str, str], str] = str.__add__, is_path: bool = False
) -> Value:
    """One after the other, `*` for those that are unknown."""
    joined = _value([""], is_path=is_path)
    for value in values if any(values) else ():
        number = max(1, len(joined.texts)) * max(1, len(value.texts))
        longest = max(map(len, joined.texts), default=0) + max(map(len, value.texts), default=0)
        steps.take(number * (1 + longest // _JOINED))
        joined = _value((how(text, part) for text in joined.texts for part in value.texts or ("*",)), is_path=is_path)
    return joined if any(values) else Value(is_path=is_path)


def _path(values: list[Value], steps: Steps, *, is_path: bool = True) -> Value:
    return _join(values, steps, how=posixpath.join, is_path=is_path)


def _each(value: Value, function: Callable[[str], str], steps: Steps) -> Value:
    steps.take(sum(1 + len(text) // _JOINED for text in value.texts))
    return _value([function(text) for text in value.texts], is_path=value.is_path)


def _without_fields(template: str, steps: Steps) -> str:
    """`part-%03d.csv` and `part-{:03}.csv` with `*` for what is filled in."""
    steps.take(1 + len(template) // _REPLACED)
    return _FIELD.sub("*", template)


def _value(texts: Iterable[str], *, is_path: bool = False) -> Value:
    """Too many or too long: we no longer know."""
    known = tuple(dict.fromkeys(texts))
    if len(known) > _MOST_ALTERNATIVES or any(len(text) > _MOST_CHARACTERS for text in known):
        return Value(is_path=is_path)
    return Value(texts=known, is_path=is_path)
