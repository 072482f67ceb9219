"""What comes back after a run that failed, and what does not: kind of object × cause, each cell of it really tried.

The table stands in docs/memory.md. `HOLDFAST_WRITE_DOCS=1` writes it there; otherwise the test compares. For each cause
one session sets up one object of each kind, each in a run of its own. Then a single run spoils them all and fails.
"""

import os
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast import Run, Session

PAGE = Path(__file__).parents[2] / "docs/memory.md"
BEGIN = "<!-- The table is measured and written by tests/journey/test_what_comes_back.py (HOLDFAST_WRITE_DOCS=1). -->"
END = "<!-- end of the table -->"

CAUSES = {
    "exception": "raise ValueError('no')",
    "SIGKILL": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "out of memory": "import numpy; numpy.ones(2**28)",
    "deadline": "import time; time.sleep(600)",
}
CODES = {"exception": "exception", "SIGKILL": "killed", "out of memory": "out_of_memory", "deadline": "timeout"}
DEADLINE_S = 6.0
"""Long after all is spoilt, also on a machine that has other things to do."""


class Case(NamedTuple):
    kind: str
    set_up: str
    spoil: str
    check: str
    """Code whose last expression is what to say: "back", or what differs."""


CASES = [
    Case(
        "numbers, strings, lists, dicts",
        "number, items, table = 1, [1, 2], {'a': [1]}",
        "number = 9; items.append(3); table['a'].clear(); del table",
        "'back' if (number, items, table) == (1, [1, 2], {'a': [1]}) else 'differs'",
    ),
    Case(
        "NumPy array, changed in place",
        "import numpy as np; array = np.arange(1000)",
        "array[:] = 0",
        "'back' if array.sum() == 499500 else 'differs'",
    ),
    Case(
        "pandas DataFrame",
        "import pandas as pd; frame = pd.DataFrame({'x': [1, 2, 3]})",
        "frame['x'] = 0; frame['y'] = 1; frame.drop(index=0, inplace=True)",
        "'back' if frame.to_dict('list') == {'x': [1, 2, 3]} else 'differs'",
    ),
    Case(
        "Arrow table",
        "import pyarrow as pa, pyarrow.compute as pc; arrow = pa.table({'a': range(100_000)})",
        "arrow = None",
        "'back' if pc.sum(arrow['a']).as_py() == sum(range(100_000)) else 'differs'",
    ),
    Case(
        "Polars frame, its thread pool used before",
        "import polars as pl; polar = pl.DataFrame({'k': [1, 2] * 5000, 'v': range(10_000)})\n"
        "group = lambda: polar.group_by('k').agg(pl.col('v').sum())['v'].sum()\ngroup()",
        "group(); polar = polar.head(1)",
        "'back' if group() == sum(range(10_000)) else 'differs'",
    ),
    Case(
        "DuckDB in memory, its threads used before",
        "import duckdb; duck = duckdb.connect(); duck.execute('create table t as select range i from range(100000)')\n"
        "duck.execute('select sum(i) from t').fetchall()",
        "duck.execute('delete from t')",
        "'back' if duck.execute('select sum(i) from t').fetchall() == [(sum(range(100_000)),)] else 'differs'",
    ),
    Case(
        "OpenBLAS, its threads used before",
        "matrix = np.random.default_rng(0).random((400, 400)); product = matrix @ matrix",
        "matrix @ matrix; product[:] = 0",
        "'back' if np.allclose(matrix @ matrix, product) else 'differs'",
    ),
    Case(
        "Matplotlib figure",
        "import io, matplotlib.pyplot as plt; figure, axes = plt.subplots(); axes.plot([1, 2, 3]); plt.close(figure)",
        "axes.set_title('spoilt'); axes.plot([5, 6])",
        "figure.savefig(picture := io.BytesIO())\n"
        "'back' if (len(axes.lines), axes.get_title()) == (1, '') and len(picture.getvalue()) > 1000 else 'differs'",
    ),
    Case(
        "functions, closures, classes, instances",
        "class Thing:\n    n = 1\ndef make():\n    cell = [0]\n    def count():\n        cell[0] += 1\n"
        "        return cell[0]\n    return count\ncount = make(); count()\n"
        "thing = Thing(); thing.own = 5; double = lambda v: 2 * v",
        "count(); count(); Thing.n = 9; thing.own = 0; double = None",
        "'back' if (count(), Thing.n, thing.own, double(4)) == (2, 1, 5, 8) else 'differs'",
    ),
    Case(
        "generator, half way through",
        "generator = iter(i for i in range(10)); next(generator)",
        "next(generator); generator.close()",
        "'back' if list(generator) == list(range(1, 10)) else 'differs'",
    ),
    Case(
        "async generator, half way through",
        "async def steps():\n    for i in range(5): yield i\nasteps = steps(); await asteps.__anext__()",
        "await asteps.__anext__(); await asteps.aclose()",
        "'back' if [i async for i in asteps] == [1, 2, 3, 4] else 'differs'",
    ),
    Case(
        "coroutine, half way through",
        "import asyncio\nasync def walk():\n    for i in range(5): await asyncio.sleep(0); passed.append(i)\n"
        "passed = []; walking = walk(); walking.send(None); walking.send(None)",
        "walking.close(); passed.clear()",
        "while len(passed) < 4: walking.send(None)\n'back' if passed == [0, 1, 2, 3] else 'differs'",
    ),
    Case(
        "asyncio task, waiting",
        "gate = asyncio.Event(); task = asyncio.ensure_future(gate.wait()); await asyncio.sleep(0.01)",
        "task.cancel(); await asyncio.sleep(0.01)",
        "waited = not task.done(); gate.set(); 'back' if await task and waited else 'differs'",
    ),
    Case(
        "random generators",
        "import random; random.seed(1); np.random.seed(1); rng = np.random.default_rng(1)\n"
        "first = random.Random(1).random(), np.random.RandomState(1).rand(), np.random.default_rng(1).random()",
        "random.random(); np.random.rand(); rng.random(); random.seed(5)",
        "'back' if (random.random(), np.random.rand(), rng.random()) == first else 'differs'",
    ),
    Case(
        "`In` and `Out`",
        "'the answer'",
        "Out.clear(); In.clear()",
        "'back' if 'the answer' in Out.values() and \"'the answer'\" in In else 'differs'",
    ),
    Case(
        "working directory, environment variables",
        "import os; os.environ['COLOUR'] = 'red'; os.makedirs('below', exist_ok=True); os.chdir('below')",
        "os.environ['COLOUR'] = 'blue'; os.chdir('/tmp')",
        "'back' if (os.environ['COLOUR'], os.getcwd()) == ('red', '/mnt/data/below') else 'differs'",
    ),
    Case(
        "lock held by the main thread",
        "import threading, time; lock, rlock = threading.Lock(), threading.RLock(); lock.acquire(); rlock.acquire()",
        "lock.release(); rlock.release()",
        "held = lock.locked(); lock.release(); rlock.release(); 'back' if held else 'differs'",
    ),
    Case(
        "lock held by another thread",
        "kept, leave = threading.Lock(), threading.Event()\ndef keep():\n    with kept: leave.wait()\n"
        "keeper = threading.Thread(target=keep, daemon=True); keeper.start()",
        "leave.set(); keeper.join()",
        "held = kept.locked(); leave.set(); keeper.join(10)\n"
        "'back' if held and kept.acquire(timeout=10) else 'differs'",
    ),
    Case(
        "background thread",
        "beats = 0\ndef beat():\n    global beats\n    while not enough: beats += 1; time.sleep(0.001)\n"
        "enough = False; beating = threading.Thread(target=beat, daemon=True); beating.start()",
        "enough = True; beating.join()",
        "before = beats; time.sleep(0.2)\n'back, and goes on' if beating.is_alive() and beats > before else 'differs'",
    ),
    Case(
        "`ThreadPoolExecutor`",
        "from concurrent.futures import ThreadPoolExecutor; pool = ThreadPoolExecutor(2); list(pool.map(abs, [1, -2]))",
        "pool.shutdown()",
        "'back' if pool.submit(abs, -3).result(timeout=10) == 3 else 'differs'",
    ),
    Case(
        "`queue.Queue`",
        "import queue; waiting = queue.Queue(); waiting.put(1)",
        "waiting.get(); waiting.put(2)",
        "'back' if (waiting.get(timeout=5), waiting.empty()) == (1, True) else 'differs'",
    ),
    Case(
        "SQLite in memory",
        "import sqlite3; lite = sqlite3.connect(':memory:'); lite.execute('create table t (x)'); lite.commit()",
        "lite.execute('insert into t values (2)'); lite.commit()",
        "'back' if lite.execute('select count(*) from t').fetchone() == (0,) else 'differs'",
    ),
    Case(
        "SQLite file: the open connection",
        "file = sqlite3.connect('/mnt/data/file.db'); file.execute('create table t (x)'); file.commit()",
        "file.execute('insert into t values (2)'); file.commit()",
        "rows = file.execute('select count(*) from t').fetchone()[0]\n"
        "file.execute('insert into t values (3)'); file.commit()\n"
        "sound = file.execute('pragma integrity_check').fetchone() == ('ok',)\n"
        "('back' if rows == 0 else 'works; rows the run committed stay') if sound else 'corrupt'",
    ),
    Case(
        "file on disk",
        "open('/mnt/data/disk.txt', 'w').write('old')",
        "open('/mnt/data/disk.txt', 'w').write('new'); open('/mnt/data/more.txt', 'w').close()",
        "there = open('/mnt/data/disk.txt').read(), os.path.exists('/mnt/data/more.txt')\n"
        "'back' if there == ('old', False) else 'stays as the run left it' if there == ('new', True) else 'differs'",
    ),
    Case(
        "file open for reading: its position",
        "open('/mnt/data/lines.txt', 'w').write(''.join(f'line {i}\\n' for i in range(9000)))\n"
        "reader = open('/mnt/data/lines.txt'); reader.readline()",
        "reader.read(); reader.seek(0)",
        "'back' if reader.readline() == 'line 1\\n' else 'differs'",
    ),
    Case(
        "file open for writing: what the run flushed",
        "writer = open('/mnt/data/writer.txt', 'w'); writer.write('AAA')",
        "writer.write('BBBBBB'); writer.flush()",
        "writer.write('CCC'); writer.close(); text = open('/mnt/data/writer.txt').read()\n"
        "{'AAACCC': 'back', 'AAACCCBBB': 'position and buffer back; bytes further on stay'}.get(text, text)",
    ),
    Case(
        "file open for appending: what the run flushed",
        "appender = open('/mnt/data/appender.txt', 'a'); appender.write('AAA'); appender.flush()",
        "appender.write('BBB'); appender.flush()",
        "appender.write('CCC'); appender.close(); text = open('/mnt/data/appender.txt').read()\n"
        "{'AAACCC': 'back', 'AAABBBCCC': 'handle works; what was appended stays'}.get(text, text)",
    ),
    Case(
        "bytes in a pipe",
        "inlet = os.pipe(); os.write(inlet[1], b'abc')",
        "os.read(inlet[0], 2)",
        "os.set_blocking(inlet[0], False); rest = os.read(inlet[0], 9)\n"
        "{b'abc': 'back', b'c': 'not back: what was read is gone (named)'}.get(rest, repr(rest))",
    ),
    Case(
        "bytes in a socket pair",
        "import socket; left, right = socket.socketpair(); left.send(b'abc')",
        "right.recv(2)",
        "right.setblocking(False); rest = right.recv(9)\n"
        "{b'abc': 'back', b'c': 'not back: what was read is gone (named)'}.get(rest, repr(rest))",
    ),
    Case(
        "shared memory (`mmap`, `SharedMemory`, `/dev/shm`)",
        "import mmap; from multiprocessing import shared_memory\n"
        "plain = mmap.mmap(-1, 10); block = shared_memory.SharedMemory('block', create=True, size=10)\n"
        "plain[:3] = block.buf[:3] = b'old'",
        "plain[:3] = block.buf[:3] = b'new'",
        "{b'oldold': 'back', b'newnew': 'not back: as the run left it (named)'}[plain[:3] + bytes(block.buf[:3])]",
    ),
    Case(
        "shared memory that the run made",
        "import os; list_shared = lambda: [n for n in os.listdir('/dev/shm') if n == 'made']",
        "open('/dev/shm/made', 'w').write('x')",
        "'back: it is gone' if not list_shared() else 'differs'",
    ),
    Case(
        "`Popen` handle",
        "import subprocess; process = subprocess.Popen(['sleep', '1000'])",
        "pass",
        "try: os.kill(process.pid, 0); alive = True\nexcept ProcessLookupError: alive = False\n"
        "'back' if alive else 'not back: processes end with the run that started them (named)'",
    ),
]  # fmt: skip


def ok(run: Run, what: str) -> Run:
    assert run.error is None, f"{what}: {run.error.traceback or run.error.message}"
    return run


def measure(cause: str) -> dict[str, str]:
    """What each kind of object is like after a run that spoilt it and then failed of this cause."""
    spoil = "\n".join(case.spoil for case in CASES)
    with Session(memory="1G", timeout=60) as session:
        for case in CASES:
            ok(session.run(case.set_up), case.kind)
        run = session.run(
            f"{spoil}\nprint('spoilt')\n{CAUSES[cause]}", timeout=DEADLINE_S if cause == "deadline" else 60
        )
        assert run.error is not None
        assert (run.stdout, run.error.code) == ("spoilt\n", CODES[cause]), run
        assert (run.memory, run.unprotected) == ("restored", None)
        assert {named.split()[0] for named in run.not_restored} >= {"pipe", "socket", "shared", "Popen"}
        return {case.kind: _answer(session, case) for case in CASES}


def _answer(session: Session, case: Case) -> str:
    run = session.run(case.check)
    return run.text.strip("'\"") if run.error is None and run.text else f"not back: {run.error and run.error.name}"


def render(measured: dict[str, dict[str, str]]) -> str:
    lines = [f"| | {' | '.join(measured)} |", "|---" * (len(measured) + 1) + "|"]
    lines += [f"| {case.kind} | {' | '.join(column[case.kind] for column in measured.values())} |" for case in CASES]
    return "\n".join(lines)


def in_the_page(text: str) -> str:
    return text.partition(BEGIN)[2].partition(END)[0].strip()


@pytest.mark.timeout(300)
def test_the_page_says_what_comes_back() -> None:
    table = render({cause: measure(cause) for cause in CAUSES})
    page = PAGE.read_text()
    if os.environ.get("HOLDFAST_WRITE_DOCS") == "1":
        before, after = page.partition(BEGIN)[0], page.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    else:
        assert in_the_page(page) == table
