"""No crash point goes untried: what the source names, the scenarios pass, and their hosts die there."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.crash.crashes import moments, moments_of
from tests.crash.hosts import Host
from tests.crash.scenarios import SCENARIOS
from tests.crash.sound import check_nothing_left
from tests.crash.test_endings import endings
from tests.lean import lean_home

import holdfast
from holdfast.protocol import NEXT

SOURCE = Path(holdfast.__file__).parent
# Where the name is put together, and from what.
STEPS = re.compile(r'_step\("(\w+)"')
TAGS = [record.__name__ for record in NEXT if record is not None]


def points_in_source() -> set[str]:
    found = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        for argument in re.findall(r"(?<!def )\bcrashpoint\((.*)\)", text):
            found |= named(argument, text, path)
    return found


def named(argument: str, text: str, path: Path) -> set[str]:
    """The points that one call can be."""
    if plain := re.fullmatch(r'"([\w.]+)"', argument):
        return {plain[1]}
    if stepped := re.fullmatch(r'f"([\w.]+)\{name\}([\w.]+)"', argument):
        return {stepped[1] + step + stepped[2] for step in STEPS.findall(text)}
    assert argument == "point.format(tag)", f"{path} names a point in a way that is not known here: {argument}"
    return {point.format(tag) for point in re.findall(r'_pass\("([\w.{}]+)"', text) for tag in TAGS}


def test_the_points_are_found_in_the_source() -> None:
    found = points_in_source()

    assert {"publish.renamed", "durable.rename.after", "journal.Verified.before", "run.point_of_no_return"} <= found
    assert len(found) > 45


class Passed(NamedTuple):
    """Of one scenario: what is passed while it is played, and when its session is deleted."""

    playing: list[str]
    closing: list[str]


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Passed]:
    host, found = Host(home := lean_home(tmp_path_factory.mktemp("points") / "home")), {}
    for name in SCENARIOS:
        session = host.ask("create", scenario=name).session
        playing = host.ask("play", session=session, scenario=name, at="").passed
        found[name] = Passed(playing, host.close(session, keep=False))
    assert host.end() == 0
    check_nothing_left(home)
    return found


@pytest.mark.timeout(300)
def test_every_point_in_the_source_is_passed_by_a_scenario(passed: dict[str, Passed]) -> None:
    assert {name for each in passed.values() for points in each for name in points} == points_in_source()


@pytest.mark.timeout(300)
def test_at_every_point_in_the_source_a_host_dies(passed: dict[str, Passed]) -> None:
    dies = [moment for name, each in passed.items() for moment in moments_of(name, each.playing)]
    dies += endings(passed["changes"].closing)

    assert {moment.at.partition(":")[0] for moment in dies} == points_in_source()


def test_of_points_that_leave_the_same_disk_one_is_died_at() -> None:
    passed = [
        "run.planned", "durable.sync_file.before", "durable.sync_file.after", "run.prepared",
        *["durable.rename.before", "durable.rename.after", "publish.renamed"] * 3, "publish.discarded",
    ]  # fmt: skip

    assert [moment.at for moment in moments(passed)] == [
        "run.planned:1", "publish.renamed:1", "durable.rename.before:3", "publish.renamed:3", "publish.discarded:1",
    ]  # fmt: skip
    assert {moment.at.partition(":")[0] for moment in moments(passed, each=("",))} == {*passed}
    assert [moment.at for moment in moments(passed, at=("publish.r",))] == ["publish.renamed:1", "publish.renamed:3"]
