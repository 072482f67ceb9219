"""What a guest's text costs the others: while the host reads it, plans by it and compares with it, a victim waits."""

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast import Session
from holdfast.access import KeyRing
from holdfast.errors import InputMissing, PatternsTooCostly
from holdfast.patterns import IN_LOOP, Files

from .victim import victim


def nested_scopes() -> str:
    """Many names in the scopes around many others."""
    names = ", ".join(f"n{i}" for i in range(2_500))
    return f"def f({names}):\n def g():\n  def h():\n   return [{'m, ' * 9_000}]"


def nested_calls() -> str:
    """Calls in calls, in a cell that reads and writes many files."""
    reads = "; ".join(f"a{i} = open('i{i}').read()" for i in range(150))
    deep = "f(" * 90 + "a0" + ")" * 90
    return "\n".join([reads, "open('o', 'w')", *[deep] * 150])


def nested_finally() -> str:
    """A `finally` in another, and so on: the compiler takes twice as long for each."""
    lines = [f"{' ' * depth}try: 0\n{' ' * depth}finally:" for depth in range(18)]
    return "\n".join([*lines, " " * 18 + "0"])


def similar_names() -> str:
    """Names one letter off the live ones."""
    return "\n".join(f"{'n' * 100}_{i:03}x" for i in range(300))


def long_scripts() -> str:
    """One long command, run by many calls."""
    return f"c = '''{'echo a > b; ' * 1_500}'''\n" + "os.system(c)\n" * 2_000


def spaces_in_sql() -> str:
    return f"duckdb.sql('''read_csv({' ' * 19_000}x attach{' ' * 19_000}x''')\n" * 1


def spaces_after_a_prompt() -> str:
    return ">>> x\n" + " " * 49_000 + "!"


def long_chains() -> str:
    """Comparisons that are nested as deep as the parser allows, and f-strings that hold thousands of values."""
    return "a<" * 12_000 + "1\nf'" + "{a}" * 8_000 + "'"


def magics() -> str:
    """Lines that only IPython understands, each of which names files."""
    return "!cat a > b\n%time x = 1\ny = !ls\nz?\n" * 1_200


def patterns_in_code() -> str:
    """Each means files at any depth, and the session has deep ones."""
    return "\n".join(f"open('**/q{i}*/**')" for i in range(195))


TEXTS: dict[str, Callable[[], str]] = {
    text.__name__.replace("_", " "): text
    for text in (nested_scopes, nested_calls, nested_finally, similar_names, long_scripts, spaces_in_sql,
                 spaces_after_a_prompt, long_chains, magics, patterns_in_code)
}  # fmt: skip


ATTACKER: Mapping[str, Any] = {"memory": "512M", "timeout": 60}
LIVE_NAMES = "\n".join(f"{'n' * 100}_{i:03} = {i}" for i in range(1_000))
DEEP_FILES = """
import os
for part in ["d"] * 1_900:
    os.mkdir(part)
    os.chdir(part)
for i in range(300):
    open(f"x{i}", "w").write("x")
os.chdir("/mnt/data")
"""


@pytest.fixture(scope="module")
def attacker() -> Iterator[Session]:
    with Session(**ATTACKER) as session:
        session.run(LIVE_NAMES)
        assert session.run(DEEP_FILES).status == "committed"
        yield session


@pytest.mark.parametrize("text", TEXTS)
def test_no_text_keeps_other_sessions_waiting(attacker: Session, text: str) -> None:
    code = TEXTS[text]()
    assert len(code) <= 50_000

    with victim() as watched:
        attacker.plan(code)

    assert not watched.is_held_up, str(watched)


def test_texts_of_one_api_key_keep_another_key_waiting_no_longer(server: Any) -> None:
    """Many at once: they wait for each other, and for a while only; there is one process that reads them."""
    keys = KeyRing(server.home / "keys")
    (_, eve), (_, ann) = keys.add("eve of texts"), keys.add("ann of texts")
    code = nested_scopes()
    attacker = Session(**ATTACKER, url=server.url, token=eve)
    with attacker as session, ThreadPoolExecutor(8) as several, victim(url=server.url, token=ann) as watched:
        cards = list(several.map(lambda _: session.plan(code), range(8)))

    assert len(cards) == 8
    assert not watched.is_held_up, str(watched)


# -- patterns, names ---------------------------------------------------------------------------------------------


def test_no_declared_patterns_keep_other_sessions_waiting(attacker: Session) -> None:
    with victim() as watched:
        for outputs in ([f"**/q{i}" for i in range(195)], [f"f{i}.csv" for i in range(1_000)]):
            run = attacker.run("open('y', 'w').write('y')", outputs=outputs)
            assert (run.status, run.error.code) == ("rolled_back", "verification")

    assert not watched.is_held_up, str(watched)


def test_the_event_loop_compares_few_patterns_however_deep_the_files(
    attacker: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two patterns and three hundred files are few, and their paths have half a million components."""
    taken, take = Counter[str](), Files.take

    def taking(files: Files, steps: int = 1) -> None:
        taken[threading.current_thread().name] += steps
        take(files, steps)

    monkeypatch.setattr(Files, "take", taking)
    run = attacker.run("open('y', 'w').write('y')", outputs=["**/q*/**", "**/z*/**"])

    assert run.error.code == "verification"
    assert sum(taken.values()) > 1_000_000
    assert taken["holdfast"] < 5 * IN_LOOP  # the thread of the event loop


def test_patterns_that_take_too_long_are_refused(attacker: Session) -> None:
    costly = [f"**/q{i}*/**" for i in range(195)]

    with victim() as watched:
        run = attacker.run("open('y', 'w').write('y')", outputs=costly)
        with pytest.raises(PatternsTooCostly):
            attacker.run("1", inputs=costly)
        card = attacker.plan(patterns_in_code())

    assert (run.status, run.error.code) == ("rolled_back", "patterns_too_costly")
    assert [finding.code for finding in card.findings] == ["forecast_left_out"]
    assert not watched.is_held_up, str(watched)


def test_a_missing_input_is_looked_for_within_bounds(attacker: Session) -> None:
    names = "for i in range(200): open('ab' * 48 + f'{i:03}', 'w').write('x')"
    assert attacker.run(names).status == "committed"

    with victim() as watched:
        for missing in ("a" * 50 + "b" * 50, "*a" * 100 + "b*"):
            with pytest.raises(InputMissing):
                attacker.plan("1", inputs=[missing])

    assert not watched.is_held_up, str(watched)


def test_names_that_come_and_go_keep_no_other_session_waiting() -> None:
    """Ten thousand names are bound in each run, and then taken away. Not all of them are remembered."""
    with Session(**ATTACKER) as attacker, victim() as watched:
        for turn in range(3):
            attacker.run(f"for i in range(9_900): globals()[f'n{turn}_{{i}}'] = i")
        unseen = attacker.run("n2_9899", preflight="block")
        attacker.run("for name in [name for name in globals() if name[:1] == 'n']: del globals()[name]")

    assert unseen.text == "9899"
    assert not watched.is_held_up, str(watched)


# -- the process that reads large texts --------------------------------------------------------------------------


def test_the_process_that_reads_texts_is_confined_and_bounded(attacker: Session) -> None:
    with victim():
        attacker.plan(nested_scopes())

    (reader,) = _readers()
    status = Path(f"/proc/{reader}/status").read_text()
    limits = Path(f"/proc/{reader}/limits").read_text()
    assert re.search(r"^Seccomp:\s+2$", status, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)
    assert re.search(rf"^Max address space\s+{512 << 20} ", limits, re.MULTILINE)
    assert os.path.samefile(f"/proc/{reader}/fd/2", os.devnull)


def test_a_text_that_takes_the_reader_too_long_ends_it_and_the_next_is_read(attacker: Session) -> None:
    endless = attacker.plan(spaces_after_a_prompt())
    readers = _readers()
    card = attacker.plan(nested_calls())

    assert [finding.code for finding in endless.findings] == ["not_looked_at"]
    assert readers == []
    assert card.forecast_outputs == ["o"]


def _readers() -> list[int]:
    """Processes of this one that read texts."""
    children = Path("/proc/self/task").glob("*/children")
    pids = {int(pid) for listed in children for pid in listed.read_text().split()}
    return [pid for pid in pids if b"preflight.reader" in Path(f"/proc/{pid}/cmdline").read_bytes()]
