"""The host is killed while a run saves files on its way: what was durably saved is kept, whatever became of the run."""

from pathlib import Path

import pytest
from tests.crash.crashes import Crashes, go_on

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("scenario", ["savepoints, then death", "savepoints, then success"])
def test_what_was_saved_is_kept(home: Path, scenario: str) -> None:
    Crashes(home, scenario).survive(go_on)
