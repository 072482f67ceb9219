"""A mistake of ours: no run is left without an end, nothing that was verified is lost, and the session goes on."""

from collections.abc import Callable
from typing import Any

import pytest

from holdfast import Session, settling, transaction
from holdfast.config import default_home
from holdfast.errors import InternalFault
from holdfast.store.sqlite import Store
from holdfast.verify import check_in_home

CHANGES: dict[str, Callable[[Session], Any]] = {
    "a cell": lambda s: s.run("open('a', 'w').write('new')"),
    "a write": lambda s: s.write("a", "new"),
    "a restore": lambda s: s.restore(s.history()[0].ckpt),
}
SAVES = "from holdfast import kit\nlog.write('saved\\n'); log.flush(); kit.save('log')\n"


def fails(*_: object, **__: object) -> Any:
    raise LookupError("a mistake")


def fails_once(module: Any, name: str, patched: pytest.MonkeyPatch) -> None:
    works = getattr(module, name)

    def fail(*_: object, **__: object) -> Any:
        patched.setattr(module, name, works)
        raise LookupError("a mistake")

    patched.setattr(module, name, fail)


def assert_sound(session: Session) -> None:
    store = Store(default_home() / "journal.sqlite3", read_only=True)
    report = check_in_home(store, session.id, default_home())
    store.close()
    assert (report.problem, report.unsettled) == ("", [])


@pytest.mark.parametrize("step", ["publish", "write_manifest", "seal"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_verified_is_committed_by_the_next_request(
    session: Session, change: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.write("a", "new")
    session.write("a", "old")
    fails_once(settling, step, monkeypatch)
    with pytest.raises(InternalFault, match="is verified, and will be committed: LookupError: a mistake") as told:
        CHANGES[change](session)

    assert (told.value.code, "do not run it again" in told.value.hint) == ("internal", True)
    assert session.run("open('a').read()").text == "'new'"
    assert [run.status for run in session.history()] == ["committed"] * len(session.history())
    assert_sound(session)


def test_a_key_whose_run_is_committed_late_runs_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_once(settling, "publish", monkeypatch)
    code = "open('count', 'a').write('x')"
    with pytest.raises(InternalFault):
        session.run(code, key="k")
    again = session.run(code, key="k")

    assert (again.status, again.replayed, again.attempt) == ("committed", True, 1)
    assert session.read("count") == b"x"


def test_a_mistake_that_stays_is_told_each_time_and_loses_nothing(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(settling, "publish", fails)
        for _ in range(3):
            with pytest.raises(InternalFault, match="a mistake"):
                session.run("open('a', 'w').write('new')")

    assert session.run("open('a').read()").text == "'new'"
    assert_sound(session)


@pytest.mark.parametrize("again", [False, True], ids=["once", "and when it is settled"])
def test_what_a_run_saved_before_we_failed_it_is_not_overwritten_by_the_next(
    session: Session, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """It is moved below the layer of a kernel that has the file open."""
    session.run("log = open('log', 'a'); log.write('first\\n'); log.flush()")
    fails_once(transaction, "verify", monkeypatch)
    if again:
        fails_once(settling, "fill_stage", monkeypatch)
    with pytest.raises(LookupError, match="a mistake"):
        session.run(SAVES)
    monkeypatch.undo()
    session.run("log.write('next\\n'); log.flush()")

    assert session.read("log") == b"first\nsaved\nnext\n"
    assert_sound(session)
