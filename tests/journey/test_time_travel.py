"""restore: the files of an earlier version come back, as a new version, and its memory where a snapshot of it sleeps;
what cannot come back is named."""

import hashlib
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast import Run, Session, manifest
from holdfast.config import MOST_VERSIONS, Limits, default_home
from holdfast.errors import CkptUnknown, InvalidSetting, StateMoved
from holdfast.store.sqlite import Store
from holdfast.verify import check_in_home

TRANSPORTS = True


def ok(run: Run) -> Run:
    assert run.error is None, run.error.traceback or run.error.message
    return run


def contents(session: Session) -> dict[str, bytes]:
    return {entry.path: session.read(entry.path) for entry in session.files()}


def test_changed_added_and_removed_files_come_back(session: Session) -> None:
    begun = session.ckpt
    ok(session.run("import os; os.makedirs('d/e'); open('d/e/f', 'w').write('1'); open('g', 'w').write('g')"))
    first = ok(session.run("x = 1"))
    old = contents(session)
    ok(session.run("import shutil; x = 2; shutil.rmtree('d'); open('g', 'w').write('2'); open('new', 'w').write('n')"))
    ok(session.run("os.remove('g'); os.mkdir('g'); open('g/h', 'w').write('h'); del x; y = 1"))
    newest = session.ckpt, contents(session)
    back = session.restore(first.ckpt)

    assert contents(session) == old
    assert {(change.path, change.action) for change in back.outputs} == {
        ("d/e/f", "added"), ("g", "changed"), ("g/h", "removed"), ("new", "removed"),
    }  # fmt: skip
    assert (back.version, session.version, back.ckpt) == (5, 5, session.ckpt)
    assert back.names_not_restored == ["shutil", "x", "y"]
    assert back.receipt is not None
    assert (back.receipt.number, back.receipt.facts().kind) == (5, "restore")
    assert ok(session.run("print(sorted(os.listdir()), open('d/e/f').read(), y)")).stdout == "['d', 'g'] 1 1\n"
    session.restore(newest[0])
    assert contents(session) == newest[1]
    session.restore(begun)
    assert session.files() == []
    assert session.history()[-1].kind == "restore"


def test_a_restore_of_what_is_there_changes_nothing_and_is_a_version(session: Session) -> None:
    run = ok(session.run("open('f', 'w').write('1')"))
    back = session.restore(run.ckpt)

    assert (back.outputs, back.version, back.names_not_restored) == ([], 2, [])


def test_files_come_back_after_memory_is_lost(session: Session) -> None:
    first = ok(session.run("x = 1; open('f', 'w').write('1')"))
    ok(session.run("open('f', 'w').write('2')"))
    session.reset()
    after = session.ckpt
    back = session.restore(first.ckpt)

    assert (contents(session), back.names_not_restored, session.generation) == ({"f": b"1"}, ["x"], 2)
    session.restore(after)
    assert contents(session) == {"f": b"2"}


LOOK = """
def look():
    found = {}
    for above, directories, files in os.walk("."):
        for name in directories + files:
            path = os.path.join(above, name)
            is_link = os.path.islink(path)
            found[path] = os.readlink(path) if is_link else oct(os.stat(path).st_mode)
    return sorted(found.items())
"""


def test_modes_links_and_empty_directories_come_back(session: Session) -> None:
    ok(session.run("import os, shutil" + LOOK))
    begun = session.ckpt
    made = "open('job.sh', 'w').write('#!/bin/sh'); os.chmod('job.sh', 0o755); os.symlink('job.sh', 'latest')\n"
    first = ok(session.run(made + "os.makedirs('d/empty', 0o700); look()"))
    chmod = ok(session.run("os.chmod('job.sh', 0o600)"))
    ok(session.run("os.remove('latest'); os.symlink('elsewhere', 'latest'); shutil.rmtree('d'); os.mkdir('e')"))
    ok(session.run("os.remove('job.sh'); open('d', 'w').write('a file')"))
    last = session.ckpt, ok(session.run("look()")).text
    back = session.restore(first.ckpt)

    assert ok(session.run("look()")).text == first.text
    assert back.files_not_restored == []
    assert {(change.path, change.kind, change.action) for change in back.outputs} == {
        ("job.sh", "file", "added"), ("latest", "symlink", "changed"),
    }  # fmt: skip
    assert ok(session.run("import subprocess; subprocess.run('./job.sh').returncode")).text == "0"
    session.restore(chmod.ckpt)
    assert ok(session.run("oct(os.stat('job.sh').st_mode), os.readlink('latest')")).text == "('0o100600', 'job.sh')"
    session.restore(last[0])
    assert ok(session.run("look()")).text == last[1]
    session.restore(begun)
    assert ok(session.run("look()")).text == "[]"


def test_they_come_back_after_a_restart_as_well(where: dict[str, Any]) -> None:
    with Session(memory="512M", timeout=30, **where) as first:
        made = ok(first.run("import os; open('f', 'w').write('1'); os.chmod('f', 0o755); os.symlink('f', 'l')"))
        ok(first.run("os.chmod('f', 0o600); os.remove('l')"))
        kept = first.id
        first.close(keep=True)
    with Session(resume=kept, **where) as again:
        again.restore(made.ckpt)
        assert ok(again.run("import os; oct(os.stat('f').st_mode), os.readlink('l')")).text == "('0o100755', 'f')"


def test_what_cannot_be_made_again_is_named(session: Session) -> None:
    one = ok(session.run("import os; os.mkfifo('pipe'); open('f', 'w').write('f')"))
    ok(session.run("os.remove('pipe'); os.remove('f')"))
    back = session.restore(one.ckpt)

    assert (back.files_not_restored, ok(session.run("os.listdir()")).text) == (["pipe"], "['f']")


def test_a_kernel_whose_directory_is_gone_with_the_version_goes_on(session: Session) -> None:
    begun = ok(session.run("import os"))
    ok(session.run("os.makedirs('d/e'); os.chdir('d/e')"))
    session.restore(begun.ckpt)

    assert session.files() == []
    ok(session.run("os.chdir('/mnt/data'); open('f', 'w').write('1')"))
    assert contents(session) == {"f": b"1"}


def test_the_latest_versions_are_kept_and_an_older_one_is_a_clear_error(session: Session) -> None:
    ckpts = [session.ckpt, *(session.write("f", f"{n}").ckpt for n in range(1, Limits().versions + 4))]
    ok(session.run("1"))  # which changes no file, and costs no version its place
    oldest = len(ckpts) - 1 - Limits().versions

    with pytest.raises(CkptUnknown) as error:
        session.restore(ckpts[oldest - 1])
    assert f"version {oldest - 1} are not kept any more" in error.value.message
    assert f"version {oldest}" in error.value.hint
    session.restore(ckpts[oldest])
    assert contents(session) == {"f": b"%d" % oldest}
    with pytest.raises(CkptUnknown):
        session.restore("CKPT-nothing")


def test_a_session_keeps_as_many_versions_as_it_was_made_with(where: dict[str, Any]) -> None:
    with Session(memory="512M", timeout=30, versions=3, **where) as first:
        ckpts = [first.ckpt, *(first.write("f", f"{n}").ckpt for n in range(1, 7))]
        ok(first.run("1"))  # which changes no file, and costs no version its place
        assert first.info().limits["versions"] == 3
        _check_kept(first, ckpts, oldest=3)
        kept = first.id
        first.close(keep=True)
    with Session(resume=kept, **where) as again:
        assert again.info().limits["versions"] == 3
        ckpts += [again.write("f", "last").ckpt]
        ok(again.run("1"))
        _check_kept(again, ckpts[:-1], oldest=5)


def _check_kept(session: Session, ckpts: list[str], *, oldest: int) -> None:
    """The oldest comes back, at the cost of the one after it; the one before it does not."""
    with pytest.raises(CkptUnknown) as error:
        session.restore(ckpts[oldest - 1])
    assert error.value.message == f"the files of version {oldest - 1} are not kept any more"
    assert f"version {oldest}" in error.value.hint
    session.restore(ckpts[oldest])
    assert contents(session) == {"f": b"%d" % oldest}


UNCHANGING = {
    "restore": lambda session: session.restore(session.ckpt),
    "write": lambda session: session.write("f", session.read("f")),
    "rewrite": lambda session: ok(session.run("text = open('f').read(); open('f', 'w').write(text)")),
    "elsewhere": lambda session: ok(session.run("open('/tmp/f', 'a').write('1')")),
    "failure": lambda session: session.run("open('f', 'w').write('no'); 1 / 0"),
    "savepoint": lambda session: session.run("from holdfast import kit; kit.save('f'); 1 / 0"),
}


@pytest.mark.embedded("the server's own home is looked into")
@pytest.mark.parametrize("way", UNCHANGING)
def test_a_version_that_changes_no_file_takes_no_place(way: str) -> None:
    with Session(memory="512M", timeout=30, versions=5) as first:
        ckpts = [first.ckpt, *(first.write("f", f"{n}").ckpt for n in range(1, 7))]
        for _ in range(7):
            UNCHANGING[way](first)
        assert check(first) == ""
        ckpts.append(first.write("f", "7").ckpt)
        ok(first.run("1"))
        assert check(first) == ""
        kept = first.id
        first.close(keep=True)
    with Session(resume=kept) as again:
        for number in (2, 4, 6):  # each restore is a change too
            again.restore(ckpts[number])
            assert contents(again) == {"f": b"%d" % number}
        assert check(again) == ""
        with pytest.raises(CkptUnknown):
            again.restore(ckpts[1])


def test_versions_are_kept_however_many_runs_came_after_them(where: dict[str, Any]) -> None:
    with Session(memory="512M", timeout=30, versions=3, **where) as first:
        ckpts = [first.ckpt, *(first.write("f", f"{n}").ckpt for n in range(1, 4))]
        for _ in range(201):
            ok(first.run("1"))
        kept = first.id
        first.close(keep=True)
    with Session(resume=kept, **where) as again:
        ckpts.append(again.write("f", "4").ckpt)
        ok(again.run("1"))
        _check_kept(again, ckpts, oldest=1)
        with pytest.raises(CkptUnknown):
            again.restore(ckpts[0])


@pytest.mark.parametrize("versions", [0, -1, MOST_VERSIONS + 1, "many"])
def test_a_number_of_versions_that_cannot_be_kept_is_refused(versions: Any, where: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=f"versions={versions!r} is not a number of versions") as error:
        Session(versions=versions, **where)
    assert error.value.hint == f"write 1 to {MOST_VERSIONS}"


def test_versions_are_kept_within_the_disk_limit() -> None:
    with Session(memory="512M", timeout=30, disk="64M") as small:
        ckpts = [small.write("f", bytes([n]) * (16 << 20)).ckpt for n in range(8)]
        ok(small.run("1"))
        with pytest.raises(CkptUnknown, match="not kept any more"):
            small.restore(ckpts[0])
        small.restore(ckpts[-2])
        assert small.read("f")[:1] == b"\6"


def test_time_travel_goes_on_where_a_kept_session_is_resumed(where: dict[str, Any]) -> None:
    with Session(memory="512M", timeout=30, **where) as first:
        kept, begun = first.id, first.ckpt
        one = ok(first.run("x = 1; open('f', 'w').write('1')")).ckpt
        saved = first.run("from holdfast import kit\nopen('f', 'w').write('saved')\nkit.save('f')\n1 / 0").ckpt
        ok(first.run("open('f', 'w').write('2')"))
        first.close(keep=True)
    with Session(resume=kept, **where) as again:
        assert again.recover().names == {"x": "recomputable"}
        for ckpt, content in ((saved, b"saved"), (one, b"1")):
            again.restore(ckpt)
            assert again.read("f") == content
        again.restore(begun)
        assert again.files() == []
        assert ok(again.run("__import__('os').listdir()")).text == "[]"


# -- manifests -----------------------------------------------------------------------------------------------------


def check(session: Session) -> str:
    """The first thing that is wrong."""
    with closing(Store(default_home() / "journal.sqlite3", read_only=True)) as store:
        return check_in_home(store, session.id, default_home()).problem


def manifests_of(session: Session) -> dict[int, Path]:
    """By version."""
    with closing(Store(default_home() / "journal.sqlite3", read_only=True)) as store:
        rows = store.versions(session.id)
    return {row.version: home_of(session) / "manifests" / row.manifest_sha256 for row in rows}


@pytest.mark.embedded("the server's own home is looked into")
def test_each_kept_version_has_a_manifest_of_its_files(session: Session) -> None:
    seen = {}
    for code in ("a = open('a', 'w').write('1')", "open('b', 'w').write('2')", "import os; os.remove('a')"):
        ok(session.run(code))
        seen[session.version] = {entry.path: entry.sha256 for entry in session.files()}
    ok(session.run("1"))
    texts = manifests_of(session)

    assert {number: manifest.parse(texts[number].read_bytes()) for number in seen} == seen
    assert len(set(texts.values())) == 3
    command = ["sha256sum", "--strict", "-c", texts[3]]
    done = subprocess.run(command, cwd=home_of(session) / "files/data", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "b: OK\n")
    assert check(session) == ""
    texts[1].unlink()
    assert check(session) == f"manifest {texts[1].name[:12]} of version 1 is missing"


@pytest.mark.embedded("the server's own home is looked into")
def test_manifests_go_with_their_versions_and_no_other_is_missed() -> None:
    with Session(memory="512M", timeout=30, versions=2) as session:
        for number in range(1, 6):
            session.write("f", f"{number}")
        ok(session.run("1"))
        there = {number for number, path in manifests_of(session).items() if path.exists()}
        assert (there, check(session)) == ({3, 4, 5, 6}, "")


@pytest.mark.embedded("the server's own home is looked into")
def test_a_version_whose_contents_had_to_make_room_still_has_its_manifest() -> None:
    with Session(memory="512M", timeout=30, disk="64M") as small:
        begun = small.ckpt
        for number in range(8):
            small.write("f", bytes([number]) * (16 << 20))
        ok(small.run("1"))
        with pytest.raises(CkptUnknown, match="not kept any more"):
            small.restore(begun)
        assert all(path.exists() for path in manifests_of(small).values())
        assert check(small) == ""


# -- past us -------------------------------------------------------------------------------------------------------


@pytest.mark.embedded("the server's own home is written to where it is")
def test_a_mode_comes_back_only_on_what_was_committed(session: Session) -> None:
    one = ok(session.run("import os; open('f', 'w').write('1'); os.chmod('f', 0o755)"))
    ok(session.run("os.chmod('f', 0o644)"))
    edit(home_of(session) / "files/data/f")
    back = session.restore(one.ckpt)

    assert (back.files_not_restored, back.outputs) == (["f"], [])
    assert ok(session.run("open('f').read()")).text == "'edited'"


@pytest.mark.embedded("the server's own home is written to where it is")
def test_what_is_put_in_a_directory_on_the_host_is_not_removed_with_it(session: Session) -> None:
    begun = session.ckpt
    ok(session.run("import os; os.makedirs('d/e'); open('d/f', 'w').write('f')"))
    (home_of(session) / "files/data/d/e/mine").write_text("mine")
    back = session.restore(begun)

    assert back.files_not_restored == ["d", "d/e"]
    assert ok(session.run("open('d/e/mine').read(), os.listdir('d')")).text == "('mine', ['e'])"


@pytest.mark.embedded("the server's own home is written to where it is")
@pytest.mark.parametrize("meddle", [lambda path: path.write_text("edited"), Path.unlink], ids=["edited", "removed"])
def test_what_is_put_back_has_the_mode_that_was_committed(session: Session, meddle: Callable[[Path], None]) -> None:
    session.write("f", "1")
    session.write("f", "2")
    again = ok(session.run("import os; open('f', 'w').write('1'); os.chmod('f', 0o711)"))
    meddle(home_of(session) / "files/data/f")
    session.restore(again.ckpt)

    assert ok(session.run("open('f').read(), oct(os.stat('f').st_mode)")).text == "('1', '0o100711')"


def home_of(session: Session) -> Path:
    return default_home() / "sessions" / session.id


def edit(committed: Path) -> None:
    committed.write_text("edited")


@pytest.mark.embedded("the server's own home is written to where it is")
@pytest.mark.parametrize("meddle", [edit, Path.unlink], ids=["edited", "removed"])
def test_what_somebody_changed_on_the_host_costs_the_versions_that_had_it_and_no_other(
    session: Session, meddle: Callable[[Path], None]
) -> None:
    begun = session.ckpt
    one = session.write("f", "1")
    session.write("g", "1")
    two = session.write("f", "2")
    meddle(home_of(session) / "files/data/f")
    run = ok(session.run("for name in 'fg': open(name, 'w').write('3')"))

    assert run.outside == ["f"]
    (check,) = [check for check in run.checks if check.name == "outside"]
    assert "what was committed of f is lost, and no restore brings it back" in check.detail
    with pytest.raises(CkptUnknown) as error:
        session.restore(two.ckpt)
    assert f"of the files of version {two.version} f cannot be brought back" in error.value.message
    assert (contents(session), session.ckpt) == ({"f": b"3", "g": b"3"}, run.ckpt), "nothing was begun"
    session.restore(one.ckpt)
    assert contents(session) == {"f": b"1"}
    session.restore(run.ckpt)
    assert contents(session) == {"f": b"3", "g": b"3"}
    session.restore(begun)
    assert session.files() == []
    for blob in home_of(session).glob("blobs/??/*"):
        assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name


@pytest.mark.embedded("the server's own home is written to where it is")
def test_what_was_lost_on_the_host_is_lost_for_whoever_resumes_and_nothing_else_is() -> None:
    with Session(memory="512M", timeout=30) as first:
        kept = first.id
        one = first.write("f", "1")
        two = first.write("f", "2")
        (home_of(first) / "files/data/f").write_text("edited")
        ok(first.run("open('f', 'w').write('3')"))
        first.close(keep=True)
    with Session(resume=kept) as again:
        with pytest.raises(CkptUnknown, match="f cannot be brought back"):
            again.restore(two.ckpt)
        again.restore(one.ckpt)
        assert contents(again) == {"f": b"1"}


@pytest.mark.embedded("the server's own home is written to where it is")
def test_a_file_with_two_names_that_was_edited_on_the_host_halts_nothing(session: Session) -> None:
    ok(session.run("import os; open('f', 'w').write('1'); os.link('f', 'other')"))
    edit(home_of(session) / "files/data/f")
    run = ok(session.run("os.remove('f')"))

    assert (run.status, run.outside) == ("committed", ["f"])
    assert ok(session.run("open('other').read()")).text == "'edited'"


@pytest.mark.embedded("the server's own home is written to where it is")
@pytest.mark.parametrize("meddle", [edit, Path.unlink], ids=["edited", "removed"])
def test_a_restore_names_what_was_changed_on_the_host_and_is_kept_nowhere(
    session: Session, meddle: Callable[[Path], None]
) -> None:
    one = session.write("f", "1")
    session.write("g", "1")
    meddle(home_of(session) / "files/data/f")
    back = session.restore(one.ckpt)

    assert (back.files_not_restored, [change.path for change in back.outputs]) == (["f"], ["g"])


@pytest.mark.embedded("the server's own home is written to where it is")
@pytest.mark.parametrize("meddle", [edit, Path.unlink], ids=["edited", "removed"])
def test_a_restore_brings_back_what_was_changed_on_the_host_where_that_is_kept(
    session: Session, meddle: Callable[[Path], None]
) -> None:
    session.write("f", "1")
    session.write("f", "2")
    again = session.write("f", "1")
    meddle(home_of(session) / "files/data/f")
    back = session.restore(again.ckpt)

    assert (back.files_not_restored, back.outside) == ([], ["f"])
    assert (contents(session), ok(session.run("open('f').read()")).text) == ({"f": b"1"}, "'1'")


@pytest.mark.embedded("the server's own home is written to where it is")
@pytest.mark.parametrize("lost", [False, True])
def test_a_restore_is_offered_only_where_it_is_possible(session: Session, lost: bool) -> None:
    expected = session.write("f", "1")
    if lost:
        edit(home_of(session) / "files/data/f")
    ok(session.run("open('f', 'w').write('2')"))
    with pytest.raises(StateMoved) as moved:
        session.run("1", expect=expected.ckpt)

    offered = [step.action for step in moved.value.differs.steps]  # type: ignore[attr-defined]
    assert offered == (["continue"] if lost else ["restore", "continue"])
    if lost:
        with pytest.raises(CkptUnknown):
            session.restore(expected.ckpt)


# -- memory too ----------------------------------------------------------------------------------------------------


@pytest.fixture
def undoing(where: dict[str, Any]) -> Iterator[Session]:
    """A session that can go three versions back, memory included."""
    with Session(memory="512M", timeout=30, undo=3, **where) as session:
        yield session


def root_of(ckpt: str) -> str:
    """Of all files and names."""
    return ckpt.rpartition("-")[2]


def test_memory_comes_back_with_the_files(undoing: Session) -> None:
    first = ok(undoing.run("x = [1]; open('f', 'w').write('1')"))
    ok(undoing.run("x.append(2); y = 2; open('f', 'w').write('2')"))
    ok(undoing.run("del x; z = 3; open('f', 'w').write('3')"))
    back = undoing.restore(first.ckpt)

    assert (back.memory, back.without_memory, back.names_not_restored) == ("restored", None, [])
    assert (back.version, undoing.version, undoing.generation) == (4, 4, 1)
    assert (back.ckpt, root_of(back.ckpt)) == (undoing.ckpt, root_of(first.ckpt)), "all is as it was, but the version"
    assert undoing.names().keys() == {"x"}
    assert ok(undoing.run("x, open('f').read()")).text == "([1], '1')"
    assert undoing.run("y").error.name == "NameError"
    assert undoing.recover().memory == "kept", "nothing was lost"


def test_one_goes_back_and_forth_and_on_from_there(undoing: Session) -> None:
    one, two, three = (ok(undoing.run(f"x = {n}; y{n} = 1")).ckpt for n in (1, 2, 3))
    for ckpt, value in ((one, 1), (three, 3), (two, 2), (two, 2), (one, 1), (three, 3)):
        assert undoing.restore(ckpt).memory == "restored"
        assert undoing.names()["x"].type == "int"
        assert {name for name in undoing.names() if name != "x"} == {f"y{n}" for n in range(1, value + 1)}
    undoing.restore(two)
    on = ok(undoing.run("x += 40; x"))
    assert on.text == "42"
    assert undoing.restore(two).memory == "restored"
    assert ok(undoing.run("x")).text == "2"
    assert undoing.restore(on.ckpt).memory == "restored"
    assert ok(undoing.run("x")).text == "42"


def test_a_run_that_fails_after_a_restore_goes_back_to_what_was_restored(undoing: Session) -> None:
    one = ok(undoing.run("x = 1")).ckpt
    ok(undoing.run("x = 2"))
    undoing.restore(one)
    died = undoing.run("x = 3; import os; os._exit(1)")

    assert (died.memory, died.unprotected) == ("restored", None)
    assert ok(undoing.run("x")).text == "1"


def test_threads_come_back_with_memory(undoing: Session) -> None:
    counting = "import threading\nturn, done, n = threading.Semaphore(0), threading.Semaphore(0), 0\n"
    counting += "def count():\n    global n\n    while turn.acquire(): n += 1; done.release()\n"
    ok(undoing.run(counting + "threading.Thread(target=count, daemon=True).start(); turn.release(); done.acquire()"))
    two = ok(undoing.run("turn.release(); done.acquire(); n"))
    ok(undoing.run("turn.release(); done.acquire(); n"))
    undoing.restore(two.ckpt)

    assert ok(undoing.run("n, threading.active_count()")).text == "(2, 2)"
    assert ok(undoing.run("turn.release(); done.acquire(); n")).text == "3"


def test_open_files_are_open_where_they_were_and_sockets_are_named(undoing: Session) -> None:
    one = ok(
        undoing.run("log = open('log', 'w'); log.write('one\\n'); log.flush(); import socket; s = socket.socket()")
    )
    ok(undoing.run("log.write('two\\n'); log.flush()"))
    ok(undoing.run("log.close(); import os; os.remove('log')"))
    back = undoing.restore(one.ckpt)

    assert [what.split(" (")[0] for what in back.not_restored] == ["socket"]
    ok(undoing.run("log.write('three\\n'); log.flush()"))
    assert undoing.read("log") == b"one\nthree\n"


def test_a_database_that_was_open_can_be_written_to_again(undoing: Session) -> None:
    ok(undoing.run("import sqlite3; db = sqlite3.connect('a.db'); db.execute('create table t (n)'); db.commit()"))
    one = ok(undoing.run("db.execute('insert into t values (1)'); db.commit()"))
    ok(undoing.run("db.execute('insert into t values (2)'); db.commit()"))
    assert undoing.restore(one.ckpt).memory == "restored"
    ok(undoing.run("db.execute('insert into t values (3)'); db.commit()"))

    assert ok(undoing.run("db.execute('select n from t').fetchall()")).text == "[(1,), (3,)]"
    assert ok(undoing.run("sqlite3.connect('a.db').execute('select n from t').fetchall()")).text == "[(1,), (3,)]"


def test_the_beginning_has_a_memory_too(undoing: Session) -> None:
    begun = undoing.ckpt
    ok(undoing.run("x = 1"))
    back = undoing.restore(begun)

    assert (back.memory, undoing.names(), root_of(back.ckpt)) == ("restored", {}, root_of(begun))


def test_files_written_from_outside_are_versions_that_one_can_go_back_from(undoing: Session) -> None:
    one = ok(undoing.run("x = 1")).ckpt
    undoing.write("f", "outside")
    ok(undoing.run("x = 2"))
    assert undoing.restore(one).memory == "restored"

    assert (undoing.files(), ok(undoing.run("x")).text) == ([], "1")


def test_savepoints_of_a_run_that_failed_have_the_memory_from_before_it(undoing: Session) -> None:
    one = ok(undoing.run("x = 1")).ckpt
    saved = undoing.run("from holdfast import kit\nx = 2\nopen('f', 'w').write('f')\nkit.save('f')\n1 / 0").ckpt
    ok(undoing.run("x = 3"))

    for ckpt, paths in ((saved, ["f"]), (one, [])):
        assert undoing.restore(ckpt).memory == "restored"
        assert ok(undoing.run("x")).text == "1"
        assert [entry.path for entry in undoing.files()] == paths


def test_modes_and_links_are_under_the_memory_that_comes_back(undoing: Session) -> None:
    one = ok(undoing.run("import os; f = open('f', 'w'); os.chmod('f', 0o755); os.symlink('f', 'l'); os.mkdir('d')"))
    ok(undoing.run("os.chdir('d'); os.chmod('../f', 0o600); os.remove('../l')"))
    ok(undoing.run("os.chdir('..'); os.rmdir('d')"))

    assert undoing.restore(one.ckpt).memory == "restored"
    look = "f.write('x'), f.flush(), oct(os.fstat(f.fileno()).st_mode), os.readlink('l'), os.listdir('d')"
    assert ok(undoing.run(look)).text == "(1, None, '0o100755', 'f', [])"


def test_what_is_older_comes_back_as_files_alone_and_says_so(undoing: Session) -> None:
    ckpts = [ok(undoing.run(f"x = {n}; open('f', 'w').write('{n}')")).ckpt for n in range(6)]
    back = undoing.restore(ckpts[1])

    assert (back.memory, back.names_not_restored) == ("kept", ["x"])
    assert back.without_memory == "only the last 3 versions are kept (undo=3)"
    assert ok(undoing.run("x, open('f').read()")).text == "(5, '1')"


def test_a_session_without_undo_says_so(session: Session) -> None:
    one = ok(session.run("x = 1")).ckpt
    ok(session.run("x = 2"))
    back = session.restore(one)

    assert (back.memory, back.names_not_restored, ok(session.run("x")).text) == ("kept", ["x"], "2")
    assert back.without_memory is not None
    assert "undo=0" in back.without_memory


@pytest.mark.parametrize("lose", ["reset", "death"])
def test_memory_of_a_generation_that_was_lost_does_not_come_back(undoing: Session, lose: str) -> None:
    one = ok(undoing.run("x = 1; open('f', 'w').write('1')")).ckpt
    ok(undoing.run("x = 2; open('f', 'w').write('2')"))
    if lose == "reset":
        undoing.reset()
    else:
        assert undoing.run("import os; os.kill(-1, 9); os._exit(1)").memory == "lost"
    back = undoing.restore(one)

    assert (back.memory, back.without_memory) == ("kept", "memory was lost since")
    assert (back.names_not_restored, undoing.read("f"), undoing.names()) == (["x"], b"1", {})


def test_a_name_that_a_restore_took_back_is_missed_by_who_expects_it(undoing: Session) -> None:
    one, two = ok(undoing.run("x = 1")).ckpt, ok(undoing.run("y = 2")).ckpt
    back = undoing.restore(one)

    with pytest.raises(StateMoved):
        undoing.run("y", expect=two)
    blocked = undoing.run("y", preflight="block")
    (finding,) = blocked.findings
    made = undoing.history()[1].run
    assert finding.names == ["y"]
    assert finding.message == (
        f"`y` was defined by run {made}, and taken back by {back.id}, which restored an earlier state; {finding.hint}"
    )
    assert finding.hint == f"re-run {made} or restore {two}"
    assert undoing.restore(two).memory == "restored"
    assert ok(undoing.run("y")).text == "2"


def offered(session: Session, code: str) -> str | None:
    """The CKPT that is offered to whoever lacks a name."""
    (finding,) = session.plan(code).findings
    found = re.findall("restore (CKPT-[^ ]+)", finding.hint)
    assert all(ckpt in finding.message for ckpt in found)
    return found[0] if found else None


def test_a_name_that_was_deleted_is_offered_as_long_as_its_memory_sleeps(undoing: Session) -> None:
    ok(undoing.run("x = 1; open('f', 'w').write('1')"))
    latest = ok(undoing.run("x = 2; open('f', 'w').write('2')")).ckpt
    ok(undoing.run("del x; open('f', 'w').write('3')"))

    assert offered(undoing, "x") == latest, "the latest that has it"
    ok(undoing.run("y = 1"))
    warned = undoing.run("x")
    assert warned.status == "rolled_back"
    assert latest in warned.findings[0].hint
    assert undoing.restore(latest).memory == "restored"
    assert ok(undoing.run("x, open('f').read()")).text == "(2, '2')"
    ok(undoing.run("del x"))
    for _ in range(4):
        ok(undoing.run("1"))
    assert offered(undoing, "x") is None, "it had to make room"


def test_what_is_lost_and_what_would_be_gone_by_then_is_not_offered(where: dict[str, Any]) -> None:
    with Session(memory="512M", timeout=30, undo=1, mode="notebook", **where) as session:
        ok(session.run("x = 1"))
        ok(session.run("del x"))
        assert offered(session, "x") is not None
        failed = session.run("x")  # a version more, and only one is kept
        assert (failed.status, "restore" in failed.findings[0].hint) == ("kept", False)
        ok(session.run("x = 2"))
        session.reset()
        assert offered(session, "x") is None


@pytest.mark.embedded("the server's own home is written to where it is")
def test_a_version_whose_files_are_not_kept_is_not_offered(undoing: Session) -> None:
    ok(undoing.run("x = 1; open('f', 'w').write('1')"))
    (home_of(undoing) / "files" / "data" / "f").write_text("edited")
    ok(undoing.run("del x; open('f', 'w').write('2')"))

    assert offered(undoing, "x") is None


def test_more_than_sixteen_versions_are_not_kept(where: dict[str, Any]) -> None:
    for undo in (-1, 17):
        with pytest.raises(InvalidSetting, match="undo="):
            Session(undo=undo, **where)


def test_a_resumed_session_keeps_as_many_as_it_was_made_with(where: dict[str, Any]) -> None:
    with Session(memory="512M", timeout=30, undo=1, **where) as first:
        kept = first.id
        first.close(keep=True)
    with Session(resume=kept, **where) as again:
        one = ok(again.run("x = 1")).ckpt
        ok(again.run("x = 2"))
        assert again.restore(one).memory == "restored"
