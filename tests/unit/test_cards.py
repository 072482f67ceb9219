"""Run Cards for people, models and programs."""

import json

import msgspec
import pytest

from holdfast import cards
from holdfast.records import AnyRecord, Executed, Finding, Flow, Input, Planned, RunCard, Saved, Settled, Verified

PLAIN = RunCard(
    run="run_7", session="s1", goal="sum up sales", code_sha256="ab" * 32, base="CKPT-s1-g1-v3-0123456789ab"
)
FULL = RunCard(
    run="run_8", session="s1", goal="sum up sales", code_sha256="ab" * 32, base="CKPT-s1-g1-v3-0123456789ab",
    stage="committed", key="monthly", attempt=2,
    inputs=[Input(path="sales.csv", sha256="cd" * 32, bytes=1_234_567)],
    outputs=["sums.parquet"],
    forecast_inputs=[Input(path=f"part-{n}.csv") for n in range(9)],
    forecast_outputs=["sums.parquet", "plots/*.png"],
    flows=[Flow(output="sums.parquet", inputs=["sales.csv", "part-1.csv"])],
    findings=[Finding(code="name_missing", message=f"`df{n}` is not in memory", names=[f"df{n}"]) for n in range(9)],
    limits={"memory_bytes": 512 << 20, "timeout_s": 60.0, "pids": 4096},
    environment="ef" * 32,
)  # fmt: skip


def test_the_fullest_card_has_fifteen_lines() -> None:
    lines = cards.render(FULL).split("\n")

    assert len(lines) == cards.MOST_LINES
    assert lines[0] == "Run Card run_8 · committed"
    assert lines[-1] == "! and 7 more findings"


def test_a_plain_card_has_no_empty_lines() -> None:
    assert cards.render(PLAIN).split("\n") == [
        "Run Card run_7 · planned",
        "goal     sum up sales",
        "base     CKPT-s1-g1-v3-0123456789ab",
        "code     sha256 abababababab",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "key      monthly (attempt 2)",
        "inputs   sales.csv (1,234,567 bytes, cdcdcdcd)",
        "writes   sums.parquet, plots/*.png",
        "flow     sales.csv, part-1.csv → sums.parquet",
        "limits   memory 512 MiB, timeout 60 s, pids 4,096",
        "! name_missing: `df0` is not in memory",
    ],
)
def test_a_card_says(line: str) -> None:
    assert line in cards.render(FULL).split("\n")


def test_long_lists_end_in_how_many_more() -> None:
    assert "part-3.csv (not there), and 5 more" in cards.render(FULL)


def test_no_text_breaks_its_line_or_reaches_the_terminal() -> None:
    hostile = msgspec.structs.replace(
        FULL, goal="a\nb\r\x1b[2Jc\u2028d" + "x" * 100_000, key="k\n" * 50, outputs=["\n" * 99], environment="\x1b" * 64
    )
    text = cards.render(hostile)

    assert len(text.splitlines()) == cards.MOST_LINES
    assert "\x1b" not in text
    assert max(map(len, text.split("\n"))) <= 160


def test_json_has_every_field() -> None:
    parsed = json.loads(cards.to_json(PLAIN))

    assert set(parsed) == set(PLAIN.__struct_fields__)
    assert (parsed["stage"], parsed["key"], parsed["inputs"]) == ("planned", None, [])


def test_a_card_is_at_the_stage_of_the_last_record() -> None:
    planned = Planned(run="r", at=1.0, card=PLAIN, code="")
    saved = Saved(run="r", at=1.5, files=[])
    executed = Executed(run="r", at=2.0, error_code=None, duration_s=1.0)
    verified = Verified(run="r", at=3.0, status="kept", version=1, stage="", changes=[], names={}, receipt=b"")
    settled = Settled(run="r", at=4.0, status="kept", version=1, ckpt="")
    records: list[AnyRecord] = [planned, saved, executed, verified, settled]

    stages = [cards.as_far(PLAIN, records[: n + 1]).stage for n in range(len(records))]
    assert stages == ["planned", "planned", "executed", "verified", "kept"]


@pytest.mark.parametrize("card", [PLAIN, FULL])
def test_json_reads_back_as_the_same_card(card: RunCard) -> None:
    assert msgspec.json.decode(cards.to_json(card), type=RunCard) == card


@pytest.mark.parametrize(
    ("code", "goal"),
    [
        ("# Load the sales\nx = 1", "Load the sales"),
        ("\n\nx = 1\ny = 2", "x = 1"),
        ("import pandas as pd\n\n## Clean up\ndf = 1", "Clean up"),
        ("#!/usr/bin/env python\nx = 1", "x = 1"),
        ("# %%\nx = 1", "x = 1"),
        ("#\n# Title", "Title"),
        ("", ""),
        ("x" * 100, "x" * 79 + "…"),
        ("# \x1b[1mbold", "\\x1b[1mbold"),
    ],
)
def test_the_goal_is_the_first_comment_or_line(code: str, goal: str) -> None:
    assert cards.goal_of(code) == goal
