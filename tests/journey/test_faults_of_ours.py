"""A mistake of ours: no run is left without an end, nothing that was verified is lost, and the session goes on."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Session, retention, settling, transaction
from holdfast.blobs.local import LocalBlobs
from holdfast.computer import Computer
from holdfast.config import default_home
from holdfast.errors import DiskFailed, DiskFull, InternalFault
from holdfast.resources.staging import Staging
from holdfast.resources.workspace import remove_tree
from holdfast.store.sqlite import Store
from holdfast.verify import check_in_home

CHANGES: dict[str, Callable[[Session], Any]] = {
    "a cell": lambda s: s.run("open('a', 'w').write('new')"),
    "a write": lambda s: s.write("a", "new"),
    "a restore": lambda s: s.restore(s.history()[0].ckpt),
}
SAVES = "from holdfast import kit\nlog.write('saved\\n'); log.flush(); kit.save('log')\n"


def live(session: Session) -> Any:
    return session._session._transport._session


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


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one processor there is only the look that counts")
def test_a_look_around_that_fails_before_it_counts_harms_no_run(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_around, looks = Computer.look_around, 0

    def fails_first(computer: Computer) -> bool:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return look_around(computer)

    monkeypatch.setattr(Computer, "look_around", fails_first)
    runs = [session.run("6 * 7") for _ in range(2)]

    assert [(run.status, run.text) for run in runs] == [("committed", "42")] * 2
    assert looks > 2


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


def test_what_was_saved_and_found_no_room_does_not_take_up_more_with_each_try(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = LocalBlobs.copy_to

    def is_full(blobs: LocalBlobs, sha256: str, dir_fd: int, name: bytes, **how: Any) -> None:
        if name == b"b":
            raise OSError(errno.ENOSPC, "No space left on device")
        copy(blobs, sha256, dir_fd, name, **how)

    monkeypatch.setattr(LocalBlobs, "copy_to", is_full)
    for code in (
        "from holdfast import kit\nfor n in 'ab': open(n, 'w').write(n)\nkit.save('a', 'b')\n1 / 0",
        "'the next request tries again'",
    ):
        with pytest.raises(DiskFull):
            session.run(code)
        assert list((default_home() / "sessions" / session.id).glob("stages/*/data/*")) == []

    monkeypatch.undo()
    assert session.run("open('a').read() + open('b').read()").text == "'ab'"
    assert_sound(session)


def test_a_run_that_its_code_failed_is_told_so_also_if_there_was_no_room_to_settle_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalBlobs, "copy_to", is_full)
    code = "from holdfast import kit\nopen('a', 'w').write('a')\nkit.save('a')\n1 / 0"
    with pytest.raises(DiskFull):
        session.run(code, key="k")
    monkeypatch.undo()
    again = session.run(code, key="k")

    assert (again.replayed, again.status, again.saved, again.attempt) == (True, "rolled_back", ["a"], 1)
    assert again.error is not None
    assert again.error.name == "ZeroDivisionError"
    assert again.receipt is not None
    told = again.receipt.facts()
    assert (told.reason, told.blame) == ("ZeroDivisionError: division by zero", "user")
    assert_sound(session)


@pytest.mark.parametrize("step", ["restage", "protect"])
def test_a_mistake_between_two_runs_costs_memory_and_nothing_else(
    session: Session, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The layer under the kernel was published: nothing may run on it, nor fall back to an older snapshot."""
    session.run("x = [1]; open('a', 'w').write('1')")
    session.names()
    monkeypatch.setattr(Computer, step, fails)
    assert session.run("x.append(2); open('a', 'w').write('2')").status == "committed"
    session.info()
    while live(session)._settling is not None and not live(session)._settling.done():
        time.sleep(0.01)
    monkeypatch.undo()
    after = session.run("'x' in globals(), open('a').read()")

    assert (after.status, after.text, after.generation) == ("committed", "(False, '2')", 2)
    assert session.run("open('b', 'w').write('b')").status == "committed"
    assert_sound(session)


@pytest.mark.parametrize("step", ["sweep", "trim"])
def test_what_could_not_be_tidied_up_is_told_to_nobody_who_comes_next(
    session: Session, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def no_room(*_: object, **__: object) -> Any:
        raise OSError("it is busy")

    monkeypatch.setattr(*((Staging, "sweep") if step == "sweep" else (retention, "trim")), no_room)
    for number in range(3):
        assert session.run(f"open('a', 'w').write('{number}')").status == "committed"
    assert session.generation == 1


def test_a_run_whose_layer_was_removed_on_the_host_is_refused_and_the_next_has_another() -> None:
    with Session(memory="256M", timeout=30) as session:
        session.run("import time; kept = [7]; open('a', 'w').write('a')")
        stages = default_home() / "sessions" / session.id / "stages"
        layers: list[Path] = []

        def remove(_: object) -> None:
            if not layers:
                layers.extend(stages.iterdir())
                remove_tree(stages)

        with pytest.raises(DiskFailed, match="layer was removed on the host"):
            session.run("open('b', 'w').write('b'); print('ready', flush=True); time.sleep(0.5)", on_event=remove)

        assert layers
        assert session.run("open('b', 'w').write('b'); kept").text == "[7]"
        remove_tree(stages)
        assert session.run("open('c', 'w').write('c'); kept").text == "[7]"
        assert [entry.path for entry in session.files()] == ["a", "b", "c"]
