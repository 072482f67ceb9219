"""What is counted of a directory that is not ours, and what is hashed again."""

import hashlib
import os
from pathlib import Path

import pytest

from holdfast.resources import census, hashing
from holdfast.resources.census import Census


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    (directory / "sub").mkdir(parents=True)
    (directory / ".holdfast").mkdir()
    (directory / "sub/.holdfast").mkdir()
    for name in ("a", "sub/b", ".holdfast/own", "sub/.holdfast/own"):
        (directory / name).write_text(name)
    (directory / "link").symlink_to("a")
    os.mkfifo(directory / "fifo")
    return directory


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inodes whose bytes were read."""
    read: list[int] = []
    real = hashing._digest_and_close

    def digest(file: int, until: float) -> hashing.Digest:
        read.append(os.fstat(file).st_ino)
        return real(file, until)

    monkeypatch.setattr(hashing, "_digest_and_close", digest)
    return read


def take(directory: Path) -> Census:
    return census.take(directory, directory / ".holdfast/hashes")


def test_regular_files_are_counted_and_nothing_of_holdfasts(directory: Path) -> None:
    found = take(directory)

    assert {path: entry.sha256 for path, entry in found.files.items()} == {
        name: hashlib.sha256(name.encode()).hexdigest() for name in ("a", "sub/b")
    }


def test_a_digest_is_kept_once_the_file_is_at_rest_and_not_before(
    directory: Path, hashed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    take(directory)
    take(directory)
    assert len(hashed) == 4, "both had just been written: another write could have had the same time"

    later = census._clock_ns(directory / ".holdfast/hashes") + 3_000_000_000
    monkeypatch.setattr(census, "_clock_ns", lambda cache: later)
    take(directory)
    hashed.clear()
    take(directory)
    assert hashed == []

    os.utime(directory / "a")
    (directory / "new").write_text("new")
    assert take(directory).files.keys() == {"a", "new", "sub/b"}
    assert sorted(hashed) == sorted((directory / name).stat().st_ino for name in ("a", "new"))


def test_a_file_with_the_old_size_and_time_is_still_seen_to_be_another(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(census, "_clock_ns", lambda cache: 1 << 62)
    before, times = take(directory), (directory / "a").stat()
    (directory / "a").write_text("b")
    os.utime(directory / "a", ns=(times.st_atime_ns, times.st_mtime_ns))

    assert before.disturbed() == {"a"}
    assert take(directory).files["a"].sha256 == hashlib.sha256(b"b").hexdigest()


def test_a_damaged_cache_is_no_cache(directory: Path) -> None:
    (directory / ".holdfast/hashes").write_bytes(b"\xff not msgpack")

    assert take(directory).files.keys() == {"a", "sub/b"}


def test_what_was_added_changed_or_removed_since_is_told(directory: Path) -> None:
    before = take(directory)
    assert before.disturbed() == set()

    (directory / "a").unlink()
    (directory / "sub/b").write_text("other")
    (directory / "sub/new").write_text("new")

    assert before.disturbed() == {"a", "sub/b", "sub/new"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_is_closed_to_the_caller_is_not_opened_by_force(directory: Path) -> None:
    (directory / "a").chmod(0)
    (directory / "sub").chmod(0)

    assert take(directory).files == {}
    assert [(directory / name).stat().st_mode & 0o777 for name in ("a", "sub")] == [0, 0]
    (directory / "sub").chmod(0o700)
