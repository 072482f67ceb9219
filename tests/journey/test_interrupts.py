"""Deadlines and interrupts: SIGINT first, then a kill, and always a clear word."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import anyio.to_thread
import msgspec
import pytest

from holdfast import Run, Session, ShellResult, transaction, verification
from holdfast.errors import SessionClosed
from holdfast.model import Mode
from holdfast.sessions import LiveSession

T = TypeVar("T", Run, ShellResult)
HEEDLESS = {
    "ignores SIGINT": "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
    "handles SIGINT": "import signal; signal.signal(signal.SIGINT, lambda *_: None)\nwhile True: pass",
    "blocks SIGINT": "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\nwhile True: pass",
    "catches all": "import time\nwhile True:\n    try: time.sleep(0.5)\n    except BaseException: pass",
    "C code": "import itertools\nsum(itertools.repeat(0))",
    "swallows the cancellation": "import asyncio\nwhile True:\n    try: await asyncio.sleep(1)\n"
    "    except BaseException: pass",
}
LONG = "print('x'); import time; time.sleep(100)"
HEEDFUL = {
    "loop": "while True: pass",
    "sleep": "import time; time.sleep(100)",
    "await": "import asyncio; await asyncio.sleep(100)",
    "command": "!sleep 100\nprint('went on')",
    "assigned command": "x = !sleep 100\nprint('went on')",
    "bash": "%%bash\nsleep 100",
    "subprocess": "import subprocess; subprocess.run(['sleep', '100'])",
    "lock": "import threading; threading.Lock().acquire(); lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "displays": "while True: display(1)",
    "prints": "import time\nwhile True: print('x'); time.sleep(0.001)",
    "C pause": "import ctypes; ctypes.CDLL(None).pause()",
}


@pytest.fixture
def notebook() -> Iterator[Session]:
    with Session(memory="512M", timeout=30, mode="notebook") as session:
        yield session


def live(session: Session) -> LiveSession:
    return session._session._transport._session  # type: ignore[no-any-return, union-attr]


def patient(session: Session) -> Session:
    """Who heeds an interrupt on a busy machine may take longer than the usual grace."""
    computer = live(session).computer
    computer.limits = msgspec.structs.replace(computer.limits, interrupt_grace_s=30.0)
    return session


def interrupted(session: Session, verb: Callable[[], T], *, when: str) -> T:
    """Carry out a verb and interrupt it once the guest has made a file."""
    stages = session._session._transport._session.workspace.path / "stages"
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(verb)
        while not any(stages.glob(f"*/data/{when}")):
            time.sleep(0.005)
        time.sleep(0.1)  # until it is well inside what it does next, and not in the midst of an import
        assert session.interrupt()
        return future.result()


# -- deadlines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", HEEDFUL.values(), ids=HEEDFUL)
def test_a_cell_that_is_not_done_in_time_leaves_no_trace_in_memory(session: Session, code: str) -> None:
    patient(session)
    session.run("kept = [1]")
    run = session.run(f"kept.append(2); half = 1\n{code}" if "%%" not in code else code, timeout=0.3)

    assert run.error is not None
    assert (run.status, run.error.code, run.error.name) == ("rolled_back", "timeout", "Timeout")
    assert "after 0.3 s" in run.error.message
    assert run.error.message.endswith("It was interrupted. Variables are as they were before the run.")
    assert "timeout=" in run.error.hint
    assert "went on" not in run.stdout
    assert (run.memory, run.generation, session.generation) == ("restored", 1, 1)
    assert session.run("kept, 'half' in globals()").text == "([1], False)"


def test_a_notebook_takes_back_what_is_not_done_in_time_as_well(notebook: Session) -> None:
    notebook.run("kept = [1]")
    run = notebook.run("kept.append(2)\nwhile True: pass", timeout=0.3)

    assert run.error is not None
    assert (run.error.code, run.memory, run.generation) == ("timeout", "restored", 1)
    assert notebook.run("kept").text == "[1]"


def test_a_timeout_says_which_line_was_running(session: Session) -> None:
    patient(session)
    run = session.run("import time\nx = 1\ntime.sleep(100)", timeout=1)

    assert run.error is not None
    assert run.error.line == 3
    assert "----> 3 time.sleep(100)" in run.error.traceback


def test_cells_that_do_not_heed_it_are_killed_after_a_grace() -> None:
    with ThreadPoolExecutor(len(HEEDLESS)) as pool:
        outcomes = dict(zip(HEEDLESS, pool.map(outcome_of_heedless, HEEDLESS.values()), strict=True))

    assert outcomes == dict.fromkeys(HEEDLESS, ("timeout", True, "restored", 1, "([1], False, ['kept'])"))


def outcome_of_heedless(code: str) -> tuple[str | None, bool, str, int, str | None]:
    with Session(memory="256M") as session:
        session.run("kept = [1]\nopen('kept', 'w').close()")
        run = session.run(f"kept.append(2); half = 1\n{code}", timeout=0.2)
        after = session.run("import os; kept, 'half' in globals(), os.listdir()")
        assert run.error is not None
        told = "the kernel was killed. Variables are as they were before the run." in run.error.message
        return run.error.code, told, run.memory, session.generation, after.text


def test_cleaning_up_within_the_grace_is_possible(session: Session) -> None:
    run = session.run("import time\ntry: time.sleep(100)\nfinally: time.sleep(0.3); print('clean')", timeout=1)

    assert run.stdout == "clean\n"
    assert (run.memory, session.generation) == ("restored", 1)


def test_the_next_cell_after_one_that_blocked_sigint_can_be_interrupted_again(session: Session) -> None:
    patient(session)
    session.run("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])")
    run = session.run("while True: pass", timeout=0.2)

    assert run.error is not None
    assert "It was interrupted" in run.error.message
    assert (run.memory, session.generation) == ("restored", 1)


def test_the_sessions_own_deadline_holds_where_a_run_names_none() -> None:
    with Session(memory="256M", timeout=0.3) as session:
        short = session.run("import time; time.sleep(100)")
        longer = session.run("import time; time.sleep(0.5); 'done'", timeout="10s")

        assert short.error is not None
        assert "after 0.3 s" in short.error.message
        assert longer.text == "'done'"


def test_a_command_has_a_deadline_too(session: Session) -> None:
    session.run("kept = 1")
    result = session.shell("echo before; sleep 100 | cat; echo after", timeout=2)

    assert result.error is not None
    assert (result.error.code, result.exit_code) == ("timeout", None)
    assert result.stdout == "before\n"
    assert (session.run("kept").text, session.generation) == ("1", 1)
    assert session.shell("pgrep sleep || echo none").stdout == "none\n"


# -- interrupts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "memory", "fate", "found"),
    [
        ("strict", "restored", "Variables are as they were before the run.", "(1, False)"),
        ("notebook", "kept", "Variables are as the cell left them.", "(2, True)"),
    ],
)
def test_another_thread_can_interrupt_a_cell(session: Session, mode: Mode, memory: str, fate: str, found: str) -> None:
    session.run("kept = 1")
    run = interrupted(
        session,
        lambda: session.run("kept = 2; new = 1\nopen('started', 'w').close()\nimport time; time.sleep(100)", mode=mode),
        when="started",
    )

    assert run.error is not None
    assert (run.error.code, run.error.name) == ("interrupted", "KeyboardInterrupt")
    assert run.error.line == 3
    assert run.error.message.endswith(fate)
    assert run.memory == memory
    assert session.run("kept, 'new' in globals()").text == found
    assert session.generation == 1


def test_a_command_can_be_interrupted(session: Session) -> None:
    session.run("kept = 1")
    result = interrupted(session, lambda: session.shell("touch started; sleep 100"), when="started")

    assert result.error is not None
    assert result.error.code == "interrupted"
    assert (session.run("kept").text, session.generation) == ("1", 1)


@pytest.mark.parametrize("mode", ["strict", "notebook"])
def test_a_cell_that_ignores_the_interrupt_is_killed(session: Session, mode: Mode) -> None:
    session.run("kept = [1]")
    run = interrupted(
        session,
        lambda: session.run(
            "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            "kept.append(2); open('started', 'w').close()\nwhile True: pass",
            mode=mode,
        ),
        when="started",
    )

    assert run.error is not None
    assert run.error.code == "interrupted"
    assert "the kernel was killed. Variables are as they were before the run." in run.error.message
    assert (run.memory, session.generation) == ("restored", 1)
    assert session.run("kept").text == "[1]"


def test_a_cell_may_catch_the_interrupt_and_end_well(session: Session) -> None:
    run = interrupted(
        session,
        lambda: session.run(
            "import time\ntry:\n    open('started', 'w').close()\n    time.sleep(100)\n"
            "except KeyboardInterrupt:\n    print('caught')\n'done'"
        ),
        when="started",
    )

    assert (run.stdout, run.text, run.memory, session.generation) == ("caught\n", "'done'", "kept", 1)
    assert session.run("time").error is None


def test_with_nothing_running_there_is_nothing_to_interrupt(session: Session) -> None:
    assert session.interrupt() is False
    assert session.run("1 + 1").text == "2"
    assert session.interrupt() is False


def test_an_interrupt_that_comes_at_once_is_not_lost(session: Session) -> None:
    session.run("kept = 1")
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(session.run, "import time; time.sleep(100)")
            while not session.interrupt():
                pass
            run = future.result()
        assert run.error is not None
        assert (run.error.code, run.memory) == ("interrupted", "restored")

    assert (session.run("kept").text, session.generation) == ("1", 1)


def test_a_late_interrupt_does_not_hit_the_next_cell(session: Session) -> None:
    for _ in range(20):
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(session.run, "1 + 1")
            session.interrupt()
            future.result()
        run = session.run("import time; time.sleep(0.002); 6 * 7")
        assert (run.text, run.error) == ("42", None)

    assert session.generation == 1


def test_a_cell_that_interrupts_itself_is_told_so(session: Session) -> None:
    session.run("kept = 1")
    run = session.run("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(10)")

    assert run.error is not None
    assert (run.error.code, run.memory) == ("interrupted", "restored")
    assert (session.run("kept").text, session.generation) == ("1", 1)


def test_a_reset_ends_what_runs(session: Session) -> None:
    started = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(session.run, "print('x'); import time; time.sleep(100)", on_stdout=lambda _: started.set())
        started.wait()
        session.reset()
        run = future.result()

    assert run.error is not None
    assert run.error.code == "interrupted"
    assert session.run("'time' in globals()").text == "False"
    assert session.generation == 2


def test_closing_ends_what_runs() -> None:
    session = Session(memory="256M")
    started = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(session.run, "print('x'); import time; time.sleep(100)", on_stdout=lambda _: started.set())
        started.wait()
        session.close()
        run = future.result()

    assert run.error is not None
    assert run.error.code == "interrupted"


def wait_for_queue(session: Session, *, of: int) -> None:
    live = session._session._transport._session
    while len(live._queue._waiters or ()) < of:
        time.sleep(0.005)


def test_closing_refuses_those_who_wait_for_their_turn() -> None:
    session = Session(memory="256M")
    started = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(session.run, LONG, on_stdout=lambda _: started.set())
        started.wait()
        waiting = [pool.submit(session.run, LONG) for _ in range(2)]
        waiting_too = pool.submit(session.write, "f", "x")
        wait_for_queue(session, of=3)
        session.close()

    assert running.result().error.code == "interrupted"
    for future in (*waiting, waiting_too):
        assert isinstance(future.exception(), SessionClosed)


def test_a_reset_comes_before_those_who_wait_for_their_turn(session: Session) -> None:
    session.run("kept = 1")
    started = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(session.run, LONG, on_stdout=lambda _: started.set())
        started.wait()
        waiting = pool.submit(session.run, "'kept' in globals()")
        written = pool.submit(session.write, "f", "x")
        wait_for_queue(session, of=2)
        session.reset()

    assert running.result().error.code == "interrupted"
    assert (waiting.result().text, waiting.result().generation) == ("False", 2)
    assert written.result().ckpt.split("-")[2] == "g2"


# -- between the parts of a run ----------------------------------------------------------------------------------


class Held:
    """A step of the host's that waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.reached, self._go, works = threading.Event(), threading.Event(), getattr(owner, name)

        async def held(*arguments: Any, **options: Any) -> Any:
            self.reached.set()
            await anyio.to_thread.run_sync(self._go.wait, 60)
            return await works(*arguments, **options)

        monkeypatch.setattr(owner, name, held)

    def while_it_waits(self, verb: Callable[[], T], then: Callable[[], bool]) -> tuple[T, bool]:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(verb)
            assert self.reached.wait(60)
            try:
                said = then()
            finally:
                self._go.set()
            return future.result(), said


@pytest.mark.parametrize("mode", ["strict", "notebook"])
@pytest.mark.parametrize("protected", [True, False])
@pytest.mark.parametrize("step", [(transaction, "changed_outside"), (LiveSession, "_refuse_if_unfit")])
def test_an_interrupt_before_the_code_begins_ends_the_run_and_nothing_of_it_runs(
    session: Session, monkeypatch: pytest.MonkeyPatch, step: tuple[object, str], protected: bool, mode: Mode
) -> None:
    session.run("kept = [1]")
    session.names()
    if not protected:
        kernel = live(session).computer.kernel
        os.kill(kernel.snapshot.pid, signal.SIGKILL)
    held = Held(monkeypatch, *step)
    code = "open('f', 'w').write('x'); kept.append(2)"
    run, said = held.while_it_waits(lambda: session.run(code, mode=mode, key="k"), session.interrupt)
    monkeypatch.undo()

    assert said
    assert run.error is not None
    assert (run.status, run.error.code, run.memory) == ("rolled_back", "interrupted", "restored")
    assert "Variables are as they were before the run." in run.error.message
    assert (session.run("kept").text, session.files(), session.generation) == ("[1]", [], 1)
    again = session.run(code, mode=mode, key="k")
    assert (again.status, again.replayed) == ("committed", False), "it was ended from outside, and may run again"


def test_an_interrupt_before_a_rehearsal_begins_ends_it(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.run("kept = [1]")
    held = Held(monkeypatch, transaction, "changed_outside")
    run, said = held.while_it_waits(lambda: session.run("kept.append(2); 1", rehearse=True), session.interrupt)

    assert (said, run.status, run.error and run.error.code, run.text) == (True, "rehearsed", "interrupted", None)


@pytest.mark.parametrize("mode", ["strict", "notebook"])
def test_an_interrupt_between_the_code_and_its_asserts_ends_the_run(
    session: Session, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    session.run("kept = [1]")
    held = Held(monkeypatch, verification, "_present")
    code = "open('f', 'w').write('x'); kept.append(2)"
    run, said = held.while_it_waits(lambda: session.run(code, asserts=["kept"], mode=mode), session.interrupt)

    assert said
    assert run.error is not None
    assert (run.status, run.error.code, run.memory) == ("rolled_back", "interrupted", "restored")
    assert [check.ok for check in run.checks] == [False]
    assert (session.run("kept").text, session.files(), session.generation) == ("[1]", [], 1)


@pytest.mark.parametrize(
    ("code", "asserts", "step"),
    [
        ("1 / 0", ["True"], (LiveSession, "roll_back")),
        ("1 +", ["True"], (transaction, "settle")),
        ("1", [], (transaction, "verify")),
        ("1", ["True"], (transaction, "verify")),
    ],
)
def test_when_nothing_more_of_a_run_is_to_come_there_is_nothing_to_interrupt(
    session: Session, monkeypatch: pytest.MonkeyPatch, code: str, asserts: list[str], step: tuple[object, str]
) -> None:
    session.run("kept = [1]")
    run, said = Held(monkeypatch, *step).while_it_waits(lambda: session.run(code, asserts=asserts), session.interrupt)

    assert not said
    assert (run.error and run.error.code) != "interrupted"
