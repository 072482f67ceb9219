"""The host is killed while it deletes a session."""

from pathlib import Path

import pytest
from tests.crash.crashes import Moment, moments
from tests.crash.hosts import Host
from tests.crash.sound import check_books, check_nothing_left, tree_of

from holdfast.store.sqlite import Store

pytestmark = pytest.mark.timeout(300)
GONE, AFTERWARDS = "durable.rename.after", ("remove.moved", "remove.emptied")


def test_a_session_that_is_being_deleted_is_whole_or_gone(home: Path) -> None:
    host = Host(home)
    passed = host.close(host.ask("create", scenario="changes").session, keep=False)
    assert {GONE, *AFTERWARDS} <= set(passed)
    found: set[str] = set()
    for moment in endings(passed):
        before = host.ask("create", scenario="changes")
        tree = tree_of(home, before.session)
        host.dies("close", session=before.session, keep=False, at=moment.at)
        # Some points are passed before the session is touched and again afterwards: what is on the disk tells.
        is_gone = not (home / "sessions" / before.session).exists()
        assert is_gone or not moment.at.startswith((GONE, *AFTERWARDS)), moment.at
        found.add("gone" if is_gone else "whole")
        host = Host(home)
        if is_gone:
            other = host.ask("create", scenario="changes").session  # the home is open, and was settled before
            assert [path for path in (home / "sessions").iterdir() if before.session in path.name] == [], moment.at
            assert known(home) == [other], moment.at
            host.close(other, keep=False)
        else:
            after = host.ask("resume", session=before.session)
            assert after.files == before.files, moment.at
            assert tree_of(home, before.session) == tree, moment.at
            check_books(home, after)
            host.close(before.session, keep=False)

    assert found == {"whole", "gone"}
    assert host.end() == 0
    assert (known(home), list((home / "sessions").iterdir())) == ([], [])
    check_nothing_left(home)


def endings(passed: list[str]) -> list[Moment]:
    """When its hosts die, each time."""
    return moments(passed, each=("",))


def known(home: Path) -> list[str]:
    store = Store(home / "journal.sqlite3", read_only=True)
    try:
        return [row.id for row in store.sessions()]
    finally:
        store.close()
