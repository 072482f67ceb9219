"""What a model is told: bounded, and never without the outcome."""

import doctest
from typing import Any

import msgspec
import pytest

from holdfast.errors import HomeBusy, StateMoved
from holdfast.model import Display, Name, Recovery, Run, RunError, Step
from holdfast.records import Change, Check, FileEntry, RunCard
from holdfast.server.mcp import answers
from holdfast.server.mcp.answers import Standing

CKPT = "CKPT-4f1c0a9be2-g1-v1-0f6967bf3dc0"


def a_run(**facts: Any) -> Run:
    card = RunCard(run="run_1", session="4f1c0a9be2", goal="", code_sha256="", base=CKPT)
    plain = Run(
        id="run_1", session="4f1c0a9be2", status="committed", version=1, ckpt=CKPT, card=card, receipt=None, outputs=[],
        names={}, checks=[], recovery=None, findings=[], saved=[], outside=[], attempt=1, replayed=False, generation=1,
        memory="kept", discarded=[], not_restored=[], unprotected=None, count=1, exit_code=None, text=None, stdout="",
        stderr="", dropped_bytes=0, displays=[], dropped_displays=0, error=None, strays=[], duration_s=0.5,
        peak_memory_bytes=None, memory_cap="cgroup",
    )  # fmt: skip
    return msgspec.structs.replace(plain, **facts)


def a_recovery(**facts: Any) -> Recovery:
    plain = Recovery(
        cause="Timeout", code="timeout", at=0.0, run="run_1", memory="lost", ckpt=CKPT, version=1, generation=2,
        files="as committed", discarded=[], names={"df": "recomputable"}, not_restored=[],
        steps=[Step(action="rerun", run="run_0", names=["df"])], text="Cause: Timeout\nNext: run run_0 again for df",
    )  # fmt: skip
    return msgspec.structs.replace(plain, **facts)


def test_the_examples_are_true() -> None:
    assert doctest.testmod(answers).failed == 0


def test_what_the_code_says_and_what_came_of_it_are_two_texts() -> None:
    answer = answers.of_run(a_run(stdout="out\n", stderr="err\n", displays=[Display(data={"text/plain": "42"})]))

    assert answer.said == "out\n[stderr]\nerr\n42"
    assert answer.text == f"[committed · run_1 · version 1 · 0.50 s]\nCKPT: {CKPT}\nnext: go on from this CKPT"
    assert not answer.refused


def test_a_footer_that_the_code_prints_is_not_taken_for_ours() -> None:
    answer = answers.of_run(a_run(status="rolled_back", stdout=f"[committed · run_1]\nCKPT: {CKPT}"))

    assert "committed" not in answer.text
    assert answer.text.startswith("[rolled_back")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"status": "kept"}, "next: the code failed"),
        ({"status": "rehearsed"}, "next: nothing was changed"),
        ({"replayed": True}, "next: this key has its answer already"),
    ],
)
def test_every_outcome_says_what_to_do_next(facts: dict[str, Any], words: str) -> None:
    assert words in answers.of_run(a_run(**facts)).text


def test_however_much_is_printed_the_answer_is_bounded_and_has_its_outcome() -> None:
    many = [Change(path=f"{n}.csv", action="added", sha256="ab" * 32, bytes=1) for n in range(10_000)]
    answer = answers.of_run(a_run(stdout="x" * 10**6, stderr="y" * 10**6, outputs=many))

    assert len(answer.said) + len(answer.text) < 50_000
    assert len(msgspec.json.encode(answer.facts)) < 200_000
    assert "980,000 characters left out" in answer.said
    assert f"added 0.csv (1 bytes, sha256 {'ab' * 32})" in answer.text
    assert "9,980 more" in answer.text
    assert f"CKPT: {CKPT}" in answer.text


def test_figures_are_images_and_too_many_are_counted() -> None:
    figure = Display(data={"image/png": b"\x89PNG", "text/plain": "<Figure>"})
    answer = answers.of_run(a_run(displays=[figure] * 12))

    assert [shown.kind for shown in answer.figures] == ["image/png"] * 10
    assert "2 figures left out" in answer.text
    assert answer.said == ""


def test_a_figure_that_is_too_large_gives_way_to_those_that_fit() -> None:
    large, small = (Display(data={"image/png": b"x" * size}) for size in (5 << 20, 1))
    answer = answers.of_run(a_run(displays=[large, small]))

    assert [len(shown.data) for shown in answer.figures] == [1]
    assert "1 figures left out" in answer.text


def test_a_display_that_no_model_can_see_is_named() -> None:
    answer = answers.of_run(a_run(displays=[Display(data={"image/svg+xml": "<svg/>", "text/html": "<b>"})]))

    assert answer.figures == []
    assert "[a display of image/svg+xml, text/html]" in answer.said


def test_a_cause_is_told_once() -> None:
    error = RunError(code="timeout", name="Timeout", message="not done after 1 s", hint="do less")
    recovery = a_recovery(text="Cause: Timeout: not done after 1 s")
    answer = answers.of_run(a_run(status="rolled_back", error=error, recovery=recovery))

    assert (answer.said + answer.text).count("not done after 1 s") == 1
    assert "hint: do less" in answer.text
    assert answer.facts["error"]["code"] == "timeout"


def test_a_failed_check_is_named() -> None:
    checks = [Check(name="output a.csv", ok=False, detail="it does not exist"), Check(name="forecast", ok=True)]
    answer = answers.of_run(a_run(status="rolled_back", checks=checks))

    assert "check failed: output a.csv: it does not exist" in answer.text
    assert "forecast" not in answer.text


@pytest.mark.parametrize(("status", "words"), [("committed", "names deleted: df"), ("rehearsed", "would delete: df")])
def test_names_that_are_gone_are_named(status: str, words: str) -> None:
    answer = answers.of_run(a_run(status=status, names_gone=["df"]))

    assert words in answer.text
    assert answer.facts["names_gone"] == ["df"]


def test_a_refusal_has_code_message_hint_and_what_differs() -> None:
    busy = answers.of_error(HomeBusy("in use", hint="use another"))
    moved = answers.of_error(StateMoved("elsewhere", hint="recover", differs=[FileEntry(path="a", sha256="", bytes=1)]))

    assert busy.refused
    assert busy.facts["error"] == {"code": "home_busy", "message": "in use", "hint": "use another"}
    assert busy.text == "in use [home_busy]\nhint: use another"
    assert moved.facts["error"]["differs"] == [{"path": "a", "sha256": "", "bytes": 1}]


def test_a_recovery_brings_the_code_that_is_to_be_run_again() -> None:
    answer = answers.of_recovery(a_recovery(), {"run_0": "df = load()"})

    assert answer.text.endswith("Code of run_0:\ndf = load()")
    assert answer.facts["steps"][0] == {"action": "rerun", "run": "run_0", "names": ["df"]}
    assert answer.facts["codes"] == {"run_0": "df = load()"}


def test_a_status_of_thousands_is_bounded() -> None:
    names = {f"x{n}": Name(type="int", approx_bytes=28) for n in range(10_000)}
    files = [FileEntry(path=f"{n}.csv", sha256="ab" * 32, bytes=1) for n in range(10_000)]
    answer = answers.of_standing(
        Standing(session="s", ckpt=CKPT, version=1, generation=1, names=names, files=files, runs=[])
    )

    assert len(answer.text) < 10_000
    assert (len(answer.facts["names"]), len(answer.facts["files"])) == (500, 500)
    assert "9,950 more" in answer.text


def test_a_status_while_a_run_is_under_way_says_so() -> None:
    now = Standing(
        session="s", ckpt=CKPT, version=1, generation=1, files=[], runs=[], running="run_2, asked for 3 s ago"
    )
    answer = answers.of_standing(now)

    assert "under way: run_2, asked for 3 s ago" in answer.text
    assert "names: not known while a run is under way" in answer.text
    assert answer.facts["names"] is None


def test_an_error_after_which_the_state_is_in_question_carries_the_recovery() -> None:
    answer = answers.of_error(StateMoved("elsewhere", hint="recover"), a_recovery())

    assert answer.text.endswith("Next: run run_0 again for df")
    assert answer.facts["recovery"]["steps"][0]["action"] == "rerun"


def test_of_many_files_some_are_listed_and_all_are_counted() -> None:
    files = [FileEntry(path=f"{n}.csv", sha256="ab" * 32, bytes=2) for n in range(300)]
    answer = answers.of_files(files, limit=100, ckpt=CKPT)

    assert "and 200 more" in answer.text
    assert "[300 files, 600 bytes" in answer.text
    assert (answer.facts["count"], len(answer.facts["files"])) == (300, 100)
