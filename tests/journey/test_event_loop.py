"""`asyncio` in cells that do not await: tasks begin, wait between two runs, and are named."""

import pytest

from holdfast import Session

WORK = """
import asyncio
async def work(name):
    print("begin", name)
    await gate.wait()
    print("end", name)
    return name
gate = asyncio.Event()
"""


@pytest.mark.parametrize(
    "start",
    [
        "asyncio.create_task(work('a'))",
        "asyncio.ensure_future(work('a'))",
        "asyncio.get_running_loop().create_task(work('a'))",
        "(lambda: asyncio.create_task(work('a')))()",
    ],
)
def test_a_task_begins_in_a_cell_without_await_and_ends_in_a_later_one(session: Session, start: str) -> None:
    session.run(WORK)
    begun = session.run(f"task = {start}")
    between = session.run("1")
    ended = session.run("gate.set()\nawait task")

    assert (begun.error, begun.stdout) == (None, "begin a\n")
    assert [(stray.kind, stray.outcome) for stray in begun.strays] == [("task", "frozen")]
    assert begun.strays[0].name.endswith(" (work)")
    assert between.strays == [], "it was named by the run that left it"
    assert (ended.stdout, ended.text, ended.strays) == ("end a\n", "'a'", [])


def test_a_task_that_a_cell_with_await_leaves_is_named_too(session: Session) -> None:
    session.run(WORK)
    run = session.run("task = asyncio.create_task(work('a'), name='mine')\nawait asyncio.sleep(0)")

    assert [stray.name for stray in run.strays] == ["mine (work)"]


def test_a_task_that_never_rests_does_not_hold_the_cell(session: Session) -> None:
    run = session.run(
        "import asyncio\nasync def spin():\n    while True: await asyncio.sleep(0)\ntask = asyncio.create_task(spin())"
    )

    assert (run.status, [stray.kind for stray in run.strays]) == ("committed", ["task"])


def test_tasks_go_with_a_cell_that_is_taken_back(session: Session) -> None:
    session.run(WORK)
    session.run("task = asyncio.create_task(work('b')); 1 / 0")

    assert session.run("len(asyncio.all_tasks(asyncio.get_event_loop()))").text == "0"


@pytest.mark.parametrize(
    "start",
    [
        "asyncio.run(asyncio.sleep(0, 5))",
        "asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, 5))",
        "asyncio.run(asyncio.sleep(0)); asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, 5))",
        "import anyio; anyio.run(asyncio.sleep, 0, 5)",
    ],
)
def test_a_loop_can_be_run_in_a_cell_though_a_task_waits(session: Session, start: str) -> None:
    session.run(WORK)
    session.run("task = asyncio.create_task(work('a'))")

    assert session.run(start).text == "5"


def test_a_thread_has_no_loop_of_the_cells(session: Session) -> None:
    run = session.run(
        "import asyncio, threading\nfound = []\ndef look():\n    try: found.append(asyncio.get_running_loop())\n"
        "    except RuntimeError as error: found.append(str(error))\n"
        "thread = threading.Thread(target=look); thread.start(); thread.join(); found"
    )

    assert run.text == "['no running event loop']"
