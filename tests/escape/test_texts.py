"""What a guest's text costs the others: while the host reads it, plans by it and compares with it, a victim waits."""

from collections.abc import Callable, Iterator

import pytest

from holdfast import Session
from tests.escape.victim import MOST_HINDERED_S, victim


def nested_scopes() -> str:
    """Many names in the scopes around many others."""
    names = ", ".join(f"n{i}" for i in range(2_500))
    return f"def f({names}):\n def g():\n  def h():\n   return [{'m, ' * 9_000}]"


def nested_calls() -> str:
    """Calls in calls, in a cell that reads and writes many files."""
    reads = "; ".join(f"a{i} = open('i{i}').read()" for i in range(150))
    deep = "f(" * 90 + "a0" + ")" * 90
    return "\n".join([reads, "open('o', 'w')", *[deep] * 150])


TEXTS: dict[str, Callable[[], str]] = {"nested scopes": nested_scopes, "nested calls": nested_calls}


@pytest.fixture(scope="module")
def attacker() -> Iterator[Session]:
    with Session(memory="512M", timeout=60) as session:
        yield session


@pytest.mark.parametrize("text", TEXTS)
def test_no_text_keeps_other_sessions_waiting(attacker: Session, text: str) -> None:
    code = TEXTS[text]()
    assert len(code) < 50_000

    with victim() as watched:
        attacker.plan(code)

    assert watched.hindered_s < MOST_HINDERED_S, watched
