"""A home has one owner; what kept somebody from becoming it keeps nobody else, and no power cut shuts it for good."""

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
