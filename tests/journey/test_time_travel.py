"""restore: the files of an earlier version come back, as a new version; what cannot come back is named."""

from typing import Any

import pytest

from holdfast import Run, Session
from holdfast.errors import CkptUnknown
from holdfast.retention import KEPT_VERSIONS

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
        ("d/e/f", "added"), ("g", "added"), ("g/h", "removed"), ("new", "removed"),
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


def test_the_latest_versions_are_kept_and_an_older_one_is_a_clear_error(session: Session) -> None:
    ckpts = [session.ckpt, *(session.write("f", f"{n}").ckpt for n in range(1, KEPT_VERSIONS + 4))]
    ok(session.run("1"))  # which changes no file, and costs no version its place
    oldest = len(ckpts) - 1 - KEPT_VERSIONS

    with pytest.raises(CkptUnknown) as error:
        session.restore(ckpts[oldest - 1])
    assert f"version {oldest - 1} are not kept any more" in error.value.message
    assert f"version {oldest}" in error.value.hint
    session.restore(ckpts[oldest])
    assert contents(session) == {"f": b"%d" % oldest}
    with pytest.raises(CkptUnknown):
        session.restore("CKPT-nothing")


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
