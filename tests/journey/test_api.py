"""The Python API: what it takes, what it gives, what it raises."""

import asyncio
import doctest
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
import holdfast.blocking
import holdfast.config
import holdfast.paths
from holdfast import AsyncSession, HoldfastError, Run, Session
from holdfast.model import Displayed, Output
from holdfast.transports import connection

TRANSPORTS = True

# -- results -----------------------------------------------------------------------------------------------------


def test_the_examples_in_the_documentation_are_true() -> None:
    for module in (holdfast, holdfast.blocking, holdfast.config, holdfast.paths, connection):
        found = doctest.testmod(module)
        assert (found.failed, found.attempted > 0) == (0, True)


def test_a_run_tells_all_about_itself(session: Session) -> None:
    run = session.run("print('out'); 6 * 7")

    assert run.id.startswith("run_")
    assert (run.session, run.status, run.generation, run.count) == (session.id, "committed", 1, 1)
    assert (run.text, run.stdout, run.stderr, run.dropped_bytes) == ("42", "out\n", "", 0)
    assert (run.error, run.strays, run.dropped_displays) == (None, [], 0)
    assert (run.memory, run.discarded, run.not_restored) == ("kept", [], [])
    assert run.duration_s > 0
    assert run.memory_cap == "cgroup"
    assert run.peak_memory_bytes is None or run.peak_memory_bytes > 0


def test_a_run_is_one_readable_line(session: Session) -> None:
    good = session.run("list(range(1000))")
    bad = session.run("raise ValueError('two\\nlines')")

    assert repr(good).startswith(f"<Run {good.id} · committed · [0, 1, 2, 3, 4")
    assert repr(good).endswith(f"… · {good.duration_s:.3f} s>")
    assert repr(bad) == f"<Run {bad.id} · rolled_back · ValueError: two lines · {bad.duration_s:.3f} s>"
    assert repr(session.run("x = 1", key="k")).count("\n") == 0
    assert "committed (replayed)" in repr(session.run("x = 1", key="k"))


def test_a_run_can_be_kept_as_json(session: Session) -> None:
    run = session.run("display({'image/png': b'\\x89PNG'}, raw=True); 1 / 0")
    kept = msgspec.json.decode(msgspec.json.encode(run))

    assert kept["error"]["name"] == "ZeroDivisionError"
    assert (kept["memory"], kept["discarded"], kept["generation"]) == ("restored", [], 1)
    assert kept["displays"][0]["data"]["image/png"] == "iVBORw=="


def test_a_result_cannot_be_changed(session: Session) -> None:
    run = session.run("1")

    with pytest.raises(AttributeError):
        run.text = "2"  # type: ignore[misc]


def test_the_peak_of_memory_is_that_of_the_run(session: Session) -> None:
    large = session.run("x = bytearray(200_000_000); del x")
    small = session.run("1")

    assert large.peak_memory_bytes is None or large.peak_memory_bytes > 200_000_000
    assert small.peak_memory_bytes is None or small.peak_memory_bytes < 150_000_000


def test_a_command_gives_its_streams_and_its_exit_code(session: Session) -> None:
    result = session.shell("echo out; echo err >&2; exit 5")

    assert (result.stdout, result.stderr, result.exit_code, result.error) == ("out\n", "err\n", 5, None)
    assert result.id.startswith("cmd_")
    assert result.duration_s > 0


def test_a_command_that_died_of_a_signal_says_so_as_a_shell_would(session: Session) -> None:
    assert session.shell("kill -TERM $$").exit_code == 128 + 15


def test_a_command_that_cannot_be_started_is_a_result(session: Session) -> None:
    result = session.shell("echo a\0b")

    assert result.exit_code is None
    assert result.error is not None
    assert "null byte" in result.error.message
    assert session.generation == 1


def test_cells_and_commands_share_files_and_directory(session: Session) -> None:
    session.run("open('from-python', 'w').write('p')")
    session.shell("echo -n s > from-shell")

    assert session.shell("cat from-python").stdout == "p"
    assert session.run("open('/mnt/data/from-shell').read()").text == "'s'"


def test_names_lists_the_live_variables(session: Session) -> None:
    session.run(
        "import numpy as np, pandas as pd\n"
        "array = np.zeros(1_000_000)\nframe = pd.DataFrame({'a': np.zeros(1_000_000)})\n"
        "text = 'x' * 1000\n_private = 1\ndef function(): pass\nitems = ['y' * 1000] * 3\nmapping = {'k': b'z' * 1000}"
    )
    names = session.names()

    assert {name: value.type for name, value in names.items()} == {
        "np": "module", "pd": "module", "array": "numpy.ndarray", "frame": names["frame"].type, "text": "str",
        "function": "function", "items": "list", "mapping": "dict",
    }  # fmt: skip
    assert names["frame"].type.endswith("DataFrame")
    assert names["array"].approx_bytes == 8_000_000
    assert 8_000_000 <= names["frame"].approx_bytes < 9_000_000
    assert 1000 < names["text"].approx_bytes < 1200
    assert names["items"].approx_bytes > 3000
    assert names["mapping"].approx_bytes > 1000


def test_names_forget_what_was_deleted(session: Session) -> None:
    session.run("a = 1; b = 2")
    session.run("del a")

    assert list(session.names()) == ["b"]


def test_a_large_cell_runs(session: Session) -> None:
    assert session.run(f"x = '{'y' * 2_000_000}'\nlen(x)").text == "2000000"


def test_unicode_passes_both_ways(session: Session) -> None:
    assert session.run("größe = '😀'\nprint(größe)").stdout == "😀\n"
    assert session.shell("echo é€😀").stdout == "é€😀\n"
    assert "größe" in session.names()


# -- what it refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"timeout": "soon"}, {"timeout": 0}, {"timeout": -1}, {"timeout": "0s"}, {"timeout": True}, {"timeout": "20x"},
        {"timeout": float("nan")}, {"timeout": float("inf")}, {"memory": "much"}, {"memory": 0},
        {"memory": "-1G"}, {"memory": "1M"}, {"memory": 1.5}, {"cpus": 0}, {"cpus": -1}, {"processes": 1},
        {"disk": "none"}, {"home": "/proc/nowhere"}, {"env": "/nowhere/at/all"}, {"memory_cap": "none"},
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_that_cannot_be_used_is_refused_with_a_hint(settings: dict[str, Any]) -> None:
    with pytest.raises(HoldfastError) as caught:
        Session(**settings)

    assert caught.value.code in ("invalid_setting", "environment_unusable")
    assert caught.value.hint
    assert next(iter(settings)) in caught.value.message or str(next(iter(settings.values()))) in caught.value.message
    assert caught.value.hint in str(caught.value)


@pytest.mark.parametrize("timeout", ["soon", 0, -5, "1 fortnight"])
def test_a_deadline_that_cannot_be_used_is_refused(session: Session, timeout: Any) -> None:
    for verb in (session.run, session.shell):
        with pytest.raises(HoldfastError, match="timeout=") as caught:
            verb("1", timeout=timeout)
        assert caught.value.code == "invalid_setting"
        assert "20m" in caught.value.hint


@pytest.mark.parametrize("timeout", ["20m", "90s", "1.5 h", 5, 0.5, "500ms", "30"])
def test_deadlines_may_be_written_as_people_do(session: Session, timeout: Any) -> None:
    assert session.run("1", timeout=timeout).text == "1"


def test_a_cell_that_is_too_large_is_refused(session: Session) -> None:
    with pytest.raises(HoldfastError, match="larger than") as caught:
        session.run("#" * 9_000_000)

    assert caught.value.code == "invalid_setting"
    assert session.run("1").text == "1"


@pytest.mark.parametrize("verb", ["run", "shell", "complete", "inspect"])
def test_what_is_no_text_is_refused_as_our_own_error(session: Session, verb: str) -> None:
    with pytest.raises(HoldfastError) as caught:
        getattr(session, verb)("x = '\udc80'")

    assert caught.value.code == "invalid_setting"
    assert session.run("1").text == "1"
    assert session.generation == 1


@pytest.mark.parametrize("run_id", ["../../etc/passwd", "a/b", "", "run_0.stdout"])
def test_an_id_that_is_none_is_refused(session: Session, run_id: str) -> None:
    with pytest.raises(HoldfastError) as caught:
        session.output(run_id)

    assert caught.value.code == "invalid_setting"


def test_a_closed_session_says_so(session: Session) -> None:
    session.close()
    session.close()

    for verb in (
        lambda: session.run("1"),
        lambda: session.shell("ls"),
        session.names,
        session.reset,
        session.interrupt,
    ):
        with pytest.raises(HoldfastError) as caught:
            verb()
        assert caught.value.code == "session_closed"
        assert caught.value.hint


def test_a_session_that_ends_takes_its_files_along() -> None:
    with Session(memory="256M") as session:
        session.run("import os\nos.makedirs('deep/er')\nos.chmod('deep', 0)\nopen('/tmp/f', 'w').close()")
        path = session._session._transport._session.workspace.path
        assert path.is_dir()

    assert not path.exists()


def test_an_error_in_the_with_block_closes_the_session() -> None:
    session = Session(memory="256M")
    path = session._session._transport._session.workspace.path
    assert path.is_dir()

    with pytest.raises(LookupError), session:
        raise LookupError

    assert not path.exists()


# -- environments ------------------------------------------------------------------------------------------------


def test_an_environment_may_be_chosen(guest_environment: Path) -> None:
    for env in (guest_environment, guest_environment / "bin" / "python", str(guest_environment)):
        with Session(memory="256M", env=env) as session:
            assert session.run("import pandas, sys; sys.prefix").text == "'/opt/env'"


def test_an_environment_without_ipython_is_refused_with_a_hint(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)

    with pytest.raises(HoldfastError, match="IPython") as caught:
        Session(env=tmp_path / "bare")

    assert caught.value.code == "environment_unusable"
    assert "ipython" in caught.value.hint.lower()


def test_guests_do_not_run_in_the_hosts_environment(session: Session) -> None:
    run = session.run("import importlib.util\n[importlib.util.find_spec(n) for n in ('anyio_none', 'pytest', 'typer')]")

    assert run.text == "[None, None, None]"


# -- threads and tasks -------------------------------------------------------------------------------------------


def test_two_threads_may_use_one_session(session: Session) -> None:
    session.run("seen = []")
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda n: session.run(f"seen.append({n})\nprint({n})\n{n}"), range(20)))

    assert [(run.text, run.stdout) for run in runs] == [(str(n), f"{n}\n") for n in range(20)]
    assert session.run("sorted(seen) == list(range(20))").text == "True"


def test_many_sessions_run_side_by_side(where: dict[str, Any]) -> None:
    def journey(n: int) -> tuple[str | None, str, str]:
        with Session(memory="128M", **where) as session:
            session.run(f"x = {n}\nopen('f', 'w').write(str(x))")
            return session.run("x").text, session.shell("cat f").stdout, session.id

    with ThreadPoolExecutor(10) as pool:
        found = list(pool.map(journey, range(10)))

    assert [(text, file) for text, file, _ in found] == [(str(n), str(n)) for n in range(10)]
    assert len({id for _, _, id in found}) == 10


def test_the_async_session_has_the_same_verbs(where: dict[str, Any]) -> None:
    async def journey() -> None:
        pieces: list[str] = []
        async with AsyncSession(memory="256M", **where) as session:
            run = await session.run("print('out'); x = 21; x * 2", on_stdout=pieces.append)
            assert (run.text, "".join(pieces)) == ("42", "out\n")
            assert (await session.shell("echo s")).stdout == "s\n"
            assert list(await session.names()) == ["x"]
            assert (await session.complete("prin")).matches == ["print"]
            assert await session.inspect("len")
            assert await session.output(run) == "out\n"
            assert await session.interrupt() is False
            await session.reset()
            assert session.generation == 2
        with pytest.raises(HoldfastError, match="not open"):
            await session.run("1")

    asyncio.run(journey())


def test_a_run_can_be_read_event_by_event(where: dict[str, Any]) -> None:
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\ndisplay('shown')\ninput('? ')"

    async def answer(prompt: str, password: bool) -> str:
        return f"answer to {prompt}"

    async def journey() -> None:
        async with AsyncSession(memory="256M", **where) as session:
            *events, run = [event async for event in session.stream(code, on_input=answer, goal="told")]
            assert isinstance(run, Run)
            assert (run.status, run.card.goal, run.text) == ("committed", "told", "'answer to ? '")
            printed = [event for event in events if isinstance(event, Output)]
            assert "".join(event.text for event in printed if event.stream == "stdout") == "out\n"
            assert "".join(event.text for event in printed if event.stream == "stderr") == "err\n"
            shown = [event.display.data["text/plain"] for event in events if isinstance(event, Displayed)]
            assert shown == ["'shown'", "'answer to ? '"]
            assert {event.run for event in events if isinstance(event, Displayed)} == {run.id}

    asyncio.run(journey())


def test_a_slow_reader_loses_nothing_and_who_stops_reading_stops_the_run(where: dict[str, Any]) -> None:
    async def journey() -> None:
        async with AsyncSession(memory="256M", **where) as session:
            printed = ""
            async for event in session.stream("for n in range(3000): print(n, flush=True)"):
                printed += event.text if isinstance(event, Output) else ""
                await asyncio.sleep(0)
            assert printed == "".join(f"{n}\n" for n in range(3000))

            endless = session.stream("x = 1; print('go', flush=True)\nwhile True: print('more', flush=True)")
            async with aclosing(endless) as events:
                assert isinstance(await anext(events), Output)
            after = await session.run("'x' in globals()")
            assert (after.text, session.version) == ("False", 2)
            with pytest.raises(HoldfastError):
                [event async for event in session.stream("1", nonsense=1)]  # type: ignore[call-arg]

    asyncio.run(journey())


def test_who_holds_a_stream_and_does_not_read_it_suspends_no_deadline_and_no_close(where: dict[str, Any]) -> None:
    endless = "while True: print('x' * 1000, flush=True)"

    async def journey() -> None:
        session = AsyncSession(memory="256M", **where)
        await session.open()
        unread = session.stream(endless, timeout=1)
        await anext(unread)
        async with asyncio.timeout(10):
            while (await session.info()).state == "running":
                await asyncio.sleep(0.1)
            assert (await session.run("6 * 7")).text == "42"
        *_, run = [event async for event in unread]
        assert isinstance(run, Run)
        assert run.error is not None
        assert run.error.code == "timeout"

        unread = session.stream(endless)
        await anext(unread)
        await asyncio.sleep(0.5)
        async with asyncio.timeout(10):
            await session.close()
        await unread.aclose()

    asyncio.run(journey())


def test_the_limits_hold_while_nobody_reads_what_is_printed() -> None:
    code = """
import threading, time
def fill():
    for n in range(1000):
        with open(f'{n}', 'wb') as file: file.write(bytes(1 << 20))
        time.sleep(0.002)
threading.Thread(target=fill, daemon=True).start()
while True: print('x' * 1000, flush=True)
"""

    async def journey() -> None:
        async with AsyncSession(memory="256M", disk="64M", timeout=30) as session:
            unread = session.stream(code)
            await anext(unread)
            async with asyncio.timeout(15):
                while (await session.info()).state == "running":
                    await asyncio.sleep(0.1)
            *_, run = [event async for event in unread]
            assert isinstance(run, Run)
            assert run.error is not None
            assert "its limit is 64 MiB" in run.error.message

    asyncio.run(journey())


def test_async_sessions_run_at_the_same_time(where: dict[str, Any]) -> None:
    settings = {"memory": "128M", **where}

    async def journey() -> list[str | None]:
        async with AsyncSession(**settings) as a, AsyncSession(**settings) as b, AsyncSession(**settings) as c:
            runs = await asyncio.gather(*(s.run("import time; time.sleep(0.3); time.time()") for s in (a, b, c)))
            starts = [float(run.text or 0) - run.duration_s for run in runs]
            ends = [float(run.text or 0) for run in runs]
            assert max(starts) < min(ends)
            return [run.status for run in runs]

    assert asyncio.run(journey()) == ["committed"] * 3


def test_a_cancelled_run_ends_its_cell() -> None:
    async def journey() -> None:
        async with AsyncSession(memory="256M") as session:
            await session.run("kept = [1]")
            stages = session._transport._session.workspace.path / "stages"
            task = asyncio.create_task(
                session.run(
                    "kept.append(2)\nimport time\nwhile True:\n    open('ticks', 'a').write('.')\n    time.sleep(0.01)"
                )
            )
            while not any(stages.glob("*/data/ticks")):
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await session.run("kept")).text == "[1]"
            sizes = [path.stat().st_size for path in stages.parent.rglob("ticks")]
            assert (await session.run("import time; time.sleep(0.2)")).status == "committed"
            assert [path.stat().st_size for path in stages.parent.rglob("ticks")] == sizes
            assert session.generation == 1

    asyncio.run(journey())


def test_a_cancelled_wait_for_its_turn_harms_nobody(where: dict[str, Any]) -> None:
    async def journey() -> None:
        async with AsyncSession(memory="256M", **where) as session:
            first = asyncio.create_task(session.run("x = 1\nimport time; time.sleep(0.5); 'first'"))
            await asyncio.sleep(0.1)
            second = asyncio.create_task(session.run("x = 2"))
            await asyncio.sleep(0.05)
            second.cancel()
            assert (await first).text == "'first'"
            assert (await session.run("x")).text == "1"
            assert session.generation == 1

    asyncio.run(journey())


def test_an_async_session_outlives_an_event_loop(where: dict[str, Any]) -> None:
    session = AsyncSession(memory="256M", **where)
    asyncio.run(session.open())  # type: ignore[arg-type]
    asyncio.run(session.run("x = 5"))  # type: ignore[arg-type]

    async def last() -> str | None:
        async with session:
            return (await session.run("x")).text

    assert asyncio.run(last()) == "5"


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"expcet": "CKPT"}, "did you mean expect="),
        ({"nonsense": 1}, "these are: timeout"),
        ({"key": 5}, "as a string"),
        ({"goal": 5}, "as a string"),
        ({"expect": 5}, "as a string"),
    ],
)
def test_an_option_that_nobody_knows_is_refused_and_nothing_runs(
    session: Session, options: dict[str, object], hint: str
) -> None:
    with pytest.raises(HoldfastError) as refused:
        session.run("x = 1", **options)

    assert refused.value.code == "invalid_setting"
    assert hint in refused.value.hint
    assert session.version == 0


def test_a_session_that_is_asked_for_nonsense_is_refused() -> None:
    with pytest.raises(HoldfastError, match="preflight"):
        Session(preflight="sometimes")
