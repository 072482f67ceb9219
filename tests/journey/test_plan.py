"""PLAN: what a run will do is written on a card before anything starts, and that plan is what is run."""

import hashlib
import json
from typing import Any

import pytest

from holdfast import Run, Session, cards, whereabouts
from holdfast.errors import InvalidSetting, StateMoved

TRANSPORTS = True

CODE = """
# Sum up the sales
import csv

folder = 'out'
rows = list(csv.reader(open('sales.csv')))
open(f'{folder}/total.txt', 'w').write(str(sum(int(row[0]) for row in rows)))
"""


def ok(run: Run) -> Run:
    assert run.error is None, run.error.traceback or run.error.message
    return run


def test_a_card_says_what_a_run_is_for_what_it_reads_and_what_it_writes(session: Session) -> None:
    session.write("sales.csv", "1\n2\n")
    ckpt = session.ckpt
    card = session.plan(CODE, inputs=["sales.csv"], outputs=["out/total.txt"], key="k1", timeout=20)

    assert (card.goal, card.stage, card.base, card.session) == ("Sum up the sales", "planned", ckpt, session.id)
    assert card.code_sha256 == hashlib.sha256(CODE.encode()).hexdigest()
    (sales,) = card.inputs
    assert (sales.path, sales.sha256, sales.bytes) == ("sales.csv", hashlib.sha256(b"1\n2\n").hexdigest(), 4)
    assert [given.sha256 for given in session.plan("open('rates.csv')").forecast_inputs] == [""]
    assert (card.outputs, card.forecast_outputs) == (["out/total.txt"], ["out/total.txt"])
    assert [(flow.output, flow.inputs) for flow in card.flows] == [("out/total.txt", ["sales.csv"])]
    assert (card.key, card.attempt, card.findings) == ("k1", 1, [])
    assert card.limits == {"memory_bytes": 512 << 20, "timeout_s": 20.0, "disk_bytes": 10 << 30}
    assert card.environment
    assert (session.ckpt, session.version, len(session.history())) == (ckpt, 1, 1)  # nothing ran

    text = cards.render(card)
    assert len(text.splitlines()) <= 15
    assert "Sum up the sales" in text
    assert "sales.csv → out/total.txt" in text
    assert json.loads(cards.to_json(card))["base"] == ckpt


def test_what_was_planned_is_what_is_run_and_once(session: Session, where: dict[str, Any]) -> None:
    session.write("sales.csv", "1\n2\n")
    ok(session.run("import os; os.mkdir('out')"))
    card = session.plan(CODE, goal="total", outputs=["out/total.txt"])
    run = ok(session.run(card))

    assert (run.id, run.card.goal, run.card.stage, run.card.base) == (card.run, "total", "committed", card.base)
    assert session.read("out/total.txt") == b"3"
    assert run.receipt is not None
    assert (run.receipt.facts().goal, run.receipt.facts().ckpt_before) == ("total", card.base)
    with pytest.raises(InvalidSetting, match="each plan runs once"):
        session.run(card)
    with pytest.raises(InvalidSetting, match="timeout"):
        session.run(session.plan("1"), timeout=3)
    with pytest.raises(InvalidSetting, match="is no plan that waits here"), Session(memory="512M", **where) as other:
        other.run(session.plan("1"))


@pytest.mark.parametrize(
    ("code", "options", "stage"),
    [
        ("x = 1", {}, "committed"), ("1 / 0", {}, "rolled_back"), ("if", {}, "rolled_back"),
        ("nothing", {"preflight": "block"}, "rolled_back"), ("x = 2\n1 / 0", {"mode": "notebook"}, "kept"),
        ("x = 3", {"rehearse": True}, "rehearsed"), ("x = 4", {"outputs": ["none"]}, "rolled_back"),
    ],
)  # fmt: skip
def test_the_card_of_a_run_says_how_it_ended(session: Session, code: str, options: Any, stage: str) -> None:
    run = session.run(code, **options)

    assert (run.status, run.card.stage) == (stage, stage)
    assert f"· {stage}" in cards.render(run.card).splitlines()[0]


def test_a_plan_holds_only_for_the_state_it_was_made_on(session: Session) -> None:
    card = session.plan("y = 1")
    ok(session.run("x = 1"))

    with pytest.raises(StateMoved) as refused:
        session.run(card)
    assert card.base in str(refused.value)
    assert session.ckpt in str(refused.value)
    assert ok(session.run("'y' in globals()")).text == "False"


def test_a_plan_is_checked_like_a_run(session: Session) -> None:
    before = session.ckpt
    ok(session.run("x = 1"))
    with pytest.raises(StateMoved):
        session.plan("1", expect=before)
    for options in ({"outputs": ["../x"]}, {"inputs": ["/etc/passwd"]}, {"preflight": "maybe"}, {"mode": "no"}):
        with pytest.raises(InvalidSetting):
            session.plan("1", **options)  # type: ignore[arg-type]


# -- preflight ---------------------------------------------------------------------------------------------------


def test_a_name_that_memory_lacks_is_explained_from_the_journal(session: Session) -> None:
    first = ok(session.run("df = [1, 2]"))
    session.reset()
    (finding,) = session.plan("total = sum(df)").findings

    assert (finding.code, finding.names) == ("name_missing", ["df"])
    assert f"`df` was defined by run {first.id} in generation 1" in finding.message
    assert "reset by the caller" in finding.message
    assert f"re-run {first.id}" in finding.message
    assert session.plan("total = sum(dg)").findings[0].message == "`dg` is not in memory: no run has defined it"
    assert session.plan("total = sum(df)", preflight="off").findings == []


def test_a_name_that_was_deleted_has_the_run_that_defined_it_and_the_one_that_deleted_it(where: dict[str, Any]) -> None:
    with Session(memory="512M", timeout=30, **where) as first:
        kept = first.id
        ok(first.run("x = 0"))
        ok(first.run("del x"))
        made, taken = ok(first.run("x = 1")), ok(first.run("del x"))
        told = f"`x` was defined by run {made.id}, and deleted by run {taken.id}; re-run {made.id}"
        (planned,) = first.plan("print(x)").findings
        warned, blocked = first.run("print(x)"), first.run("print(x)", preflight="block")
        first.close(keep=True)
    with Session(resume=kept, **where) as again:
        (resumed,) = again.plan("print(x, y)").findings[:1]
        assert again.plan("x, y").findings[1].message == "`y` is not in memory: no run has defined it"

    assert (planned.message, planned.hint, planned.names) == (told, f"re-run {made.id}", ["x"])
    assert [run.findings for run in (warned, blocked)] == [[planned], [planned]]
    assert blocked.error is not None
    assert told in blocked.error.message
    assert resumed == planned


@pytest.mark.embedded("looks inside the process")
def test_of_a_name_that_was_deleted_long_ago_nothing_false_is_said(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whereabouts, "_LOOKED_BACK", 2)
    ok(session.run("x = 1"))
    taken = ok(session.run("del x"))
    ok(session.run("1"))
    assert session.plan("x").findings[0].message == f"`x` was deleted by run {taken.id}"
    ok(session.run("1"))
    assert session.plan("x").findings[0].message == "`x` is not in memory: none of the last 2 runs has defined it"


def test_warned_a_cell_runs_and_blocked_it_does_not(session: Session) -> None:
    code = "open('f', 'w').write('x')\nprint('ran')\ntotal = sum(df)"
    warned = session.run(code)
    assert warned.error is not None
    assert (warned.stdout, warned.findings[0].names, warned.error.code) == ("ran\n", ["df"], "exception")

    blocked = session.run(code, preflight="block")
    assert blocked.error is not None
    assert (blocked.status, blocked.stdout, blocked.error.name) == ("rolled_back", "", "NameError")
    assert "not started: `df` is not in memory" in blocked.error.message
    assert (blocked.memory, blocked.version, session.files()) == ("kept", 0, [])
    assert blocked.recovery is not None
    assert blocked.receipt is not None
    assert blocked.receipt.facts().status == "rolled_back"
    assert session.run(code, preflight="off").findings == []
    assert ok(session.run("df = [1]\nsum(df)", preflight="block")).text == "1"


def test_a_policy_can_be_the_sessions(where: dict[str, Any]) -> None:
    with Session(memory="512M", timeout=30, preflight="block", **where) as strict:
        assert strict.run("print(nothing)").stdout == ""
        assert strict.run("print('ran')\nnothing", preflight="warn").stdout == "ran\n"


def test_names_in_memory_are_known_however_they_came_there(session: Session) -> None:
    ok(session.run("exec('a = 1'); globals()['b'] = 2\nfrom math import *\nimport os.path"))
    ok(session.run("%%capture c\nprint('x')"))
    ok(session.run("for d in range(3): pass\nwith open('/dev/null') as e: pass\ndef f(): global g; g = 1\nf()"))
    needs = "a, b, c, d, e, f, g, pi, os"

    assert session.plan(needs).findings == []
    ok(session.run("del a"))
    (finding,) = session.plan(needs).findings
    assert finding.names == ["a"]


def test_plans_that_wait_hold_a_bounded_memory(session: Session) -> None:
    plans = [session.plan("#" * (7 << 20)) for _ in range(5)]

    with pytest.raises(InvalidSetting, match="no plan that waits"):
        session.run(plans[0])
    assert ok(session.run(plans[1])).status == "committed"
