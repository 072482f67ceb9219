"""Which files a pattern means, and what finding them may cost."""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

import pytest

from holdfast.errors import PatternsTooCostly
from holdfast.patterns import MOST_STEPS, Files


@pytest.mark.parametrize(
    ("pattern", "covered"),
    [
        ("*.csv", ["a.csv", "[1].csv"]),
        ("**/*.csv", ["a.csv", "[1].csv", "x/b.csv", "x/y/c.csv"]),
        ("x/**", ["x/b.csv", "x/y/c.csv"]),
        ("**", ["a.csv", "[1].csv", "x/b.csv", "x/y/c.csv", "new\\nline"]),
        ("x/**/c.csv", ["x/y/c.csv"]),
        ("new?line", ["new\\nline"]),
        ("[1].csv", ["[1].csv"]),
        ("[a-c].csv", ["a.csv"]),
        ("x", []),
        ("A.csv", []),
    ],
)
def test_patterns_stay_in_their_directory_unless_they_say_otherwise(pattern: str, covered: list[str]) -> None:
    files = ["a.csv", "[1].csv", "x/b.csv", "x/y/c.csv", "new\\nline"]

    assert Files(files).meant_by(pattern) == Files(dict.fromkeys(files)).meant_by(pattern) == covered


@pytest.mark.parametrize("seed", range(20))
def test_a_pattern_means_what_its_components_mean_one_by_one(seed: int) -> None:
    chosen = random.Random(seed)
    components = ["**", "*", "?", "a*", "*b", "*.c", "a?", "[ab]", "[!a]*", "a", "b", "ab", "**b", "*a*", "[x]"]
    names = ["a", "b", "ab", "a.c", "[x]", "x*", "aa?"]
    for _ in range(200):
        files = list({"/".join(chosen.choices(names, k=chosen.randint(1, 5))) for _ in range(6)})
        pattern = "/".join(chosen.choices(components, k=chosen.randint(1, 5)))
        covered = [path for path in files if _covers(pattern.split("/"), path.split("/"))]

        assert Files(files).meant_by(pattern) == ([pattern] if pattern in files else covered), (pattern, files)


def _covers(pattern: list[str], names: list[str]) -> bool:
    """Slow and plain."""
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_covers(pattern[1:], names[at:]) for at in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _covers(pattern[1:], names[1:])


DEEP = [f"{i}/" + "d/" * 1_900 + "x" for i in range(60)]
FLAT = [f"f{i}.csv" for i in range(5_000)]


@pytest.mark.parametrize(
    ("files", "patterns", "most"),
    [
        (DEEP, [f"**/q{i}" for i in range(195)], 1_000),
        (DEEP, [f"**/q*{i}" for i in range(195)], 20_000),
        (FLAT, [f"f{i}.csv" for i in range(1_000)], 10_000),
        (FLAT, [f"g{i}.csv" for i in range(1_000)], 10_000),
        (FLAT, [f"*_{i}.csv" for i in range(1_000)], 1_500_000),
        (["a/" * 300 + "a" * 200], ["**/" * 300 + "*a" * 100 + "b"], 1_000),
    ],
)
def test_many_patterns_take_few_steps(files: list[str], patterns: list[str], most: int) -> None:
    present = Files(files, most_steps=most)

    _all(present.meant_by, patterns)


@pytest.mark.parametrize(
    ("files", "patterns"),
    [
        (DEEP, [f"**/q*{i}/**" for i in range(195)]),
        (DEEP, ["**/d/" * 200 + f"y{i}/**/x" for i in range(195)]),
        (["a" * 255 + str(i) for i in range(5_000)], ["*a" * 100 + "b*"] * 1_000),
        (["a" * 250 + str(i) for i in range(5_000)], ["?*" * 100 + f"b{i}*" for i in range(1_000)]),
        (FLAT, ["[a]" * 1_300 + f"b{i}*" for i in range(1_000)]),
    ],
)
def test_patterns_that_would_take_too_long_are_refused(files: list[str], patterns: list[str]) -> None:
    present = Files(files)

    with pytest.raises(PatternsTooCostly, match="more than 3,000,000 comparisons") as refused:
        _all(present.meant_by, patterns)

    assert MOST_STEPS == 3_000_000
    assert refused.value.hint


def test_a_forecast_that_would_take_too_long_is_refused_as_well() -> None:
    present = Files([("a" * 200 + "/") * 19 + str(i) for i in range(2_000)])

    with pytest.raises(PatternsTooCostly):
        _all(present.foreseen_by, ["*a" * 2_000 + "b*"] * 200)


def _all(means: Callable[[str], list[str]], patterns: list[str]) -> None:
    for pattern in patterns:
        means(pattern)


@pytest.fixture
def no_switches() -> Iterator[None]:
    """Another thread goes on only where the running one lets it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("no_switches")
def test_other_threads_go_on_while_patterns_are_compared() -> None:
    files = Files("d/" * 1_900 + f"x{i}" for i in range(300))
    done, turns = threading.Event(), 0

    def compare() -> None:
        for i in range(4):
            files.meant_by(f"**/q{i}*/**")
        done.set()

    comparing = threading.Thread(target=compare)
    comparing.start()
    while not done.wait(0.0001):
        turns += 1
    comparing.join()
    assert turns > 100
