"""Measuring a session's disk while its guest moves things about."""

import os
import stat
from pathlib import Path

import pytest

from holdfast.resources import measuring


def entries_in_order(directory: int) -> list[tuple[str, os.stat_result]]:
    with os.scandir(directory) as found:
        return sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in found)


def test_a_directory_that_is_moved_up_does_not_lead_out_of_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_entries", entries_in_order)  # so that the chain comes first, and the decoys wait
    outside = tmp_path / "decoy" / "secret"
    outside.parent.mkdir()
    outside.touch()
    deep = tmp_path / "stages" / "z" / "z" / "z"
    deep.mkdir(parents=True)
    (deep / "bottom").touch()
    for level in (deep, *deep.parents):
        if level.is_relative_to(tmp_path / "stages"):
            (level / "decoy").mkdir()

    bottom, seen = (deep / "bottom").stat().st_ino, set()
    with pytest.raises(measuring.Restless):  # noqa: PT012 (the walk itself raises)
        for status, _ in measuring._walk(tmp_path / "stages"):
            seen.add(status.st_ino)
            if status.st_ino == bottom and deep.exists():
                deep.rename(tmp_path / "stages" / "moved")

    assert outside.stat().st_ino not in seen
    assert (tmp_path / "stages" / "moved").exists()


def test_a_link_in_the_place_of_a_directory_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapped between the look and the change of its mode, as a guest can that runs meanwhile."""
    victim, shut, link = tmp_path / "victim", tmp_path / "shut", tmp_path / "link"
    victim.touch(mode=0o644)
    shut.mkdir(mode=0o000)
    link.symlink_to(victim)
    looked = os.stat(shut)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("os.stat", lambda *_, **__: looked)

    with pytest.raises(OSError, match="not supported"):
        measuring._enter(str(link))

    monkeypatch.undo()
    assert stat.S_IMODE(victim.stat().st_mode) == 0o644


def test_modes_are_put_back_also_where_a_directory_was_moved_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)  # root has no need to open what is shut
    shut, deep = tmp_path / "root" / "shut", tmp_path / "root" / "shut" / "b" / "c"
    deep.mkdir(parents=True)
    (deep / "bottom").touch()
    shut.chmod(0o500)

    bottom = (deep / "bottom").stat().st_ino
    with pytest.raises(measuring.Restless):  # noqa: PT012 (the walk itself raises)
        for status, _ in measuring._walk(tmp_path / "root"):
            if status.st_ino == bottom:
                deep.rename(tmp_path / "moved")

    assert stat.S_IMODE(shut.stat().st_mode) == 0o500


def test_holes_count_as_if_they_were_written_and_a_file_of_many_names_once(tmp_path: Path) -> None:
    """However a hole is made: by a truncate, by a seek, by a mapping, or dug into what was written."""
    (tmp_path / "truncated").touch()
    os.truncate(tmp_path / "truncated", 10 << 30)
    with (tmp_path / "sought").open("wb") as file:
        file.seek((1 << 30) - 1)
        file.write(b"x")
    for number in range(50):
        (tmp_path / f"link{number}").hardlink_to(tmp_path / "truncated")

    usage = measuring.measure([tmp_path])

    assert usage.size_bytes == 11 << 30
    assert usage.written_bytes < 1 << 20
    assert usage.files == 52


def test_the_list_of_all_files_counts_every_path_in_full(tmp_path: Path) -> None:
    (tmp_path / "ab" / "\udcffd").mkdir(parents=True)
    (tmp_path / "ab" / "\udcffd" / "e").touch()
    (tmp_path / "z").touch()

    paths = [b"ab", b"ab/\xffd", b"ab/\xffd/e", b"z"]
    assert measuring.measure([tmp_path]).list_bytes == sum(len(path) + 67 for path in paths)
