"""Memory survives: whatever ends a run, the session goes on with its variables, or says that it could not."""

import ast
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from tests.lean import lean_envs

import holdfast
from holdfast import AsyncSession, Run, Session
from holdfast.config import default_home

CONTROL = (
    "import gc\n"
    "_snapshots = next(o for o in gc.get_objects() if type(o).__name__ == 'Snapshots')\n"
    "_control, _wake = get_ipython().sink._channel._keep, _snapshots._wake\n"
)
DEATHS = {
    "exit": ("import os\nos._exit(3)", "killed", "exit code 3"),
    "a clean exit": ("import os\nos._exit(0)", "killed", "exit code 0"),
    "SIGKILL": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "killed", "signal 9 (SIGKILL)"),
    "SIGTERM": ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", "killed", "signal 15 (SIGTERM)"),
    "SEGV": ("import ctypes\nctypes.string_at(0)", "killed", "signal 11 (SIGSEGV)"),
    "abort": ("import os\nos.abort()", "killed", "signal 6 (SIGABRT)"),
    "a thread": ("import _thread, os, time;_thread.start_new_thread(os._exit, (4,)); time.sleep(9)", "killed", "4"),
    "memory": ("import numpy as np\nnp.ones(2**28)", "out_of_memory", "512 MiB"),
    "deadline": ("import time\ntime.sleep(60)", "timeout", "not done after"),
    "deadline not heeded": ("import signal\nsignal.signal(2, signal.SIG_IGN)\nwhile 1: pass", "timeout", "not heed"),
    "broken protocol": (f"{CONTROL}_control.send(b'\\x07'); import time; time.sleep(20)", "killed", "protocol"),
    "control socket closed": (f"{CONTROL}_control.close()", "killed", "exit code 1"),
    "every descriptor closed": ("import os\nos.closerange(3, 4096)", "killed", "exit code 1"),
}  # fmt: skip


def ok(run: Run) -> Run:
    assert run.error is None, run.error.traceback or run.error.message
    return run


def value(session: Session, expression: str) -> Any:
    return ok(session.run(expression)).text


def deadline_of(death: str) -> float:
    return 0.5 if "deadline" in death else 30


@pytest.fixture
def notebook() -> Iterator[Session]:
    with Session(memory="512M", timeout=30, mode="notebook") as session:
        yield session


@pytest.fixture
def small() -> Iterator[Session]:
    """A cap that is quickly reached."""
    with Session(memory="256M", timeout=30) as session:
        yield session


# -- strict, and as in a notebook ------------------------------------------------------------------------------


def test_an_exception_takes_back_what_the_cell_did(session: Session) -> None:
    ok(session.run("x, items, gone = 1, [1], 'here'"))
    run = session.run("x = 2\nnew = 3\nitems.append(2)\ndel gone\nraise ValueError('no')")

    assert (run.status, run.memory, run.unprotected, run.generation) == ("rolled_back", "restored", None, 1)
    assert run.error is not None
    assert (run.error.code, run.error.message) == ("exception", "no")
    assert value(session, "x, items, gone, 'new' in globals()") == "(1, [1], 'here', False)"


def test_a_rollback_names_what_it_took_back(session: Session) -> None:
    ok(session.run("x, y, items = [1], [2], [3]"))
    run = session.run("x = [9]; new = 1\ndef function(): pass\nitems.append(4)\nfor i in range(3): pass\n1 / 0")

    assert run.discarded == ["function", "i", "new", "x"]
    assert ok(session.run("y")).discarded == []


def test_of_a_dead_kernel_the_names_are_read_off_the_cell(session: Session) -> None:
    ok(session.run("x = [1]"))
    run = session.run("import os as system\nx = 2\nclass Shape: inner = 1\nsystem._exit(1)")

    assert run.discarded == ["Shape", "system", "x"]


def test_the_first_cell_of_a_session_can_fail_as_well(session: Session) -> None:
    run = session.run("x = 1\nraise ValueError('no')")

    assert (run.memory, run.generation, run.discarded) == ("restored", 1, ["x"])
    assert value(session, "'x' in globals()") == "False"


def test_what_does_not_parse_changes_nothing(session: Session) -> None:
    ok(session.run("x = 1"))
    run = session.run("x = 2\nif")

    assert run.error is not None
    assert (run.error.code, run.memory, run.discarded) == ("syntax", "restored", [])
    assert value(session, "x") == "1"


def test_a_notebook_session_keeps_what_a_failed_cell_did(notebook: Session) -> None:
    ok(notebook.run("x = 1"))
    run = notebook.run("x = 2\nnew = 3\nraise ValueError('no')")

    assert (run.status, run.memory, run.discarded, run.generation) == ("kept", "kept", [], 1)
    assert value(notebook, "x, new") == "(2, 3)"


def test_one_run_can_be_as_in_a_notebook(session: Session) -> None:
    run = session.run("x = 1\n1 / 0", mode="notebook")

    assert run.memory == "kept"
    assert value(session, "x") == "1"
    assert session.run("x = 2\n1 / 0").memory == "restored"
    assert value(session, "x") == "1"


def test_one_run_of_a_notebook_session_can_be_strict(notebook: Session) -> None:
    ok(notebook.run("x = 1"))

    assert notebook.run("x = 2\n1 / 0", mode="strict").memory == "restored"
    assert value(notebook, "x") == "1"


@pytest.mark.parametrize("death", ["exit", "memory", "deadline", "deadline not heeded"])
def test_in_a_notebook_too_a_death_rolls_back(death: str) -> None:
    code, error, _ = DEATHS[death]
    with Session(memory="512M", timeout=30, mode="notebook") as session:
        ok(session.run("x = 1"))
        run = session.run(f"x = 2\n{code}", timeout=deadline_of(death))

        assert run.error is not None
        assert (run.error.code, run.memory, run.generation) == (error, "restored", 1)
        assert value(session, "x") == "1"


def test_a_memory_error_in_a_notebook_rolls_back(small: Session) -> None:
    ok(small.run("x = 1"))
    run = small.run("x = 2\nkept = []\nwhile True: kept.append(b'x' * 1_000_000)", mode="notebook")

    assert run.memory == "restored"
    assert value(small, "x, 'kept' in globals()") == "(1, False)"


def test_an_interrupted_cell_of_a_notebook_keeps_what_it_did(notebook: Session) -> None:
    ok(notebook.run("x = 1"))
    run = notebook.run(
        "x = 2\nprint('go', flush=True)\nimport time; time.sleep(30)", on_stdout=lambda _: notebook.interrupt()
    )

    assert run.error is not None
    assert (run.error.code, run.memory) == ("interrupted", "kept")
    assert value(notebook, "x") == "2"


def test_an_interrupted_cell_is_rolled_back(session: Session) -> None:
    ok(session.run("x = 1; import time"))
    run = session.run("x = 2\nprint('go', flush=True)\ntime.sleep(30)", on_stdout=lambda _: session.interrupt())

    assert run.error is not None
    assert (run.error.code, run.memory, run.discarded) == ("interrupted", "restored", ["x"])
    assert value(session, "x") == "1"


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(holdfast.HoldfastError, match="mode"):
        Session(mode="lenient").close()


# -- deaths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("death", DEATHS)
def test_every_death_leaves_memory_as_it_was(session: Session, death: str) -> None:
    code, error, word = DEATHS[death]
    ok(session.run("x, items = 1, [1]"))
    run = session.run(
        f"print('last words', flush=True)\nx, new = 2, 3; items.append(2)\n{code}", timeout=deadline_of(death)
    )

    assert run.error is not None
    assert run.error.code == error
    assert word in run.error.message
    assert "Variables are as they were before the run." in run.error.message
    assert run.error.hint
    assert (run.status, run.memory, run.unprotected, run.generation) == ("rolled_back", "restored", None, 1)
    assert {"x", "new"} <= set(run.discarded)
    assert run.stdout == "last words\n"
    assert value(session, "x, items, 'new' in globals()") == "(1, [1], False)"
    assert session.generation == 1


@pytest.mark.parametrize("death", DEATHS)
def test_a_first_run_that_dies_leaves_the_session_as_new(session: Session, death: str) -> None:
    code, error, _ = DEATHS[death]
    run = session.run(f"x = 1\n{code}", timeout=deadline_of(death))

    assert run.error is not None
    assert (run.error.code, run.memory, run.generation, session.generation) == (error, "restored", 1, 1)
    assert value(session, "'x' in globals()") == "False"


def test_one_death_after_the_other(session: Session) -> None:
    ok(session.run("n = 0"))
    for n in range(10):
        assert session.run("n = -1; import os; os._exit(1)").memory == "restored"
        assert session.run("n = -1; 1 / 0").memory == "restored"
        assert value(session, "n += 1; n") == str(n + 1)
    assert session.generation == 1


def test_a_cause_of_death_is_not_carried_over_to_the_next(small: Session) -> None:
    ok(small.run("x = 1"))
    first = small.run("import numpy as np; np.ones(2**28)")
    second = small.run("import os; os._exit(7)")

    assert first.error is not None
    assert first.error.code == "out_of_memory"
    assert second.error is not None
    assert second.error.code == "killed"
    assert "exit code 7" in second.error.message


def test_a_shut_down_control_socket_is_shut_for_the_snapshot_as_well(session: Session) -> None:
    ok(session.run("x = 1"))
    run = session.run(f"{CONTROL}import socket; _control.shutdown(socket.SHUT_RDWR)")

    assert run.error is not None
    assert (run.memory, run.generation) == ("lost", 2)
    assert run.unprotected
    assert value(session, "'x' in globals()") == "False"


def test_a_command_that_kills_the_kernel_takes_no_variable_along(session: Session) -> None:
    ok(session.run("x = 1"))
    result = session.shell("kill -9 $PPID; sleep 10")

    assert result.error is not None
    assert "SIGKILL" in result.error.message
    assert (value(session, "x"), session.generation) == ("1", 1)


def test_a_command_that_fails_rolls_nothing_back(session: Session) -> None:
    ok(session.run("x = [1]; address = id(x)"))

    assert session.shell("exit 3").exit_code == 3
    assert value(session, "id(x) == address") == "True"


def test_a_kernel_that_dies_while_its_snapshot_is_taken_is_lost_and_said_to_be(session: Session) -> None:
    """Its last snapshot is older than what the caller was told, so it is no substitute."""
    ok(session.run("x = 1"))
    ok(session.run(f"{CONTROL}type(_snapshots).take = lambda self: os._exit(5)\nimport os"))
    run = session.run("'x' in globals()")

    # At once, and not at its deadline: nobody waits for a kernel that is dead.
    assert (run.status, run.text, run.generation) == ("committed", "False", 2)
    assert "exit code 5" in run.kernel_replaced
    assert value(session, "6 * 7") == "42"


def test_a_cell_that_patches_os_does_not_cost_the_kernel(session: Session) -> None:
    """As `unittest.mock` does; what the guest itself uses must not be what the cell left there."""
    ok(session.run("x = 1"))
    ok(session.run("import os\ndef broken(*_, **__): raise ValueError\nos.listdir = os.fstat = os.lseek = broken"))

    assert (value(session, "x"), session.generation) == ("1", 1)


# -- where it was ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "timeout"),
    [
        ("import ctypes; ctypes.string_at(0)", 30),
        ("import os; os.abort()", 30),
        ("np.ones(2**28)", 30),
        ("sum(range(10**12))", 1),
        ("raise ValueError('no')", 30),
        ("while True: kept.append(b'x' * 1_000_000)", 30),
    ],
    ids=["SEGV", "abort", "memory in C", "deadline in C", "exception", "memory in Python"],
)
def test_the_line_that_was_running_is_named(line: str, timeout: float) -> None:
    with Session(memory="512M", timeout=30) as session:
        ok(session.run("import numpy as np; kept = []"))
        run = session.run(f"a = 1\nb = 2\n{line}\nc = 3", timeout=timeout)

        assert run.error is not None
        assert run.error.line == 3, run.error


def test_the_line_is_that_of_the_cell_and_not_of_a_library(session: Session) -> None:
    ok(session.run("import ctypes\ndef deep(n):\n    return deep(n - 1) if n else ctypes.string_at(0)"))
    run = session.run("x = 1\n\nimport functools\nfunctools.reduce(lambda a, b: deep(3), [1, 2])")

    assert run.error is not None
    assert run.error.line == 4


# -- the cap -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loop",
    [
        "while True: kept.append(b'x' * 1_000_000)",
        "while True: kept.append([0] * 1000)",
        "import numpy as np\nwhile True: kept.append(np.ones(1_000_000))",
        "import pandas as pd\nwhile True: kept.append(pd.DataFrame({'a': range(100_000)}))",
    ],
    ids=["bytes", "small objects", "between calls of numpy", "between calls of pandas"],
)
def test_a_runaway_loop_ends_in_a_memory_error(small: Session, loop: str) -> None:
    ok(small.run("x = 1"))
    run = small.run(f"x = 2\nkept = []\n{loop}")

    assert run.error is not None
    assert (run.error.name, run.error.code) == ("MemoryError", "out_of_memory")
    held = re.search(r"holds (\d+) MiB, the cap is 256 MiB", run.error.message)
    assert held is not None
    assert 150 < int(held[1]) <= 384, "what the cell took, and no more than cap and reserve"
    assert "chunks" in run.error.message
    assert "Variables are as they were" in run.error.message
    assert (run.memory, run.unprotected, run.generation) == ("restored", None, 1)
    assert value(small, "x, 'kept' in globals()") == "(1, False)"


CATCH = """
kept = []
try:
    for _ in range(10**9): kept.append(b"x" * 1_000_000)
except MemoryError as error:
    kept.clear()
    print(error)
"""


def test_a_cell_that_makes_room_after_a_memory_error_goes_on(small: Session) -> None:
    run = ok(small.run(f"{CATCH}\nsum(range(1000))"))

    assert (run.text, run.memory) == ("499500", "kept")
    assert "256 MiB" in run.stdout
    assert value(small, "kept") == "[]"


def test_a_cell_that_ignores_its_memory_error_is_killed(small: Session) -> None:
    ok(small.run("x = 1"))
    run = small.run(f"{CATCH}\nwhile True: kept.append(b'x' * 1_000_000)")

    assert run.error is not None
    assert (run.error.code, run.memory) == ("out_of_memory", "restored")
    assert value(small, "x") == "1"


def test_each_run_gets_a_warning_of_its_own(small: Session) -> None:
    for _ in range(3):
        run = small.run("kept = []\nwhile True: kept.append(b'x' * 1_000_000)")
        assert run.error is not None
        assert run.error.name == "MemoryError"


@pytest.mark.parametrize("code", ["np.ones(2**28)", "np.zeros(2**28) + 1", "bytearray(b'x') * 2**31"])
def test_a_leap_past_the_cap_is_a_kill_and_says_how_far_it_came(small: Session, code: str) -> None:
    ok(small.run("x = 1; import numpy as np"))
    run = small.run(f"x = 2\n{code}")

    assert run.error is not None
    assert (run.error.code, run.memory, run.generation) == ("out_of_memory", "restored", 1)
    assert "cap of 256 MiB" in run.error.message
    assert "it held" in run.error.message
    assert value(small, "x") == "1"


def test_a_child_that_takes_too_much_does_not_cost_a_variable(small: Session) -> None:
    ok(small.run("x = 1; import subprocess, sys"))
    run = small.run("subprocess.run([sys.executable, '-c', 'x = b\"x\" * 10 ** 9'], check=True)")

    assert run.error is not None
    assert (run.memory, run.generation) == ("restored", 1)
    assert value(small, "x") == "1"


def test_rewriting_three_fifths_of_the_cap_in_place_is_nobodys_fault() -> None:
    with Session(memory="512M", timeout=60) as session:
        ok(session.run("import numpy as np, os; a = np.ones(int(0.6 * (512 << 20)) // 8)"))
        run = ok(session.run("a += 1\na[0], a[-1], a.mean()"))

        assert run.text == "(np.float64(2.0), np.float64(2.0), np.float64(2.0))"
        assert run.unprotected is None
        assert session.run("a += 1\nos._exit(1)").memory == "restored"
        assert value(session, "float(a.mean())") == "2.0"


def test_what_only_the_snapshot_still_maps_of_a_file_makes_no_room(small: Session) -> None:
    """It was never copied: what the cell itself holds, its file in memory included, is as large as it is."""
    ok(
        small.run("""
            import mmap, os
            file = os.memfd_create("held")
            os.ftruncate(file, 110 << 20)
            memory = mmap.mmap(file, 110 << 20, flags=mmap.MAP_PRIVATE)
            memory[0] = 1  # from now on a fork takes its pages along
            read = sum(memory[at] for at in range(0, len(memory), mmap.PAGESIZE))
        """)
    )
    run = small.run("memory.close()\nmore = b'x' * (200 << 20)")

    assert run.error is not None
    assert run.error.code == "out_of_memory"


def test_when_the_reserve_is_used_up_the_snapshot_goes_and_the_run_goes_on(small: Session) -> None:
    ok(small.run("import numpy as np, os; a = np.ones(int(0.8 * (256 << 20)) // 8)"))
    run = ok(small.run("a += 1\nfloat(a.mean())"))

    assert (run.text, run.memory) == ("2.0", "kept")
    assert run.unprotected is not None
    assert "memory ran short" in run.unprotected
    after = small.run("a[0] = 7\n1 / 0")
    assert (after.memory, after.unprotected) == ("restored", None)
    assert value(small, "float(a[0])") == "2.0"


def test_a_run_that_lost_its_snapshot_and_then_dies_loses_memory_and_says_so(small: Session) -> None:
    ok(small.run("import numpy as np, os; a = np.ones(int(0.8 * (256 << 20)) // 8); x = 1"))
    run = small.run("x = 2\na += 1\nos._exit(9)")

    assert run.error is not None
    assert (run.memory, run.generation, small.generation) == ("lost", 2, 2)
    assert "exit code 9" in run.error.message
    assert "Variables are lost" in run.error.message
    assert "memory ran short" in run.error.message
    assert "memory ran short" in (run.unprotected or "")
    assert value(small, "'x' in globals(), 'a' in globals()") == "(False, False)"
    ok(small.run("x = 3"))
    assert small.run("x = 4; import os; os._exit(1)").memory == "restored"
    assert value(small, "x") == "3"


def test_a_run_that_lost_its_snapshot_and_then_raises_loses_memory_too(small: Session) -> None:
    """Never half-changed: what the cell did cannot be undone, so it is not kept as if it had been."""
    ok(small.run("import numpy as np; a = np.ones(int(0.8 * (256 << 20)) // 8); x = 1"))
    run = small.run("x = 2\na += 1\n1 / 0")

    assert (run.memory, run.generation) == ("lost", 2)
    assert run.unprotected
    assert value(small, "'x' in globals()") == "False"


def test_the_same_in_a_notebook_keeps_everything(small: Session) -> None:
    ok(small.run("import numpy as np; a = np.ones(int(0.8 * (256 << 20)) // 8); x = 1"))
    run = small.run("x = 2\na += 1\n1 / 0", mode="notebook")

    assert (run.memory, run.generation) == ("kept", 1)
    assert value(small, "x, float(a.mean())") == "(2, 2.0)"


# -- unprotected -------------------------------------------------------------------------------------------------


def test_a_cell_that_kills_its_snapshot_is_unprotected_and_nothing_worse(session: Session) -> None:
    ok(session.run("x = 1; import os, time"))
    run = ok(session.run("os.kill(-1, 9)\ntime.sleep(0.2)\nx = 2\nx"))

    assert (run.text, run.memory, run.generation) == ("2", "kept", 1)
    assert run.unprotected is not None
    assert "snapshot was killed" in run.unprotected
    assert session.run("x = 3\n1 / 0").memory == "restored"
    assert value(session, "x") == "2"


@pytest.mark.parametrize("end", ["os._exit(2)", "1 / 0"])
def test_who_kills_the_snapshot_and_then_fails_loses_memory(session: Session, end: str) -> None:
    ok(session.run("x = 1; import os, time"))
    run = session.run(f"os.kill(-1, 9)\ntime.sleep(0.2)\nx = 2\n{end}")

    assert run.error is not None
    assert (run.memory, run.generation, session.generation) == ("lost", 2, 2)
    assert "snapshot was killed" in (run.unprotected or "")
    if run.error.code != "exception":
        assert "Variables are lost" in run.error.message
    assert value(session, "'x' in globals()") == "False"


def test_more_threads_than_a_snapshot_can_keep_are_a_reason_and_not_a_crash() -> None:
    threads = (
        "import threading\nthreading.stack_size(65536)\nstop = threading.Event()\n"
        "for _ in range(1100): threading.Thread(target=stop.wait, daemon=True).start()"
    )
    with Session(memory="1G", processes=2000, timeout=60) as session:
        ok(session.run("x = 1"))
        ok(session.run(threads))
        run = ok(session.run("threading.active_count()"))
        assert run.text == "1101"
        assert "more threads than a snapshot can keep" in (run.unprotected or "")
        died = session.run("import os; os._exit(1)")
        assert (died.memory, died.generation) == ("lost", 2)
        assert "more threads" in (died.unprotected or "")


def test_a_session_is_protected_again_when_its_threads_have_ended() -> None:
    with Session(memory="1G", processes=2000, timeout=60) as session:
        ok(session.run(
            "import threading\nthreading.stack_size(65536)\nstop = threading.Event()\n"
            "threads = [threading.Thread(target=stop.wait, daemon=True) for _ in range(1100)]\n"
            "for thread in threads: thread.start()"
        ))  # fmt: skip
        ok(session.run("stop.set()\nfor thread in threads: thread.join()"))
        assert ok(session.run("x = 1")).unprotected is None


WITHOUT_EXTENSION = """
import json, sys
from holdfast import Session
with Session(memory="512M", timeout=60) as session:
    told = [session.run("x = 1"), session.run("x = 2; import os; os._exit(1)"), session.run("x"), session.run("1 / 0")]
    told += [session.run("import _thread, time; _thread.start_new_thread(time.sleep, (60,))")]
    told += [session.run("x"), session.run("os._exit(1)"), session.run("'x' in globals()")]
    told += [session.run('''
import os
def tries(verb, *arguments):
    try: return verb(*arguments)
    except OSError as error: return error.strerror
tries(os.kill, 1, 9); tries(os.kill, 1, 19)
[tries(os.open, f"/proc/1/{name}", os.O_RDONLY) for name in ("mem", "maps", "environ", "fd", "root")]
''')]
    json.dump([(r.memory, r.unprotected, r.text, r.generation) for r in told], sys.stdout)
"""


def test_without_the_c_parts_only_kernels_with_threads_are_unprotected(tmp_path: Path) -> None:
    """As it is where there was no compiler: without the thread-keeping fork, and with a pid 1 in Python."""
    package, home = tmp_path / "lib/holdfast", tmp_path / "home"
    left_out = shutil.ignore_patterns("_snapshot*.so", "pid1", "__pycache__")
    shutil.copytree(Path(holdfast.__file__).parent, package, ignore=left_out)
    home.mkdir()
    (home / "envs").symlink_to(default_home() / "envs")
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTENSION],
        env={**os.environ, "PYTHONPATH": str(package.parent), "HOLDFAST_HOME": str(home)},
        capture_output=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr.decode()
    first, died, x, raised, threaded, unprotected, lost, after, pid_1 = json.loads(told.stdout)
    assert (first[0], died[0], x[2], raised[0]) == ("kept", "restored", "1", "restored")
    assert [died[1], x[1], raised[1], threaded[1]] == [None] * 4
    assert "threads" in unprotected[1]
    assert "C part" in unprotected[1]
    assert (lost[0], lost[3], after[2]) == ("lost", 2, "False")
    assert "C part" in lost[1]
    assert set(ast.literal_eval(pid_1[2])) <= {"No such file or directory", "Permission denied"}


# -- what lies outside memory ------------------------------------------------------------------------------------


def test_open_sockets_and_pipes_are_named(session: Session) -> None:
    ok(session.run("import os, socket\nr, w = os.pipe()\na, b = socket.socketpair()\nlistener = socket.socket()"))
    fds = [
        int(fd)
        for fd in str(value(session, "[r, w, a.fileno(), b.fileno(), listener.fileno()]")).strip("[]").split(",")
    ]
    run = session.run("os._exit(1)")

    assert sorted(run.not_restored) == sorted(
        [f"pipe (descriptor {fd})" for fd in fds[:2]] + [f"socket (descriptor {fd})" for fd in fds[2:]]
    )


def test_shared_memory_and_what_linux_counts_are_named(session: Session) -> None:
    ok(session.run("""
        import mmap, os, select
        from multiprocessing import shared_memory
        plain = mmap.mmap(-1, 4096)
        block = shared_memory.SharedMemory("block", create=True, size=64)
        memfd, counter, watcher = os.memfd_create("x"), os.eventfd(0), select.epoll()
        fds = memfd, counter, watcher.fileno()
    """))  # fmt: skip
    memfd, counter, watcher = (int(fd) for fd in str(value(session, "fds")).strip("()").split(","))
    run = session.run("plain[:3] = block.buf[:3] = b'new'; os._exit(1)")

    assert run.memory == "restored"
    assert {
        "shared memory, mapped (/dev/zero)", "shared memory /dev/shm/block", f"shared memory (descriptor {memfd})",
        f"eventfd (descriptor {counter})", f"epoll (descriptor {watcher})",
    } <= set(run.not_restored)  # fmt: skip
    assert value(session, "plain[:3], bytes(block.buf[:3])") == "(b'new', b'new')", "which is why they are named"


MAKE_SHARED = {
    "a file": "open('/dev/shm/new', 'wb').write(bytes(100 << 20))",
    "a directory": "import os; os.makedirs('/dev/shm/new/er'); open('/dev/shm/new/er/f', 'wb').write(bytes(100 << 20))",
    "a segment": "at = libc.shmat(libc.shmget(7, 100 << 20, 0o1600), None, 0); ctypes.memset(at, 1, 100 << 20)",
    "semaphores": "sets = [libc.semget(0, 32_000, 0o1600) for _ in range(50)]; assert min(sets) >= 0",
    "messages": "queue = libc.msgget(7, 0o1600); assert libc.msgsnd(queue, bytes([1, *bytes(7), 65]), 1, 0) == 0",
}


@pytest.mark.parametrize("what", MAKE_SHARED)
def test_shared_memory_that_a_failed_run_made_is_gone(small: Session, what: str) -> None:
    """Nobody could get at it any more, and it would count against the cap of every run that follows."""
    libc = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); libc.shmat.restype = ctypes.c_void_p\n"
    ok(small.run(f"{libc}open('/dev/shm/old', 'w').write('kept'); old = libc.shmget(5, 4096, 0o1600)"))
    for _ in range(3):
        assert small.run(f"{libc}{MAKE_SHARED[what]}\n1 / 0").memory == "restored"

    assert value(small, "import os; os.listdir('/dev/shm')") == "['old']"
    tables = "[len(open(f'/proc/sysvipc/{kind}').readlines()) - 1 for kind in ('shm', 'sem', 'msg')]"
    assert value(small, tables) == "[1, 0, 0]"
    assert value(small, "open('/dev/shm/old').read(), libc.shmget(5, 4096, 0) == old") == "('kept', True)"
    ok(small.run("large = bytearray(b'x') * (150 << 20)"))


def test_handles_on_processes_that_are_gone_are_named(session: Session) -> None:
    ok(session.run("""
        import multiprocessing, subprocess, time
        done, left = subprocess.Popen(["true"]), subprocess.Popen(["sleep", "1000"])
        done.wait()
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)); worker.start()
    """))  # fmt: skip
    run = session.run("1 / 0")

    assert [named for named in run.not_restored if "process is gone" in named] == [
        "Popen left: its process is gone", "ForkProcess worker: its process is gone",
    ]  # fmt: skip


@pytest.mark.parametrize("answer", ["time.sleep(1000)", "os._exit(3)", "os.kill(os.getpid(), 19)"])
def test_a_snapshot_that_does_not_come_up_is_given_up_and_told(
    session: Session, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.resources.memory._WAKE_S", 2.0)
    ok(session.run(
        "import os, time, holdfast.guest.outside as outside\nx = 1\n"
        f"outside.take_back = lambda *_: {answer}"
    ))  # fmt: skip
    run = session.run("x = 2\n1 / 0")

    assert (run.memory, run.generation, session.generation) == ("lost", 2, 2)
    assert run.unprotected == "the snapshot did not wake"
    assert run.recovery is not None
    assert "lost" in run.recovery.text
    assert value(session, "'x' in globals()") == "False"
    assert session.run("y = 1").memory == "kept"
    assert session.run("y = 2; os._exit(1)").memory == "restored"


def test_our_own_descriptors_are_not_named(session: Session) -> None:
    ok(session.run("x = 1"))

    assert session.run("import os; os._exit(1)").not_restored == []
    assert session.run("1 / 0").not_restored == []


def test_the_offsets_of_open_files_come_back(session: Session) -> None:
    ok(session.run(
        "open('in.txt', 'w').write(''.join(f'line {i}\\n' for i in range(10_000)))\n"
        "reader, raw = open('in.txt'), open('in.txt', 'rb', buffering=0)\n"
        "writer = open('out.txt', 'w+b', buffering=0)\n"
        "reader.readline(); raw.read(7); writer.write(b'AAA')"
    ))  # fmt: skip
    run = session.run("reader.read(); raw.seek(0); writer.write(b'BBB'); import os; os._exit(1)")

    assert run.memory == "restored"
    assert value(session, "reader.readline(), raw.read(6), writer.tell()") == "('line 1\\n', b'line 1', 3)"


def test_random_generators_go_on_where_they_were(session: Session) -> None:
    ok(session.run("import random, numpy as np; random.seed(1); np.random.seed(1); rng = np.random.default_rng(1)"))
    draw = "random.random(), float(np.random.rand()), float(rng.random())"
    for end in ("import os; os._exit(1)", "1 / 0"):
        assert session.run(f"{draw}\n{end}").memory == "restored"
    expected = (
        "random.Random(1).random(), float(np.random.RandomState(1).rand()), float(np.random.default_rng(1).random())"
    )

    assert value(session, f"({draw}) == ({expected})") == "True"


# -- threads -----------------------------------------------------------------------------------------------------


BUSY = """
import threading, time, os
from concurrent.futures import ThreadPoolExecutor
beats = 0
def beat():
    global beats
    while True:
        beats += 1
        time.sleep(0.001)
thread = threading.Thread(target=beat, name="beat", daemon=True); thread.start()
pool = ThreadPoolExecutor(2); list(pool.map(abs, [1, -2]))
lock, release = threading.Lock(), threading.Event()
def hold():
    with lock:
        release.wait()
holder = threading.Thread(target=hold, daemon=True); holder.start()
"""


@pytest.mark.parametrize(
    "end", ["os._exit(1)", "os.kill(os.getpid(), 9)", "import ctypes; ctypes.string_at(0)", "1 / 0"]
)
def test_threads_executors_and_locks_go_on_after_a_wake(session: Session, end: str) -> None:
    ok(session.run(BUSY))
    assert session.run(f"release.set(); holder.join(); pool.shutdown()\n{end}").memory == "restored"

    beating = value(session, "before = beats; time.sleep(0.2); beats > before, thread.is_alive(), thread.name")
    assert beating == "(True, True, 'beat')"
    assert value(session, "list(pool.map(abs, [-1, -2, -3]))") == "[1, 2, 3]"
    assert value(session, "lock.locked(), lock.acquire(timeout=0.01)") == "(True, False)"
    assert (
        value(session, "release.set(); holder.join(10); lock.acquire(timeout=10), holder.is_alive()") == "(True, False)"
    )


def test_threads_of_the_run_that_failed_are_gone(session: Session) -> None:
    ok(session.run("import threading, time; before = threading.active_count()"))
    assert session.run("threading.Thread(target=time.sleep, args=(60,)).start()\n1 / 0").memory == "restored"

    assert (
        value(session, "threading.active_count() == before, len(__import__('os').listdir('/proc/self/task'))")
        == "(True, 1)"
    )


# -- the rest of the session, across rollbacks -------------------------------------------------------------------


def test_output_streams_and_displays_are_each_runs_own(session: Session) -> None:
    heard: list[str] = []
    for n in range(5):
        heard.clear()
        last_words = f"print('a{n}'); print('b', end='', flush=True); import os; os._exit(1)"
        died = session.run(last_words, on_stdout=heard.append)
        assert ("".join(heard), died.stdout) == (f"a{n}\nb", f"a{n}\nb")
        heard.clear()
        shown: list[Any] = []
        run = session.run(f"print({n}); display({n}); {n}", on_stdout=heard.append, on_display=shown.append)
        assert ("".join(heard), run.stdout, run.text, len(shown)) == (f"{n}\n", f"{n}\n", str(n), 2)


def test_a_large_output_that_is_cut_short_by_death_does_not_reach_the_next_run(session: Session) -> None:
    ok(session.run("x = 1"))
    died = session.run("print('x' * 50_000); display('y' * 500_000); import os; os._exit(1)")

    assert died.stdout.count("x") <= 50_000
    assert value(session, "print('only'); x") == "1"
    assert ok(session.run("print('only')")).stdout == "only\n"


def test_a_callback_that_fails_ends_the_run_and_rolls_it_back() -> None:
    async def scenario() -> tuple[str | None, int]:
        def fail(text: str) -> None:
            raise LookupError(text)

        async with AsyncSession(memory="512M", timeout=30) as session:
            await session.run("x = 1")
            with pytest.raises(LookupError):
                await session.run("x = 2; print('go', flush=True); import time; time.sleep(20)", on_stdout=fail)
            return (await session.run("x")).text, session.generation

    assert asyncio.run(scenario()) == ("1", 1)


def test_a_cancelled_run_is_rolled_back() -> None:
    async def scenario() -> tuple[str | None, int]:
        async with AsyncSession(memory="512M", timeout=30) as session:
            await session.run("x = 1")
            started = asyncio.Event()
            loop = asyncio.get_running_loop()
            task = asyncio.create_task(
                session.run(
                    "x = 2; print('go', flush=True); import time; time.sleep(20)",
                    on_stdout=lambda _: loop.call_soon_threadsafe(started.set),
                )
            )
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return (await session.run("x")).text, session.generation

    assert asyncio.run(scenario()) == ("1", 1)


def test_execution_counts_do_not_count_what_was_taken_back(session: Session) -> None:
    assert ok(session.run("'one'")).count == 1
    assert session.run("1 / 0").count == 2
    session.run("import os; os._exit(1)")

    run = ok(session.run("In[1], Out[1], _, len(In)"))
    assert (run.count, run.text) == (2, "(\"'one'\", 'one', 'one', 3)")


def test_names_commands_and_completions_are_right_after_a_rollback(session: Session) -> None:
    ok(session.run("alpha = [1, 2, 3]"))
    for end in ("import os; os._exit(1)", "1 / 0"):
        session.run(f"alphabet = 1; alpha = None\n{end}")
        names = session.names()
        assert set(names) == {"alpha"}
        assert names["alpha"].type == "list"
        session.run(f"alphabet = 1\n{end}")
        assert session.shell("echo here").stdout == "here\n"
        session.run(f"alphabet = 1\n{end}")
        assert session.complete("alph").matches == ["alpha"]
        session.run(f"alphabet = 1\n{end}")
        assert "list" in str(session.inspect("alpha").get("text/plain"))


def test_a_woken_kernel_can_be_interrupted(session: Session) -> None:
    ok(session.run("x = 1"))
    for _ in range(3):
        session.run("import os; os._exit(1)")
        run = session.run(
            "print('go', flush=True)\nimport time\ntime.sleep(30)", on_stdout=lambda _: session.interrupt()
        )
        assert run.error is not None
        assert (run.error.code, run.memory) == ("interrupted", "restored")


def test_a_woken_kernel_reaps_and_starts_processes(session: Session) -> None:
    ok(session.run("import subprocess, os"))
    session.run("os._exit(1)")

    assert value(session, "subprocess.run(['echo', 'hi'], capture_output=True).stdout") == "b'hi\\n'"
    assert value(session, "subprocess.Popen(['sleep', '100']).pid > 1") == "True"
    assert [stray.name for stray in session.run("subprocess.Popen(['sleep', '100'])").strays] == ["sleep 100"]


def test_the_strays_of_a_run_that_died_are_killed_and_named(session: Session) -> None:
    ok(session.run("x = 1"))
    run = session.run("import subprocess, os; subprocess.Popen(['sleep', '1234']); os._exit(1)")

    assert [(stray.kind, stray.name, stray.outcome) for stray in run.strays] == [("process", "sleep 1234", "killed")]
    assert "sleep" not in session.shell("ps ax -o args").stdout


def test_a_reset_is_no_rollback(session: Session) -> None:
    ok(session.run("x = 1; open('kept.txt', 'w').write('k')"))
    session.reset()

    assert session.generation == 2
    run = session.run("y = 1; import os; os._exit(1)")
    assert (run.memory, run.generation) == ("restored", 2)
    assert value(session, "'x' in globals(), open('kept.txt').read()") == "(False, 'k')"


def test_snapshots_end_with_the_kernel_they_were_taken_of(session: Session) -> None:
    for _ in range(3):
        ok(session.run("x = bytearray(b'x') * 10_000_000"))
        session.reset()
    ok(session.run("x = 1"))
    session.names()

    live = session._session._transport._session
    assert live.computer.now is not None
    assert len(live.computer.now.cgroup.pids()) == 3, "pid 1, the kernel, its snapshot"


def test_a_session_can_be_closed_while_its_snapshot_is_taken() -> None:
    for _ in range(5):
        with Session(memory="512M", timeout=30) as session:
            ok(session.run("import _thread, time\nfor _ in range(50): _thread.start_new_thread(time.sleep, (60,))"))
            ok(session.run("x = [[i] for i in range(300_000)]"))


def test_a_session_can_be_closed_in_the_midst_of_a_rollback() -> None:
    for pause_s in (0, 0.005, 0.02, 0.05):
        session = Session(memory="512M", timeout=30)
        ok(session.run("x = [[i] for i in range(300_000)]"))
        dying = threading.Thread(target=session.run, args=("print('go'); import os; os._exit(1)",))
        dying.start()
        time.sleep(pause_s)
        session.close()
        dying.join(30)
        assert not dying.is_alive()


def test_sessions_die_side_by_side_without_harm() -> None:
    def live(number: int) -> str:
        with Session(memory="256M", timeout=60) as session:
            ok(session.run(f"n = 0; me = {number}"))
            for turn in range(6):
                end = ("import os; os._exit(1)", "1 / 0", "import ctypes; ctypes.string_at(0)")[turn % 3]
                assert session.run(f"n = me = -1\n{end}").memory == "restored"
                ok(session.run("n += 1"))
            return f"{value(session, 'me, n')} {session.generation}"

    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(live, range(5))) == [f"({n}, 6) 1" for n in range(5)]


def test_the_watchdog_protects_memory_as_well(tmp_path: Path) -> None:
    (tmp_path / "envs").symlink_to(lean_envs())
    code = dedent("""
        from holdfast import Session
        with Session(memory="512M", timeout=30, memory_cap="watchdog") as session:
            session.run("x = 1")
            print(session.run("x = 2; import os; os._exit(1)").memory, session.run("x = 2; 1 / 0").memory)
            print(session.run("x").text)
    """)
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(holdfast.__file__).parents[1]), "HOLDFAST_HOME": str(tmp_path)},
        capture_output=True,
        check=False,
    )

    assert told.stdout.decode() == "restored restored\n1\n", told.stderr.decode()
