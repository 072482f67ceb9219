"""What a run changed is what is in the upper layer, whatever it did to get there."""

import hashlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.overlaid import Disk

from holdfast.records import Change
from holdfast.resources import layers
from holdfast.resources.layers import TooLarge, Unreadable
from holdfast.resources.workspace import remove_tree


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    yield Disk(tmp_path)
    remove_tree(tmp_path)  # pytest could not: too deep, or closed


def short(changes: list[Change]) -> list[str]:
    return [f"{change.action} {change.kind} {change.path}" for change in changes]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_stage_that_nothing_was_written_to_has_no_changes(disk: Disk) -> None:
    disk.run("os.listdir('.')")

    assert not layers.has_changes(disk.stage)
    assert disk.changes() == []


def test_a_new_file_is_added_with_its_digest(disk: Disk) -> None:
    disk.run("os.umask(0o022); os.mkdir('d'); open('d/a.csv', 'w').write('a,b')")

    assert layers.has_changes(disk.stage)
    directory, file = disk.changes()
    assert (directory.kind, directory.path, directory.mode) == ("directory", "d", 0o755)
    assert file == Change(path="d/a.csv", action="added", sha256=sha256(b"a,b"), bytes=3, mode=0o644)


def test_a_changed_file_names_what_it_was(disk: Disk) -> None:
    disk.commit("open('a', 'w').write('old')")
    disk.run("open('a', 'a').write('er')")

    (change,) = disk.changes()
    assert (change.action, change.sha256, change.bytes) == ("changed", sha256(b"older"), 5)
    assert (change.before, change.before_bytes) == (sha256(b"old"), 3)


def test_a_file_opened_for_writing_and_left_alone_is_no_change(disk: Disk) -> None:
    disk.commit("open('a', 'w').write('old')")
    disk.run("open('a', 'a').close()")

    assert layers.has_changes(disk.stage)
    assert disk.changes() == []


def test_the_same_content_with_another_time_or_mode_is_a_change(disk: Disk) -> None:
    disk.commit("open('a', 'w').write('1'); open('b', 'w').write('2')")
    disk.run("os.utime('a', (1, 1)); os.chmod('b', 0o600)")

    assert [(change.path, change.sha256 == change.before) for change in disk.changes()] == [("a", True), ("b", True)]


def test_content_changed_behind_an_unchanged_time_is_a_change(disk: Disk) -> None:
    disk.commit("open('a', 'w').write('old')")
    disk.run("s = os.stat('a'); open('a', 'r+').write('new'); os.utime('a', ns=(s.st_atime_ns, s.st_mtime_ns))")

    assert short(disk.changes()) == ["changed file a"]


def test_a_removed_file_and_all_of_a_removed_directory_are_named(disk: Disk) -> None:
    disk.commit("os.makedirs('d/e'); open('d/e/x', 'w').write('x'); os.symlink('x', 'd/l'); open('f', 'w').write('f')")
    disk.run("shutil.rmtree('d'); os.unlink('f')")

    changes = disk.changes()
    assert short(changes) == [
        "removed directory d",
        "removed directory d/e",
        "removed file d/e/x",
        "removed symlink d/l",
        "removed file f",
    ]
    assert changes[2].before == sha256(b"x")


def test_a_directory_made_anew_hides_what_was_in_the_old_one(disk: Disk) -> None:
    disk.commit("os.makedirs('d/e'); [open(p, 'w').write(p) for p in ('d/a', 'd/b', 'd/e/x', 'd/e/y')]")
    disk.run("shutil.rmtree('d'); os.makedirs('d/e'); open('d/b', 'w').write('new'); open('d/e/y', 'w').write('new')")

    assert short(disk.changes()) == ["removed file d/a", "changed file d/b", "removed file d/e/x", "changed file d/e/y"]


def test_a_directory_in_place_of_a_file_is_one_change_of_its_path(disk: Disk) -> None:
    disk.commit("open('p', 'w').write('file')")
    disk.run("os.unlink('p'); os.mkdir('p'); open('p/x', 'w').write('x')")

    changes = disk.changes()
    assert short(changes) == ["changed directory p", "added file p/x"]
    assert changes[0].before == sha256(b"file")


def test_a_file_in_place_of_a_directory_removes_what_was_in_it(disk: Disk) -> None:
    disk.commit("os.mkdir('p'); open('p/x', 'w').write('x')")
    disk.run("shutil.rmtree('p'); open('p', 'w').write('file')")

    changes = disk.changes()
    assert short(changes) == ["changed file p", "removed file p/x"]
    assert changes[0].before == ""


def test_what_a_run_made_and_removed_again_is_no_change(disk: Disk) -> None:
    disk.commit("open('keep', 'w').write('x')")
    disk.run("open('t', 'w').write('t'); os.unlink('t'); os.mkdir('d'); os.rmdir('d')")

    assert disk.changes() == []


def test_links_fifos_and_sockets_are_named_and_never_opened(disk: Disk) -> None:
    disk.run(
        """
        os.symlink('/etc/passwd', 'link'); os.mkfifo('fifo', 0o600)
        socket.socket(socket.AF_UNIX).bind('socket')
        """
    )

    changes = disk.changes()
    assert short(changes) == ["added fifo fifo", "added symlink link", "added socket socket"]
    assert (changes[1].target, changes[1].sha256) == ("/etc/passwd", "")


def test_each_name_of_a_hard_link_is_a_file(disk: Disk) -> None:
    disk.run("open('a', 'wb').write(b'x' * 300_000); os.link('a', 'b')")

    assert [(c.path, c.sha256) for c in disk.changes()] == [(name, sha256(b"x" * 300_000)) for name in "ab"]


def test_a_sparse_file_has_the_digest_of_its_zeros_too(disk: Disk) -> None:
    disk.run("f = open('s', 'wb'); f.seek(3_000_000); f.write(b'x'); f.truncate(5_000_001)")

    (change,) = disk.changes()
    assert change.sha256 == sha256(bytes(3_000_000) + b"x" + bytes(2_000_000))
    assert change.bytes == 5_000_001


def test_more_than_can_be_hashed_is_refused_by_name(disk: Disk) -> None:
    disk.run("open('huge', 'w').write('x'); open('small', 'w').write('x')")
    os.truncate(disk.stage / "data/huge", 1 << 40)

    with pytest.raises(TooLarge, match="huge"):
        disk.changes()


def test_many_sparse_files_count_together_and_one_inode_once(disk: Disk) -> None:
    disk.run("[open(n, 'wb').truncate(700) for n in 'ab']; os.link('b', 'c')")

    assert len(layers.read_changes(disk.stage, disk.files, {}, limit_bytes=1400)) == 3
    with pytest.raises(TooLarge, match="b: "):
        layers.read_changes(disk.stage, disk.files, {}, limit_bytes=1399)


def test_names_that_are_no_text_come_through(disk: Disk) -> None:
    disk.run(r"open(b'\xff\n\\', 'w').write('x'); open('caf\u00e9', 'w').write('y')")

    assert [change.path for change in disk.changes()] == ["café", "\\xff\\n\\\\"]


def test_files_outside_of_data_are_not_hashed(disk: Disk) -> None:
    disk.commit("os.mkdir('../tmp/d'); open('../tmp/d/x', 'w').write('x')")
    disk.run("open('../home/h', 'w').write('hh'); shutil.rmtree('../tmp/d')")

    removed, added = disk.changes()
    assert (removed.area, removed.action, removed.path) == ("tmp", "removed", "d")
    assert (added.area, added.path, added.sha256, added.bytes) == ("home", "h", "", 2)


def test_the_mode_of_the_workspace_itself_is_a_change_of_the_dot(disk: Disk) -> None:
    disk.run("os.chmod('.', 0o750)")

    assert [(c.action, c.kind, c.path, c.mode) for c in disk.changes()] == [("changed", "directory", ".", 0o750)]


def test_what_a_guest_closes_to_itself_is_read_and_left_closed(disk: Disk) -> None:
    disk.run("os.mkdir('d'); open('d/a', 'w').write('x'); os.chmod('d/a', 0); os.chmod('d', 0)")

    changes = disk.changes()
    assert [(change.path, change.mode) for change in changes] == [("d", 0), ("d/a", 0)]
    assert changes == disk.changes()
    assert stat.S_IMODE((disk.stage / "data/d").stat().st_mode) == 0


def test_a_path_longer_than_linux_takes_is_refused_in_words(disk: Disk) -> None:
    (disk.stage / "data").mkdir()
    here = os.open(disk.stage / "data", os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("dd", dir_fd=here)
        below = os.open("dd", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)

    with pytest.raises(Unreadable, match="at most 4,096 are kept"):
        disk.changes()


def test_names_without_end_are_refused(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "LIMIT_PATHS_BYTES", 100)
    disk.run("[open('n' * 60 + str(i), 'w') for i in range(2)]")

    with pytest.raises(TooLarge):
        disk.changes()


def test_changes_without_end_are_refused(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "LIMIT_CHANGES", 10)
    disk.run("[open(str(i), 'w') for i in range(10)]")
    assert len(disk.changes()) == 10

    disk.run("open('one more', 'w')")
    with pytest.raises(TooLarge, match="a run may change 10 files"):
        disk.changes()


def test_what_cannot_be_hashed_in_time_is_refused_in_words(disk: Disk) -> None:
    disk.run("open('hole', 'w').write('x')")
    os.truncate(disk.stage / "data/hole", 1 << 40)

    with pytest.raises(Unreadable, match="give it a longer timeout"):
        layers.read_changes(disk.stage, disk.files, {}, limit_bytes=1 << 41, until=time.monotonic())


def test_a_mark_that_a_guest_set_itself_means_nothing(disk: Disk) -> None:
    disk.commit("os.mkdir('d'); open('d/a', 'w').write('x')")
    forged = "user" if os.geteuid() == 0 else "trusted"
    disk.run("open('d/b', 'w').write('y')")
    if forged == "user":
        os.setxattr(disk.stage / "data/d", "user.overlay.opaque", b"y")

    assert short(disk.changes()) == ["added file d/b"]


@pytest.mark.skipif(os.geteuid() != 0, reason="trusted marks are root's")
def test_a_whiteout_by_mark_is_one_where_its_directory_says_so(disk: Disk) -> None:
    disk.commit("open('a', 'w').write('x'); open('b', 'w').write('y')")
    data: Path = disk.stage / "data"
    data.mkdir(parents=True)
    data.chmod(stat.S_IMODE((disk.files / "data").stat().st_mode))
    for name in "ab":
        (data / name).touch()
    os.setxattr(data / "a", "trusted.overlay.whiteout", b"y")

    assert short(disk.changes()) == ["changed file a", "changed file b"]
    os.setxattr(data, "trusted.overlay.opaque", b"x")
    assert short(disk.changes()) == ["removed file a", "changed file b"]
