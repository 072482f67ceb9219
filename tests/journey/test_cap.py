"""The memory cap, the freezer and the snapshots together, on whichever cgroup version this machine has.

Short on purpose: `tests/vm` runs it again on cgroup v2, in emulation.
"""

import os
from collections.abc import Iterator

import pytest

from holdfast import Session


@pytest.fixture(scope="module")
def capped() -> Iterator[Session]:
    with Session(memory="256M", timeout=120) as session:
        assert session.run("import numpy as np, os, signal, time; x = 1").error is None
        yield session


def test_the_expected_cgroup_version_is_in_use(capped: Session) -> None:
    kind = capped._session._transport._session.computer._node.tree.kind

    assert kind in ("v1", "v2")
    assert kind == os.environ.get("HOLDFAST_EXPECT_CGROUP", kind)


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)", "os.abort()"])
def test_a_death_leaves_memory_as_it_was(capped: Session, end: str) -> None:
    run = capped.run(f"x = 2; {end}")

    assert (run.memory, run.unprotected, run.generation) == ("restored", None, 1)
    assert capped.run("x").text == "1"


def test_a_python_loop_gets_a_memory_error_before_the_cap(capped: Session) -> None:
    run = capped.run("big = []\nwhile True: big.append(' ' * 10**6)")

    assert run.error is not None
    assert (run.error.name, run.error.code) == ("MemoryError", "out_of_memory")
    assert "256 MiB" in run.error.message
    assert capped.run("x").text == "1"


def test_a_leap_past_the_cap_is_killed_and_rolled_back(capped: Session) -> None:
    run = capped.run("leap = np.ones(80 * 2**20)")  # 640 MiB

    assert run.error is not None
    assert (run.error.code, run.memory) == ("out_of_memory", "restored")
    assert capped.run("x").text == "1"


def test_a_cell_that_rewrites_most_of_the_cap_in_place_survives(capped: Session) -> None:
    assert capped.run("a = np.ones(150 * 2**20 // 8)").error is None

    runs = [capped.run("a += 1; float(a[0])") for _ in range(3)]

    assert [run.text for run in runs] == ["2.0", "3.0", "4.0"]
    assert capped.run("del a").error is None


def test_what_a_run_leaves_is_killed_and_the_rest_is_frozen(capped: Session) -> None:
    run = capped.run(
        "import subprocess, threading\nsubprocess.Popen(['sleep', '100'])\n"
        "threading.Thread(target=time.sleep, args=(100,), name='napper', daemon=True).start()"
    )

    assert [(stray.kind, stray.name, stray.outcome) for stray in run.strays] == [
        ("process", "sleep 100", "killed"),
        ("thread", "napper", "frozen"),
    ]


def test_a_deadline_ends_a_cell_that_does_not_heed_it(capped: Session) -> None:
    run = capped.run("signal.signal(signal.SIGINT, signal.SIG_IGN)\nx = 3\nwhile True: pass", timeout=3)

    assert run.error is not None
    assert (run.error.code, run.error.line, run.memory) == ("timeout", 3, "restored")
    assert capped.run("x").text == "1"


def test_a_waiting_thread_does_not_turn_a_full_memory_into_a_crash() -> None:
    """Whoever waits for a lock takes a signal at once; at the cap there was no room to write it down."""
    with Session(memory="256M", timeout=60) as session:
        session.run(
            "import itertools, threading, time\nticks = itertools.count()\ndef tick():\n"
            "    while True: next(ticks); time.sleep(0.005)\nthreading.Thread(target=tick, daemon=True).start()"
        )
        runs = [session.run("flood = []\nwhile True: flood.append(bytearray(8 << 20))") for _ in range(5)]

    assert [(run.error.code, run.memory) for run in runs if run.error] == [("out_of_memory", "restored")] * 5
