"""The host is killed at the point of no return, and what it left staged is damaged before the next one publishes it."""

from pathlib import Path

import pytest
from tests.crash.hosts import Host

pytestmark = pytest.mark.timeout(300)
CHANGED = "data/changed.txt"


def test_what_is_not_what_was_verified_halts_its_session_and_no_other(home: Path) -> None:
    host = Host(home)
    other = host.ask("create", scenario="changes").session
    session = host.ask("create", scenario="changes").session
    old = content_of(home, session)
    host.dies("play", session=session, scenario="changes", at="run.point_of_no_return")
    (staged,) = (home / "sessions" / session / "stages").glob(f"*/{CHANGED}")
    _flip(staged)

    host = Host(home)
    told = host.refuses(session)
    assert f"session {session} is stopped: {CHANGED} is not what was verified" in told
    assert host.refuses(session) == told
    assert content_of(home, session) == old
    go_on_with(host, other)

    _flip(staged)  # and back: whoever did that may have done more, and somebody is to look
    host.end()
    host = Host(home)
    assert host.refuses(session) == told
    assert content_of(home, session) == old
    go_on_with(host, other)
    assert host.end() == 0


def go_on_with(host: Host, session: str) -> None:
    before = host.ask("resume", session=session)
    after = host.ask("go_on", session=session)
    assert after.version == before.version + 1
    host.close(session, keep=True)


def content_of(home: Path, session: str) -> bytes:
    return (home / "sessions" / session / "files" / CHANGED).read_bytes()


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[0] ^= 1
    path.write_bytes(raw)
