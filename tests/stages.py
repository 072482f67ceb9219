"""`make test`: every stage of the suite, then what failed once more, then what came of it.

    python tests/stages.py

Several tests at once on a few cores are a load under which a deadline may pass, and a machine that is emulated may be
late. So what failed is tried once more: alone, in a process of its own, when nothing else of ours runs any longer. It
must pass then, and the last lines name it: what needs a second try time and again has to be mended.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import ordinary_user

TESTS_FAILED = 1
ALONE = ("--last-failed", "--last-failed-no-failures", "none")
# Most tests wait for a deadline or a death. A file's tests stay together, the longest come first, and each worker has a
# home of its own.
AT_ONCE = ("-n", "4", "--dist", "loadfile", "--no-loadscope-reorder")
SUITE = ("tests/stress", "tests/crash", "tests/journey", "tests/escape", "tests/unit", "tests/contract")
PYTEST = (sys.executable, "-m", "pytest")
REMEMBERED = "v/cache/lastfailed"
AS_USER = (sys.executable, str(Path(ordinary_user.__file__)))


class Stage(NamedTuple):
    name: str
    pytest: tuple[str, ...]
    """The command that runs it."""
    tests: tuple[str, ...]
    how: tuple[str, ...]
    cache: Path
    """Where pytest writes down what failed."""


class Tried(NamedTuple):
    """What came of a stage, or of its second try."""

    stage: Stage
    code: int
    failed: tuple[str, ...]
    """By pytest's names; none if it could not tell."""
    wall_s: float
    processor_s: float
    """Of what was started and waited for: sessions and their keepers are nobody's children, and not in it."""


def main() -> int:
    with tempfile.TemporaryDirectory() as caches:
        # Beside the first stages: it is a minute of unpacking and compiling.
        preparing = subprocess.Popen([*AS_USER, "--prepare"]) if os.geteuid() == 0 else None
        tried = [try_it(stage) for stage in stages_here(Path(caches))]
        if preparing is not None:  # else the suite ran as an ordinary user already
            if preparing.wait() != 0:
                print("stages: the ordinary user's environment could not be made")
                return 1
            tried += [try_it(stage) for stage in stages_of_user()]
        again = [try_again(first) for first in tried if first.code != 0]
    return tell(tried, again)


def stages_here(caches: Path) -> list[Stage]:
    return [
        Stage("the suite", PYTEST, SUITE, AT_ONCE, caches / "suite"),
        Stage("cgroup v2, in a machine", PYTEST, ("tests/vm",), ("-n", "2"), caches / "vm"),
    ]


def stages_of_user() -> list[Stage]:
    one, two = (ordinary_user.PLACE / "home" / f"cache-{ids}" for ids in (1, 2))
    for cache in (one, two):
        (cache / REMEMBERED).unlink(missing_ok=True)
    return [
        Stage("an ordinary user", (*AS_USER, "--prepared"), tuple(ordinary_user.WITH_ONE_ID), AT_ONCE, one),
        Stage("… with two ids", (*AS_USER, "--prepared", "--ids", "2"), tuple(ordinary_user.WITH_TWO_IDS), (), two),
    ]


def try_it(stage: Stage) -> Tried:
    return _run(stage, stage.how)


def try_again(first: Tried) -> Tried:
    """What failed; or all of it, where pytest did not come to its end and nobody knows what it left out."""
    return _run(first.stage, ALONE if first.code == TESTS_FAILED and first.failed else ())


def _run(stage: Stage, how: Sequence[str]) -> Tried:
    command = [*stage.pytest, *stage.tests, "-o", f"cache_dir={stage.cache}", *how]
    print(f"\n=== {stage.name}: {' '.join(how) or 'one by one'}", flush=True)
    began, used = time.monotonic(), _processor_s()
    code = subprocess.run(command, check=False).returncode
    return Tried(stage, code, _failed(stage), time.monotonic() - began, _processor_s() - used)


def _failed(stage: Stage) -> tuple[str, ...]:
    try:
        return tuple(json.loads((stage.cache / REMEMBERED).read_text()))
    except FileNotFoundError:
        return ()


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tell(tried: Sequence[Tried], again: Sequence[Tried]) -> int:
    """The last lines, and the exit code."""
    print()
    for each in tried:
        print(f"{each.stage.name:30} {each.wall_s:5.0f} s   {each.processor_s:5.0f} s of the processors   {_end(each)}")
    for second in again:
        print(f"{second.stage.name + ', again':30} {second.wall_s:5.0f} s {'':28}   {_end(second)}")
        first = next(each for each in tried if each.stage is second.stage)
        for name in first.failed or (f"pytest itself, with {first.code}",):
            twice = second.code != 0 and (name in second.failed or not second.failed)
            print(f"    {'failed twice' if twice else 'passed at the second try'}: {name}")
    failed = any(second.code != 0 for second in again)
    print(f"stages: {'failed' if failed else 'all passed'}, after {sum(e.wall_s for e in (*tried, *again)):.0f} s")
    return int(failed)


def _end(tried: Tried) -> str:
    return "passed" if tried.code == 0 else f"{len(tried.failed)} failed (exit code {tried.code})"


if __name__ == "__main__":
    sys.exit(main())
