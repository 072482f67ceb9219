"""Names that a cell lacks: what Python itself says when it runs the cell is what we are compared with."""

import asyncio
import contextlib
import inspect
import io
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from typing import Any

import pytest

from holdfast.preflight import Gone, check_syntax, examine, explain_missing, missing_names
from holdfast.records import Lost
from holdfast.store.rows import NameRow

LACKING = [
    ("x = x + 1", ["x"]),
    ("x += 1", ["x"]),
    ("print(a)\nprint(b)\nprint(a)", ["a", "b"]),
    ("x: int\nx", ["x"]),
    ("del y", ["y"]),
    ("x = 1\ndel x\nprint(x)", ["x"]),
    ("(x := x + 1)", ["x"]),
    ("[i * k for i in range(3)]", ["k"]),
    ("[i for i in range(3)]\nprint(i)", ["i"]),
    ("[i for i in xs]", ["xs"]),
    ("{k: v for k, v in pairs}", ["pairs"]),
    ("sum(i * w for i in [1])", ["w"]),
    ("list(map(lambda a: a + b, [1]))", ["b"]),
    ("def f():\n    return df\nf()", ["df"]),
    ("def f():\n    def g():\n        return df\n    return g()\nf()", ["df"]),
    ("def f(a=default):\n    return a", ["default"]),
    ("@decorator\ndef f(): pass", ["decorator"]),
    ("class A(Base): pass", ["Base"]),
    ("class A:\n    z = 1\n    def m(self):\n        return z\nA().m()", ["z"]),
    ("for i in range(3):\n    total += i", ["total"]),
    ("while True:\n    if done: break\n    done = True", ["done"]),
    ("if True:\n    print(x)\n    x = 1", ["x"]),
    ("try:\n    df\nexcept ValueError:\n    pass", ["df"]),
    ("with open(p) as f: f.read()", ["p"]),
    ("match v:\n    case {'a': b, **rest}: b, rest\n    case [c, *d]: c, d", ["v"]),
    ("async def f(): return 1\nawait f()\nawait g()", ["g"]),
    ("f'{a}'", ["a"]),
    ("print(__file__)", ["__file__"]),
    ("def f(x: Unheard): pass", ["Unheard"]),
    ("import os.path as p\nos.getcwd()", ["os"]),
]
HAVING = [
    "x = 1\nx",
    "def f():\n    return df\ndf = 1\nf()",
    "def f():\n    return g()\ndef g():\n    return 1\nf()",
    "def f():\n    global c\n    c = 1\nf()\nc",
    "def f():\n    n = 0\n    def g():\n        nonlocal n\n        n += 1\n    g()\nf()",
    "(n := 5) + n",
    "any((hit := i) > 1 for i in [1, 2])\nhit",
    "[y := 1, y]",
    "[[c for c in r] for r in ['ab']]",
    "[f() for f in [lambda x=x: x for x in range(2)]]",
    "[f() for f in [lambda: x for x in range(2)]]",
    "for i in range(3):\n    if i: print(prev)\n    prev = i",
    "for i in range(3):\n    if not i:\n        prev = 0\n        continue\n    print(prev)",
    "try:\n    import unheard_of\nexcept ImportError:\n    unheard_of = None\nunheard_of",
    "try:\n    df\nexcept NameError:\n    df = 1\ndf",
    "try:\n    df\nexcept Exception:\n    df = 1\ndf",
    "import contextlib\nwith contextlib.suppress(NameError):\n    print(df)",
    "if 'df' in globals():\n    df.head()",
    "if 'df' not in locals().keys():\n    df = 1\ndf",
    "df2 = df if 'df' in dir() else None",
    "def f():\n    try:\n        return df\n    except NameError:\n        return 1\nf()",
    "from math import *\npi",
    "exec('a = 1')\na",
    "globals()['a'] = 1\na",
    "globals().update(a=1)\na",
    "class A:\n    z = 1\n    w = z\n    def m(self): return __class__\nA().m()",
    "class A:\n    T = int\n    def m(self, x: T): pass",
    "from __future__ import annotations\ndef f(x: Unheard): pass",
    "import os.path\nos.getcwd()",
    "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    print(e)",
    "match [1, 2]:\n    case [c, *d]: print(c, d)\n    case {'k': v, **rest}: print(v, rest)",
    "match 1:\n    case int() as n: print(n)",
    "with open('/dev/null') as f, open('/dev/null') as g: f.read(), g.read()",
    "a = b = 1\n(c, *d), e = ([a, b], 2)\nc, d, e",
    "def f(n):\n    return n and f(n - 1)\nf(2)",
    "print(__name__, __doc__, __debug__)",
]
IPYTHONS = [
    "print(_, __, ___, _1, _i1, _i, In, Out, _oh, get_ipython, display, exit, quit)",
    "%run script.py\nmade_there",
    "%unheard_of magic\nmade_there",
    "get_ipython().run_line_magic('run', 'a.py')\nmade_there",
    "files = !ls\nfiles",
    "%%capture out\nprint(1)\nout",
    "%%timeit x = 1\nx + 1",
]


def raised(code: str) -> str | None:
    """The name that Python misses first when it runs the cell."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    compiled = compile(code, "cell", "exec", PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            result = eval(compiled, namespace)
            if inspect.iscoroutine(result):
                asyncio.run(result)
    except NameError as error:
        return error.name
    return None


@pytest.mark.parametrize(("code", "names"), LACKING)
def test_a_name_that_python_would_miss_is_found(code: str, names: list[str]) -> None:
    assert raised(code) == names[0]

    assert missing_names(code, live=()) == names


@pytest.mark.parametrize("code", HAVING)
def test_a_cell_that_runs_lacks_nothing(code: str) -> None:
    assert raised(code) is None

    assert missing_names(code, live=()) == []


@pytest.mark.parametrize("code", IPYTHONS)
def test_names_that_ipython_brings_are_not_missing(code: str) -> None:
    assert missing_names(code, live=()) == []


@pytest.mark.parametrize(
    ("code", "names"),
    [("%time total = f(df)\ntotal", ["f", "df"]), ("%%time\ndf.sum()", ["df"]), ("!ls\nx = %time g()", ["g"])],
)
def test_python_inside_of_a_magic_is_looked_at(code: str, names: list[str]) -> None:
    assert missing_names(code, live=()) == names


def test_live_names_are_not_missing() -> None:
    assert missing_names("def f(): return df\ntotal = price * count", live={"df", "price"}) == ["count"]


# -- explaining ---------------------------------------------------------------------------------------------------

PAST = {
    "df": NameRow(type="DataFrame", run="run_12", generation=1),
    "sales": NameRow(type="DataFrame", run="run_20", generation=3),
}
LOSSES = [
    Lost(at=73_860.0, generation=2, cause="out of memory", run="run_13"),
    Lost(at=80_000.0, generation=3, cause="reset by the caller"),
]


def test_a_name_that_a_reset_took_is_explained_by_the_reset_that_took_it() -> None:
    finding = explain_missing("df", past=PAST, losses=LOSSES, generation=3)

    assert finding.code == "name_missing"
    assert finding.names == ["df"]
    assert finding.message == (
        "`df` was defined by run run_12 in generation 1; memory was lost at 20:31 UTC, out of memory; re-run run_12"
    )


def test_a_name_that_nobody_defined_says_so_and_what_was_meant() -> None:
    finding = explain_missing("salse", past=PAST, losses=LOSSES, generation=3)

    assert "no run has defined it" in finding.message
    assert finding.hint == "did you mean `sales`?"


def test_a_lost_name_is_not_offered_in_place_of_another() -> None:
    assert "df" not in explain_missing("dff", past=PAST, losses=LOSSES, generation=3).hint


def test_the_usual_imports_are_offered() -> None:
    assert explain_missing("np", past={}, losses=[], generation=1).hint == "add `import numpy as np`"


def test_a_name_that_was_deleted_says_by_which_run_and_what_brings_it_back() -> None:
    gone = Gone(by="run_9", is_deletion=True, run="run_3")
    finding = explain_missing("x", past=PAST, losses=LOSSES, generation=3, gone=gone, way_back="CKPT-s-g3-v7-00")

    assert finding.message == (
        "`x` was defined by run run_3, and deleted by run run_9; re-run run_3 or restore CKPT-s-g3-v7-00"
    )
    assert finding.hint == "re-run run_3 or restore CKPT-s-g3-v7-00"


def test_a_name_that_a_restore_took_back_says_so() -> None:
    gone = Gone(by="restore_9", is_deletion=False, run="run_3")
    finding = explain_missing("x", past=PAST, losses=LOSSES, generation=3, gone=gone)

    assert finding.message == (
        "`x` was defined by run run_3, and taken back by restore_9, which restored an earlier state; re-run run_3"
    )


def test_of_what_was_not_looked_at_nothing_is_said() -> None:
    gone = Gone(by="run_900", is_deletion=True)
    deleted = explain_missing("x", past={}, losses=[], generation=1, gone=gone, looked_back=300)
    unknown = explain_missing("x", past={}, losses=[], generation=1, looked_back=300)

    assert (deleted.message, deleted.hint) == ("`x` was deleted by run run_900", "define it in this run")
    assert unknown.message == "`x` is not in memory: none of the last 300 runs has defined it"


def test_a_loss_that_was_not_recorded_is_still_a_loss() -> None:
    assert "memory was lost since" in explain_missing("df", past=PAST, losses=[], generation=3).message


def test_a_syntax_error_is_the_only_finding() -> None:
    assert examine("df.head(\n", live=(), past={}) == [check_syntax("df.head(\n")]
    assert [finding.names for finding in examine("f(df)", live=(), past={})] == [["f"], ["df"]]
