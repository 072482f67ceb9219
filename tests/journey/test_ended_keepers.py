"""The keeper is killed, and with it every process of every session. Another one takes its place, sessions go on with
their files, and no run is told that its code was at fault."""

import os
import select
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.journey.kernels import wait_until
from tests.lean import lean_home

from holdfast import Session
from holdfast.errors import KeeperLost
from holdfast.nodes.local import LocalNode


def node_of(session: Session) -> LocalNode:
    node: LocalNode = session._session._transport._session.computer._node
    return node


def kill_keeper(session: Session) -> None:
    line = node_of(session)._keeper
    assert line is not None
    kill(line.peer_pid)


def kill(keeper: int) -> None:
    """A keeper ends when every process below it has ended."""
    handle = os.pidfd_open(keeper)
    try:
        os.kill(keeper, signal.SIGKILL)
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        assert ended.poll(20_000)
    finally:
        os.close(handle)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    lean_home(tmp_path / "home")
    return tmp_path / "home"


def test_sessions_outlive_the_keeper_with_their_files(home: Path) -> None:
    with Session(home=home, memory="256M") as session, Session(home=home, memory="256M") as other:
        session.run("x = 1; open('kept.txt', 'w').write('kept')")
        other.run("y = 2")
        kill_keeper(session)

        read = "x, open('kept.txt').read()"
        refused = session.run(read, key="innocent")
        assert refused.error is not None
        assert (refused.error.code, refused.memory, refused.generation) == ("kernel_lost", "lost", 2)
        assert "keeper" in refused.error.message
        assert "keeper" in session.recover().cause
        session.run("x = 3")
        assert session.run(read, key="innocent").text == "(3, 'kept')"

        after = other.run("6 * 7")
        assert (after.status, after.text, after.generation) == ("committed", "42", 2)
        assert "keeper" in after.kernel_replaced
        with Session(home=home, memory="256M") as new:
            assert new.run("1").text == "1"


def test_a_run_that_ends_with_the_keeper_keeps_its_key(home: Path) -> None:
    with Session(home=home, memory="256M") as session:
        session.run("import time, os; x = 1")
        threading.Timer(0.3, kill_keeper, [session]).start()

        run = session.run("time.sleep(20 if 'done' not in os.listdir() else 0)", key="innocent")

        assert run.error is not None
        assert (run.status, run.error.code, run.memory) == ("rolled_back", "kernel_lost", "lost")
        assert "keeper" in run.error.message
        assert run.receipt is not None
        assert run.receipt.statement["predicate"]["rollback"]["blame"] == "system"
        session.write("done", b"")
        session.run("import time, os")
        assert session.run("time.sleep(20 if 'done' not in os.listdir() else 0)", key="innocent").status == "committed"


def test_guests_mind_the_signals_that_the_host_was_started_to_ignore(home: Path) -> None:
    """A shell does that to its background jobs, and nohup too."""
    numbers = [signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR2]
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        with Session(home=home, memory="256M") as session:
            asked = session.run(
                "import signal, subprocess\n"
                f"numbers = {list(map(int, numbers))}\n"
                "print(*(signal.getsignal(n).name for n in numbers), signal.pthread_sigmask(signal.SIG_BLOCK, ()))\n"
                "print(*(subprocess.call(f'kill -{n} $$; echo lived', shell=True) for n in numbers))"
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler)

    assert asked.stdout == f"SIG_DFL SIG_DFL SIG_DFL set()\n{' '.join(str(-number) for number in numbers)}\n"


def test_a_keeper_may_end_again_and_again(home: Path) -> None:
    with Session(home=home, memory="256M") as session:
        for number in range(3):
            kill_keeper(session)
            assert session.run(f"{number}").text == str(number)


def test_without_another_keeper_the_error_says_so_and_names_no_code(home: Path) -> None:
    with Session(home=home, memory="256M") as session:
        session.run("x = 1")
        log = next(home.rglob("keeper.log"))
        log.unlink()
        log.mkdir()  # so that no other keeper can be started
        kill_keeper(session)

        with pytest.raises(KeeperLost, match="keeper"):
            session.run("x", key="innocent")

        log.rmdir()
        refused = session.run("x", key="innocent")
        assert refused.error is not None
        assert (refused.error.code, refused.memory) == ("kernel_lost", "lost")


def test_a_clock_that_is_set_back_lets_no_new_kernel_look_ended(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(home=home, memory="256M") as session:
        fast = SimpleNamespace(time=lambda: time.time() + 3600, monotonic=time.monotonic, sleep=time.sleep)
        with monkeypatch.context() as patch:
            patch.setattr("holdfast.nodes.local.time", fast)
            kill_keeper(session)
            session.run("x = 1")

        session.run("x = 2")
        run = session.run("x")
        assert (run.text, run.kernel_replaced) == ("2", "")
        cgroup = session._session._transport._session.computer.now.cgroup
        assert wait_until(lambda: cgroup.wait_frozen(0)), "it does not run in between"


def test_a_server_goes_on_with_another_keeper(serving: Any, tmp_path: Path) -> None:
    with (
        serving(tmp_path / "home") as server,
        Session(url=server.url, token=server.token, memory="256M") as session,
    ):
        session.run("x = 1; open('kept.txt', 'w').write('kept')")
        kill(_keeper_of(server.process.pid))

        assert session.run("open('kept.txt').read()").text == "'kept'"

        health = httpx.get(f"{server.url}/v1/health")
        assert (health.status_code, health.json()["status"]) == (200, "ok")


def test_a_server_that_cannot_have_another_keeper_ends_with_an_error(serving: Any, tmp_path: Path) -> None:
    with serving(tmp_path / "home") as server:
        log = next((tmp_path / "home").rglob("keeper.log"))
        log.unlink()
        log.mkdir()
        kill(_keeper_of(server.process.pid))

        assert server.process.wait(20) == 3


def _keeper_of(host: int) -> int:
    """The process that holds a pidfd of the host's, found by what it was started with."""
    give_up_at = time.monotonic() + 10
    while time.monotonic() < give_up_at:
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                command = Path(f"/proc/{name}/cmdline").read_bytes()
                if b"holdfast.kernel.keeper" in command and _watches(int(name), host):
                    return int(name)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    raise AssertionError("no keeper")


def _watches(pid: int, host: int) -> bool:
    return any(f"\nPid:\t{host}\n" in fd.read_text() for fd in Path(f"/proc/{pid}/fdinfo").iterdir())
