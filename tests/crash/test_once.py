"""The host is killed while a run with a key goes on; the caller asks again: it was executed once, all in all."""

import hashlib
from pathlib import Path

import pytest
from tests.crash.crashes import Crashes, Moment
from tests.crash.hosts import Told
from tests.crash.scenarios import COUNTED_ONCE

pytestmark = pytest.mark.timeout(600)


def ask_again(crashes: Crashes, after: Told, moment: Moment) -> Told:
    """As a caller does whose host died under it, and once more."""
    first = crashes.host.ask("play", session=after.session, scenario=crashes.name, at="")
    second = crashes.host.ask("play", session=after.session, scenario=crashes.name, at="")

    assert first.replayed == (moment.steps > 0)
    assert first.version == after.version + (not first.replayed)
    assert second.replayed
    assert (second.run, second.receipt, second.ckpt) == (first.run, first.receipt, first.ckpt)
    assert second.files == crashes.played.files
    return second


def test_a_run_with_a_key_is_executed_once_all_in_all(home: Path) -> None:
    crashes = Crashes(home, "a key")
    assert crashes.played.files["count.txt"] == hashlib.sha256(COUNTED_ONCE).hexdigest()

    crashes.survive(ask_again)


def test_a_run_with_a_key_that_writes_no_file_is_answered_once(home: Path) -> None:
    Crashes(home, "a key of a run that keeps no file").survive(ask_again)
