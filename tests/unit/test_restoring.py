"""Older versions come back, and what callers write from outside goes the way of every run."""

import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.overlaid import Disk

from holdfast.errors import FileUnknown, InvalidSetting, SessionHalted
from holdfast.records import Change, FileEntry
from holdfast.resources import restoring
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
    disk.stage.mkdir()
    changes = restoring.plan_restore(disk.known, target)
    restoring.fill_stage(disk.stage, changes, disk.blobs, owner=None)
    disk.publish(changes)
    return changes


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
