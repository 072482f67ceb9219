"""What may be declared of a run, and what is said to nonsense."""

from pathlib import PurePosixPath
from typing import Any

import pytest

from holdfast import expectations
from holdfast.errors import InvalidSetting
from holdfast.expectations import Expected


def test_a_list_of_outputs_asks_for_files_of_any_content() -> None:
    assert expectations.outputs(["a.csv", PurePosixPath("plots/*.png")]) == [
        Expected(path="a.csv"),
        Expected(path="plots/*.png"),
    ]
    assert expectations.outputs(None) == expectations.outputs([]) == []


def test_terms_may_be_a_format_or_a_mapping_or_nothing() -> None:
    declared = {
        "a": "json",
        "b.pq": {"columns": ["id"], "min_rows": 0},
        "c.bin": None,
        "d.png": {"format": "image"},
    }

    assert expectations.outputs(declared) == [
        Expected(path="a", format="json"),
        Expected(path="b.pq", format="parquet", columns=["id"]),
        Expected(path="c.bin"),
        Expected(path="d.png", format="image"),
    ]


def test_a_declared_table_must_have_a_row_unless_none_is_asked_for() -> None:
    assert [one.min_rows for one in expectations.outputs({"a.csv": "csv", "b.csv": {"min_rows": 0}})] == [1, 0]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("/mnt/data/x/y.csv", "x/y.csv"),
        ("./x//y.csv", "x/y.csv"),
        ("a..b", "a..b"),
        ("mnt/data/x", "mnt/data/x"),
        ("back\\slash\n", "back\\\\slash\\n"),
        ("caf\udce9", "caf\\xe9"),
    ],
)
def test_paths_are_relative_to_the_workspace_and_kept_as_text(given: str, kept: str) -> None:
    assert expectations.inputs([given]) == [kept]


@pytest.mark.parametrize(
    "path",
    [
        "", ".", "/", "/mnt/data", "/mnt/data/", "/etc/passwd", "/mnt/database/x", "../x", "a/../b", "/mnt/data/../x",
        "plots/", "a\0b", "a" * 5000, "\ud800", 7, None, b"bytes",
    ],
)  # fmt: skip
def test_a_path_that_is_none_is_refused_with_a_hint(path: Any) -> None:
    with pytest.raises(InvalidSetting) as refused:
        expectations.outputs([path])

    assert refused.value.hint


@pytest.mark.parametrize(
    "outputs",
    [
        "a.csv", 7, {"a.csv": "xlsx"}, {"a.csv": {"colums": ["id"]}}, {"a.csv": {"columns": "id"}},
        {"a.csv": {"min_rows": -1}}, {"a.csv": {"min_rows": 1 << 70}}, {"a.csv": 7}, {"a.bin": {"min_rows": 1}},
        {"a.png": {"columns": ["x"]}}, {"a.csv": "csv", "./a.csv": "csv"}, ["x"] * 1001,
    ],
)  # fmt: skip
def test_terms_that_make_no_sense_are_refused_with_a_hint(outputs: Any) -> None:
    with pytest.raises(InvalidSetting) as refused:
        expectations.outputs(outputs)

    assert refused.value.hint


@pytest.mark.parametrize("asserts", ["x > 1", [""], [7], ["x" * 10_001], {"x > 1": None}])
def test_assertions_are_a_list_of_texts(asserts: Any) -> None:
    with pytest.raises(InvalidSetting):
        expectations.asserts(asserts)


def test_probes_are_for_files_that_are_there_and_for_assertions() -> None:
    expected = expectations.outputs({"*.png": "image", "a.csv": {"columns": ["id"]}, "b.csv": "csv", "c.bin": None})

    probes = expectations.probes(expected, ["1.png", "2.png", "a.csv", "c.bin"], asserts=["len(df) > 0"])

    assert [(probe.path, probe.format, probe.columns, probe.min_rows) for probe in probes] == [
        ("1.png", "image", [], 0),
        ("2.png", "image", [], 0),
        ("a.csv", "csv", ["id"], 1),
        ("", "", [], 0),
    ]
    assert probes[-1].name == probes[-1].code == "len(df) > 0"
