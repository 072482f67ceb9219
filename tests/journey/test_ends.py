"""No run is left without an end, whatever fails on the way that is ours: it is rolled back, or verified and to be
committed, and the session goes on or says why not."""

from typing import Any

import pytest

from holdfast import Session, computer
from holdfast.computer import Computer
from holdfast.kernel.conduct import Conduct

WORK = "x = 2; open('f', 'w').write('half'); import os; os.write(1, bytes(2 << 20))"


def live(session: Session) -> Any:
    return session._session._transport._session


def ends(session: Session) -> list[str]:
    return [entry.status for entry in session.history()]


def broken(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("a fault of ours")


async def broken_later(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("a fault of ours")


FAULTS: dict[str, list[tuple[object, str, Any]]] = {
    "looking at what is left": [(Computer, "_check_disk", broken_later)],
    "looking for the cause": [(computer, "explain", broken)],
    "giving a run up": [(Conduct, "_check", broken_later), (Conduct, "abandon", broken_later)],
    "rolling back too": [(computer, "explain", broken), (Computer, "_wake", broken_later)],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_we_failed_is_rolled_back_and_told(
    session: Session, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    session.run("x = 1; open('f', 'w').write('1')")
    with monkeypatch.context() as patched:
        for place, name, instead in FAULTS[fault]:
            patched.setattr(place, name, instead)
        with pytest.raises(ZeroDivisionError, match="a fault of ours"):
            session.run(WORK, key="k")

    assert (ends(session), live(session).books.open) == (["committed", "rolled_back"], {})
    assert session.info().state == "ready"
    lost = fault == "rolling back too"
    after = session.run("open('f').read(), globals().get('x')")
    assert (after.text, after.generation) == (f"('1', {None if lost else 1})", 2 if lost else 1)
    assert session.run(WORK, key="k").status == "committed"


def test_a_rehearsal_that_we_failed_is_taken_back(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.run("x = 1; open('f', 'w').write('1')")
    with monkeypatch.context() as patched:
        patched.setattr(computer, "explain", broken)
        with pytest.raises(ZeroDivisionError, match="a fault of ours"):
            session.run(WORK, rehearse=True)

    assert session.run("open('f').read(), x").text == "('1', 1)"
    assert ends(session) == ["committed", "committed"]
