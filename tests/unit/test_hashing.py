"""A digest is that of the whole file, however it lies on disk."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from holdfast.resources.hashing import Hasher, TooSlow, digest

MIB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, MIB + 1, 3 * MIB + 7])
def test_a_file_of_any_size(size: int, tmp_path: Path) -> None:
    content = os.urandom(size)
    (tmp_path / "f").write_bytes(content)

    assert digest_of(tmp_path / "f") == (hashlib.sha256(content).hexdigest(), size)


@pytest.mark.parametrize("stretches", [[], [0], [MIB], [0, 2 * MIB], [MIB, 3 * MIB], [5 * MIB - 1]])
def test_a_file_with_holes(stretches: list[int], tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as file:
        for offset in stretches:
            os.pwrite(file.fileno(), b"x", offset)
        file.truncate(5 * MIB)

    assert digest_of(tmp_path / "f")[0] == hashlib.sha256((tmp_path / "f").read_bytes()).hexdigest()


def test_many_files_at_once_keep_their_order(tmp_path: Path) -> None:
    contents = [os.urandom(10 if number % 3 else 300_000) for number in range(120)]
    with Hasher() as hasher:
        for number, content in enumerate(contents):
            (tmp_path / str(number)).write_bytes(content)
            hasher.add(os.open(tmp_path / str(number), os.O_RDONLY))
        assert [sha256 for sha256, _ in hasher.results()] == [hashlib.sha256(each).hexdigest() for each in contents]


def test_a_hasher_that_is_given_up_leaves_no_file_open(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(20 * MIB))
    before = os.listdir("/proc/self/fd")
    with Hasher() as hasher:
        for _ in range(20):
            hasher.add(os.open(tmp_path / "f", os.O_RDONLY))

    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_hashing_ends_when_its_time_is_over_holes_or_not(tmp_path: Path) -> None:
    (tmp_path / "written").write_bytes(bytes(20 * MIB))
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 40)
    began = time.monotonic()
    for name in ("written", "hole"):
        with Hasher(until=began) as hasher:
            hasher.add(os.open(tmp_path / name, os.O_RDONLY))
            with pytest.raises(TooSlow):
                hasher.results()


def digest_of(path: Path) -> tuple[str, int]:
    file = os.open(path, os.O_RDONLY)
    try:
        return digest(file)
    finally:
        os.close(file)
