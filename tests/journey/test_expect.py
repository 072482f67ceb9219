"""expect=: a run happens on the state its caller believes in, or not at all."""

import pytest

from holdfast import Run, Session
from holdfast.errors import CkptUnknown, StateMoved
from holdfast.model import Step
from holdfast.recovery import Differences

TRANSPORTS = True


def ok(run: Run) -> Run:
    assert run.error is None, run.error.traceback or run.error.message
    return run


def refused(session: Session, ckpt: str) -> tuple[str, Differences]:
    with pytest.raises(StateMoved) as error:
        session.run("open('no', 'w').write('ran')", expect=ckpt)
    assert error.value.code == "state_moved"
    assert isinstance(error.value.differs, Differences)
    assert error.value.differs.found == session.ckpt
    assert "recover()" in error.value.hint
    return error.value.message, error.value.differs


def test_a_run_on_the_state_that_is_expected_happens(session: Session) -> None:
    run = ok(session.run("x = 1", expect=session.ckpt))
    run = ok(session.run("x += 1", expect=f" {run.ckpt}\n"))

    assert ok(session.run("x", expect=run.ckpt)).text == "2"


def test_on_any_other_nothing_runs_and_what_differs_is_told(session: Session) -> None:
    believed = ok(session.run("x, y = 1, 2; open('f', 'w').write('1')")).ckpt
    ok(session.run("x = 3; open('f', 'w').write('2'); open('g', 'w').write('3')"))
    message, differs = refused(session, believed)

    assert (differs.expected, differs.files, differs.names_changed) == (believed, ["f", "g"], ["x"])
    assert (differs.names_lost, differs.resets) == ([], [])
    assert "files changed since: f, g" in message
    assert "resets since: none" in message
    back, go_on = differs.steps
    assert back == Step(action="restore", ckpt=believed, why=back.why)
    assert go_on == Step(action="continue", ckpt=session.ckpt, why=go_on.why)
    assert (len(session.files()), session.version, len(session.history())) == (2, 2, 2)
    session.restore(back.ckpt)
    assert [(entry.path, session.read(entry.path)) for entry in session.files()] == [("f", b"1")]


def test_after_a_reset_names_cause_and_time_and_the_way_back_are_told(session: Session) -> None:
    begun = session.ckpt
    first = ok(session.run("df = 1"))
    session.reset()
    in_between = session.ckpt
    message, differs = refused(session, first.ckpt)

    assert (differs.names_lost, [lost.cause for lost in differs.resets]) == (["df"], ["reset by the caller"])
    assert differs.resets[0].at > 1.7e9
    assert differs.steps[0] == Step(action="rerun", run=first.id, names=["df"])
    assert [step.action for step in differs.steps] == ["rerun", "continue"]  # no file has changed
    assert "not in memory any more: df" in message
    assert "reset by the caller (20" in message
    ok(session.run("df = 2"))
    assert refused(session, in_between)[1].names_changed == ["df"]
    assert refused(session, first.ckpt)[1].names_lost == []
    assert refused(session, begun)[1].names_changed == ["df"]


def test_a_mistyped_ckpt_is_not_taken_for_another(session: Session) -> None:
    right = ok(session.run("x = 1")).ckpt
    session.reset()
    after = session.ckpt
    for typed, meant in (
        (right[:-1] + ("0" if right[-1] != "0" else "1"), right),
        (after.replace("-g2-", "-g3-"), after),
        (after[:-2] + "zz", None),
        ("CKPT-elsewhere-g1-v1-0123456789ab", None),
        ("the last one", None),
    ):
        with pytest.raises(CkptUnknown) as error:
            session.run("y = 1", expect=typed)
        assert meant is None or error.value.hint == f"did you mean {meant}?"
    assert session.version == 1


def test_two_callers_who_believe_in_one_state_do_not_both_run(session: Session) -> None:
    believed = ok(session.run("n = 0")).ckpt
    ok(session.run("n += 1", expect=believed))
    refused(session, believed)

    assert ok(session.run("n")).text == "1"
