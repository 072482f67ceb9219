"""Staged files that are held open get inodes of their own: whoever holds them writes to nobody's copy."""

import errno
import os
import socket
import sqlite3
from pathlib import Path

import pytest

from holdfast.errors import DiskFull
from holdfast.records import Change
from holdfast.resources.handles import databases, let_go, still_held


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    (tmp_path / "data" / "d").mkdir(parents=True)
    return tmp_path


def added(*paths: str) -> list[Change]:
    return [Change(path=path, action="added") for path in paths]


def test_what_is_open_for_writing_is_replaced_by_a_copy_that_looks_the_same(stage: Path) -> None:
    file = stage / "data" / "d" / "f"
    with file.open("wb") as held:
        held.write(b"begin")
        held.seek(1 << 20)
        held.write(b"end")
        held.flush()
        os.chmod(file, 0o640)
        os.utime(file, ns=(1, 2))
        before = os.stat(file)
        assert let_go(stage, added("d/f")) == ["d/f"]
        held.write(b" and more")
        held.flush()

    after = os.stat(file)
    assert after.st_ino != before.st_ino
    assert (after.st_mode, after.st_mtime_ns, after.st_uid) == (before.st_mode, 2, before.st_uid)
    assert (after.st_size, after.st_blocks <= before.st_blocks + 16) == ((1 << 20) + 3, True)
    assert file.read_bytes() == b"begin" + bytes((1 << 20) - 5) + b"end"
    assert os.listdir(stage / "data" / "d") == ["f"]


def test_where_there_is_no_room_for_a_copy_the_disk_is_full_and_the_file_is_as_it_was(
    stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = stage / "data" / "d" / "f"
    with file.open("wb", buffering=0) as held:
        held.write(b"begin")
        monkeypatch.setattr(os, "copy_file_range", is_full)
        with pytest.raises(DiskFull):
            let_go(stage, added("d/f"))

    assert (file.read_bytes(), os.listdir(stage / "data" / "d")) == (b"begin", ["f"])


def test_what_is_only_read_or_not_staged_is_left_alone(stage: Path) -> None:
    (stage / "data" / "read").write_text("1")
    (stage / "data" / "other").write_text("2")
    inodes = {path: path.stat().st_ino for path in (stage / "data").iterdir()}
    with (stage / "data" / "read").open(), (stage / "data" / "other").open("a"):
        assert let_go(stage, [*added("read"), Change(path="other", action="removed")]) == []

    assert inodes == {path: path.stat().st_ino for path in (stage / "data").iterdir()}


def test_every_name_of_a_file_that_is_held_lets_go(stage: Path) -> None:
    one, two = stage / "data" / "one", stage / "data" / "two"
    with one.open("w") as held:
        held.write("1")
        held.flush()
        two.hardlink_to(one)
        assert let_go(stage, added("one", "two")) == ["one", "two"]
        held.write("more")

    assert (one.read_text(), two.read_text()) == ("1", "1")


def test_a_descriptor_that_no_process_has_holds_as_well(stage: Path) -> None:
    file = stage / "data" / "f"
    file.write_text("1")
    here, there = socket.socketpair()
    with here, there:
        with file.open("a") as held:
            socket.send_fds(here, [b"x"], [held.fileno()])
        assert let_go(stage, added("f")) == ["f"]
    assert let_go(stage, added("f")) == []


def test_a_database_that_is_held_is_told_from_other_files(stage: Path) -> None:
    (stage / "data" / "text").write_text("SQLite")
    db = sqlite3.connect(stage / "data" / "db")
    db.execute("create table t (x)")
    db.commit()
    with (stage / "data" / "text").open("a"):
        assert databases(stage, added("db", "text")) == {(b"data", b"db")}
    assert still_held(stage, {(b"data", b"db")}) == ["db"]
    db.close()
    assert databases(stage, added("db", "text")) == frozenset()
    assert still_held(stage, {(b"data", b"db")}) == []
