"""What a guest's text costs the others: while the host reads it, plans by it and compares with it, a victim waits."""

from collections.abc import Callable, Iterator

import pytest

from holdfast import Session

from .victim import MOST_HINDERED_S, victim


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


TEXTS: dict[str, Callable[[], str]] = {
    text.__name__.replace("_", " "): text
    for text in (nested_scopes, nested_calls, nested_finally, similar_names, long_scripts, spaces_in_sql,
                 spaces_after_a_prompt)
}  # fmt: skip


@pytest.fixture(scope="module")
def attacker() -> Iterator[Session]:
    with Session(memory="512M", timeout=60) as session:
        session.run("\n".join(f"{'n' * 100}_{i:03} = {i}" for i in range(1_000)))
        yield session


@pytest.mark.parametrize("text", TEXTS)
def test_no_text_keeps_other_sessions_waiting(attacker: Session, text: str) -> None:
    code = TEXTS[text]()
    assert len(code) < 50_000

    with victim() as watched:
        attacker.plan(code)

    assert watched.hindered_s < MOST_HINDERED_S, watched
