"""Cells as IPython takes them: its own transformation is what ours is compared with."""

import ast
import doctest
import sys
import time
import warnings
from types import ModuleType

import pytest
from IPython.core.inputtransformer2 import TransformerManager

import holdfast.cards
import holdfast.preflight
from holdfast.preflight import (
    check_syntax,
    folding,
    forecast,
    ipython,
    languages,
    missing_names,
    names,
    syntax,
)

FINE = [
    "1 + 1",
    "",
    "# only a comment",
    "await anything()",
    "async for row in rows():\n    print(row)\nawait done()",
    "[x async for x in rows()]",
    "%matplotlib inline\nimport os",
    "!ls -l 'it''s here' | wc\nx = 1",
    "!!ls",
    "files = !ls *.csv\nprint(files)",
    "d['a'], b = %env HOME\nb",
    "elapsed = %timeit -o -n 10 sum(range(10))",
    "%time total = sum(range(10))",
    "df.head?",
    "?df",
    "df.head??\nx = 2",
    "if True:\n    %time f()\n    !echo \"unbalanced '\nelse:\n    pass",
    "!echo a \\\n   b \\\n   'c\nx = 1",
    "text = '''\n%not a magic\n!nor this\n'''\n%time text",
    "value = (10\n%3)\n%time value",
    "s = 'a \\\n%b'\n!ls",
    "  x = 1\n  if x:\n      y = 2",
    ">>> x = 1\n>>> if x:\n...     y = 2\n",
    "In [1]: x = 1\n   ...: y = 2",
    "# pasted\n>>> x = 1",
    "/print 1",
    'text = """is it?\nyes"""\n%time text',
    ",print a b",
    "%%time\nx = 1\n%time y = 2",
    "%%capture out\nprint(1)",
    "\n\n%%timeit -n 3\nsum(range(3))",
    "pattern = '\\d+'\nx is 3",
]
NOT_PYTHON = ["%%bash\nfor f in *; do echo $f; done", "%%html\n<b>", "%%writefile a.py\ndef (", "%%!\nls |"]
ONE_LINE_MAGICS = ["ls", "ls -l", "pip install rich", "cd /tmp", "time sum(range(3))", "whos"]
BROKEN = [
    ("if x\n    y", 1),
    ("x = 1\ny = = 2", 2),
    ("x = 1\nreturn x", 2),
    ("break", 1),
    ("def f():\n    await g()", 2),
    ("%time f()\nx = (1,\n", 2),
    ("!ls\nfor", 2),
    ("x = 1\n    y = 2", 2),
    ("print 'hello'", 1),
    ("%%time\nx = 1\ny = )", 3),
]


def compiles_in_ipython(code: str) -> bool:
    python = TransformerManager().transform_cell(code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(python, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        except SyntaxError:
            return False
    return True


@pytest.mark.parametrize("code", FINE)
def test_what_ipython_accepts_is_no_syntax_error(code: str) -> None:
    assert compiles_in_ipython(code)

    assert check_syntax(code) is None


@pytest.mark.parametrize(("code", "line"), BROKEN)
def test_what_is_broken_is_named_with_its_line(code: str, line: int) -> None:
    assert code.startswith("%%") or not compiles_in_ipython(code)

    finding = check_syntax(code)

    assert finding is not None
    assert (finding.code, finding.line) == ("syntax", line)
    assert "nothing was started" in finding.message


@pytest.mark.parametrize("code", NOT_PYTHON + ONE_LINE_MAGICS)
def test_what_is_not_python_is_not_checked(code: str) -> None:
    assert check_syntax(code) is None
    assert missing_names(code, live=()) == []


@pytest.mark.parametrize("code", FINE)
def test_lines_keep_their_numbers(code: str) -> None:
    cell = ipython.read(code + "\n@\n")

    assert cell.error is not None
    assert cell.error.lineno in ((code + "\n").count("\n") + 1, (code + "\n").count("\n") + 2)


def test_syntax_of_a_newer_python_than_ours_is_not_judged() -> None:
    newer = f"3.{sys.version_info[1] + 1}.2"

    assert check_syntax("x = = 1", python=newer) is None
    assert check_syntax("x = = 1", python=sys.version.split()[0]) is not None


def test_the_hint_shows_the_line() -> None:
    finding = check_syntax("x = 1\nif x = 2:\n    pass")

    assert finding is not None
    assert finding.hint == "line 2 reads: if x = 2:"


HOSTILE = {
    "deep operators": "-" * 49_000 + "1",
    "deep brackets": "(" * 49_000,
    "deep attributes": "a" + ".b" * 20_000,
    "deep calls": "f" + "()" * 20_000,
    "deep lambdas": "lambda:" * 7_000 + "x",
    "deep comprehensions": "[x for x in " * 90 + "y" + "]" * 90,
    "deep blocks": "".join(" " * depth + "if x:\n" for depth in range(99)) + " " * 99 + "x",
    "many branches": "if a: pass\n" + "elif a: pass\n" * 3_000,
    "wide comparison": "a<" * 20_000 + "1",
    "many functions": "def f():\n x = y\n" * 3_000,
    "many magics": "%time x\n" * 6_000,
    "many commands": "! '\n" * 12_000,
    "joined lines": "%time x \\\n" * 5_000,
    "backslashes": "'\\" * 25_000,
    "quotes": "'" * 49_999,
    "carriage returns": "\r" * 49_999,
    "a NUL": "x = '\0'",
    "a lone surrogate": "x = '\ud800'",
    "a long number": "x = " + "9" * 40_000,
    "doubling text": "a = 'x' * 9 + 'y'\n" + "a = a + a\n" * 4_000 + "open(a)",
    "many alternatives": "a = ['b', 'c', 'd', 'e']\n" + "p = f'" + "{a}" * 9_000 + "'\nopen(p)",
    "more than we read": "x = y\n" * 100_000,
    "quoted everywhere": "duckdb.sql('''" + "copy x (((( from " * 2_500 + "''')",
    "shell quotes": "%%bash\n" + "echo $( ${ '\n" * 4_000,
}


@pytest.mark.parametrize("code", HOSTILE.values(), ids=HOSTILE)
def test_hostile_code_is_unknown_and_costs_little(code: str) -> None:
    started = time.process_time()

    check_syntax(code)
    missing_names(code, live=())
    forecast(code)

    assert time.process_time() - started < 10


def test_code_beyond_the_limit_is_not_looked_at() -> None:
    long = "#" * ipython.MOST_CHARACTERS

    assert check_syntax(long + "\nif") is None
    assert missing_names(long + "\ny", live=()) == []


def test_warnings_of_a_cell_do_not_reach_the_host(recwarn: pytest.WarningsRecorder) -> None:
    assert check_syntax("x = '\\d'\nx is 3\nassert (x, 'always true')") is None

    assert not recwarn.list


@pytest.mark.parametrize(
    "module",
    [
        holdfast.cards,
        holdfast.preflight,
        folding,
        sys.modules["holdfast.preflight.forecast"],  # the package's `forecast` is the function
        ipython,
        languages,
        names,
        syntax,
    ],
)
def test_the_examples_in_the_docstrings_hold(module: ModuleType) -> None:
    tried = doctest.testmod(module)

    assert tried.attempted > 0
    assert tried.failed == 0
