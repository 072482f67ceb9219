"""The zygote: warm, replaceable, and never in the way."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from holdfast import Session, engine


def children_of(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


def zygotes_of(session: Session) -> list[int]:
    service = session._session._transport._service
    assert service is not None
    assert service.node._keeper is not None
    found = []
    for pid in children_of(service.node._keeper.peer_pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"kernel.zygote" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def kill_zygotes(session: Session) -> None:
    """A spare session that is being prepared may bring about a successor at any time."""
    service = session._session._transport._service
    assert service is not None
    engine.wait(service.prepare)  # a session that was a spare may have had no zygote left
    found = zygotes_of(session)
    assert found
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    while any(pid in zygotes_of(session) for pid in found):
        time.sleep(0.01)


def test_a_session_outlives_its_zygote(session: Session) -> None:
    session.run("x = 5\nimport threading, time")
    kill_zygotes(session)

    assert session.run("print('on'); x").text == "5"
    assert session.shell("echo on").stdout == "on\n"
    assert session.generation == 1


def test_new_kernels_come_from_its_successor(session: Session) -> None:
    kill_zygotes(session)
    with Session(memory="256M") as other:
        assert other.run("import pandas; 1 + 1").text == "2"

    session.reset()
    assert session.run("x = 1 + 1\nx").text == "2"
    assert session.run("import os; os._exit(1)").memory == "restored"
    assert (session.run("x").text, session.generation) == ("2", 2)
    assert len(zygotes_of(session)) == 1


def test_memory_comes_back_without_a_zygote(session: Session) -> None:
    session.run("x = [5]")
    kill_zygotes(session)
    run = session.run("x.append(6)\nimport os; os._exit(1)")

    assert (run.memory, run.generation) == ("restored", 1)
    assert session.run("x").text == "[5]"


def test_a_first_run_that_dies_gets_a_kernel_of_the_successor(session: Session) -> None:
    kill_zygotes(session)
    run = session.run("import os; os._exit(1)")

    assert (run.memory, run.generation) == ("restored", 1)
    assert session.run("1 + 1").text == "2"


def test_a_running_cell_does_not_notice_its_death(session: Session) -> None:
    stages = session._session._transport._session.workspace.path / "stages"
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(session.run, "open('started', 'w').close()\nimport time; time.sleep(0.5); 'done'")
        while not any(stages.glob("*/data/started")):
            time.sleep(0.01)
        kill_zygotes(session)
        run = future.result()

    assert (run.text, run.error) == ("'done'", None)


def test_many_that_ask_at_once_share_one_successor(session: Session) -> None:
    kill_zygotes(session)

    def one(_: int) -> str | None:
        with Session(memory="128M") as other:
            return other.run("1 + 1").text

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(4))) == ["2"] * 4
    assert len(zygotes_of(session)) == 1


def test_what_guests_are_likely_to_want_is_there_already(session: Session) -> None:
    run = session.run("import sys\n{'numpy', 'pandas', 'pyarrow', 'matplotlib.pyplot', 'IPython'} <= set(sys.modules)")

    assert run.text == "True"


def test_every_library_that_is_promised_can_be_imported(session: Session) -> None:
    promised = (
        "numpy pandas pyarrow polars duckdb matplotlib seaborn scipy sklearn PIL openpyxl requests httpx bs4 lxml "
        "sympy networkx IPython"
    )
    run = session.run(f"import {', '.join(promised.split())}", timeout=110)

    assert run.error is None, run.error


def test_a_fresh_kernel_has_no_trace_of_the_warm_up(session: Session) -> None:
    assert session.names() == {}
    assert session.run("In, Out, dir(__import__('__main__')).count('plt')").text == (
        "(['', \"In, Out, dir(__import__('__main__')).count('plt')\"], {}, 0)"
    )
    assert session.run("import sys; sys.argv, hasattr(sys, 'last_value')").text == "([''], False)"
    assert session.run("import matplotlib.pyplot as plt; plt.get_fignums()").text == "[]"


def test_sessions_of_one_zygote_share_nothing(session: Session) -> None:
    with Session(memory="256M") as other:
        session.run("import json; json.marker = 1; x = 1\nopen('f', 'w').close()\nopen('/tmp/g', 'w').close()")

        assert other.run("import json, os; hasattr(json, 'marker'), os.listdir(), os.listdir('/tmp')").text == (
            "(False, [], [])"
        )
        assert other.names().keys() == {"json", "os"}
        assert session.id != other.id
