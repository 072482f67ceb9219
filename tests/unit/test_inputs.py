"""What runs read, and whether it still is what they read."""

from typing import Any

from holdfast import inputs
from holdfast.inputs import Read, spoilt
from holdfast.records import FileEntry, Input


def entry(path: str, sha256: str) -> FileEntry:
    return FileEntry(path=path, sha256=sha256, bytes=1)


def given(path: str, sha256: str, **more: Any) -> Input:
    return Input(path=path, sha256=sha256, **more)


def test_a_run_is_spoilt_by_what_is_not_there_as_it_read_it() -> None:
    read = Read(by_run={
        "run_1": [given("a", "1"), given("b", "1")],
        "run_2": [given("a", "0"), given("b", "0"), given("c", "1"), given("d", "1")],
        "run_3": [],
    })  # fmt: skip

    assert spoilt(read, {path: entry(path, "1") for path in "abc"}) == {
        "run_2": "a, b, which run_2 read, have changed since; d, which run_2 read, has been removed since"
    }


def test_what_is_on_the_host_counts_for_more_than_what_was_committed() -> None:
    read = Read(
        by_run={"run_1": [given("a", "host")], "run_2": [given("b", "1")], "run_3": [given("a", "1")]},
        on_host={"a": entry("a", "host"), "b": None},
    )
    committed = {"a": entry("a", "1"), "b": entry("b", "1")}

    assert spoilt(read, committed) == {
        "run_2": "b, which run_2 read, has been removed since", "run_3": "a, which run_3 read, has changed since",
    }  # fmt: skip


def test_many_files_are_counted() -> None:
    read = Read(by_run={"run_1": [given(f"{n}", "1") for n in range(9)]})

    assert spoilt(read, {}) == {"run_1": "0, 1, 2, 3, 4 and 4 more, which run_1 read, have been removed since"}


def test_what_is_read_again_is_bounded_and_does_not_depend_on_what_was_read_before() -> None:
    large = [given("large", "1", bytes=1 << 30), given("small", "1", bytes=10), given("other", "1", bytes=20)]

    assert inputs._affordable(large) == ["small", "other"]
    assert inputs._affordable(large[::-1]) == ["small", "other"]
