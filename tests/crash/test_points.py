"""No crash point goes untried: what the source names, the scenarios pass."""

import re
from pathlib import Path

import pytest
from tests.crash.hosts import Host
from tests.crash.scenarios import SCENARIOS
from tests.crash.sound import check_nothing_left

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


@pytest.mark.timeout(300)
def test_every_point_in_the_source_is_passed_by_a_scenario(home: Path) -> None:
    host, passed = Host(home), set()
    for name in SCENARIOS:
        session = host.ask("create", scenario=name).session
        passed |= set(host.ask("play", session=session, scenario=name, at="").passed)
        passed |= set(host.close(session, keep=False))

    assert host.end() == 0
    assert passed == points_in_source()
    check_nothing_left(home)
