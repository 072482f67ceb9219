"""A kernel that is ended from outside, while it has nothing to do or before it has read the request. No run fails for
it as if its code had; no key is used up; and what ended the kernel, and when, is told."""

import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from holdfast import Run, Session, transaction
from holdfast.computer import Computer
from holdfast.kernel.client import Kernel

WHEN = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC")
Hurt = Callable[[Kernel], int]


def computer_of(session: Session) -> Computer:
    computer: Computer = session._session._transport._session.computer
    return computer


def rest(session: Session) -> Kernel:
    """Wait until the session is put to rest after its last run, and frozen."""
    live = session._session._transport._session
    done = threading.Event()

    def wait() -> None:
        if live._settling is None or live._settling.done():
            done.set()
        else:
            live._settling.add_done_callback(lambda _: done.set())

    live._settling.get_loop().call_soon_threadsafe(wait)
    assert done.wait(10)
    assert live.computer.now.cgroup.wait_frozen(5)
    kernel: Kernel = live.computer.kernel
    return kernel


def end(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except PermissionError:
        pytest.skip("the process belongs to a subordinate uid, which this user may not signal")


def snapshot_of(kernel: Kernel) -> int:
    assert kernel.snapshot is not None
    return kernel.snapshot.pid


@pytest.fixture
def laden(session: Session) -> Session:
    assert session.run("kept = ['before']").error is None
    return session


def assert_told(run: Run, *words: str) -> None:
    """In the answer and, signed, in the receipt: the cause, and when it was."""
    assert all(word in run.kernel_replaced for word in words), run.kernel_replaced
    assert WHEN.search(run.kernel_replaced)
    assert run.receipt is not None
    assert run.receipt.statement["predicate"]["byproducts"]["kernel_replaced"] == run.kernel_replaced


# -- between two runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGQUIT])
def test_the_run_after_a_kernel_was_ended_has_all_variables(laden: Session, number: signal.Signals) -> None:
    end(rest(laden).pid, number)

    run = laden.run("kept.append('after'); kept", key="innocent")

    assert (run.status, run.text, run.memory) == ("committed", "['before', 'after']", "kept")
    assert (run.generation, run.unprotected) == (1, None)
    assert_told(run, number.name)
    again = laden.run("kept.append('after'); kept", key="innocent")
    assert (again.replayed, again.text) == (True, "['before', 'after']")
    assert laden.run("kept").kernel_replaced == ""


def test_the_run_after_the_snapshot_was_ended_is_protected(laden: Session) -> None:
    kernel = rest(laden)
    end(snapshot_of(kernel))
    assert not kernel.has_snapshot()  # also where it has not ended yet

    run = laden.run("kept.append('half'); import os; os._exit(3)")

    assert run.error is not None
    assert (run.error.code, run.memory) == ("killed", "restored")
    assert laden.run("kept").text == "['before']"


def test_a_session_whose_first_process_was_ended_starts_no_code_that_needs_what_is_lost(laden: Session) -> None:
    end(rest(laden).init_pid)

    run = laden.run("kept", key="innocent")

    assert run.error is not None
    assert (run.status, run.error.code, run.memory, run.generation) == ("rolled_back", "kernel_lost", "lost", 2)
    assert run.recovery is not None
    assert [(step.action, step.names) for step in run.recovery.steps[:1]] == [("rerun", ["kept"])]
    for told in (run.error.message, run.recovery.cause, laden.recover().cause):
        assert "first process" in told
        assert WHEN.search(told)
    assert run.receipt is not None
    assert run.receipt.statement["predicate"]["rollback"]["blame"] == "system"
    laden.run("kept = ['made again']")
    again = laden.run("kept", key="innocent")
    assert (again.replayed, again.attempt, again.text) == (False, 2, "['made again']")


def test_a_session_whose_first_process_was_ended_runs_what_needs_nothing(laden: Session) -> None:
    end(rest(laden).init_pid)

    run = laden.run("6 * 7")

    assert (run.status, run.text, run.generation) == ("committed", "42", 2)
    assert_told(run, "first process")
    assert laden.run("7").kernel_replaced == ""


def test_a_new_session_whose_kernel_was_ended_has_lost_nothing(session: Session) -> None:
    end(computer_of(session).kernel.pid)

    run = session.run("1")

    assert (run.status, run.generation) == ("committed", 1)


@pytest.mark.parametrize("which", ["kernel", "init"])
def test_a_kernel_that_ends_before_it_rests_costs_no_run_its_key(laden: Session, which: str) -> None:
    for number in range(8):
        run = laden.run(f"kept = [{number}]")
        kernel = computer_of(laden).kernel
        end(kernel.pid if which == "kernel" else kernel.init_pid)
        after = laden.run("kept", key=f"key-{number}")
        if after.error is not None:
            assert (after.error.code, after.generation) == ("kernel_lost", run.generation + 1)
            laden.run(f"kept = [{number}]")
            after = laden.run("kept", key=f"key-{number}")
        assert (after.status, after.text, after.replayed) == ("committed", f"[{number}]", False)


@pytest.mark.parametrize("laden_first", [False, True])
def test_code_that_ends_its_own_kernel_is_told_so_whether_or_not_a_snapshot_is_there(
    session: Session, laden_first: bool
) -> None:
    """Without one nobody is left, and the session's first process ends by itself."""
    if laden_first:
        assert session.run("x = 1").error is None
    for code in ("import os; os._exit(3)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"):
        run = session.run(code, key=code)

        assert run.error is not None
        assert (run.error.code, run.memory, run.kernel_replaced) == ("killed", "restored", "")
        assert session.run(code, key=code).replayed


def test_questions_and_files_do_not_notice(laden: Session) -> None:
    end(rest(laden).pid)
    assert "kept" in laden.names()
    end(rest(laden).pid)
    laden.write("note.txt", b"x")
    assert laden.run("kept, open('note.txt').read()").text == "(['before'], 'x')"


def test_an_earlier_version_is_gone_back_to_past_a_kernel_that_was_ended() -> None:
    with Session(memory="512M", undo=2) as session:
        first = session.run("x = 1")
        session.run("x = 2")
        end(rest(session).pid)

        assert session.restore(first.ckpt).memory == "restored"
        assert session.run("x").text == "1"


# -- after it was found alive ------------------------------------------------------------------------------------


def kernel_pid(kernel: Kernel) -> int:
    return kernel.pid


def init_pid(kernel: Kernel) -> int:
    return kernel.init_pid


@pytest.fixture(params=["while it is planned", "just before the code begins"])
def at_the_last_moment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Hurt], None]:
    """Has a process ended once, when the session's turn has begun; or when the request lies before its kernel."""

    def once(hurt: Hurt) -> None:
        done: list[int] = []

        def strike(kernel: Kernel) -> None:
            if not done:
                done.append(hurt(kernel))
                end(done[0])

        if request.param == "while it is planned":
            look = transaction.changed_outside

            async def looks(books: Any, computer: Computer) -> list[str]:
                strike(computer.kernel)
                return await look(books, computer)

            monkeypatch.setattr(transaction, "changed_outside", looks)
            return
        send = Kernel.send_nowait

        def sends(self: Kernel, message: Any) -> bool:
            sent = send(self, message)
            strike(self)
            return sent

        monkeypatch.setattr(Kernel, "send_nowait", sends)

    return once


def test_code_that_had_not_begun_begins_on_the_snapshot(laden: Session, at_the_last_moment: Any) -> None:
    rest(laden)
    at_the_last_moment(kernel_pid)

    run = laden.run("print('once'); kept.append('after'); kept", key="innocent")

    assert (run.status, run.stdout, run.text) == ("committed", "once\n", "['before', 'after']")
    assert (run.generation, run.unprotected) == (1, None)
    assert_told(run, "SIGKILL", "before the code began")


def test_the_first_code_of_a_session_begins_on_another_kernel(session: Session, at_the_last_moment: Any) -> None:
    at_the_last_moment(kernel_pid)

    run = session.run("made = 1; made")

    assert (run.status, run.text, run.generation) == ("committed", "1", 1)


def test_code_that_had_not_begun_when_memory_was_lost_keeps_its_key(laden: Session, at_the_last_moment: Any) -> None:
    rest(laden)
    at_the_last_moment(init_pid)

    run = laden.run("kept", key="innocent")
    if run.status == "committed":  # cgroup v1: it was done before its first process had got as far as dying
        run = laden.run("kept", key="innocent too")

    assert run.error is not None
    assert (run.status, run.error.code, run.memory, run.generation) == ("rolled_back", "kernel_lost", "lost", 2)
    assert "first process" in run.error.message
    assert laden.run("kept = 1").status == "committed"
    assert laden.run("kept", key=run.card.key).text == "1"


def test_a_first_process_that_is_ended_under_running_code_is_not_the_codes_fault(laden: Session) -> None:
    kernel = rest(laden)
    threading.Timer(0.3, lambda: os.kill(kernel.init_pid, signal.SIGKILL)).start()

    run = laden.run("import time; time.sleep(20)", key="innocent")

    if run.status == "committed":
        pytest.skip("the process belongs to a subordinate uid, which this user may not signal")
    assert run.error is not None
    assert (run.error.code, run.memory) == ("kernel_lost", "lost")
    assert run.receipt is not None
    assert run.receipt.statement["predicate"]["rollback"]["blame"] == "system"


def test_a_kernel_that_is_ended_under_running_code_is_told_as_before(laden: Session) -> None:
    kernel = rest(laden)
    threading.Timer(0.3, lambda: end(kernel.pid)).start()

    run = laden.run("import time; time.sleep(20)", key="guilty")

    assert run.error is not None
    assert (run.error.code, run.memory) == ("killed", "restored")
    assert laden.run("import time; time.sleep(20)", key="guilty").replayed


# -- over HTTP ---------------------------------------------------------------------------------------------------


def test_a_server_tells_its_clients_the_same(server: Any) -> None:
    with Session(url=server.url, token=server.token, memory="512M") as session:
        inside = session.run("import os; kept = ['before']; os.getpid()").text
        pids = [pid for pid, number in _processes_of(session.id).items() if number == int(inside or 0)]
        if not pids:
            pytest.skip("no cgroup names the session's processes")
        end(pids[0])

        run = session.run("kept", key="innocent")

        if run.error is None:
            assert (run.text, run.memory) == ("['before']", "kept")
            assert_told(run, "SIGKILL")
        else:  # it had not come to rest yet
            assert run.error.code == "kernel_lost"


def _processes_of(session: str) -> dict[int, int]:
    """The processes of a session, by the numbers that they have here; and those that they have inside."""
    found: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cgroup") as cgroup, open(f"/proc/{name}/status") as status:
                if session in cgroup.read():
                    numbers = next(line for line in status if line.startswith("NSpid:"))
                    found[int(name)] = int(numbers.split()[-1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
