"""No background work: processes that a run leaves are killed and named, threads are frozen and named."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.lean import lean_home

from holdfast import Session, Stray

COUNTER = (
    "import threading, time\n"
    "count = 0\n"
    "def work():\n"
    "    global count\n"
    "    while True: count += 1; time.sleep(0.001)\n"
    "threading.Thread(target=work, name='counter', daemon=True).start()\n"
    "while count < 20: time.sleep(0.001)\n"
)


@pytest.fixture(scope="module")
def watchdog_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lean_home(tmp_path_factory.mktemp("watchdog") / "home")


@pytest.fixture(params=["cgroup", "watchdog"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """All of this holds with a real cgroup and with the watchdog."""
    if request.param == "cgroup":
        chosen = Session(memory="256M", timeout=30)
    else:
        home = request.getfixturevalue("watchdog_home")  # not where only the other is wanted: it takes its time
        chosen = Session(memory="256M", timeout=30, home=home, memory_cap="watchdog")
    with chosen as session:
        yield session


def processes(session: Session) -> list[str]:
    """What lives in the sandbox beside the shell that looks."""
    listing = session.shell("for f in /proc/[0-9]*; do tr '\\0' ' ' < $f/cmdline; echo; done").stdout
    return [line for line in listing.splitlines() if "sleep" in line]


def size_of(ticks: Path) -> int:
    return ticks.stat().st_size if ticks.exists() else 0


def size_when_still(ticks: Path) -> int:
    """What ticks every few milliseconds is frozen soon after the reply; on a busy machine a little later."""
    give_up_at = time.monotonic() + 30
    while time.monotonic() < give_up_at:
        size = size_of(ticks)
        time.sleep(0.4)
        if size_of(ticks) == size:
            return size
    raise AssertionError("it ticks on")


def test_a_process_left_behind_is_killed_and_named(session: Session) -> None:
    run = session.run("import subprocess\np = subprocess.Popen(['sleep', '1000'])")

    assert run.strays == [Stray(kind="process", name="sleep 1000", outcome="killed")]
    assert processes(session) == []
    assert session.run("p.wait()").text == "-9"


def test_a_daemon_that_detached_itself_is_killed_too(session: Session) -> None:
    run = session.run("!setsid bash -c 'nohup sleep 1234 > /dev/null 2>&1 &' && sleep 0.1")

    assert [stray.name for stray in run.strays] == ["sleep 1234"]
    assert processes(session) == []


def test_a_double_fork_is_found(session: Session) -> None:
    run = session.run(
        "import os, sys, time\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: os.execlp('sleep', 'sleep', '4321')\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "while not any('4321' in open(f'/proc/{p}/cmdline').read() for p in os.listdir('/proc') if p.isdigit()): pass"
    )

    assert run.strays == [Stray(kind="process", name="sleep 4321", outcome="killed")]


def test_a_command_leaves_nothing_either(session: Session) -> None:
    result = session.shell("sleep 777 & disown; echo started")

    assert result.stdout == "started\n"
    assert [stray.name for stray in result.strays] == ["sleep 777"]
    assert session.shell("echo next").strays == []


def test_a_fork_of_the_kernel_is_not_shown_as_our_own_machinery(session: Session) -> None:
    run = session.run("import os, time\nif os.fork() == 0: time.sleep(1000)")

    (stray,) = run.strays
    assert (stray.kind, stray.outcome) == ("process", "killed")
    assert "zygote" not in stray.name


def test_worker_pools_left_open_are_killed_and_the_kernel_lives(session: Session) -> None:
    run = session.run("import concurrent.futures as c\npool = c.ProcessPoolExecutor(2)\nlist(pool.map(abs, [-1, -2]))")

    assert run.text == "[1, 2]"
    assert [stray.kind for stray in run.strays].count("process") == 2
    assert session.run("1 + 1").text == "2"
    assert session.generation == 1


def test_children_that_ended_are_no_strays(session: Session) -> None:
    assert session.run("import subprocess; subprocess.run(['true'])\n!echo x").strays == []


def test_a_thread_that_lives_on_is_named_and_frozen(session: Session, inside: Callable[[Session], Path]) -> None:
    run = session.run(COUNTER.replace("count += 1;", "count += 1; open('ticks', 'a').write('.');"))
    session.names()  # answered once the snapshot of that run is taken; frozen again right after
    ticks = inside(session) / "mnt/data/ticks"
    size = size_when_still(ticks)
    time.sleep(0.5)

    assert run.strays == [Stray(kind="thread", name="counter", outcome="frozen")]
    assert ticks.stat().st_size == size >= 20


def test_a_frozen_thread_goes_on_in_the_next_run(session: Session) -> None:
    session.run(COUNTER)
    run = session.run("before = count; time.sleep(0.1); count > before")

    assert run.text == "True"
    assert run.strays == [], "it was named by the run that left it"


def test_threads_that_ended_are_no_strays(session: Session) -> None:
    assert session.run("import threading; t = threading.Thread(target=print); t.start(); t.join()").strays == []


def test_names_and_commands_work_while_threads_are_frozen(session: Session) -> None:
    session.run(COUNTER)

    assert session.names()["count"].type == "int"
    assert session.shell("echo on").stdout == "on\n"
    assert session.run("threading.active_count()").text == "2"


def test_a_process_is_frozen_with_its_session(session: Session, inside: Callable[[Session], Path]) -> None:
    """Even one that a question, not a run, had started."""
    session.run(
        "class Odd:\n"
        "    def __dir__(self):\n"
        "        import subprocess; subprocess.Popen('while true; do echo >> ticks; sleep 0.01; done', shell=True)\n"
        "        return []\n"
        "odd = Odd()"
    )
    session.complete("odd.")
    ticks = inside(session) / "mnt/data/ticks"
    size = size_when_still(ticks)
    time.sleep(0.3)

    assert size_of(ticks) == size


def test_strays_of_a_kernel_that_died_are_gone_too(session: Session) -> None:
    session.run("kept = 1")
    run = session.run("import os, subprocess\nsubprocess.Popen(['sleep', '555'])\nos._exit(1)")

    assert run.error is not None
    assert processes(session) == []
    assert (run.memory, session.run("kept").text) == ("restored", "1")


def test_strays_of_a_cell_that_is_taken_back_are_named_and_gone(session: Session) -> None:
    session.run("kept = 1")
    run = session.run("import subprocess\nchild = subprocess.Popen(['sleep', '666'])\nraise ValueError")

    assert run.strays == [Stray(kind="process", name="sleep 666", outcome="killed")]
    assert processes(session) == []
    assert session.run("kept, 'child' in globals()").text == "(1, False)"


def test_a_thread_goes_on_after_a_rollback(session: Session) -> None:
    session.run(COUNTER)
    run = session.run("import os; os._exit(1)")
    after = session.run("before = count; time.sleep(0.1); count > before")

    assert run.memory == "restored"
    assert (after.text, after.generation) == ("True", 1)
    assert after.strays == [], "it was named by the run that left it"


def test_too_much_memory_is_noticed_whoever_watches(session: Session) -> None:
    session.run("kept = ['before']")
    run = session.run("while True: kept.append(b'x' * 2_000_000)")

    assert run.error is not None
    assert run.error.code == "out_of_memory"
    assert "256 MiB" in run.error.message
    assert run.memory_cap == session.run("1").memory_cap
    assert (run.memory, session.generation) == ("restored", 1)
    assert session.run("kept").text == "['before']"


def test_the_watchdog_is_labelled(session: Session, watchdog_home: Path) -> None:
    expected = "watchdog" if session._session._settings.home == watchdog_home else "cgroup"

    assert session.run("1").memory_cap == expected
