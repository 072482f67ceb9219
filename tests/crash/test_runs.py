"""The host is killed at every boundary of a run, and the next one finds it done or not done."""

from pathlib import Path

import pytest
from tests.crash.crashes import Crashes, go_on

pytestmark = pytest.mark.timeout(600)


def test_a_run_that_adds_changes_and_removes_files_is_done_or_not_done(home: Path) -> None:
    Crashes(home, "changes").survive(go_on)


@pytest.mark.parametrize("scenario", ["many files", "memory alone", "a failure", "a database that stays open"])
def test_a_run_is_done_or_not_done(home: Path, scenario: str) -> None:
    Crashes(home, scenario).survive(go_on)
