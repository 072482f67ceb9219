"""The ways past IPython's own: each leads where IPython itself would have arrived, and ends where a hook stands."""

import ast
import builtins
import getpass
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.displayhook import DisplayHook
from IPython.core.formatters import DisplayFormatter
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.prefilter import PrefilterChecker

from holdfast.guest.shell import GuestShell, dedent, make_shell
from holdfast.guest.shortcuts import PlainTransformers, PlainValues, is_ordinary

LINES = [
    "", "  ", "1 + 1", "x = 1", "x", "(1,\n 2)", "[i for i in 'ab']", "'a;b'", "x != 3", "f'{x!r}'", "x = 7 % 3", "-1",
    "%who", "%%time", "!ls", "!!ls", "x = !ls", "x = %who", "len?", "?len", "len??", "# why?", "'why?'", "; a b",
    ", a b",
    "/ f x", ">>> 1", "... 2", "...", "In [1]: 3", "   ...: 4", "  indented", "\tindented", "def f():\n    return 1",
    "await f()", "async def g(): pass", "'await'", "1;", "1 ; # end", "x = 1; x", "who", "ls -l", "exit", "time 1",
    "\"\"\"\n>>> 1\n\"\"\"", "1 # PYTHON-MODE", "1\f", "'\u2028'", "a\r\nb", "x = (\n... )", "(f) x", "'ü'", "x +",
    "[ins] In [2]: 1",
]  # fmt: skip
CELLS = [*LINES, *("\n".join(pair) for pair in itertools.product(LINES, repeat=2)), *(f"{line}\n" for line in LINES)]
VALUES: list[Any] = [
    0, 1, -7, 10**30, 10**5000, True, False, "", "text", "it's\n\"two\" lines", "\ud800", "x" * 10_000, 1.5, 1e300,
    None,
    b"bytes", (), (1, 2), [1], {"a": 1}, {1}, int, len, ..., 2j, range(3),
]  # fmt: skip


def test_blank_lines_take_no_time() -> None:
    """Once it was cubic in their number: forty thousand would never have come to an end."""
    assert is_ordinary("x = 1" + "\n" * 40_000 + "y = 2")


@pytest.fixture(scope="module")
def shell() -> Iterator[GuestShell]:
    before = sys.displayhook, sys.excepthook, builtins.input, getpass.getpass, sys.modules["__main__"]
    made = make_shell()
    yield made
    made.restore_sys_module_state()
    GuestShell.clear_instance()
    sys.displayhook, sys.excepthook, builtins.input, getpass.getpass, sys.modules["__main__"] = before


@pytest.fixture
def values() -> tuple[DisplayFormatter, PlainValues]:
    formatter = DisplayFormatter()
    return formatter, PlainValues(formatter)


def plain_transformers() -> PlainTransformers:
    made = PlainTransformers()
    made.cleanup_transforms[:2] = [dedent]
    made.begin()
    return made


def ipythons_transformers() -> TransformerManager:
    made = TransformerManager()
    made.cleanup_transforms[:2] = [dedent]
    return made


def outcome(transform: Any, cell: str) -> Any:
    """What comes of it, be it an error. One that Python would make too is made sooner or later."""
    try:
        made = transform(cell)
    except Exception as error:  # whatever IPython raises is what we raise
        return type(error)
    try:
        ast.parse(made)
    except IndentationError:
        return IndentationError
    except (SyntaxError, ValueError, TypeError):
        pass  # what IPython would have made something of must not be left as it is
    return made


# -- a cell ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`make_tokens_by_line`")  # which IPython says of a line separator in a text
def test_every_cell_is_transformed_as_by_ipython() -> None:
    ours, theirs = plain_transformers(), ipythons_transformers()

    different = [c for c in CELLS if outcome(ours.transform_cell, c) != outcome(theirs.transform_cell, c)]

    assert different == []


@pytest.mark.filterwarnings("ignore:`make_tokens_by_line`")
def test_every_line_is_transformed_as_by_ipythons_shell(shell: GuestShell, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {cell: outcome(shell.transform_cell, cell) for cell in CELLS}
    monkeypatch.setattr(shell, "input_transformer_manager", ipythons_transformers())

    assert ours == {cell: outcome(lambda c: InteractiveShell.transform_cell(shell, c), cell) for cell in CELLS}


def test_plain_python_takes_the_shortcut() -> None:
    """Or these tests would compare IPython with itself."""
    taken = ["1 + 1", "x = 1", "x != 3", "def f():\n    return 1", "'a;b'", "for i in x:\n    print(i)"]

    assert [cell for cell in taken if not is_ordinary(cell)] == []


def test_whether_a_cell_awaits_is_as_ipython_says(shell: GuestShell) -> None:
    for cell in CELLS:
        ours = shell.should_run_async(cell, transformed_cell=cell, preprocessing_exc_tuple=None)
        assert ours == InteractiveShell.should_run_async(
            shell, cell, transformed_cell=cell, preprocessing_exc_tuple=None
        ), cell


def test_whether_a_semicolon_hides_the_value_is_as_ipython_says(shell: GuestShell) -> None:
    def told(cell: str) -> Any:
        return outcome(lambda c: bool(DisplayHook.semicolon_at_end_of_expression(c)), cell)

    parsed = [cell for cell in CELLS if isinstance(told(cell), bool)]

    assert [cell for cell in parsed if shell.displayhook.semicolon_at_end_of_expression(cell) != told(cell)] == []


@pytest.mark.parametrize("among", ["cleanup_transforms", "line_transforms"])
def test_a_transformer_of_the_users_sees_every_cell(among: str) -> None:
    transformers = plain_transformers()
    getattr(transformers, among).append(lambda lines: [line.replace("1", "2") for line in lines])

    assert transformers.transform_cell("1 + 1") == "2 + 2\n"


def test_a_transformer_for_the_end_sees_every_cell(shell: GuestShell) -> None:
    shell.input_transformers_post.append(lambda lines: [line.replace("1", "2") for line in lines])
    try:
        assert shell.transform_cell("1 + 1") == "2 + 2\n"
    finally:
        shell.input_transformers_post.clear()


def test_a_checker_of_the_users_sees_every_line(shell: GuestShell) -> None:
    seen: list[str] = []

    class Watching(PrefilterChecker):  # type: ignore[misc]
        def check(self, line_info: Any) -> None:
            seen.append(line_info.line)

    watching = Watching(shell=shell, prefilter_manager=shell.prefilter_manager)
    try:
        shell.transform_cell("1 + 1")
    finally:
        shell.prefilter_manager.unregister_checker(watching)

    assert seen == ["1 + 1"]


# -- a value -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_a_value_looks_as_ipython_says(value: Any, values: tuple[DisplayFormatter, PlainValues]) -> None:
    formatter, plain = values
    form = plain.form(formatter, value)

    assert form is None or form == formatter.format(value)


def test_plain_values_take_the_shortcut(values: tuple[DisplayFormatter, PlainValues]) -> None:
    formatter, plain = values

    assert [value for value in (1, "text") if plain.form(formatter, value) is None] == []


def test_a_subclass_has_forms_of_its_own(values: tuple[DisplayFormatter, PlainValues]) -> None:
    class Shouting(int):
        def _repr_html_(self) -> str:
            return "<b>!</b>"

    assert values[1].form(values[0], Shouting(1)) is None


def _register_a_type(formatter: DisplayFormatter) -> None:
    formatter.formatters["text/html"].for_type(int, lambda value: f"<b>{value}</b>")


def _register_another_text(formatter: DisplayFormatter) -> None:
    formatter.formatters["text/plain"].for_type(int, lambda value, p, cycle: p.text("an integer"))


def _register_by_name(formatter: DisplayFormatter) -> None:
    formatter.formatters["text/latex"].for_type_by_name("builtins", "int", lambda value: "$x$")


def _register_a_bundle(formatter: DisplayFormatter) -> None:
    formatter.mimebundle_formatter.for_type(int, lambda value, include, exclude: {"text/x": "y"})


def _register_a_display(formatter: DisplayFormatter) -> None:
    formatter.ipython_display_formatter.for_type(int, lambda value: True)


def _replace_the_printers(formatter: DisplayFormatter) -> None:
    formatter.formatters["text/html"].type_printers = {int: lambda value: "<i>!</i>"}


def _replace_a_formatter(formatter: DisplayFormatter) -> None:
    html = type(formatter.formatters["text/html"])()
    html.for_type(int, lambda value: "<u>!</u>")
    formatter.formatters["text/html"] = html


def _replace_the_method(formatter: DisplayFormatter) -> None:
    formatter.format = lambda value, **_: ({"text/plain": "mine"}, {})


@pytest.mark.parametrize(
    "hook",
    [
        _register_a_type, _register_another_text, _register_by_name, _register_a_bundle, _register_a_display,
        _replace_the_printers, _replace_a_formatter, _replace_the_method,
    ],
)  # fmt: skip
def test_a_form_that_the_user_gave_a_type_is_used(hook: Any, values: tuple[DisplayFormatter, PlainValues]) -> None:
    formatter, plain = values
    before = plain.form(formatter, 1)
    hook(formatter)

    assert (before, plain.form(formatter, 1)) == (({"text/plain": "1"}, {}), None)


def test_a_form_for_another_type_is_none_of_theirs(values: tuple[DisplayFormatter, PlainValues]) -> None:
    formatter, plain = values
    plain.form(formatter, 1)
    formatter.formatters["image/png"].for_type(complex, lambda value: b"png")

    assert plain.form(formatter, 1) == ({"text/plain": "1"}, {})


def test_a_form_that_was_given_and_taken_back_is_used_no_more(values: tuple[DisplayFormatter, PlainValues]) -> None:
    formatter, plain = values
    _register_a_type(formatter)
    given = plain.form(formatter, 1)
    formatter.formatters["text/html"].pop(int)

    assert (given, plain.form(formatter, 1)) == (None, ({"text/plain": "1"}, {}))


def test_another_formatter_in_its_place_is_asked(values: tuple[DisplayFormatter, PlainValues]) -> None:
    assert values[1].form(DisplayFormatter(), 1) is None


# -- what is left behind -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [(), ("_",), ("__", "_3")], ids=["free", "one of the user's", "two of the user's"])
def test_the_names_of_values_are_as_ipython_sets_them(shell: GuestShell, taken: tuple[str, ...]) -> None:
    def names(update: Any) -> dict[str, Any]:
        shell.forget()
        shell.user_ns.update(dict.fromkeys(taken, "mine"))
        for number, value in enumerate((1, "two", [3], shell.user_ns["_oh"], None, 6), 1):
            shell.execution_count = number + 1
            update(value)
            shell.user_ns.update(dict.fromkeys(taken[:1], "again") if number == 4 else {})
        found = {name: value for name, value in shell.user_ns.items() if not name.strip("_0123456789")}
        return {**found, "Out": dict(shell.user_ns["_oh"]), "hidden": sorted(set(found) & set(shell.user_ns_hidden))}

    hook = shell.displayhook

    assert names(hook.update_user_ns) == names(lambda value: DisplayHook.update_user_ns(hook, value))


def test_the_texts_of_the_last_cells_have_names_and_in_has_them_all(shell: GuestShell) -> None:
    shell.forget()
    for number in range(1, 252):
        shell.execute(f"{number}")

    assert (shell.user_ns["_i251"], shell.user_ns["_i250"], shell.user_ns["In"][7]) == ("251", "250", "7")
    assert len([name for name in shell.user_ns if name.startswith("_i") and name[2:].isdigit()]) <= 201
