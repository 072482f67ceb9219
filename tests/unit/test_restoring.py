"""Older versions come back, and what callers write from outside goes the way of every run."""

import io
import itertools
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.unit.overlaid import Disk
from tests.unit.test_publish import AFTER, BEFORE, publish_in_child

from holdfast.errors import CkptUnknown, FileUnknown, InvalidSetting, SessionHalted
from holdfast.records import Change, FileEntry
from holdfast.resources import publish, restoring
from holdfast.resources.descent import open_file
from holdfast.resources.workspace import remove_tree


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    yield Disk(tmp_path)
    remove_tree(tmp_path)  # pytest could not: too deep, or closed


def contents(disk: Disk) -> dict[str, str]:
    data = disk.files / "data"
    return {str(path.relative_to(data)): path.read_text() for path in data.rglob("*") if path.is_file()}


def commit(disk: Disk, code: str) -> list[Change]:
    disk.run(code)
    changes = disk.changes()
    disk.publish(changes)
    return changes


def restore(disk: Disk, target: dict[str, FileEntry]) -> list[Change]:
    changes = restoring.plan_restore(disk.known, target)
    stage(disk, changes)
    disk.publish(changes)
    return changes


def back_over(disk: Disk, *later: list[Change]) -> tuple[list[Change], list[str]]:
    """The way back over runs, the latest last; and what cannot come back."""
    changes, gone = restoring.plan_back(reversed(later))
    stage(disk, changes)
    disk.publish(changes)
    return changes, gone


def stage(disk: Disk, changes: list[Change]) -> None:
    disk.stage.mkdir()
    restoring.fill_stage(disk.stage, changes, disk.blobs, owner=None, files=disk.files)


def timeless(disk: Disk) -> dict[str, list[int | str]]:
    """All that a version is made of: what is committed in /mnt/data, but the times."""
    found = disk.tree().items()
    return {path: [mode, content] for path, (mode, _, content) in found if path.split("/")[0] == "data"}


# -- older versions ----------------------------------------------------------------------------------------------


def test_undoing_a_runs_changes_gives_the_files_before_it(disk: Disk) -> None:
    commit(disk, "open('a', 'w').write('1'); open('b', 'w').write('22'); open('d', 'w').write('d')")
    first = dict(disk.known)
    changes = commit(
        disk,
        """
        open('a', 'w').write('one'); os.unlink('b'); open('c', 'w').write('3')
        os.unlink('d'); os.mkdir('d'); open('d/x', 'w').write('x'); open('../tmp/a', 'w').write('t')
        """,
    )

    assert restoring.undo(disk.known, changes) == first


def test_any_older_version_comes_back_and_forth(disk: Disk) -> None:
    steps = [
        "open('a', 'w').write('1'); os.makedirs('d/e'); open('d/e/x', 'w').write('x')",
        "open('a', 'w').write('2'); shutil.rmtree('d'); open('d', 'w').write('file')",
        "os.unlink('d'); os.mkdir('d'); open('d/y', 'w').write('y'); os.unlink('a')",
        "os.symlink('/etc', 'a'); shutil.rmtree('d'); os.symlink('/etc', 'd')",
    ]
    versions, seen = [], []
    for step in steps:
        commit(disk, step)
        versions.append(dict(disk.known))
        seen.append(contents(disk))

    for number in (0, 2, 1, 3, 0, 1):
        restore(disk, versions[number])
        assert contents(disk) == seen[number]
        assert disk.known == versions[number]


def test_a_restore_can_be_done_again(disk: Disk) -> None:
    commit(disk, "os.mkdir('d'); open('d/x', 'w').write('x')")
    first = dict(disk.known)
    commit(disk, "shutil.rmtree('d'); open('d', 'w').write('file')")
    changes = restore(disk, first)
    disk.stage.mkdir()

    disk.publish(changes, redo=True)

    assert contents(disk) == {"d/x": "x"}


def test_only_what_differs_is_restored() -> None:
    entry = FileEntry(path="a", sha256="1" * 64, bytes=1)
    other = FileEntry(path="b", sha256="2" * 64, bytes=2)

    assert restoring.plan_restore({"a": entry}, {"a": entry}) == []
    assert restoring.plan_restore({"a": entry}, {"a": entry, "b": other}) == [
        Change(path="b", action="added", sha256="2" * 64, bytes=2, mode=0o644)
    ]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param("os.chmod('x', 0o644)", id="a mode"),
        pytest.param("os.chmod('x', 0)", id="closed"),
        pytest.param("open('x', 'w').write('other'); os.chmod('x', 0o600)", id="content and mode"),
        pytest.param("os.unlink('x')", id="removed"),
        pytest.param("os.chmod('.', 0o711); os.chmod('d', 0o700)", id="directories"),
        pytest.param("shutil.rmtree('d')", id="a tree"),
        pytest.param("shutil.rmtree('d'); open('d', 'w').write('file')", id="a file for a tree"),
        pytest.param("os.unlink('x'); os.makedirs('x/y'); open('x/y/z', 'w').write('z')", id="a tree for a file"),
        pytest.param("os.unlink('l'); os.symlink('elsewhere', 'l')", id="a link"),
        pytest.param("os.unlink('l'); open('l', 'w').write('file')", id="a file for a link"),
        pytest.param("os.unlink('l'); os.mkdir('l')", id="a directory for a link"),
        pytest.param("os.unlink('x'); os.symlink('d', 'x')", id="a link for a file"),
        pytest.param("os.rmdir('d/empty'); os.symlink('/etc', 'd/empty')", id="a link for a directory"),
        pytest.param("os.makedirs('new/deep'); os.symlink('x', 'new/l')", id="new ones"),
        pytest.param("shutil.move('d', 'e')", id="renamed"),
        pytest.param(r"os.symlink(b'\xff\\n', b'\xff')", id="odd names"),
    ],
)
def test_all_that_a_run_changed_comes_back_with_its_mode_and_target(change: str, disk: Disk) -> None:
    commit(
        disk,
        r"""
        open('x', 'w').write('run'); os.chmod('x', 0o755); os.symlink('x', 'l')
        os.makedirs('d/empty'); os.chmod('d/empty', 0o750); os.symlink('/etc', 'd/l'); os.symlink(b'\xfe\n', 'd/odd')
        open('d/y', 'w').write('y'); os.chmod('d/y', 0o4711); os.chmod('d', 0o555)
        """,
    )
    first = timeless(disk)
    there = commit(disk, change)
    second = timeless(disk)
    changes, gone = back_over(disk, there)

    assert gone == []
    assert timeless(disk) == first
    assert second != first
    back_over(disk, there, changes)
    assert timeless(disk) == first, "there is nothing to undo"
    back_over(disk, changes)
    assert timeless(disk) == second, "and forth"


def test_what_several_runs_did_is_undone_at_once(disk: Disk) -> None:
    commit(disk, "open('x', 'w').write('1'); os.chmod('x', 0o700); os.symlink('x', 'l')")
    first = timeless(disk)
    later = [
        commit(disk, "os.chmod('x', 0o755)"),
        commit(disk, "os.unlink('x'); os.mkdir('x'); open('x/y', 'w').write('y')"),
        commit(disk, "shutil.rmtree('x'); os.rename('l', 'x')"),
        commit(disk, "open('l', 'w').write('2')"),
    ]
    back_over(disk, *later)

    assert timeless(disk) == first


def test_what_cannot_be_made_again_is_named(disk: Disk) -> None:
    commit(disk, "os.mkfifo('pipe'); socket.socket(socket.AF_UNIX).bind('sock'); os.mkfifo('stays')")
    later = commit(disk, "os.unlink('pipe'); os.unlink('sock'); open('sock', 'w').write('s'); os.unlink('stays')")
    later += commit(disk, "os.mkfifo('stays')")
    _, gone = back_over(disk, later[:-1], later[-1:])

    assert gone == ["pipe", "sock"]
    assert os.listdir(disk.files / "data") == ["stays"]


def test_of_a_journal_that_tells_no_modes_the_present_one_stays_and_lost_links_are_named(disk: Disk) -> None:
    commit(
        disk,
        """
        for name in 'abc': open(name, 'w').write(name); os.chmod(name, 0o755)
        os.mkdir('d'); os.chmod('d', 0o700); os.symlink('a', 'l'); os.symlink('a', 'm'); os.mkdir('e')
        """,
    )
    changes = commit(
        disk,
        """
        os.chmod('a', 0o700); open('b', 'w').write('new'); os.unlink('c'); os.rmdir('d'); os.unlink('l')
        os.unlink('m'); open('m', 'w').write('file'); os.chmod('e', 0o700)
        """,
    )
    old = [msgspec.structs.replace(change, before_mode=None, before_kind=None, before_target="") for change in changes]
    _, gone = back_over(disk, old)

    assert gone == ["e", "l", "m"]
    modes = {path: oct(mode & 0o777) for path, (mode, _) in timeless(disk).items() if path != "data"}
    assert modes == {
        "data/a": "0o700", "data/b": "0o755", "data/c": "0o644", "data/d": "0o755", "data/e": "0o700",
    }  # fmt: skip
    assert contents(disk) == {"a": "a", "b": "b", "c": "c"}


@pytest.mark.parametrize("point", ["publish.removed", "publish.made", "publish.renamed", "publish.synced"])
def test_a_way_back_that_is_killed_is_finished_by_the_next(point: str, tmp_path: Path) -> None:
    disk = Disk(tmp_path / "ready")
    commit(disk, BEFORE + "os.chmod('keep', 0o711); os.chmod('edit', 0o755); os.chmod('tree/deep', 0o700)")
    first = timeless(disk)
    changes, _ = restoring.plan_back([commit(disk, AFTER + "os.chmod('keep', 0o600); os.chmod('edit', 0o600)")])
    stage(disk, changes)
    publish.prepare(disk.stage, changes)
    (disk.files.parent / "changes").write_bytes(msgspec.json.encode(changes))
    for times in itertools.count(1):
        subprocess.run(["cp", "-a", disk.files.parent, tmp_path / str(times)], check=True)
        copy = Disk(tmp_path / str(times))
        if publish_in_child(copy, crash_at=f"{point}:{times}") == 0:
            break
        publish.publish(copy.stage, copy.files, changes, copy.blobs, redo=True)
        assert timeless(copy) == first, f"{point}:{times}"
    assert times > 1, f"{point} was never passed"
    assert timeless(copy) == first


def test_a_directory_stays_that_holds_what_no_version_has(disk: Disk) -> None:
    later = commit(disk, "os.makedirs('d/e'); os.makedirs('f/g'); open('d/x', 'w').write('x')")
    (disk.files / "data/d/e/mine").write_text("put there on the host")
    changes, _ = restoring.plan_back([later])

    assert restoring.hold_others(changes, disk.files) == ["d", "d/e"]


def test_a_mode_is_put_on_no_other_content_than_was_committed(disk: Disk) -> None:
    commit(disk, "open('x', 'w').write('1')")
    later = commit(disk, "os.chmod('x', 0o755)")
    (disk.files / "data/x").write_text("edited on the host")

    with pytest.raises(CkptUnknown, match="x was changed on the host"):
        back_over(disk, later)


def test_a_hole_in_a_file_whose_mode_comes_back_stays_a_hole(disk: Disk) -> None:
    commit(disk, "os.truncate(os.open('x', os.O_CREAT | os.O_WRONLY), 64 << 20)")
    back_over(disk, commit(disk, "os.chmod('x', 0o600)"))

    assert (disk.files / "data/x").stat().st_blocks * 512 < 1 << 20


def test_a_damaged_blob_is_not_restored(disk: Disk, tmp_path: Path) -> None:
    commit(disk, "open('a', 'w').write('1')")
    first = dict(disk.known)
    commit(disk, "open('a', 'w').write('2')")
    blob = tmp_path / "blobs" / first["a"].sha256[:2] / first["a"].sha256
    blob.chmod(0o600)
    blob.write_text("0")

    with pytest.raises(SessionHalted, match=first["a"].sha256):
        restore(disk, first)


# -- written from outside ----------------------------------------------------------------------------------------


def put(disk: Disk, path: str, content: bytes) -> FileEntry:
    disk.stage.mkdir(exist_ok=True)
    return restoring.put_file(disk.stage, path, io.BytesIO(content), owner=None, files=disk.files)


def test_a_file_put_from_outside_is_a_change_like_any_other(disk: Disk) -> None:
    commit(disk, "os.mkdir('d'); os.chmod('d', 0o711); open('d/x', 'w').write('old')")
    before = disk.known["d/x"]
    entry = put(disk, "d/x", b"new")
    put(disk, "e/f/y", b"y" * 3_000_000)

    changes = disk.changes()
    assert [(change.action, change.kind, change.path) for change in changes] == [
        ("changed", "file", "d/x"),
        ("added", "directory", "e"),
        ("added", "directory", "e/f"),
        ("added", "file", "e/f/y"),
    ]
    assert (changes[0].sha256, changes[0].before, changes[0].mode) == (entry.sha256, before.sha256, 0o644)
    disk.publish(changes)
    assert disk.known["d/x"] == entry
    assert contents(disk)["d/x"] == "new"
    assert stat.S_IMODE((disk.files / "data/d").stat().st_mode) == 0o711


def test_a_link_is_replaced_and_never_written_through(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("untouched")
    commit(disk, f"os.symlink({str(tmp_path / 'outside/file')!r}, 'l'); os.symlink({str(tmp_path / 'outside')!r}, 'd')")

    put(disk, "l", b"mine")
    with pytest.raises(InvalidSetting, match="d is a symlink"):
        put(disk, "d/file", b"mine")
    disk.publish(disk.changes())

    assert (tmp_path / "outside/file").read_text() == "untouched"
    assert not (disk.files / "data/l").is_symlink()


@pytest.mark.parametrize("path", ["", ".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a\0b", "n" * 256, "\ud800"])
def test_a_path_that_is_none_is_refused(path: str, disk: Disk) -> None:
    with pytest.raises(InvalidSetting):
        put(disk, path, b"x")
    with pytest.raises(FileUnknown):
        open_file(disk.files / "data", path)


def test_a_file_is_not_put_over_a_directory(disk: Disk) -> None:
    commit(disk, "os.mkdir('d')")

    with pytest.raises(InvalidSetting, match="is a directory"):
        put(disk, "d", b"x")


def test_a_removal_names_all_that_goes(disk: Disk) -> None:
    commit(disk, "os.makedirs('d/e'); open('d/e/x', 'w').write('x'); os.symlink('x', 'd/l'); open('k', 'w').write('k')")
    disk.stage.mkdir()
    changes = restoring.plan_removal("d", files=disk.files, known=disk.known)

    assert [change.path for change in changes] == ["d", "d/e", "d/e/x", "d/l"]
    disk.publish(changes)
    assert contents(disk) == {"k": "k"}
    assert os.listdir(disk.files / "data") == ["k"]
    with pytest.raises(FileUnknown):
        restoring.plan_removal("d", files=disk.files, known=disk.known)


# -- reading -----------------------------------------------------------------------------------------------------


def read(disk: Disk, path: str) -> bytes:
    with os.fdopen(open_file(disk.files / "data", path), "rb") as file:
        return file.read()


def test_a_committed_file_is_read_whatever_its_mode_and_name(disk: Disk) -> None:
    commit(disk, r"os.mkdir(b'\xff'); open(b'\xff/a', 'w').write('x'); os.chmod(b'\xff/a', 0); os.chmod(b'\xff', 0)")

    assert read(disk, "\\xff/a") == b"x"
    assert stat.S_IMODE((disk.files / "data" / os.fsdecode(b"\xff")).stat().st_mode) == 0


def test_only_regular_files_that_are_there_are_read(disk: Disk) -> None:
    commit(disk, "os.symlink('/etc/passwd', 'l'); os.symlink('/etc', 'd'); os.mkfifo('f'); os.mkdir('e')")

    for path in ("l", "d/passwd", "f", "e", "none", "none/x", "l/x"):
        with pytest.raises(FileUnknown):
            read(disk, path)
