"""Whether committed files are what was committed: only those whose sign is another are hashed."""

import hashlib
import os
from pathlib import Path

import pytest

from holdfast.records import Change, FileEntry
from holdfast.resources.descent import Tree
from holdfast.resources.intact import Intact


def entry(path: str, content: bytes) -> FileEntry:
    return FileEntry(path=path, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data" / "d").mkdir(parents=True)
    (tmp_path / "data" / "a").write_bytes(b"a")
    (tmp_path / "data" / "d" / "b").write_bytes(b"b")
    return tmp_path / "data"


KNOWN = {"a": entry("a", b"a"), "d/b": entry("d/b", b"b")}


def test_what_was_published_need_not_be_hashed(data: Path) -> None:
    intact = Intact(Tree(data.parent))
    assert intact.unsure(KNOWN, KNOWN) == ["a", "d/b"]
    intact.remember(
        [
            Change(path="a", action="added", sha256=KNOWN["a"].sha256, bytes=1),
            Change(path="d", action="added", kind="directory"),
            Change(path="d/b", action="changed", sha256=KNOWN["d/b"].sha256, bytes=1),
            Change(path="tmp", action="added", area="tmp"),
        ]
    )
    assert intact.unsure(KNOWN, KNOWN) == []
    (data / "a").unlink()
    intact.remember([Change(path="a", action="removed")])
    assert intact.unsure(["a"], {}) == []


def test_what_was_hashed_and_found_right_is_not_hashed_again_and_what_is_wrong_is(data: Path) -> None:
    intact = Intact(Tree(data.parent))
    assert intact.strange(["a", "d/b"], KNOWN) == {}
    assert intact.unsure(KNOWN, KNOWN) == []

    os.utime(data / "a", (0, 0))
    assert intact.unsure(KNOWN, KNOWN) == ["a"]
    assert intact.strange(["a"], KNOWN) == {}
    (data / "a").write_bytes(b"x")
    for _ in range(2):  # each time
        assert intact.unsure(KNOWN, KNOWN) == ["a"]
        assert intact.strange(["a"], KNOWN) == {"a": entry("a", b"x")}


def test_the_same_size_and_time_do_not_deceive(data: Path) -> None:
    intact = Intact(Tree(data.parent))
    intact.strange(["a"], KNOWN)
    before = (data / "a").stat()
    (data / "other").write_bytes(b"x")
    os.utime(data / "other", ns=(before.st_atime_ns, before.st_mtime_ns))
    (data / "other").rename(data / "a")

    assert intact.strange(intact.unsure(["a"], KNOWN), KNOWN) == {"a": entry("a", b"x")}


def test_what_is_missing_or_new_or_no_file_is_told_apart(data: Path) -> None:
    intact = Intact(Tree(data.parent))
    (data / "a").unlink()
    (data / "a").symlink_to("d/b")
    (data / "new").write_bytes(b"n")
    paths = ["a", "new", "d", "nothing", "a/b", "../etc/passwd", "nul\0", ""]

    unsure = intact.unsure(paths, KNOWN)
    assert unsure == ["a", "new"]
    assert intact.strange(unsure, KNOWN) == {"a": None, "new": entry("new", b"n")}
