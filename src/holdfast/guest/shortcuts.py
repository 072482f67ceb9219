"""Past IPython's general ways, where a cell is plain and nobody has hooked anything in.

IPython asks of every cell, however small, whether it is any of all that a cell can be: it tokenizes it twice, compiles
it three times, and asks twelve formatters for the looks of an integer. Each answer here is the one that IPython itself
would give (`tests/unit/test_shortcuts.py` holds them against each other), and each looks first whether anything of the
user's stands in its way: a transformer, a formatter, a printer for a type.
"""

import re
from typing import Any

from IPython.core.formatters import DisplayFormatter, PlainTextFormatter
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.prefilter import PrefilterManager
from IPython.lib.pretty import _repr_pprint, _singleton_pprinters

_MAY_MEAN_MORE = re.compile(r"[%?]|!(?!=)|^[^\S\n]*+(?:[,;/!]|>>>|\.\.\.|(?:\[\w+\][^\S\n]*+)?In )", re.MULTILINE)
"""A magic, a command, help, a prompt that was copied with the code: whatever IPython might take for one of these."""
_BEGINS_PLAINLY = re.compile(r"[0-9(\[{\"'+-][^#]*\Z")
"""A line that begins so calls no magic by its bare name, and nothing that calls itself."""
_INDENTED = ("", " ", "\t", "\f", "\n", "\r")
_TEXT_PLAIN = "text/plain"
_BY_REPR = frozenset((int, str))
_PRINTERS = ("singleton_printers", "type_printers", "deferred_printers")
_format = DisplayFormatter.format


def is_ordinary(cell: str) -> bool:
    """Whether IPython's transformations leave it as it is, but for a newline at its end."""
    return cell[:1] not in _INDENTED and _MAY_MEAN_MORE.search(cell) is None


def awaits(cell: str) -> bool:
    """Whether it may: what holds neither word does not."""
    return "await" in cell or "async" in cell


class PlainTransformers(TransformerManager):
    """IPython's, which leaves an ordinary cell alone as long as the transformers are those that it began with."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        """Those that are there now are ours."""
        self._own = [list(each) for each in self._each()]

    def leaves(self, cell: str) -> bool:
        return is_ordinary(cell) and self._each() == self._own

    def transform_cell(self, cell: str) -> str:
        return ended(cell) if self.leaves(cell) else super().transform_cell(cell)

    def _each(self) -> list[list[Any]]:
        return [self.cleanup_transforms, self.line_transforms, self.token_transformers]


class PlainLines:
    """What IPython does with a cell of one line goes by what its first word stands for: nothing, if it is none."""

    def __init__(self, prefilter: PrefilterManager) -> None:
        self._prefilter = prefilter
        self._before = [list(prefilter.checkers), list(prefilter.transformers), dict(prefilter.handlers)]

    def leaves(self, cell: str) -> bool:
        found = self._prefilter
        return (
            _BEGINS_PLAINLY.match(cell) is not None
            and [found.checkers, found.transformers, found.handlers] == self._before
        )


def ended(cell: str) -> str:
    return cell if cell.endswith("\n") else cell + "\n"


class PlainValues:
    """Values whose only form is their `repr`, as long as nobody has given their type another.

    Whatever is registered with IPython's formatters is looked through once, and again when anything of it has changed.
    """

    def __init__(self, formatter: DisplayFormatter) -> None:
        self._formatter = formatter
        self._all: dict[str, Any] = {}
        self._printers: list[dict[Any, Any]] = []
        self._before: list[dict[Any, Any]] = []
        self._plain: set[type] = set()
        self._replaced = True
        self._watched: set[int] = set()

    def form(self, formatter: Any, value: object) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """What IPython would say of it; None: ask IPython."""
        kind = type(value)
        if kind not in _BY_REPR or formatter is not self._formatter:
            return None
        if self._replaced or self._printers != self._before or formatter.formatters != self._all:
            self._look()
        if kind not in self._plain or "format" in vars(formatter) or type(formatter).format is not _format:
            return None
        try:
            return {_TEXT_PLAIN: repr(value)}, {}
        except ValueError:  # an integer of too many digits
            return None

    def _look(self) -> None:
        """Which types are plain now."""
        whole = self._formatter
        self._all = dict(whole.formatters)
        formatters = [*self._all.values(), whole.ipython_display_formatter, whole.mimebundle_formatter]
        self._printers = [getattr(each, name, {}) for each in formatters for name in _PRINTERS]
        self._before = [dict(each) for each in self._printers]
        self._watch(whole, *formatters)
        ours = all(type(each).__module__ == _format.__module__ for each in formatters)
        self._plain = {kind for kind in _BY_REPR if ours and all(_leaves(each, kind) for each in formatters)}
        self._replaced = False

    def _watch(self, *formatters: Any) -> None:
        """Printers that are replaced as a whole are not noticed otherwise."""
        for each in formatters:
            if id(each) not in self._watched and hasattr(each, "observe"):
                self._watched.add(id(each))
                each.observe(self._notice)

    def _notice(self, _: Any) -> None:
        self._replaced = True


def _leaves(formatter: Any, kind: type) -> bool:
    """Whether a formatter of IPython's own has nothing to say of values of a type, or but their `repr`."""
    if type(formatter) is PlainTextFormatter:
        printers: dict[Any, Any] = formatter.type_printers
        return formatter.singleton_printers.keys() <= _singleton_pprinters.keys() and printers.get(kind) is _repr_pprint
    named = {(each.__module__, each.__name__) for each in kind.__mro__}
    return not (
        formatter.singleton_printers
        or formatter.type_printers.keys() & set(kind.__mro__)
        or formatter.deferred_printers.keys() & named
    )
