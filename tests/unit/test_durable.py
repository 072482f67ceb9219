"""What is said to last is synced, in the right order; what could not be synced is said."""

import ast
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import durable
from holdfast.errors import DiskFailed

from .watched import WatchedDisk, watch

WRITE = """
import sys
from pathlib import Path
from holdfast import durable
durable.write_file(Path(sys.argv[1]), b"new")
"""
SYNC_FILES = """
import sys
from pathlib import Path
from holdfast import durable
root = Path(sys.argv[1])
durable.sync_files([root / name for name in sys.argv[2:]], root=root)
"""
STEPS = ["create", "write", "sync_file", "rename", "sync_directory"]


@pytest.fixture
def watched_disk(tmp_path_factory: pytest.TempPathFactory) -> WatchedDisk:
    return watch(tmp_path_factory)


def test_a_written_file_has_its_bytes_and_exactly_its_mode(tmp_path: Path) -> None:
    durable.write_file(tmp_path / "key", b"secret")
    durable.write_file(tmp_path / "public", b"known", mode=0o666)

    assert (tmp_path / "key").read_bytes() == b"secret"
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "public").stat().st_mode) == 0o666
    assert sorted(os.listdir(tmp_path)) == ["key", "public"]


def test_a_written_file_replaces_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("untouched")
    (tmp_path / "name").symlink_to("target")

    durable.write_file(tmp_path / "name", b"new")

    assert (tmp_path / "target").read_text() == "untouched"
    assert not (tmp_path / "name").is_symlink()


def test_a_file_is_synced_before_it_has_its_name_and_its_directory_afterwards(
    watched_disk: WatchedDisk, tmp_path: Path
) -> None:
    watched_disk.run(WRITE, tmp_path / "file")

    temporary, *rest = watched_disk.steps(tmp_path)
    assert re.fullmatch(rf"fsync {re.escape(durable.TEMPORARY)}[0-9a-f]+", temporary)
    assert rest == ["rename file", "fsync ."]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_leaves_the_old_file_or_the_new(step: str, when: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")

    child = subprocess.run(
        [sys.executable, "-c", WRITE, str(tmp_path / "file")],
        env=os.environ | {"HOLDFAST_CRASH_AT": f"durable.{step}.{when}"},
    )

    renamed = (step, when) in [("rename", "after"), ("sync_directory", "before"), ("sync_directory", "after")]
    assert child.returncode == -signal.SIGKILL
    assert (tmp_path / "file").read_bytes() == (b"new" if renamed else b"old")
    assert all(name.startswith(durable.TEMPORARY) for name in os.listdir(tmp_path) if name != "file")


def test_a_sync_that_fails_is_said_once_and_the_old_file_stays(watched_disk: WatchedDisk, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    watched_disk.failing.touch()

    said = watched_disk.run(
        "from holdfast.errors import DiskFailed\ntry:"
        + WRITE.replace("\n", "\n    ")
        + "\nexcept DiskFailed as error: print(error)",
        tmp_path / "file",
    )

    assert "sync_file failed: Input/output error [disk_failed]" in said
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
    assert len(watched_disk.steps(tmp_path)) == 1


def test_what_cannot_be_synced_at_all_is_a_failure_too() -> None:
    reader, writer = os.pipe()
    with durable.closing_fd(reader), durable.closing_fd(writer), pytest.raises(DiskFailed, match="sync_file failed"):
        durable.sync_file(writer)


def test_a_full_disk_is_called_a_full_disk() -> None:
    with durable.closing_fd(os.open("/dev/full", os.O_WRONLY)) as full, pytest.raises(DiskFailed, match="disk is full"):
        durable.write_all(full, b"x")


def test_few_files_are_synced_each_with_the_directories_above_them(watched_disk: WatchedDisk, tmp_path: Path) -> None:
    (tmp_path / "data/deep").mkdir(parents=True)
    (tmp_path / "data/deep/a").touch()
    (tmp_path / "data/b").touch()

    watched_disk.run(SYNC_FILES, tmp_path, "data/deep/a", "data/b")

    steps = watched_disk.steps(tmp_path)
    assert sorted(steps) == ["fsync .", "fsync data", "fsync data/b", "fsync data/deep", "fsync data/deep/a"]
    assert steps[-1] == "fsync ."


def test_many_files_are_synced_with_their_file_system_at_one_go(watched_disk: WatchedDisk, tmp_path: Path) -> None:
    names = [f"file{number}" for number in range(durable.MANY + 1)]
    for name in names:
        (tmp_path / name).touch()

    watched_disk.run(SYNC_FILES, tmp_path, *names)

    assert watched_disk.steps(tmp_path) == ["syncfs ."]


def test_a_sync_of_the_file_system_that_fails_is_said(watched_disk: WatchedDisk, tmp_path: Path) -> None:
    watched_disk.failing.touch()

    said = watched_disk.run(
        "import sys\nfrom pathlib import Path\nfrom holdfast import durable, errors\n"
        "try: durable.sync_filesystem(Path(sys.argv[1]))\nexcept errors.DiskFailed as error: print(error)",
        tmp_path,
    )

    assert "sync_filesystem failed: Input/output error" in said


def test_whatever_is_at_a_path_its_directory_is_synced(watched_disk: WatchedDisk, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "linked").symlink_to("/etc")
    os.mkfifo(tmp_path / "fifo")

    watched_disk.run(SYNC_FILES, tmp_path, "link", "fifo", "gone", "linked/passwd", "fifo/below")

    assert watched_disk.steps(tmp_path) == ["fsync ."]


def test_a_path_out_of_the_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leaves its root"):
        durable.sync_files([Path("../elsewhere/file")], root=tmp_path)


def test_names_are_changed_in_the_directories_given(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with durable.closing_fd(os.open(tmp_path, os.O_RDONLY)) as top:
        durable.mkdir("sub", dir_fd=top)
        with durable.closing_fd(os.open(tmp_path / "sub", os.O_RDONLY)) as sub:
            durable.link(b"file", b"second", src_dir=top, dst_dir=sub)
            durable.rename("file", "moved", src_dir=top, dst_dir=sub)
            assert sorted(os.listdir(sub)) == ["moved", "second"]
            for name in ("moved", "second"):
                durable.unlink(name, dir_fd=sub)
    assert list(tmp_path.rglob("*")) == [tmp_path / "sub"]


def test_what_a_crash_left_unfinished_is_swept(tmp_path: Path) -> None:
    (tmp_path / f"{durable.TEMPORARY}00").write_text("half")
    durable.write_file(tmp_path / "whole", b"whole")

    durable.sweep(tmp_path)
    assert os.listdir(tmp_path) == ["whole"]


def test_a_link_to_a_symlink_is_one_itself(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    with durable.closing_fd(os.open(tmp_path, os.O_RDONLY)) as top:
        durable.link("link", "second", src_dir=top, dst_dir=top)

    assert os.readlink(tmp_path / "second") == "/etc/passwd"


def test_what_the_caller_must_tell_apart_is_left_as_it_is(tmp_path: Path) -> None:
    with durable.closing_fd(os.open(tmp_path, os.O_RDONLY)) as top, pytest.raises(FileNotFoundError):
        durable.rename("nothing", "something", src_dir=top, dst_dir=top)


OF_MODULES = {
    "os": {"fsync", "fdatasync", "sync", "rename", "renames", "replace", "link"},
    "shutil": {"move"},
    "_libc": {"syncfs", "renameat", "renameat2", "linkat"},
}
OF_PATHS = {"rename", "hardlink_to"}
ELSEWHERE = {
    ("resources/workspace.py", "rename"),  # what is moved there is about to be deleted
    # The guest's own files, before they are staged.
    ("guest/renames.py", "rename"),
    ("guest/renames.py", "replace"),
    ("guest/renames.py", "link"),
}


def test_nothing_is_synced_or_renamed_but_here() -> None:
    """So that one simulated disk, and the crash points around each step, are enough to try them all."""
    source = Path(durable.__file__).parent
    found = {
        (str(path.relative_to(source)), step) for path in source.rglob("*.py") for step in lasting(path.read_text())
    }

    here = {("durable.py", step) for step in ("fsync", "syncfs", "rename", "renameat2", "link")}
    assert found == ELSEWHERE | here


@pytest.mark.parametrize("code", [
    "os.fsync(file)", "os.replace(a, b)", "os.link(a, b)", "step = os.rename", "from os import rename as plain",
    "shutil.move(a, b)", "from shutil import move", "_libc.syncfs(fd)", "path.rename(b)", "(a / 'b').replace(b)",
    "path.hardlink_to(b)",
])  # fmt: skip
def test_each_way_to_sync_or_to_rename_is_known(code: str) -> None:
    assert len(list(lasting(code))) == 1


@pytest.mark.parametrize("code", ["durable.rename(a, b)", "text.replace('a', 'b')", "structs.replace(a, b=1)"])
def test_what_only_sounds_like_it_is_not_meant(code: str) -> None:
    assert list(lasting(code)) == []


def lasting(code: str) -> Iterator[str]:
    """What Python code says that syncs, or gives a file a name."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                yield from (each.name for each in names if each.name in OF_MODULES.get(module, ()))
            case ast.Attribute(value=ast.Name(id=on), attr=step) if on in OF_MODULES:
                if step in OF_MODULES[on]:
                    yield step
            case ast.Attribute(value=on, attr=step) if step in OF_PATHS and ast.unparse(on) != "durable":
                yield step
            case ast.Call(func=ast.Attribute(attr="replace" as step), args=[_], keywords=[]):  # of a text it takes two
                yield step
