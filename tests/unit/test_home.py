"""A home has one owner; what kept somebody from becoming it keeps nobody else, and no power cut shuts it for good."""

import json
from pathlib import Path

import pytest

from holdfast import durable
from holdfast.errors import DiskFull, HomeBusy
from holdfast.home import Home, acquire, acquire_shared


@pytest.fixture(params=[False, True], ids=["a home", "a directory of the user's"])
def is_shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def own(place: Path, *, is_shared: bool) -> Home:
    (place / "project").mkdir(exist_ok=True)
    return acquire_shared(place / "project", place / "home") if is_shared else acquire(place / "home")


def test_a_home_has_one_owner_and_counts_them(tmp_path: Path, is_shared: bool) -> None:
    first = own(tmp_path, is_shared=is_shared)
    with pytest.raises(HomeBusy, match="in use by process"):
        own(tmp_path, is_shared=is_shared)
    first.release()
    second = own(tmp_path, is_shared=is_shared)
    second.release()

    assert (second.id, second.epoch) == (first.id, first.epoch + 1)


def test_who_finds_no_room_to_write_himself_down_may_try_again(
    tmp_path: Path, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DiskFull("the disk is full", hint="")

    with monkeypatch.context() as while_full:
        while_full.setattr(durable, "write_all", full)
        with pytest.raises(DiskFull):
            own(tmp_path, is_shared=is_shared)
    own(tmp_path, is_shared=is_shared).release()


@pytest.mark.parametrize("left", ["", "\n", "\0\0\0\0"])
def test_a_count_of_which_a_power_cut_left_nothing_begins_anew(tmp_path: Path, is_shared: bool, left: str) -> None:
    home = own(tmp_path, is_shared=is_shared)
    home.release()
    (home.path / "epoch").write_text(left)
    again = own(tmp_path, is_shared=is_shared)
    again.release()

    assert (again.id, again.epoch) == (home.id, 1)


@pytest.mark.parametrize("left", ["", "\n", "\0\0\0\0"])
def test_an_id_of_which_a_power_cut_left_nothing_is_made_anew(tmp_path: Path, left: str) -> None:
    """Of a home. In a directory of the user's it lasts before the mark that stands for it is made."""
    home = own(tmp_path, is_shared=False)
    home.release()
    (home.path / "id").write_text(left)
    again = own(tmp_path, is_shared=False)
    again.release()
    third = own(tmp_path, is_shared=False)
    third.release()

    assert again.id
    assert third.id == again.id


def test_what_names_a_home_lasts_before_anybody_owns_it(
    tmp_path: Path, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    sync_file = durable.sync_file

    def note(file: int) -> None:
        synced.append(file)
        sync_file(file)

    monkeypatch.setattr(durable, "sync_file", note)
    home = own(tmp_path, is_shared=is_shared)
    home.release()

    # In a directory of the user's there are the key, its chain, `.gitignore`, the journal and the mark besides.
    assert len(synced) == (9 if is_shared else 3), "place, id and epoch"
    assert not list(home.path.glob(f"{durable.TEMPORARY}*"))


@pytest.mark.parametrize(
    ("change", "is_copy"),
    [
        ({"boot": "another", "device": 1}, False),
        ({"device": 1}, True),
        ({"inode": 1}, True),
        ({"born_ns": 1}, True),
        ({"file_system": "ab"}, True),
    ],
    ids=[
        "a reboot changes the device number",
        "a disk mounted beside",
        "another inode",
        "another birth",
        "another UUID",
    ],
)
def test_a_copy_takes_a_new_id_and_a_reboot_is_no_copy(
    tmp_path: Path, change: dict[str, object], is_copy: bool
) -> None:
    home = own(tmp_path, is_shared=False)
    home.release()
    noted = json.loads((home.path / "place").read_bytes())
    if "file_system" in change and not noted["file_system"]:
        pytest.skip("this kernel does not tell UUIDs of file systems")
    (home.path / "place").write_text(json.dumps(noted | change))
    again = own(tmp_path, is_shared=False)
    again.release()
    third = own(tmp_path, is_shared=False)
    third.release()

    assert (again.id != home.id) == is_copy
    assert third.id == again.id


@pytest.mark.parametrize("left", [None, "", "damaged"])
def test_a_note_of_its_place_that_is_lost_costs_a_home_nothing(tmp_path: Path, left: str | None) -> None:
    home = own(tmp_path, is_shared=False)
    home.release()
    (home.path / "place").unlink() if left is None else (home.path / "place").write_text(left)
    again = own(tmp_path, is_shared=False)
    again.release()

    assert again.id == home.id


def test_a_deleted_or_replaced_lock_file_lets_nobody_in(tmp_path: Path, is_shared: bool) -> None:
    first = own(tmp_path, is_shared=is_shared)
    (first.path / "lock").unlink()
    with pytest.raises(HomeBusy):
        own(tmp_path, is_shared=is_shared)
    (first.path / "lock").write_text("")
    with pytest.raises(HomeBusy):
        own(tmp_path, is_shared=is_shared)
    first.release()
    own(tmp_path, is_shared=is_shared).release()
