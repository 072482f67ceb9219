"""What a guest's files, output and egress cost the host and the other sessions."""

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from tests.escape.victim import MOST_HINDERED_S, Watched, victim

from holdfast import Session, config, engine
from holdfast.errors import JournalLimit

MIB = 1 << 20
MOST_TURN_S = 0.1
"""The attacks cost one turn 0.3 s and more; with a pace they cost 2 ms."""
_MUCH_CPU_S = 1.5
"""Of the host, for a run whose files it does not hash."""


@contextmanager
def turns_of_the_loop() -> Iterator[list[float]]:
    """What the turns of the engine's event loop cost, in the processor's time: other programs of a busy machine do not
    count. One turn in about a millisecond is measured."""
    loop, turns, is_over = engine._running().loop, list[float](), False

    def begin() -> None:
        began = time.thread_time()
        loop.call_soon(lambda: end(began))

    def end(began: float) -> None:
        turns.append(time.thread_time() - began)
        if not is_over:
            loop.call_later(0.001, begin)

    loop.call_soon_threadsafe(begin)
    try:
        yield turns
    finally:
        is_over = True


def check(watched: Watched, turns: list[float]) -> None:
    """The waits of the victim depend on what else the machine does; the costs of a turn do not."""
    assert max(turns) < MOST_TURN_S
    assert watched.hindered_s < max(MOST_HINDERED_S, 8 * watched.idle_s), watched


# -- files -------------------------------------------------------------------------------------------------------

HOLES = {
    "truncated": "for i in range(3):\n with open(f's{i}', 'wb') as file: file.truncate(10 << 30)",
    "in tmp": "for i in range(3):\n with open(f'/tmp/s{i}', 'wb') as file: file.truncate(10 << 30)",
    "sought": "for i in range(3):\n with open(f's{i}', 'wb') as file: file.seek(9 << 30); file.write(b'x')",
    "grown": "for i in range(1, 20):\n with open('s', 'ab') as file: file.truncate(i << 29)\n os.link('s', f'l{i}')\n"
    "open('t', 'wb').truncate(3 << 30)",
}


@pytest.fixture
def bounded(open_session) -> Session:
    session = open_session(timeout=2, cpus=0.1, memory="256M")
    session.run("import os")
    return session


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("holes", HOLES)
def test_holes_are_refused_before_they_are_hashed(bounded: Session, holes: str) -> None:
    before_s = cpu_s()
    run = bounded.run(HOLES[holes])
    took_s = cpu_s() - before_s

    assert run.error is not None
    assert "holes count" in run.error.message
    assert took_s < _MUCH_CPU_S
    assert bounded.run("1 + 1").text == "2"


def test_long_paths_are_refused_and_later_runs_cost_nothing(open_session) -> None:
    """The list of all files has a limit of its own, so that no version's manifest is large."""
    session = open_session(disk="64M", timeout=30, memory="256M")
    make = """
import os
for _ in range(15):
    os.mkdir('d' * 250)
    os.chdir('d' * 250)
for number in range({}):
    open(f'{{number:0>100}}', 'w').close()
os.chdir('/mnt/data')
"""
    with victim() as watched, turns_of_the_loop() as turns:
        assert session.run(make.format(3_000)).error is not None
        assert session.run(make.format(400)).error is None
        kept = used_bytes(session, "manifests")
        for number in range(5):
            session.run(f"open('small', 'w').write('{number}')")

    assert used_bytes(session, "manifests") - kept < 5 * config.Limits(disk_bytes=64 * MIB).list_bytes
    check(watched, turns)


def used_bytes(session: Session, part: str) -> int:
    directory = config.default_home() / "sessions" / session.id / part
    return sum(path.stat().st_size for path in directory.iterdir())


# -- the journal -------------------------------------------------------------------------------------------------


@pytest.fixture
def small_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "LEAST_JOURNAL_BYTES", 2 * MIB)
    monkeypatch.setattr(config, "_JOURNAL_PART", 1_000)


FILLERS: dict[str, Callable[[int], str]] = {
    "code": lambda number: f"{number}\n" + "# much to keep\n" * 20_000,
    "names": lambda number: f"for i in range(3000): globals()[f'n{{i:0>90}}'] = [{number}]",
    "files": lambda number: f"for i in range(500): open(f'{{i:0>150}}', 'w').write('{number}')",
}


@pytest.mark.usefixtures("small_journal")
@pytest.mark.parametrize("filler", FILLERS)
def test_what_the_journal_holds_of_a_session_has_a_limit(filler: str) -> None:
    with Session(disk="8M", timeout=30, memory="256M") as session:
        with pytest.raises(JournalLimit, match="MiB of this session's runs, and its limit is 2 MiB"):
            run_often(session, FILLERS[filler])

        assert session.history()
        with pytest.raises(JournalLimit):
            session.write("a file", b"of the host's")


def run_often(session: Session, filler: Callable[[int], str]) -> None:
    for number in range(40):
        assert session.run(filler(number)).error is None


@pytest.mark.usefixtures("small_journal")
def test_answers_that_are_dropped_count_no_more(open_session) -> None:
    """Those under a key that a client made for one call."""
    session = open_session(disk="8M", timeout=30, memory="256M")
    for number in range(40):
        run = session.run("print('x' * 150_000)", key=f"call-{number:032x}")
        assert run.error is None, number


def test_saving_without_end_is_refused_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "LEAST_JOURNAL_BYTES", 20_000)
    monkeypatch.setattr(config, "_JOURNAL_PART", 10_000)
    with Session(disk="64M", timeout=60, memory="256M") as session:
        run = session.run("""
from holdfast import kit
names = [f'{i:0>200}' for i in range(5)]
for name in names:
    open(name, 'w').close()
for _ in range(100):
    kit.save(*names)
""")
    assert run.error is not None
    assert "the journal holds" in run.error.message


# -- egress ------------------------------------------------------------------------------------------------------

ONE_BYTE_CHUNKS = b"1\r\nx\r\n" * 10_000


@contextmanager
def answering(*pieces: bytes, times: int) -> Iterator[str]:
    """A server that answers each connection with the same pieces, again and again."""

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(1 << 16)
                for _ in range(times):
                    for piece in pieces:
                        connection.sendall(piece)
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=256) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
READ = """
import threading, urllib.request
def read():
    try:
        urllib.request.urlopen('http://{}/').read()
    except OSError:
        pass
threads = [threading.Thread(target=read) for _ in range(20)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_answers_in_tiny_chunks_keep_nobody_waiting() -> None:
    with answering(CHUNKED + ONE_BYTE_CHUNKS, ONE_BYTE_CHUNKS, times=100) as at:
        crowd(READ.format(at), egress=[at])


# -- output ------------------------------------------------------------------------------------------------------

FLOODS = {
    "bytes": "import os\nwhile True: os.write(1, b'x'); os.write(2, b'y')",
    "displays": "while True: display(1)",
    "updates": "shown = display(1, display_id=True)\nwhile True: shown.update(1)",
    "metadata": "while True: display({'text/plain': 'x'}, raw=True, metadata={'a': [[]] * 15_000})",
    "many forms": "while True: display({f'a/{i}': 'x' for i in range(10_000)}, raw=True)",
    "deep": "while True: display({'application/json': '[' * 400_000 + ']' * 400_000}, raw=True)",
}


@pytest.mark.parametrize("flood", FLOODS)
def test_floods_of_output_keep_nobody_waiting(flood: str) -> None:
    crowd(FLOODS[flood])


def crowd(code: str, **settings: object) -> None:
    """Three sessions do the same at once, and a fourth is watched."""
    with ExitStack() as opened:
        settings = {"memory": "512M", "timeout": 1.5, "cpus": 0.2, **settings}
        sessions = [opened.enter_context(Session(**settings)) for _ in range(3)]
        for session in sessions:
            session.run("from IPython.display import display")
        with ThreadPoolExecutor(3) as threads, victim() as watched, turns_of_the_loop() as turns:
            list(threads.map(lambda session: session.run(code), sessions))
    check(watched, turns)
