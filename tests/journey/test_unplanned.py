"""The plan is made while the guest is at work: if that fails nothing of the run stays, and if it takes long no deadline
waits for it."""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import anyio
import pytest

from holdfast import AsyncSession, Session, plans
from holdfast.config import default_home
from holdfast.errors import SessionHalted
from holdfast.resources.intact import Intact

WORK = "open('f', 'w').write('half'); x = 2; y = 2; import time; time.sleep(60)"
Slow = Callable[[float], None]


def live(session: Session) -> Any:
    return session._session._transport._session


def edit_on_host(session: Session, name: str) -> None:
    """So that it has to be hashed before a plan can name its digest."""
    (default_home() / "sessions" / session.id / "files/data" / name).write_text("edited")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    """As large a file as takes so long to be hashed."""
    hash_them = Intact.strange

    def slow(seconds: float) -> None:
        def strange(*arguments: Any) -> Any:
            time.sleep(seconds)
            return hash_them(*arguments)

        monkeypatch.setattr(Intact, "strange", strange)

    return slow


class Held(NamedTuple):
    """Hashing goes on when it is let go, or after a long while."""

    let_go: threading.Event
    in_time: list[bool]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    held, hash_them = Held(threading.Event(), []), Intact.strange

    def strange(*arguments: Any) -> Any:
        held.in_time.append(held.let_go.wait(20))
        return hash_them(*arguments)

    monkeypatch.setattr(Intact, "strange", strange)
    return held


def fails(*_: object, **__: object) -> Any:
    raise ValueError("no plan")


def fails_late(*_: object) -> Any:
    time.sleep(0.5)
    raise ValueError("no plan")


@pytest.mark.parametrize("keyed", [None, "k"])
@pytest.mark.parametrize("when", ["at once", "while files are looked into"])
def test_nothing_stays_of_a_run_that_could_not_be_planned(
    session: Session, monkeypatch: pytest.MonkeyPatch, when: str, keyed: str | None
) -> None:
    session.write("given", "1")
    before = session.run("x = 1; open('f', 'w').write('1')")
    runs = len(session.history())
    with monkeypatch.context() as patched:
        if when == "at once":
            patched.setattr(plans, "card_of", fails)
        else:
            edit_on_host(session, "given")
            patched.setattr(Intact, "strange", fails_late)
        began = time.monotonic()
        with pytest.raises(ValueError, match="no plan"):
            session.run(WORK, inputs=["given"], key=keyed)

    assert time.monotonic() - began < 30, "nobody waits for the end of the cell"
    assert (session.ckpt, len(session.history()), live(session).books.open) == (before.ckpt, runs, {})
    assert session.read("f") == b"1"
    assert session.run("x, 'y' in globals(), open('f').read()").text == "(1, False, '1')"
    assert session.run("x = 3", key=keyed).status == "committed"


def test_a_failure_of_ours_that_halts_the_session_is_told_as_that(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.write("given", "1")
    edit_on_host(session, "given")

    def damaged(*_: object) -> Any:
        raise SessionHalted("damaged", hint="look")

    monkeypatch.setattr(Intact, "strange", damaged)
    with pytest.raises(SessionHalted, match="damaged"):
        session.run(WORK, inputs=["given"])
    assert live(session).books.open == {}


def test_a_deadline_does_not_wait_for_files_to_be_hashed(session: Session, held: Held) -> None:
    session.write("given", "1")
    edit_on_host(session, "given")
    code = "import time\ntry: time.sleep(60)\nfinally: print('ended', flush=True)"
    run = session.run(code, inputs=["given"], timeout=0.5, on_stdout=lambda _: held.let_go.set())

    assert held.in_time == [True], "the cell had ended before they were hashed"
    assert (run.error.code, run.status, run.stdout) == ("timeout", "rolled_back", "ended\n")
    assert run.outside == ["given"], "and the plan is true"


def test_what_a_cell_prints_is_told_while_files_are_hashed(session: Session, held: Held) -> None:
    session.write("given", "1")
    edit_on_host(session, "given")
    run = session.run("print('now')", inputs=["given"], on_stdout=lambda _: held.let_go.set())

    assert held.in_time[:1] == [True]
    assert (run.status, run.stdout, run.outside) == ("committed", "now\n", ["given"])


def test_what_a_cell_saves_waits_for_the_plan_and_lasts(session: Session, slow: Slow) -> None:
    session.write("given", "1")
    edit_on_host(session, "given")
    slow(1.0)
    code = "import os\nfrom holdfast import kit\nopen('g', 'w').write('1'); kit.save('g'); open('h', 'w'); os._exit(1)"
    run = session.run(code, inputs=["given"])

    assert (run.status, run.saved) == ("rolled_back", ["g"])
    assert {entry.path for entry in session.files()} == {"given", "g"}


def test_who_goes_away_while_files_are_hashed_leaves_a_run_that_is_settled(slow: Slow) -> None:
    async def leave() -> None:
        async with AsyncSession(memory="512M", timeout=30) as session:
            await session.write("given", "1")
            (default_home() / "sessions" / session.id / "files/data/given").write_text("edited")
            slow(2.0)
            with anyio.move_on_after(0.5) as left:
                await session.run("x = 1; import time; time.sleep(60)", inputs=["given"])
            assert left.cancelled_caught
            assert (await session.run("'x' in globals()")).text == "False"
            assert [run.status for run in await session.history()] == ["committed", "rolled_back", "committed"]

    anyio.run(leave)
