"""Savepoints: what code inside has saved on the way is kept, whatever becomes of its run."""

import threading
import time
from textwrap import dedent
from typing import Any

import pytest

from holdfast import Run, Session
from holdfast.errors import DiskFull
from holdfast.journal import Journal
from holdfast.kernel import wire
from holdfast.model import Mode

ENDS = {
    "exception": "1 / 0",
    "exit": "os._exit(3)",
    "time-out": "time.sleep(60)",
    "out of memory": "bytearray(b'x') * 2**31",
    "verification": "pass",
}
STEPS = """
import os, time
from holdfast import kit
os.makedirs('parts')
for n in range(3):
    with open(f'parts/{n}.csv', 'w') as part: part.write(str(n))
    kit.save(f'parts/{n}.csv', step=f'part {n}')
with open('kept.txt', 'w') as kept: kept.write('saved')
kit.save('kept.txt')
open('kept.txt', 'w').write('half'); open('lost.txt', 'w').write('half')
x = 2
"""


def ok(run: Run) -> Run:
    assert run.error is None, run.error.traceback or run.error.message
    return run


def contents(session: Session) -> dict[str, bytes]:
    return {entry.path: session.read(entry.path) for entry in session.files()}


@pytest.mark.parametrize("end", ENDS)
def test_what_was_saved_is_a_version_of_its_own_and_the_run_is_rolled_back(session: Session, end: str) -> None:
    ok(session.run("x = 1; open('kept.txt', 'w').write('before')"))
    outputs = ["never.txt"] if end == "verification" else []
    run = session.run(STEPS + ENDS[end], timeout=1 if end == "time-out" else 30, outputs=outputs)

    assert (run.status, run.memory, run.version, session.version) == ("rolled_back", "restored", 2, 2)
    assert contents(session) == {
        "kept.txt": b"saved", "parts/0.csv": b"0", "parts/1.csv": b"1", "parts/2.csv": b"2",
    }  # fmt: skip
    assert run.saved == ["kept.txt", "parts/0.csv", "parts/1.csv", "parts/2.csv"]
    assert run.recovery is not None
    assert "saved on the way and kept: kept.txt, parts/0.csv" in run.recovery.files
    assert "lost.txt" in run.recovery.discarded
    assert not set(run.saved) & set(run.recovery.discarded)
    assert (run.ckpt, run.recovery.ckpt) == (session.ckpt, session.ckpt)
    _check_receipts(run)
    assert ok(session.run("print(x, open('kept.txt').read(), sorted(__import__('os').listdir('parts')))")).stdout == (
        "1 saved ['0.csv', '1.csv', '2.csv']\n"
    )


MODES = """
import os
from holdfast import kit
open('new.sh', 'w').write('#!/bin/sh'); os.chmod('new.sh', 0o755)
open('old', 'w').write('new'); os.chmod('old', 0o700); os.chmod('same', 0o600)
os.remove('link'); open('link', 'w').write('file'); os.makedirs('d/e'); open('d/e/f', 'w').write('f')
kit.save('new.sh', 'old', 'same', 'link', 'd/e/f')
1 / 0
"""
LOOK = "print(*sorted((os.readlink(n) if os.path.islink(n) else oct(os.stat(n).st_mode), n) for n in os.listdir()))"


def test_what_was_saved_keeps_its_mode_and_what_it_replaced_can_be_gone_back_to(session: Session) -> None:
    made = "open('old', 'w').write('old'); os.chmod('old', 0o755); os.symlink('old', 'link'); open('same', 'w').close()"
    first = ok(session.run(f"import os; {made}\n{LOOK}"))
    run = session.run(MODES)

    assert run.saved == ["d/e/f", "link", "new.sh", "old", "same"]
    assert ok(session.run(LOOK)).stdout == (
        "('0o100600', 'same') ('0o100644', 'link') ('0o100700', 'old') ('0o100755', 'new.sh') ('0o40755', 'd')\n"
    )
    assert session.restore(first.ckpt).files_not_restored == []
    assert ok(session.run(LOOK)).stdout == first.stdout
    session.restore(run.ckpt)
    assert ok(session.run("oct(os.stat('new.sh').st_mode)")).text == "'0o100755'"


def _check_receipts(run: Run) -> None:
    """One for what was saved, and after it the one of the run."""
    assert run.receipt is not None
    told = run.receipt.facts()
    assert (told.number, told.status, told.version, told.changes) == (3, "rolled_back", 2, [])
    assert told.saved == ["part 0", "part 1", "part 2", "step 4"]
    assert told.ckpt == run.ckpt


def test_of_a_run_that_commits_they_are_among_its_files(session: Session) -> None:
    run = ok(session.run(STEPS))

    assert (run.status, run.version) == ("committed", 1)
    assert run.saved == ["parts/0.csv", "parts/1.csv", "parts/2.csv", "kept.txt"]
    assert (session.read("kept.txt"), session.read("lost.txt")) == (b"half", b"half")
    assert run.receipt is not None
    assert (run.receipt.number, run.receipt.facts().saved) == (1, ["part 0", "part 1", "part 2", "step 4"])


def test_what_was_saved_unchanged_is_no_version(session: Session) -> None:
    ok(session.run("open('f', 'w').write('1')"))
    run = session.run("from holdfast import kit\nkit.save('f')\n1 / 0")

    assert (run.version, run.saved) == (1, [])


LARGE = """
import os
from holdfast import kit
for name in ('small', 'large'):
    with open(name, 'wb') as file: file.write(name.encode())
kit.save('small', step='finished')
with open('new', 'wb') as file: file.write(b'new')
with open('large', 'wb') as file: file.truncate(9 << 30)
"""


@pytest.mark.parametrize("mode", ["strict", "notebook"])
@pytest.mark.parametrize("by", ["deadline", "interrupt"])
def test_a_save_that_is_stopped_ends_in_time_and_leaves_nothing_behind(session: Session, by: str, mode: Mode) -> None:
    blobs = session._session._transport._session.books.blobs
    save = "print('saving', flush=True)\ntry: kit.save('new', 'large')\nfinally: os.truncate('large', 1)"
    began = time.monotonic()
    run = session.run(
        LARGE + save, timeout=1 if by == "deadline" else 60, mode=mode,
        on_stdout=lambda _: threading.Timer(0.3, session.interrupt).start() if by == "interrupt" else None,
    )  # fmt: skip

    assert time.monotonic() - began < 10
    assert run.error is not None
    assert run.error.code == {"deadline": "timeout", "interrupt": "interrupted"}[by]
    assert "did not heed" not in run.error.message, "the code was told, and had its time to clear up"
    kept = {"small"} if run.status == "rolled_back" else {"small", "new", "large"}
    assert {file.path for file in session.files()} == kept
    assert len(blobs.digests()) <= 1
    assert not list(session._session._transport._session.workspace.path.glob("blobs/.*"))


def test_code_that_was_asked_to_end_can_still_save(session: Session) -> None:
    code = "import time\nfrom holdfast import kit\nopen('f', 'w').write('half')\n"
    run = session.run(f"{code}try: time.sleep(60)\nexcept KeyboardInterrupt: kit.save('f'); raise", timeout=1)

    assert run.error is not None
    assert (run.error.code, run.saved) == ("timeout", ["f"])


def test_what_a_thread_was_saving_when_its_cell_ended_is_saved(session: Session) -> None:
    code = """
        import threading
        from holdfast import kit
        with open('f', 'wb') as file: file.truncate(300 << 20)
        threading.Thread(target=kit.save, args=('f',), daemon=True).start()
        import time; time.sleep(0.2)
    """
    assert ok(session.run(dedent(code))).saved == ["f"]
    assert ok(session.run("6 * 7")).text == "42"


SAVING = """
import threading
from holdfast import kit
with open('f', 'wb') as file: file.truncate(64 << 20)
saved, refused = [], []
def work():
    while not saved or not over.is_set():
        try: kit.save('f')
        except kit.SaveRefused as error: refused.append(str(error))
        else: saved.append(1)
over = threading.Event()
"""


def test_threads_that_save_without_end_do_not_keep_a_run_from_its_end(session: Session) -> None:
    ok(session.run(SAVING))
    run = ok(session.run("for _ in range(3): threading.Thread(target=work, daemon=True).start()", timeout=15))

    assert (run.status, run.memory) == ("committed", "kept")
    code = "import time\nwhile not (saved and refused): time.sleep(0.01)\nover.set(); refused[0]"
    assert "the run's code has ended: save while it runs" in (ok(session.run(code)).text or "")


def test_a_thread_that_saves_between_two_runs_waits_for_the_next(session: Session) -> None:
    """Nobody answered it, and whoever saved later waited behind it."""
    ok(session.run(SAVING + "asked = threading.Event()"))
    later = "def later():\n    asked.wait()\n    work()\nover.set()\nthreading.Thread(target=later).start()"
    ok(session.run(later))
    live = session._session._transport._session
    # What a question runs of the user's own lets the thread go, while no run is conducted.
    ok(session.run("class Asked:\n    def __sizeof__(self): asked.set(); return 1\nit = Asked()"))
    session.names()
    while not any(isinstance(event, wire.Saving) for event in live.computer.kernel._early):
        session.names()
    run = ok(session.run("open('g', 'w').write('1'); kit.save('g'); len(saved)", timeout=10))

    assert (run.text, sorted(run.saved)) == ("1", ["f", "g"])


REFUSED = """
import os
from holdfast import kit
os.mkdir('d'); open('/tmp/t', 'w').write('t'); os.symlink('/tmp/t', 'out'); open('f', 'w').write('f')
os.symlink('f', 'link'); os.mkfifo('fifo')
for path in ('d', '/tmp/t', 'out', '/etc/passwd', 'nothing', 'fifo', '..', b'nul\\0'):
    try: kit.save(path)
    except (kit.SaveRefused, ValueError, OSError) as error: print(type(error).__name__)
    else: print(path, 'was saved')
kit.save('link')
1 / 0
"""


def test_what_cannot_be_saved_is_refused_and_a_link_stands_for_its_file(session: Session) -> None:
    run = session.run(REFUSED)

    assert "was saved" not in run.stdout
    assert len(run.stdout.splitlines()) == 8
    assert run.saved == ["f"]
    assert contents(session) == {"f": b"f"}


def test_a_file_is_saved_as_it_is_at_that_moment_and_the_last_save_counts(session: Session) -> None:
    code = "from holdfast import kit\nfor n in range(20):\n    open('f', 'w').write(str(n)); kit.save('f')\n1 / 0"
    run = session.run(code)

    assert (session.read("f"), run.saved, session.version) == (b"19", ["f"], 1)


def test_threads_can_save_and_children_cannot(session: Session) -> None:
    code = """
        import os, threading
        from holdfast import kit
        def work(n):
            with open(f'{n}', 'w') as f: f.write(str(n))
            kit.save(f'{n}')
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
        if os.fork() == 0:
            try: kit.save('0')
            except RuntimeError: os._exit(7)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        1 / 0
    """
    run = session.run(dedent(code))

    assert (run.stdout, run.saved) == ("7\n", [str(n) for n in range(8)])


def test_what_the_code_does_to_a_saved_file_afterwards_counts_if_it_commits(session: Session) -> None:
    save = "import os\nfrom holdfast import kit\nfor name in 'ab':\n    open(name, 'w').write('1'); kit.save(name)\n"
    change = "os.remove('a'); open('b', 'w').write('2')\n"

    assert session.run(f"{save}{change}1 / 0").saved == ["a", "b"]
    assert contents(session) == {"a": b"1", "b": b"1"}  # a version of its own: nothing of the rest happened
    run = ok(session.run(save + change))
    assert (run.saved, run.version, contents(session)) == (["a", "b"], 2, {"b": b"2"})
    assert run.receipt is not None
    assert (run.receipt.facts().kind, run.receipt.facts().saved) == ("cell", ["step 1", "step 2"])


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next commit that has a savepoint in it finds the disk full."""
    commit, full = Journal._commit, [True]

    def full_once(journal: Journal, units: list[Any]) -> None:
        if not (full and any("Saved" in unit.tags for unit in units)):
            return commit(journal, units)
        full.clear()
        journal._store.abandon()
        journal._fail_all(units, DiskFull("the disk is full (journal)", hint="free space"))

    monkeypatch.setattr(Journal, "_commit", full_once)


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize("wait", ["", "time.sleep(0.2)"], ids=["with its plan", "alone"])
@pytest.mark.parametrize("end", ["", "os._exit(3)", "kit.save('p', step='then'); 1 / 0"])
def test_a_savepoint_that_could_not_be_written_down_is_refused_and_nothing_else(wait: str, end: str) -> None:
    with Session(memory="256M", timeout=30) as session:
        ok(session.run("import os, time\nfrom holdfast import kit"))
        saves = "try: kit.save('p')\nexcept kit.SaveRefused as error: print(error, flush=True)"
        run = session.run(f"{wait}\nopen('p', 'w').write('1')\n{saves}\n{end}")

        assert "the disk is full (journal)" in run.stdout
        assert run.status == ("rolled_back" if end else "committed")
        assert run.saved == (["p"] if "then" in end else [])
        assert contents(session) == ({} if end == "os._exit(3)" else {"p": b"1"})
        assert run.receipt is not None
        assert run.receipt.facts().saved == (["then"] if "then" in end else [])
        assert session.info().state == "ready"
        assert ok(session.run("1")).status == "committed"


def test_a_thread_may_save_while_a_long_answer_is_on_its_way(session: Session) -> None:
    code = dedent("""
        import threading
        from holdfast import kit
        open('part', 'w').write('x')
        is_answered, refused = threading.Event(), []
        def save():
            while not is_answered.is_set():
                try: kit.save('part')
                except kit.SaveRefused as error: refused.append(str(error))
        saving = threading.Thread(target=save)
        saving.start()
        lengths = [len(input()) for _ in range(3)]
        is_answered.set()
        saving.join()
        lengths, refused
    """)
    run = ok(session.run(code, on_input=lambda *_: "y" * (8 << 20)))

    assert run.text == f"({[8 << 20] * 3}, [])"


def test_a_file_that_was_saved_in_place_of_a_directory_is_told_and_the_directory_comes_back(session: Session) -> None:
    ok(session.run("import os; os.makedirs('out/deep'); open('out/deep/x.csv', 'w').write('precious')"))
    before = session.ckpt
    replace = "import shutil; shutil.rmtree('out'); open('out', 'w').write('new')"
    run = session.run(f"{replace}; from holdfast import kit; kit.save('out'); 1 / 0")

    assert (run.status, run.saved, contents(session)) == ("rolled_back", ["out"], {"out": b"new"})
    assert run.recovery is not None
    assert run.recovery.files.endswith("saved on the way and kept: out, in place of out/deep/x.csv")
    assert "out/deep/x.csv" not in run.recovery.discarded
    assert ok(session.run("open('out').read()")).text == "'new'"
    session.restore(before)
    assert contents(session) == {"out/deep/x.csv": b"precious"}
