"""Every run is a transaction: memory and files move to the next version together, or neither does."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast import AsyncSession, Run, Session
from holdfast.cli.verify import check_session
from holdfast.config import default_home
from holdfast.errors import InputMissing, StateMoved
from holdfast.model import HistoryEntry, Recovery, Step
from holdfast.recovery import Differences

TRANSPORTS = True

BEFORE = "x, items = 1, [1]\nopen('kept.txt', 'w').write('before')\nopen('gone.txt', 'w').write('here')"
SPOIL = (
    "import os\nx, new = 2, 3; items.append(2)\n"
    "open('kept.txt', 'w').write('half'); open('new.txt', 'w').write('half'); os.remove('gone.txt')\n"
    "os.makedirs('deep/er'); open('deep/er/f', 'w').close()\n"
    "open('/tmp/scratch', 'w').write('half'); open(os.path.expanduser('~/notes'), 'w').write('half')\n"
)
DEATHS = {
    "exception": ("raise ValueError('no')", "exception", "no"),
    "out of memory": ("import numpy as np\nnp.ones(2**28)", "out_of_memory", "512 MiB"),
    "time-out": ("import time\ntime.sleep(60)", "timeout", "not done after 0.5 s"),
    "SIGSEGV": ("import ctypes\nctypes.string_at(0)", "killed", "SIGSEGV"),
    "exit": ("os._exit(9)", "killed", "exit code 9"),
}


def ok(run: Run) -> Run:
    assert run.error is None, run.error.traceback or run.error.message
    return run


def value(session: Session, expression: str) -> Any:
    return ok(session.run(expression)).text


def contents(session: Session) -> dict[str, bytes]:
    return {entry.path: session.read(entry.path) for entry in session.files()}


# -- forward -----------------------------------------------------------------------------------------------------


def test_a_run_commits_what_it_did_to_names_and_files(session: Session) -> None:
    first = ok(session.run(BEFORE, goal="begin"))
    assert (first.status, first.version, first.card.stage, first.recovery) == ("committed", 1, "committed", None)
    assert first.names == {"x": "int", "items": "list"}
    assert {(change.path, change.action, change.bytes) for change in first.outputs} == {
        ("kept.txt", "added", 6), ("gone.txt", "added", 4),
    }  # fmt: skip

    second = ok(session.run("import os; os.rename('kept.txt', 'moved.txt'); os.remove('gone.txt'); del items"))
    assert {(change.path, change.action) for change in second.outputs} == {
        ("kept.txt", "removed"), ("gone.txt", "removed"), ("moved.txt", "added"),
    }  # fmt: skip
    assert (second.version, session.version, second.ckpt) == (2, 2, session.ckpt)
    assert second.ckpt.startswith(f"CKPT-{session.id}-g1-v2-")
    assert contents(session) == {"moved.txt": b"before"}
    assert [(entry.run, entry.status, entry.version) for entry in session.history()] == [
        (first.id, "committed", 1), (second.id, "committed", 2),
    ]  # fmt: skip
    assert session.history()[0].goal == "begin"


def test_a_run_that_changes_nothing_is_a_version_all_the_same(session: Session) -> None:
    first, second = ok(session.run("1")), ok(session.run("1"))

    assert (first.version, second.version) == (1, 2)
    assert first.ckpt.rpartition("-")[2] == second.ckpt.rpartition("-")[2]  # the same files and names
    assert second.outputs == []


def test_a_ckpt_changes_with_a_file_a_name_its_type_and_the_run_that_bound_it(session: Session) -> None:
    roots = [
        ok(session.run(code)).ckpt.rpartition("-")[2]
        for code in ("1", "x = 1", "x = 1", "x = 'a'", "open('f', 'w').write('1')", "del x")
    ]
    assert len(set(roots)) == len(roots)


def test_whatever_is_done_to_files_is_committed(session: Session) -> None:
    ok(session.run("import os\nos.makedirs('d/e'); open('d/e/f', 'w').write('f'); open('g', 'w').write('g')"))
    ok(session.run("os.rename('d', 'moved')\nos.chmod('g', 0o600); os.symlink('g', 'link'); os.link('g', 'hard')"))
    ok(session.run("import shutil; shutil.rmtree('moved'); os.mkdir('moved'); open('moved/new', 'w').write('n')"))
    ok(session.run("with open('sparse', 'wb') as f: f.truncate(1 << 20)\nopen('a b\\n\\\\c', 'w').write('odd')"))
    seen = ok(
        session.run("print(sorted(os.listdir()), os.listdir('moved'), os.readlink('link'), os.stat('g').st_mode)")
    )

    assert seen.stdout == "['a b\\n\\\\c', 'g', 'hard', 'link', 'moved', 'sparse'] ['new'] g 33152\n"
    assert {entry.path: entry.bytes for entry in session.files()} == {
        "a b\\n\\\\c": 3, "g": 1, "hard": 1, "moved/new": 1, "sparse": 1 << 20,
    }  # fmt: skip


def test_a_command_is_a_run_too(session: Session) -> None:
    done = session.shell("echo made > by-command; cd /; mkdir -p /tmp/d; exit 0")
    assert (done.status, done.version, done.exit_code, [c.path for c in done.outputs]) == (
        "committed", 1, 0, ["by-command"],
    )  # fmt: skip
    assert done.receipt is not None
    assert done.receipt.facts().kind == "command"
    assert (done.card.run, done.card.stage, done.recovery) == (done.id, "committed", None)

    failed = session.shell("echo more >> by-command; exit 3")
    assert (failed.status, failed.exit_code, session.read("by-command")) == ("kept", 3, b"made\nmore\n")

    killed = session.shell("echo lost > by-command; sleep 60", timeout=0.3)
    assert (killed.status, session.read("by-command"), session.version) == ("rolled_back", b"made\nmore\n", 2)
    assert killed.recovery is not None
    assert (killed.recovery.code, killed.recovery.run, killed.card.stage) == ("timeout", killed.id, "rolled_back")
    assert "by-command" in killed.recovery.discarded
    assert value(session, "open('by-command').read()") == "'made\\nmore\\n'"


# -- back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("death", DEATHS)
def test_memory_and_files_roll_back_together(session: Session, death: str) -> None:
    code, error, words = DEATHS[death]
    before = ok(session.run(BEFORE))
    run = session.run(SPOIL + code, timeout=0.5 if death == "time-out" else 30)

    assert run.error is not None
    assert (run.status, run.error.code, run.memory, run.generation) == ("rolled_back", error, "restored", 1)
    assert (run.version, run.ckpt, session.ckpt, run.outputs) == (1, before.ckpt, before.ckpt, [])
    assert contents(session) == {"kept.txt": b"before", "gone.txt": b"here"}
    seen = "x, items, 'new' in globals(), sorted(os.listdir()), os.listdir('/tmp'), os.path.exists('/home/user/notes')"
    assert value(session, f"import os; {seen}") == "(1, [1], False, ['gone.txt', 'kept.txt'], [], False)"
    _check_recovery(run, words)
    _check_receipt_of_rollback(run, before)


def _check_recovery(run: Run, words: str) -> None:
    told = run.recovery
    assert told is not None
    assert run.error is not None
    assert (told.code, told.run, told.memory, told.ckpt) == (run.error.code, run.id, "restored", run.ckpt)
    assert words in told.cause
    assert told.files == "as committed at version 1"
    files = {"kept.txt", "new.txt", "gone.txt", "deep/er/f", "/tmp/scratch", "/home/user/notes"}
    assert files | {"x", "new"} <= set(told.discarded)
    assert told.names == {}
    assert told.steps == [Step(action="change", run=run.id, why=told.steps[0].why)]
    for line in (f"Cause: {told.cause}", "Files: as committed at version 1", f"State now: {run.ckpt}", "Next: change"):
        assert line in told.text


def _check_receipt_of_rollback(run: Run, before: Run) -> None:
    assert run.receipt is not None
    assert before.receipt is not None
    assert (run.receipt.number, run.receipt.previous) == (2, before.receipt.sha256)
    told = run.receipt.facts()
    assert run.error is not None
    assert (told.status, told.version, told.error_code, told.changes) == ("rolled_back", 1, run.error.code, [])
    assert (told.blame, told.ckpt_before, told.ckpt) == ("user", before.ckpt, before.ckpt)
    assert run.error.name in told.reason


def test_the_first_run_of_a_session_rolls_back_as_well(session: Session) -> None:
    ckpt = session.ckpt
    for code in ("raise ValueError", "os._exit(1)"):
        run = session.run("import os; x = 1; open('f', 'w').write('half')\n" + code)
        assert (run.status, run.version, run.generation, run.ckpt) == ("rolled_back", 0, 1, ckpt)
        assert run.recovery is not None
        assert "f" in run.recovery.discarded
    assert (session.files(), value(session, "import os; os.listdir(), 'x' in globals()")) == ([], "([], False)")


def test_what_does_not_parse_is_a_run_that_started_nothing(session: Session) -> None:
    ok(session.run(BEFORE))
    run = session.run("open('kept.txt', 'w')\nif")

    assert run.error is not None
    assert (run.status, run.error.code, run.version, run.memory) == ("rolled_back", "syntax", 1, "restored")
    assert run.findings[0].code == "syntax"
    assert run.recovery is not None
    assert "nothing was started" in run.recovery.text
    assert run.receipt is not None
    assert run.receipt.number == 2
    assert session.read("kept.txt") == b"before"


def test_a_notebook_keeps_names_and_files_of_a_cell_that_raised_and_no_others(where: dict[str, Any]) -> None:
    with Session(memory="512M", timeout=30, mode="notebook", **where) as notebook:
        ok(notebook.run("import os; x = 1"))
        run = notebook.run("x = 2\nopen('f', 'w').write('kept')\n1 / 0")
        assert (run.status, run.version, run.memory, [c.path for c in run.outputs]) == ("kept", 2, "kept", ["f"])
        assert run.recovery is None
        assert run.receipt is not None
        assert (run.receipt.facts().status, run.receipt.facts().error_code) == ("kept", "exception")
        assert notebook.history()[-1].status == "kept"

        died = notebook.run("x = 3\nopen('f', 'w').write('half')\nos._exit(1)")
        assert (died.status, died.version, notebook.read("f")) == ("rolled_back", 2, b"kept")
        assert value(notebook, "x, open('f').read()") == "(2, 'kept')"


def test_a_caller_who_goes_away_leaves_nothing_behind(where: dict[str, Any]) -> None:
    async def go_away() -> tuple[str, Recovery, list[HistoryEntry], str | None]:
        async with AsyncSession(memory="512M", timeout=30, **where) as lost:
            await lost.run("x = 1; open('f', 'w').write('before')")
            before = lost.ckpt
            loop, begun = asyncio.get_running_loop(), asyncio.Event()
            code = "x = 2; open('f', 'w').write('half'); print('go', flush=True)\nimport time; time.sleep(30)"

            def begin(_: str) -> None:
                loop.call_soon_threadsafe(begun.set)

            task = asyncio.create_task(lost.run(code, on_stdout=begin))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            told = await lost.recover()
            after = await lost.run("x, open('f').read()", expect=before)
            return before, told, await lost.history(), after.text

    before, told, history, seen = asyncio.run(go_away())
    assert ([entry.status for entry in history], seen) == (["committed", "rolled_back", "committed"], "(1, 'before')")
    assert (history[1].ckpt, told.ckpt, told.version) == (before, before, 1)
    how = "the run was interrupted" if where else "the caller gave up"
    end = "It was interrupted. Variables are as they were before the run."
    assert history[1].reason == f"KeyboardInterrupt: {how}. {end}"
    assert (told.code, told.memory, told.cause, told.names, told.steps) == ("ok", "kept", "nothing was lost", {}, [])


def test_a_write_whose_caller_goes_away_is_done_or_not_and_never_half() -> None:
    async def go_away() -> tuple[list[str], int]:
        async with AsyncSession(memory="512M", timeout=30) as lost:
            for wait_s in (0, 0.001, 0.003, 0.01):
                task = asyncio.create_task(lost.write("f", b"x" * 1_000_000))
                await asyncio.sleep(wait_s)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert (await lost.run("y = 1")).status == "committed"
            assert not lost._transport._session.books.open
            return [entry.status for entry in await lost.history()], lost.version

    statuses, version = asyncio.run(go_away())
    assert set(statuses) == {"committed"}
    assert version == len(statuses)


def test_after_memory_is_lost_files_stay_and_each_name_has_the_run_that_makes_it_again(session: Session) -> None:
    first = ok(session.run("a = 1"))
    second = ok(session.run("b, c = a, 2; import os, time; open('f', 'w').write('1')"))
    run = session.run("os.kill(-1, 9); time.sleep(0.2)\nopen('f', 'w').write('half')\nos._exit(2)")

    assert (run.memory, run.generation, session.read("f")) == ("lost", 2, b"1")
    told = run.recovery
    assert told is not None
    assert told.names == dict.fromkeys(["a", "b", "c", "os", "time"], "recomputable")
    assert told.steps[:2] == [
        Step(action="rerun", run=first.id, names=["a"]),
        Step(action="rerun", run=second.id, names=["b", "c", "os", "time"]),
    ]
    assert f"Next: run {first.id} again for a" in told.text
    assert run.ckpt.startswith(f"CKPT-{session.id}-g2-v2-")
    assert run.receipt is not None
    assert (run.receipt.facts().generation, run.receipt.facts().ckpt) == (2, run.ckpt)


def test_recover_tells_the_same_each_time_and_until_names_are_back(session: Session) -> None:
    assert (session.recover().code, session.recover().memory) == ("ok", "kept")
    first = ok(session.run("a = 1"))
    session.reset()
    told = session.recover()

    assert session.recover() == told
    assert (told.cause, told.memory, told.generation, told.ckpt) == ("reset by the caller", "lost", 2, session.ckpt)
    assert (told.names, told.steps) == ({"a": "recomputable"}, [Step(action="rerun", run=first.id, names=["a"])])
    ok(session.run("a = 2"))
    assert session.recover().names == {}
    assert session.recover().steps == []
    assert "computed again" not in session.recover().text


def test_a_name_is_lost_where_what_its_run_read_is_not_there_as_it_was(session: Session) -> None:
    for path in ("kept.csv", "changed.csv", "removed.csv", "own.csv"):
        session.write(path, path)
    runs = {path: ok(session.run(f"{path[:-4]} = open({path!r}).read()")) for path in ("kept.csv", "changed.csv")}
    runs["removed.csv"] = ok(session.run("removed = 1", inputs=["removed.csv"]))
    runs["own.csv"] = ok(session.run("own = open('own.csv').read(); open('own.csv', 'w').write(own.upper())"))
    made = ok(session.run("open('made.csv', 'w').write('1'); made = open('made.csv').read()"))
    session.write("changed.csv", "anew")
    session.remove("removed.csv")
    believed = session.ckpt
    session.reset()
    told = session.recover()

    assert told.names == {
        "kept": "recomputable", "made": "recomputable", "changed": "lost", "own": "lost", "removed": "lost",
    }  # fmt: skip
    why = {
        "changed.csv": f"changed.csv, which {runs['changed.csv'].id} read, has changed since",
        "removed.csv": f"removed.csv, which {runs['removed.csv'].id} read, has been removed since",
        "own.csv": f"own.csv, which {runs['own.csv'].id} read, has changed since",
    }
    steps = [Step(action="rerun", run=run.id, names=[path[:-4]], why=why.get(path, "")) for path, run in runs.items()]
    assert told.steps == [*steps, Step(action="rerun", run=made.id, names=["made"])]
    assert "lost; to be computed again: kept, made; not as they were" in told.text
    assert f"run {runs['own.csv'].id} again for own ({why['own.csv']})" in told.text
    assert session.recover() == told
    with pytest.raises(StateMoved) as moved:
        session.run("1", expect=believed)
    differs = moved.value.differs
    assert isinstance(differs, Differences)
    assert differs.steps[:-1] == told.steps
    session.write("changed.csv", "changed.csv")
    assert session.recover().names["changed"] == "recomputable"


def test_the_runs_that_bring_names_back_come_in_their_order_also_when_resumed(where: dict[str, Any]) -> None:
    with Session(memory="512M", timeout=30, **where) as first:
        kept = first.id
        runs = [ok(first.run(code)).id for code in ("z = 1", "y = z + 1", "z = z + y", "a = y + z")]
        first.close(keep=True)
    with Session(resume=kept, **where) as again:
        told = again.recover()

    assert [(step.run, step.names) for step in told.steps] == [(runs[1], ["y"]), (runs[2], ["z"]), (runs[3], ["a"])]


@pytest.mark.embedded("the server's own home is written to where it is")
def test_what_a_run_had_read_may_also_have_changed_on_the_host(session: Session) -> None:
    committed = default_home() / "sessions" / session.id / "files" / "data"
    session.write("edited.csv", "1")
    session.write("strange.csv", "1")
    (committed / "strange.csv").write_text("edited before it was read")
    ok(session.run("edited = open('edited.csv').read()"))
    ok(session.run("strange = open('strange.csv').read()"))
    (committed / "edited.csv").write_text("edited since")
    died = session.run("import os, time; os.kill(-1, 9); time.sleep(0.2)\nos._exit(2)")

    assert died.recovery is not None
    assert died.recovery.names == {"edited": "lost", "strange": "recomputable"}
    assert "edited.csv, which" in died.recovery.text
    assert session.recover().names == died.recovery.names


# -- receipts ----------------------------------------------------------------------------------------------------


def test_every_run_has_a_receipt_that_names_the_one_before(session: Session) -> None:
    runs = [
        ok(session.run("open('in.csv', 'w').write('1')")),
        session.run("1 / 0"),
        session.run("if"),
        session.shell("true"),
        session.write("f", "x"),
        ok(session.run("open('out.csv', 'w').write(open('in.csv').read())", goal="copy", inputs=["in.csv"])),
    ]
    receipts = [run.receipt for run in runs]

    assert all(receipts)
    assert [one.number for one in receipts if one] == [1, 2, 3, 4, 5, 6]
    assert [one.previous for one in receipts if one] == ["", *(one.sha256 for one in receipts[:-1] if one)]
    last = receipts[-1]
    assert last is not None
    statement = json.loads(json.dumps(last.statement))
    (output,) = statement["subject"]
    entry = next(entry for entry in session.files() if entry.path == "out.csv")
    assert (output["name"], output["digest"]["sha256"]) == ("out.csv", entry.sha256)
    told = last.facts()
    assert [(given.path, bool(given.sha256)) for given in told.inputs] == [("in.csv", True)]
    assert (told.goal, told.duration_s > 0, len(told.environment) > 0, told.egress) == ("copy", True, True, [])


@pytest.mark.embedded("the server's own home is verified where it is")
def test_whatever_happened_to_a_session_it_can_be_verified(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.write("in.csv", "1")
    begun = ok(session.run("import os; log = open('log', 'w'); log.write('x'); log.flush(); os.mkdir('d')"))
    session.run("from holdfast import kit\nopen('d/saved', 'w').write('s'); kit.save('d/saved'); os._exit(1)")
    ok(session.run("log.write('y'); log.flush(); open('odd\\n\\\\', 'w').close()", rehearse=True))
    ok(session.run("log.write('y'); log.flush(); os.rename('d', 'e'); open('odd\\n\\\\', 'w').close()"))
    session.shell("ln -s log link; exit 1")
    session.reset()
    session.run("import os; os.kill(-1, 9); 1 / 0")
    session.restore(begun.ckpt)
    ok(session.run("open('last', 'w').write('1')"))

    assert check_session(session.id, home=None, public_key=None, as_json=False) == 0, capsys.readouterr().out
    assert {entry.path for entry in session.files()} == {"in.csv", "last", "log"}
    assert "9 receipts" in capsys.readouterr().out


# -- open files, directories, threads ----------------------------------------------------------------------------


def test_files_stay_open_across_commits_and_rollbacks(session: Session) -> None:
    ok(session.run("import os\nlog = open('log', 'w'); log.write('one\\n'); log.flush()\ntail = open('log')"))
    ok(session.run("log.write('two\\n'); log.flush()"))
    assert (session.read("log"), value(session, "tail.read()")) == (b"one\ntwo\n", "'one\\ntwo\\n'")

    assert session.run("log.write('no\\n'); log.flush(); 1 / 0").status == "rolled_back"
    assert session.run("log.write('no\\n'); log.flush(); os._exit(1)").status == "rolled_back"
    ok(session.run("log.write('three\\n'); log.flush()"))

    assert session.read("log") == b"one\ntwo\nthree\n"
    assert value(session, "tail.read()") == "'three\\n'"


def test_the_working_directory_is_kept_across_commits_and_rollbacks(session: Session) -> None:
    ok(session.run("import os; os.makedirs('a/b'); os.chdir('a/b')"))
    ok(session.run("open('f', 'w').write('1')"))
    assert session.run("os.chdir('/tmp'); os.mkdir('x'); os.chdir('x'); 1 / 0").status == "rolled_back"

    assert value(session, "os.getcwd(), os.listdir()") == "('/mnt/data/a/b', ['f'])"
    assert [entry.path for entry in session.files()] == ["a/b/f"]


WRITER = """
import threading, time
def work():
    for n in range(10**6):
        time.sleep(0.001)
        try: open(f'/mnt/data/by-thread/{n}', 'w').close()
        except OSError: pass
import os; os.mkdir('by-thread')
threading.Thread(target=work, daemon=True).start()
"""


def test_what_a_thread_wrote_between_two_runs_is_named(session: Session) -> None:
    ok(session.run(WRITER))
    run = ok(session.run("1"))

    assert run.outside
    assert all(path.startswith("by-thread/") for path in run.outside)
    assert set(run.outside) <= {change.path for change in run.outputs}
    assert session.write("f", "x").outside
    assert not [stray for stray in run.strays if stray.kind == "process"]


@pytest.mark.embedded("the server's own home is written to where it is")
def test_what_somebody_changed_on_the_host_is_named_and_no_receipt_has_a_false_digest(session: Session) -> None:
    for name in ("read.txt", "replaced.txt", "gone.txt", "left.txt"):
        session.write(name, "committed")
    committed = default_home() / "sessions" / session.id / "files" / "data"
    ok(session.run("open('read.txt').read()"))
    for name in ("read.txt", "replaced.txt", "left.txt"):
        (committed / name).write_text("edited")
    (committed / "gone.txt").unlink()
    (committed / "new.txt").write_text("added")

    code = "for _ in []: open('gone.txt')\n[open(name).read() for name in ('read.txt', 'new.txt')]"
    with pytest.raises(InputMissing, match=r"no file gone\.txt is in"):
        session.run(code, inputs=["gone.txt"])
    read = ok(session.run(code, inputs=["new.txt"]))
    assert (read.text, read.outside) == ("['edited', 'added']", ["gone.txt", "new.txt", "read.txt"])
    assert read.receipt is not None
    told = read.receipt.facts()
    assert {given.path: given.sha256 for given in told.inputs} == {
        "gone.txt": "", "read.txt": hashlib.sha256(b"edited").hexdigest(),
        "new.txt": hashlib.sha256(b"added").hexdigest(),
    }  # fmt: skip
    (check,) = [check for check in told.checks if check.name == "outside"]
    assert "changed on the host since they were committed, by no run: gone.txt, new.txt, read.txt" in check.detail

    assert ok(session.run("n = 1")).outside == []  # it has to do with none of them
    assert ok(session.run("path = 'replaced' + str('.txt'); open(path, 'w').write('anew')")).outside == ["replaced.txt"]
    assert ok(session.run("open('replaced.txt').read()")).outside == []
    assert session.write("left.txt", "anew").outside == ["left.txt"]
    assert session.plan("open('read.txt')").forecast_inputs[0].sha256 == hashlib.sha256(b"edited").hexdigest()


def test_files_that_only_look_changed_are_not_named(session: Session) -> None:
    session.write("a.txt", "1")
    ok(session.run("import os; os.link('a.txt', 'b.txt')"))
    ok(session.run("os.remove('b.txt'); os.utime('a.txt', (0, 0)); os.chmod('a.txt', 0o400)"))

    assert ok(session.run("open('a.txt').read()", inputs=["a.txt"])).outside == []


def test_a_thread_that_writes_to_an_open_file_never_touches_what_is_committed(session: Session) -> None:
    code = "log = open('log', 'w', buffering=1)\ndef work():\n    while True: log.write('x\\n')\n"
    ok(session.run(f"import threading\n{code}threading.Thread(target=work, daemon=True).start()"))
    for _ in range(5):
        ok(session.run("1"))
        session.names()  # the files are staged anew by now, and the thread has been running since
        (entry,) = session.files()
        assert hashlib.sha256(session.read("log")).hexdigest() == entry.sha256


def test_a_file_that_cannot_be_opened_again_never_touches_what_is_committed(session: Session) -> None:
    ok(session.run("import os\nlog = open('log', 'w', buffering=1); log.write('one\\n'); os.chmod('log', 0o444)"))
    run = ok(session.run("os.link('log', 'other'); log.write('two\\n')"))

    assert (session.read("log"), session.read("other")) == (b"one\n", b"one\n")
    assert len(run.not_restored) == 1
    assert run.not_restored[0].startswith("/mnt/data/log (descriptor ")
    assert ok(session.run("log.close()")).not_restored == run.not_restored
    session.write("f", "x")
    assert ok(session.run("1")).not_restored == []


def test_memory_that_is_a_file_fails_verification(session: Session) -> None:
    code = "import numpy as np\nm = np.memmap('m', dtype='u1', mode='w+', shape=(4096,)); m[:] = 7"
    run = session.run(code)

    assert run.error is not None
    assert (run.status, run.error.code, run.memory) == ("rolled_back", "verification", "restored")
    assert "/mnt/data/m" in run.error.message
    assert "del" in run.error.message
    assert [check.name for check in run.checks if not check.ok] == ["shared mappings"]
    assert run.recovery is not None
    assert run.recovery.discarded[:1] == ["m"]
    ok(session.run(f"{code}\nm.flush(); del m"))
    assert session.read("m") == b"\7" * 4096


def test_a_committed_file_belongs_to_the_guest_and_to_nobody_else(session: Session, tmp_path: Path) -> None:
    ok(session.run("open('f', 'w').write('1')"))
    session.write("g", "2")
    ok(session.run("open('f', 'a').write('1'); open('g', 'a').write('2')"))

    assert (session.read("f"), session.download("g", tmp_path / "g").read_bytes()) == (b"11", b"22")
