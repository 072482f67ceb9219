"""The host is killed while a run sends requests: whatever arrived is in the books, and the next attempt is told."""

from pathlib import Path

import pytest
from tests.crash.crashes import Crashes, Moment
from tests.crash.hosts import Told
from tests.crash.scenarios import NOBODY
from tests.upstream import Upstream

pytestmark = pytest.mark.timeout(600)
SCENARIO = "a key of a run that sends"


def test_what_a_killed_host_let_out_may_have_happened(home: Path, upstream: Upstream) -> None:
    def ask_again(crashes: Crashes, after: Told, moment: Moment) -> Told:
        arrived = [line.replace("POST ", f"POST http://{upstream.at}") for line in upstream.seen]
        upstream.seen.clear()
        told = crashes.host.ask("play", session=after.session, scenario=SCENARIO, at="")

        assert told.replayed == (moment.steps > 0)
        if told.replayed:
            assert told.sent == arrived == both
            assert (told.may_have_happened, upstream.seen) == ([], [])
        else:  # the last may have been written down and not have left
            assert after.may_have_happened in (arrived, both[: len(arrived) + 1])
            assert told.may_have_happened == after.may_have_happened
            assert (told.sent, len(upstream.seen)) == (both, 2)
        upstream.seen.clear()
        return told

    crashes = Crashes(home, SCENARIO)
    both = [f"POST http://{upstream.at}/first", f"POST http://{upstream.at}/second"]
    assert crashes.played.sent == both
    upstream.seen.clear()
    crashes.survive(ask_again)


def test_what_reached_nobody_may_have_happened_until_that_is_written_down(home: Path) -> None:
    def look(crashes: Crashes, after: Told, moment: Moment) -> Told:
        is_noted = moment.at.startswith(("journal.Sent.after", "journal.Unsent.before"))
        assert after.may_have_happened == ([f"POST http://{NOBODY}/"] if is_noted else [])
        return after

    crashes = Crashes(home, "a run that reaches nobody")
    assert crashes.played.sent == [f"refused: POST http://{NOBODY}/ (unreachable)"]
    crashes.survive(look)
