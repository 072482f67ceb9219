"""The host is killed while it changes a session's files itself."""

from pathlib import Path

import pytest
from tests.crash.crashes import Crashes, go_on

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "scenario", ["a write", "a write into new directories", "a removal", "a restore", "a restore with memory"]
)
def test_a_change_from_outside_is_done_or_not_done(home: Path, scenario: str) -> None:
    Crashes(home, scenario).survive(go_on)
