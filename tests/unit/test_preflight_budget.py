"""Whatever a cell's text is, the work on it is counted. A family of sources, up to the largest that is read.

Calls of functions are counted beside the steps, so that work which takes no steps is found on a machine of any speed.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.preflight import Steps, TooManySteps, read_here
from holdfast.preflight.ipython import MOST_CHARACTERS
from holdfast.preflight.ipython import read as read_cell
from holdfast.preflight.reading import read

_MOST_STEPS = 20_000
_CALLS = 12
"""Calls of functions for one step, or for one character of the text, which is split and parsed before it is walked."""

NAMES = st.sampled_from(["a", "b", "x1", "é", "open", "globals", "pd", "os", "_", "n" * 300])
STRINGS = st.sampled_from(["'i.csv'", "'''a > b; ' '''", "b'x'", "'%s-%d'", "'" + "*" * 200 + "'", "9" * 300, "0xff"])
ATOMS = NAMES | STRINGS
WRAPPERS = st.sampled_from(
    [
        "({})", "[{}]", "f({})", "not {}", "-{}", "lambda x: {}", "[{} for a in b]", "{{a: {} for a in b if a}}",
        "({} for a in b)", "(y := {})", "f'{{{}}}'", "{} if a else b", "a.b({}).c", "open({}).read()", "{}[0]",
        "pd.read_csv({})", "{} + a", "{} % a", "os.path.join({}, 'x')", "{}.format(a)", "await {}", "*{},",
    ]
)  # fmt: skip
BLOCKS = st.sampled_from(
    [
        "if a:", "for a in b:", "while a:", "def f(a, b=c):", "class C(a):", "with open(a) as b:", "async def g(*a):",
        "try:\n{}    0\n{}except NameError:", "try:\n{}    0\n{}finally:", "match a:\n{}  case {{'k': [b, *c]}}:",
        "@f(a)\n{}def h():",
    ]
)  # fmt: skip
LINES = st.sampled_from(
    [
        "import a.b as c", "from a import *", "global a", "del a", "x = y = z", "x += 1", "x: int = a", "!ls > {a}",
        "%time x = 1", "%cd sub", "a?", "os.system('cat a > b')", "duckdb.sql(\"copy 'a' to 'b'\")", ">>> a",
        "open('o', 'w').write(open('i').read())", "x = !ls", "os.chdir(a)", "\t", "\\", "\x00", "\ud800", "'''", "(",
    ]
)  # fmt: skip


@st.composite
def sources(draw: st.DrawFn) -> str:
    """Blocks in blocks, and in them one expression in others, or many lines, as often as there is room for."""
    expression = draw(ATOMS)
    for wrapper in draw(st.lists(WRAPPERS, max_size=3)):
        for _ in range(draw(st.sampled_from([1, 2, 30, 90]))):
            if len(expression) < MOST_CHARACTERS:
                expression = wrapper.format(expression)
    lines, indent = [], ""
    for block in draw(st.lists(BLOCKS, max_size=15)):
        lines.append(indent + block.format(indent, indent))
        indent += "    "
    body = [expression, *draw(st.lists(LINES | st.builds("{} = {}".format, NAMES, ATOMS), max_size=5))]
    size = sum(map(len, lines)) + sum(len(indent) + len(line) + 1 for line in body)
    times = draw(st.sampled_from([1, 5, 100, MOST_CHARACTERS]))
    room = max(1, (MOST_CHARACTERS - size) // max(1, sum(len(indent) + len(line) + 1 for line in body)))
    lines += [indent + line for line in body] * min(times, room)
    return (draw(st.sampled_from(["", "", "%%bash\n", "%%timeit\n", "%%capture x\n"])) + "\n".join(lines))[
        :MOST_CHARACTERS
    ]


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(code=sources())
def test_all_work_on_a_text_takes_steps(code: str) -> None:
    steps = Steps(_MOST_STEPS)
    with suppress(RecursionError):
        read_cell(code)  # the parser's own work is bounded by the size of the text
    with calls() as counted, suppress(TooManySteps, RecursionError):
        read(code, steps)

    used = _MOST_STEPS - max(0, steps.left)
    assert counted[0] <= _CALLS * (used + len(code) + 100), code[:200]


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(code=sources())
def test_the_event_loop_reads_a_text_or_leaves_it_and_never_fails(code: str) -> None:
    reading = read_here(code, live={"a"})

    assert reading is None or reading.unread == ""


@pytest.mark.parametrize("more", [1, 1_000_000])
def test_a_text_that_is_too_large_is_not_looked_at(more: int) -> None:
    reading = read_here("x" * (MOST_CHARACTERS + more))

    assert reading is not None
    assert "at most 50,000 are read" in reading.unread


@contextmanager
def calls() -> Iterator[list[int]]:
    """How many functions are called in this thread, of Python and of C."""
    counted = [0]

    def count(frame: FrameType, event: str, argument: object) -> None:
        counted[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield counted
    finally:
        sys.setprofile(before)
