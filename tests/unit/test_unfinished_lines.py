"""What waits for the end of its line, and for how long."""

import pytest

from holdfast.kernel import unfinished_lines
from holdfast.kernel.unfinished_lines import HOLD_BUSY_S, HOLD_S, MOST_CHARACTERS, UnfinishedLines


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(unfinished_lines, "time", made := Clock())
    return made


def test_a_line_waits_for_its_end_and_takes_it_along(clock: Clock) -> None:
    lines = UnfinishedLines(lambda: False)

    assert (lines.add("stdout", "a\nx"), lines.lines()) == ([], [("stdout", "a\n")])
    clock.now += HOLD_S / 2
    assert lines.lines() == []
    assert (lines.add("stdout", "\nb\n"), lines.lines(), lines.lines()) == ([], [("stdout", "x\nb\n")], [])


@pytest.mark.parametrize(("busy", "after_s"), [(False, HOLD_S), (True, HOLD_BUSY_S)])
def test_a_line_that_nobody_ends_is_told_in_time(clock: Clock, busy: bool, after_s: float) -> None:
    lines, begun = UnfinishedLines(lambda: busy), clock.now
    lines.add("stderr", "name? ")
    while not (told := lines.lines()):
        assert 0 < lines.left_s() <= HOLD_S + 1e-6
        clock.now += lines.left_s()

    assert told == [("stderr", "name? ")]
    assert after_s - 0.1 <= clock.now - begun <= after_s + 0.1
    assert lines.rest() == []


def test_what_came_late_tears_no_line(clock: Clock) -> None:
    lines = UnfinishedLines(lambda: False)
    lines.add("stdout", "half")
    clock.now += 10
    lines.add("stdout", " of it\nand the nex")

    assert (lines.lines(), lines.lines()) == ([("stdout", "half of it\n")], [])


def test_streams_keep_their_order(clock: Clock) -> None:
    lines = UnfinishedLines(lambda: True)

    assert lines.add("stdout", "a") == []
    assert lines.add("stderr", "b\n") == [("stdout", "a")]
    assert lines.add("stdout", "c") == [("stderr", "b\n")]
    assert lines.rest() == [("stdout", "c")]


def test_no_more_is_held_than_its_bound(clock: Clock) -> None:
    lines, told = UnfinishedLines(lambda: True), ""
    for _ in range(64):
        told += "".join(text for _, text in lines.add("stdout", "x" * (1 << 16)))

    assert len(told) >= 64 * (1 << 16) - MOST_CHARACTERS
