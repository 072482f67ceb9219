"""The host that settles what a dead one left is killed itself, at every boundary; the third finishes it."""

from pathlib import Path

import pytest
from tests.crash.crashes import Crashes

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("scenario", "at", "steps"),
    [("changes", "run.point_of_no_return", 1), ("savepoints, then death", "save.journalled:2", 2)],
)
def test_what_is_settled_at_the_start_may_be_cut_short(home: Path, scenario: str, at: str, steps: int) -> None:
    Crashes(home, scenario).survive_restarts(at, steps=steps)
