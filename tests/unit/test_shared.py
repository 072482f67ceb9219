"""A directory of the user's as a workspace: where its files are, and that whoever publishes there is not led astray."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import home, scripts
from holdfast.blobs.local import LocalBlobs
from holdfast.errors import InvalidSetting, NotOurs
from holdfast.records import Change, FileEntry
from holdfast.resources import layers, publish, restoring
from holdfast.resources.descent import Cursor, Tree, identity_of
from holdfast.resources.hashing import digest


class Disk:
    """A shared directory, one stage for it, blobs."""

    def __init__(self, path: Path) -> None:
        self.directory, self.stage = path / "project", path / "project/.holdfast/stages/s1"
        self.outside = path / "outside"
        for made in (self.outside, self.stage / "data", path / "project/.holdfast/files/data"):
            made.mkdir(parents=True)
        (path / "project/.holdfast/blobs").mkdir()
        self.blobs = LocalBlobs(path / "project/.holdfast/blobs")
        self.files = Tree(path / "project/.holdfast/files", self.directory)
        self.known: dict[str, FileEntry] = {}

    def has(self, name: str, content: str) -> None:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        with path.open("rb") as file:
            sha256, size = digest(file.fileno())
        self.known[name] = FileEntry(path=name, sha256=sha256, bytes=size)

    def stages(self, name: str, content: str) -> None:
        path = self.stage / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    def changes(self) -> list[Change]:
        return layers.read_changes(self.stage, self.files, self.known)

    def publish(self, changes: list[Change], *, redo: bool = False) -> list[str]:
        return publish.publish(self.stage, self.files, changes, self.blobs, redo=redo)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def test_what_is_staged_is_published_into_the_directory_and_the_old_is_copied(disk: Disk) -> None:
    disk.has("changed", "old")
    disk.stages("changed", "new")
    disk.stages("d/added", "added")
    (disk.directory / "changed").chmod(0o640)
    (disk.stage / "data/changed").chmod(0o640)
    os.link(disk.directory / "changed", disk.outside / "same")
    changes = disk.changes()

    disk.publish(changes)

    assert [change.path for change in changes] == ["changed", "d", "d/added"]
    assert (disk.directory / "changed").read_text() == "new"
    assert (disk.directory / "d/added").read_text() == "added"
    assert disk.blobs.has(disk.known["changed"].sha256)
    assert ((disk.outside / "same").read_text(), (disk.outside / "same").stat().st_mode & 0o777) == ("old", 0o640)
    assert not disk.stage.exists()


@pytest.mark.parametrize("name", [".holdfast/journal.sqlite3", "sub/.holdfast", ".holdfast"])
def test_nothing_is_published_into_what_is_holdfasts_own(disk: Disk, name: str) -> None:
    disk.stages(name, "forged")

    with pytest.raises(layers.Unreadable, match="where Holdfast keeps its own"):
        disk.changes()


def swap(disk: Disk) -> None:
    (disk.directory / "d").rename(disk.directory / "moved")
    (disk.directory / "d").symlink_to(disk.outside)


def carry_off(disk: Disk) -> None:
    (disk.directory / "d").rename(disk.outside / "d")


@pytest.mark.parametrize("attack", [swap, carry_off])
def test_whoever_moves_directories_about_while_they_are_published_leads_nobody_out(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, attack: Callable[[Disk], None]
) -> None:
    for name in ("d/e/a", "d/e/b", "d/e/f/c", "z"):
        disk.stages(name, "new")
    changes, passed = disk.changes(), list[str]()

    def crashpoint(name: str) -> None:
        passed.append(name)
        if passed.count("publish.renamed") == 1 and name == "publish.renamed":
            attack(disk)

    monkeypatch.setattr(publish, "crashpoint", crashpoint)
    failed = False
    try:
        disk.publish(changes)
    except OSError:
        failed = True
    monkeypatch.undo()
    disk.publish(changes, redo=True)

    assert failed == (attack is carry_off), "the way up leads where the way down came from, or nowhere"
    assert [path.name for path in disk.outside.iterdir() if path.name != "d"] == []
    assert not (disk.outside.parent / "z").exists()
    assert (disk.directory / "z").read_text() == "new"


def test_a_redo_leaves_alone_what_the_user_changed_since(disk: Disk) -> None:
    disk.has("removed", "old")
    for name in ("a", "b"):
        disk.stages(name, "new")
    changes = [*disk.changes(), Change(path="removed", action="removed", before=disk.known["removed"].sha256)]
    (disk.stage / "data/a").rename(disk.directory / "a")  # as far as it had come
    (disk.directory / "a").write_text("the user's")
    (disk.directory / "removed").write_text("again the user's")

    disk.publish(changes, redo=True)

    assert {name: (disk.directory / name).read_text() for name in ("a", "b", "removed")} == {
        "a": "the user's", "b": "new", "removed": "again the user's",
    }  # fmt: skip


def test_what_the_user_writes_after_it_was_verified_is_his_and_is_told(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("as it was", "edited", "to go"):
        disk.has(name, "old")
    for name in ("as it was", "edited", "added", "at the last moment", "new"):
        disk.stages(name, "new")
    changes = [*disk.changes(), *removals(disk, "to go")]
    for name in ("edited", "added", "to go"):
        (disk.directory / name).write_text("the user's")

    def race(name: bytes, dir_fd: int) -> os.stat_result | None:
        """Somebody writes between the last look at a name and what is done then."""
        found = look(name, dir_fd=dir_fd)
        if name == b"at the last moment" and found is None:
            (disk.directory / "at the last moment").write_text("the user's")
        return found

    look = publish.look
    monkeypatch.setattr(publish, "look", race)
    theirs = publish.publish(disk.stage, disk.files, changes, disk.blobs, redo=False)

    assert sorted(theirs) == ["added", "at the last moment", "edited", "to go"]
    assert {name: (disk.directory / name).read_text() for name in theirs} == dict.fromkeys(theirs, "the user's")
    assert [(disk.directory / name).read_text() for name in ("as it was", "new")] == ["new", "new"]
    assert not disk.stage.exists()


def test_a_redo_replaces_only_what_the_run_found(disk: Disk) -> None:
    for name in ("as it was", "edited", "to directory", "to link"):
        disk.has(name, "old")
    for name in ("as it was", "edited", "added", "to directory/in", "new/in"):
        disk.stages(name, "new")
    (disk.stage / "data/to link").symlink_to("elsewhere")
    (disk.directory / "link").symlink_to("old")
    (disk.stage / "data/link").symlink_to("new")
    changes = disk.changes()
    for name in ("edited", "added", "to directory", "to link", "new"):  # after the crash
        (disk.directory / name).write_text("the user's")

    disk.publish(changes, redo=True)

    kept = ("edited", "added", "to directory", "to link", "new")
    assert [(disk.directory / name).read_text() for name in kept] == ["the user's"] * len(kept)
    assert (disk.directory / "as it was").read_text() == "new"
    assert os.readlink(disk.directory / "link") == "new"
    assert not disk.stage.exists()


@pytest.mark.parametrize("redo", [False, True])
def test_a_directory_that_goes_takes_nothing_along_that_was_put_there_since(disk: Disk, redo: bool) -> None:
    for name in ("gone/deep/a", "stays/deep/a", "stays/b", "file/a"):
        disk.has(name, "old")
    disk.stages("file", "new")
    changes = [*disk.changes(), *removals(disk, "gone", "stays")]
    for name in ("stays/deep/new", "file/new"):
        (disk.directory / name).write_text("the user's")

    disk.publish(changes, redo=redo)

    found = sorted(str(path.relative_to(disk.directory)) for path in disk.directory.rglob("*") if path.is_file())
    assert [path for path in found if not path.startswith(".holdfast")] == [
        "file/a",  # what was to replace its directory has no place, and so it need not go
        "file/new",
        "stays/deep/new",
    ]
    assert not (disk.directory / "gone").exists()


def removals(disk: Disk, *names: str) -> list[Change]:
    return [change for name in names for change in restoring.plan_removal(name, files=disk.files, known=disk.known)]


@pytest.mark.parametrize(("left", "expected"), [(0, "new"), (5000, "new"), (None, "the user's")])
def test_a_redo_finishes_a_database_that_was_cut_short_and_leaves_one_that_the_user_wrote(
    disk: Disk, left: int | None, expected: str
) -> None:
    contents = {name: "SQLite format 3\0" + name * 2000 for name in ("old", "new", "the user's")}
    disk.has("db", contents["old"])
    disk.stages("db", contents["new"])
    changes = disk.changes()
    new = contents["new"]
    cut = "" if left == 0 else new[:left].ljust(len(new), "\0")
    (disk.directory / "db").write_text(contents["the user's"] if left is None else cut)

    disk.publish(changes, redo=True)

    assert (disk.directory / "db").read_text() == contents[expected]


def test_the_way_up_is_the_way_that_one_came(disk: Disk) -> None:
    (disk.directory / "d/e").mkdir(parents=True)
    cursor = Cursor(disk.files)
    assert cursor.go([b"data", b"d", b"e"])
    cursor.go([b"data"])
    assert os.fstat(cursor.fd).st_ino == disk.directory.stat().st_ino
    cursor.go([])
    assert os.fstat(cursor.fd).st_ino == disk.files.root.stat().st_ino

    cursor.go([b"data", b"d", b"e"])
    (disk.directory / "d/e").rename(disk.outside / "e")
    with pytest.raises(OSError, match="moved away"):
        cursor.leave()
    with pytest.raises(OSError, match="moved away"):
        cursor.close()


def test_nothing_is_read_from_or_published_to_another_directory_in_its_place(disk: Disk) -> None:
    disk.files = Tree(disk.files.root, disk.directory, identity_of(disk.directory.stat()))
    disk.stages("a", "new")
    changes = disk.changes()
    put_another_in_its_place(disk.directory)

    with pytest.raises(layers.Unreadable, match="another directory than it was"):
        disk.changes()
    with pytest.raises(OSError, match="another directory than it was"):
        disk.publish(changes)
    assert [path.name for path in disk.directory.iterdir()] == [".holdfast"]
    assert (disk.stage / "data/a").read_text() == "new", "it can be tried again"


def put_another_in_its_place(directory: Path) -> None:
    """With all that Holdfast keeps there."""
    moved = directory.rename(directory.with_name("moved"))
    directory.mkdir()
    (moved / ".holdfast").rename(directory / ".holdfast")


def test_some_directories_are_no_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user, own = tmp_path / "user", tmp_path / "user/project/holdfast"
    (user / "other/.holdfast/sessions").mkdir(parents=True)
    own.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(user))
    home.refuse_unfit(user / "other", own)
    for unfit in (Path("/"), user, user / "project", own / "sessions", user / "other/.holdfast", tmp_path):
        with pytest.raises(InvalidSetting, match="cannot be a workspace"):
            home.refuse_unfit(unfit, own)


def test_a_link_in_place_of_what_holdfast_keeps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "project").mkdir()
    (tmp_path / "project/.holdfast").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(InvalidSetting, match="it is a link"):
        home.acquire_shared(tmp_path / "project", tmp_path / "home")
    assert os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can trust what another user has made")
def test_root_does_not_trust_what_another_user_keeps_there(tmp_path: Path) -> None:
    kept, victim = tmp_path / "project/.holdfast", tmp_path / "victim"
    kept.mkdir(parents=True)
    victim.write_text("root's\n")
    for name in (".gitignore", "lock", "epoch", "id"):
        (kept / name).symlink_to(victim)
    os.chown(kept, 61_236, 61_236)

    with pytest.raises(InvalidSetting, match="it belongs to user 61236") as refused:
        home.acquire_shared(tmp_path / "project", tmp_path / "home")
    assert "run the job as the user" in refused.value.hint
    assert victim.read_text() == "root's\n"


@pytest.mark.parametrize("name", [".gitignore", "lock", "epoch", "id"])
def test_what_holdfast_keeps_is_nobody_elses_to_write_and_no_link_leads_out_of_it(tmp_path: Path, name: str) -> None:
    kept, victim = tmp_path / "project/.holdfast", tmp_path / "victim"
    kept.mkdir(parents=True)
    victim.write_text("mine\n")
    (kept / name).symlink_to(victim)
    kept.chmod(0o770)
    with pytest.raises(InvalidSetting, match="others can write to it"):
        home.acquire_shared(tmp_path / "project", tmp_path / "home")

    kept.chmod(0o700)
    with pytest.raises((InvalidSetting, NotOurs), match=r"cannot be written|is not believed"):
        home.acquire_shared(tmp_path / "project", tmp_path / "home")
    assert victim.read_text() == "mine\n"


def test_a_script_is_read_as_python_reads_it_and_knows_where_it_is(tmp_path: Path) -> None:
    inside, elsewhere = tmp_path / "w/sub/job.py", tmp_path / "job.py"
    inside.parent.mkdir(parents=True)
    inside.write_bytes("# coding: latin-1\nprint('\xe4')".encode("latin-1"))
    elsewhere.write_text("1")

    code, script = scripts.read(inside, workspace=tmp_path / "w", arguments=["x"])
    _, other = scripts.read(elsewhere, workspace=tmp_path / "w", arguments=[])

    assert code.endswith("print('\xe4')")
    assert (script.file, script.arguments) == ("/mnt/data/sub/job.py", ["x"])
    assert other.file == "/opt/job/job.py"
    inside.write_bytes(b"print('\xe4')")
    with pytest.raises(InvalidSetting, match="no Python source"):
        scripts.read(inside, workspace=tmp_path, arguments=[])


@pytest.mark.parametrize("document", [b"no json", b'{"worksheets": []}', b'{"cells": [{"cell_type": 7}]}'])
def test_what_is_no_notebook_is_refused(document: bytes) -> None:
    with pytest.raises(InvalidSetting, match="no notebook"):
        scripts.code_cells(document, name="n.ipynb")


def test_a_directory_of_another_users_that_came_in_the_way_is_left_to_him(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.stages("out", "new")
    disk.stages("other", "new")
    changes = disk.changes()
    (disk.directory / "out").mkdir()
    enter = Cursor.enter

    def refused(cursor: Cursor, name: bytes) -> None:
        if name == b"out":
            raise PermissionError(errno.EACCES, "Permission denied")
        enter(cursor, name)

    monkeypatch.setattr(Cursor, "enter", refused)

    assert disk.publish(changes, redo=False) == ["out"]
    assert (disk.directory / "other").read_text() == "new"
