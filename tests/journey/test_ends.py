"""No run is left without an end, whatever fails on the way that is ours: it is rolled back, or verified and to be
committed, and the session goes on or says why not."""

from typing import Any

import anyio
import pytest

from holdfast import AsyncSession, Session, computer, engine, journal, retention, settling, transaction
from holdfast.computer import Computer
from holdfast.errors import DiskFull
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


def test_a_blocked_run_that_could_not_be_settled_as_such_is_settled_all_the_same(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.run("x = 1")
    with monkeypatch.context() as patched:
        patched.setattr("holdfast.transaction.recovery.of_rollback", broken)
        with pytest.raises(ZeroDivisionError, match="a fault of ours"):
            session.run("nowhere_defined + 1", preflight="block")

    assert (ends(session), live(session).books.open) == (["committed", "rolled_back"], {})
    assert session.run("x").text == "1"


def full(patched: pytest.MonkeyPatch, place: Any, name: str, *, times: int = 1) -> None:
    """Its next calls find the disk full."""
    real, left = getattr(place, name), [times]

    def full(*arguments: object, **options: object) -> Any:
        left[0] -= 1
        if left[0] < 0:
            return real(*arguments, **options)
        raise DiskFull("the disk is full (write)", hint="free space")

    patched.setattr(place, name, full)


def test_a_plan_that_is_on_its_way_to_the_journal_is_not_written_twice(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.run("x = 1")
    monkeypatch.setattr(journal, "_LINGER_S", 60.0)
    full(monkeypatch, transaction, "prepare")
    with pytest.raises(DiskFull):
        session.run("open('f', 'w').write('1')")

    assert (ends(session), session.info().state) == (["committed", "rolled_back"], "ready")
    assert session.run("x").text == "1"


def test_the_end_of_the_code_is_not_written_twice(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.run("from holdfast import kit")
    full(monkeypatch, settling, "_publish_saved")
    run = session.run("open('p', 'w').write('1'); kit.save('p'); 1 / 0")

    assert (run.status, run.saved, session.read("p")) == ("rolled_back", ["p"], b"1")
    assert (ends(session), session.info().state) == (["committed", "rolled_back"], "ready")


def test_a_reset_takes_nothing_from_a_run_that_is_verified(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.run("x = 1")
    full(monkeypatch, settling, "publish", times=3)
    with pytest.raises(DiskFull):
        session.run("open('f', 'w').write('precious')")
    for _ in range(2):
        with pytest.raises(DiskFull, match="will be committed when there is room"):
            session.reset()
    session.reset()

    assert (session.read("f"), session.generation) == (b"precious", 2)
    assert (ends(session), live(session).books.open) == (["committed", "committed"], {})
    assert session.run("open('f').read()").text == "'precious'"


def test_a_layer_that_is_to_be_published_is_not_swept(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch, settling, "publish")
    with pytest.raises(DiskFull):
        session.run("open('f', 'w').write('precious')")

    async def sweep() -> None:
        await live(session).computer.renew()
        await live(session).sweep()

    engine.wait(sweep)
    assert session.run("open('f').read()").text == "'precious'"


def test_a_file_can_be_written_as_soon_as_there_is_room(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.run("x = 1")
    full(monkeypatch, settling, "publish", times=2)
    with pytest.raises(DiskFull):
        session.run("open('f', 'w').write('1')")
    with pytest.raises(DiskFull, match="will be committed when there is room"):
        session.write("g", "2")
    session.write("g", "2")

    assert [entry.path for entry in session.files()] == ["f", "g"]
    assert session.run("open('f').read(), open('g').read()").text == "('1', '2')"


def test_what_was_saved_is_kept_until_its_run_has_an_end(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.run("from holdfast import kit")
    full(monkeypatch, settling, "_publish_saved", times=3)
    with pytest.raises(DiskFull):
        session.run("open('p', 'w').write('1'); kit.save('p'); 1 / 0")
    retention._remove_unneeded(live(session).books, live(session).limits)

    assert session.run("open('p').read()").text == "'1'"
    assert ends(session) == ["committed", "rolled_back", "committed"]


def test_who_goes_away_while_his_turn_is_made_ready_leaves_it_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    told, protect = list[str](), Computer.protect

    async def slowly(computer: Computer, version: int) -> None:
        told.append("begun")
        await protect(computer, version)
        await anyio.sleep(1.0)
        told.append("done")

    async def leave() -> None:
        async with AsyncSession(memory="512M", timeout=30, undo=1) as session:
            monkeypatch.setattr(Computer, "protect", slowly)
            with anyio.move_on_after(0.5) as left:
                await session.run("x = 1")
            assert left.cancelled_caught
            assert (await session.run("'x' in globals()")).text == "False"
            assert told[:2] == ["begun", "done"]

    anyio.run(leave)
