"""A process that Linux hangs on outlives its SIGKILL. Its run has an end all the same, and so has its session.

Nobody can make Linux hang at will: here a process outlives its kill because that is not sent.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Session
from holdfast.errors import ProcessStuck
from holdfast.kernel.client import Kernel
from holdfast.sandbox.cgroups import contract, scoped, v1, v2, watchdog

MARK = "27182818"
STRAY = f"import subprocess; subprocess.Popen(['sleep', '{MARK}'])\n"
DEAF = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
Hang = Callable[[Callable[[int], bool]], None]


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Hang:
    """Have some processes outlive their kill; nobody is patient for long."""
    send = contract._kill_listed

    def hang(is_stuck: Callable[[int], bool]) -> None:
        def kill(victims: list[int], *rest: Any) -> None:
            send([pid for pid in victims if not is_stuck(pid)], *rest)

        monkeypatch.setattr(contract, "_kill_listed", kill)

    for kind in (contract.Cgroup, v1.V1Cgroup, v2.V2Cgroup, watchdog.WatchdogCgroup):
        for verb in (kind.kill_except, kind.kill_all):
            monkeypatch.setitem(verb.__kwdefaults__, "deadline_s", 1.0)
    monkeypatch.setattr("holdfast.computer.DEATH_S", 1.0)
    return hang


def live(session: Session) -> Any:
    return session._session._transport._session


def is_marked(pid: int) -> bool:
    return MARK in contract.command_of(pid)


def test_a_stray_that_hangs_ends_its_run_and_not_the_session(session: Session, hang: Hang) -> None:
    before = session.run("x = 1; open('f', 'w').write('1')")
    hang(is_marked)
    with pytest.raises(ProcessStuck) as error:
        session.run(STRAY + "x = 2; open('f', 'w').write('2')", key="once")

    assert (error.value.code, "hangs inside a system call" in error.value.message) == ("process_stuck", True)
    assert "/stack" in error.value.hint
    ended = session.history()[-1]
    assert (ended.status, ended.version, session.version) == ("rolled_back", before.version, before.version)
    assert "hangs inside a system call" in ended.reason
    assert live(session).books.open == {}, "nothing is left to settle"
    assert session.recover().memory == "lost"
    assert session.read("f") == b"1"
    assert session.run("x = 3; open('f').read()", key="once-more").text == "'1'"
    assert session.run("x = 2; open('f', 'w').write('2')", key="anew").error is None


def test_a_key_whose_run_hung_may_run_again(session: Session, hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    hang(is_marked)
    with pytest.raises(ProcessStuck):
        session.run(STRAY, key="k")
    monkeypatch.undo()
    run = session.run(STRAY, key="k")

    assert (run.status, run.replayed, run.attempt) == ("committed", False, 2)


def test_a_kernel_that_hangs_is_left_behind_with_its_memory(
    session: Session, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.run("x = 1; open('f', 'w').write('1')")
    kernel = live(session).computer.kernel.pid
    hang(lambda pid: pid == kernel)
    monkeypatch.setattr(Kernel, "kill", lambda _: None)
    run = session.run("open('f', 'w').write('2')\n" + DEAF, timeout=0.5)
    monkeypatch.undo()

    assert (run.status, run.memory, run.error.code) == ("rolled_back", "lost", "timeout")
    assert "hangs inside a system call" in run.error.message
    assert session.run("open('f').read()").text == "'1'"
    assert session.run("x").error.name == "NameError"


@pytest.mark.skipif(os.geteuid() != 0, reason="a session's first process is only root's to stop")
def test_a_session_whose_processes_all_hang_is_closed_and_its_ids_go_to_nobody(
    hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    with Session(memory="512M", timeout=30) as session:
        computer = live(session).computer
        processes = computer.pids()
        monkeypatch.setattr(computer._node, "give_back_ids", given.append)
        monkeypatch.setattr(v2.V2Cgroup, "kill_all", contract.Cgroup.kill_all)  # there Linux sends the kill, not we
        monkeypatch.setattr(Kernel, "kill_session", lambda _: None)
        hang(lambda _: True)
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)  # else they would end by themselves, as nobody speaks to them any more

    for pid in sorted(processes, reverse=True):  # the first takes all others with it
        os.kill(pid, signal.SIGKILL)  # raises, if it had not outlived the session
    assert given == []


def test_a_home_in_which_something_hangs_is_not_opened(
    tmp_path: Path, lean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sweep(_: object) -> None:
        raise contract.Unkillable([4711], [])

    with monkeypatch.context() as patched:
        for kind in (v1.V1Tree, v2.V2Tree, scoped.ScopedTree):
            patched.setattr(kind, "sweep", sweep)
        with pytest.raises(ProcessStuck, match="4711"):
            Session(home=tmp_path, env=lean)

    with Session(memory="512M", home=tmp_path, env=lean) as session:
        assert session.run("1").text == "1", "and nobody holds it"
