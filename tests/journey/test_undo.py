"""What it costs to keep earlier versions' memory (`undo=`): whoever works goes first, and nothing grows."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import Run, Session

CAP_BYTES = 256 << 20
SHARE = f"int({CAP_BYTES} * {{}})"


@pytest.fixture
def session() -> Iterator[Session]:
    with Session(memory=CAP_BYTES, timeout=60, undo=3) as session:
        yield session


def ok(run: Run) -> Run:
    assert run.error is None, run.error.traceback or run.error.message
    return run


def computer(session: Session):
    """The session's, when it has come to rest."""
    session.names()
    return session._session._transport._session.computer


def kept(session: Session) -> set[int]:
    """The versions whose memory can be woken, the present one among them."""
    return computer(session).protection.kept.versions()


def test_three_versions_and_the_present_one_sleep(session: Session) -> None:
    for n in range(6):
        ok(session.run(f"x = {n}"))

    assert kept(session) == {3, 4, 5, 6}
    assert len(computer(session).now.cgroup.pids()) == 6, "pid 1, the kernel, its snapshot, and three"


def test_an_honest_run_gets_the_memory_that_kept_versions_hold(session: Session) -> None:
    """Together they would be past the cap: what is kept goes, and the run and its own snapshot stay."""
    ok(session.run(f"data = bytearray(b'x') * {SHARE.format(0.25)}"))
    one = ok(session.run("for i in range(0, len(data), 4096): data[i] = 1")).ckpt
    ok(session.run("for i in range(0, len(data), 4096): data[i] = 2"))
    assert len(kept(session)) > 1
    grown = ok(session.run(f"more = bytearray(b'x') * {SHARE.format(0.6)}; len(more)"))

    assert grown.unprotected is None
    assert kept(session) == {session.version}
    back = session.restore(one)
    assert (back.memory, back.names_not_restored) == ("kept", ["i", "more"])
    assert back.without_memory == "its snapshot had to make room: memory or disk ran short"
    assert ok(session.run("len(more) > len(data) > 0")).text == "True"


def test_a_run_past_the_cap_is_told_so_and_keeps_nothing_alive(session: Session) -> None:
    for n in range(4):
        ok(session.run(f"x = {n}"))
    died = session.run(f"more = [bytearray(b'x') * {SHARE.format(0.25)} for _ in range(8)]")

    assert died.error is not None
    assert died.error.code in ("out_of_memory", "exception")
    assert (died.memory, ok(session.run("x")).text) == ("restored", "3")


def test_a_session_that_is_nearly_full_keeps_none(session: Session) -> None:
    ok(session.run("x = 1"))
    ok(session.run(f"big = bytearray(b'x') * {SHARE.format(0.8)}"))
    assert kept(session) == {2}
    ok(session.run("del big"))
    ok(session.run("x = 2"))
    assert kept(session) == {3, 4}, "there is room again"


def test_at_the_disk_limit_what_is_kept_goes_before_the_run_does() -> None:
    """It may hold files that have no name any more; here it does not, and the run ends all the same."""
    with Session(memory="512M", timeout=60, disk="64M", undo=3) as small:
        for n in range(3):
            ok(small.run(f"x = {n}"))
        assert len(kept(small)) == 4
        full = small.run("open('f', 'wb').write(bytes(80 << 20))")

        assert full.error is not None
        assert "disk holds" in full.error.message
        assert (full.memory, kept(small)) == ("restored", {3})


@pytest.mark.timeout(300)
def test_a_hundred_runs_leave_as_many_processes_and_descriptors_as_ten(session: Session) -> None:
    def held() -> tuple[int, int, int]:
        now = computer(session).now
        kernel = Path(f"/proc/{now.kernel.pid}/fd")
        return len(now.cgroup.pids()), len(os.listdir("/proc/self/fd")), len(os.listdir(kernel))

    ckpts, early, memory_bytes = [], (0, 0, 0), 0
    for n in range(100):
        ckpts.append(ok(session.run(f"x = {n}; open('f', 'w').write(str(x))")).ckpt)
        if n % 10 == 9:
            assert session.restore(ckpts[-3]).memory == "restored"
            assert ok(session.run("x, open('f').read()")).text == f"({n - 2}, '{n - 2}')"
        if n == 19:
            early, memory_bytes = held(), computer(session).now.cgroup.memory_pinned_bytes()
    late = held()

    assert (late[0], late[2]) == (early[0], early[2])
    assert late[1] < early[1] + 10, "a spare session may have come"
    assert computer(session).now.cgroup.memory_pinned_bytes() < memory_bytes + (16 << 20)
