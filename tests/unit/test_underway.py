"""Which directories are looked at for killed jobs, and which never."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast import underway
from holdfast.cli.telling import _finish_killed
from holdfast.errors import HomeBusy
from holdfast.home import acquire_shared


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    return home


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    directory.mkdir()
    return directory


def enter(home: Path, directory: Path) -> Path:
    """By a process that then dies; the entry."""
    code = (
        "import sys; from pathlib import Path; from holdfast import underway\n"
        "from holdfast.home import acquire_shared\n"
        "underway.enter(acquire_shared(Path(sys.argv[1]), Path(sys.argv[2])))"
    )
    subprocess.run([sys.executable, "-c", code, directory, home], check=True)
    (entry,) = (home / "jobs").iterdir()
    return entry


def test_a_home_without_jobs_has_nothing_to_look_at(home: Path) -> None:
    assert list(underway.abandoned(home)) == []
    assert list(home.iterdir()) == [], "and looking leaves nothing"


def test_the_job_of_a_process_that_died_is_found_until_it_is_done(home: Path, directory: Path) -> None:
    enter(home, directory)

    assert list(underway.abandoned(home)) == [directory]
    assert list(underway.abandoned(home)) == [directory]
    underway.leave(home, directory)
    assert list(underway.abandoned(home)) == []


def test_a_job_of_a_living_process_is_left_alone(home: Path, directory: Path) -> None:
    owned = acquire_shared(directory, home)
    try:
        underway.enter(owned)
        assert list(underway.abandoned(home)) == []
    finally:
        owned.release()


def test_a_number_that_another_process_has_now_does_not_keep_a_job_alive(home: Path, directory: Path) -> None:
    entry = enter(home, directory)
    told = msgspec.json.decode(entry.read_bytes(), type=underway.Entry)
    entry.write_bytes(msgspec.json.encode(msgspec.structs.replace(told, process=os.getpid())))

    assert list(underway.abandoned(home)) == [directory]


def test_a_directory_that_is_another_now_is_forgotten(home: Path, directory: Path) -> None:
    enter(home, directory)
    (directory / ".holdfast/id").write_text("another\n")

    assert list(underway.abandoned(home)) == []
    assert list((home / "jobs").iterdir()) == []


def test_a_directory_that_is_away_is_remembered_for_a_month(home: Path, directory: Path) -> None:
    entry = enter(home, directory)
    directory.rename(directory.with_name("away"))
    assert list(underway.abandoned(home)) == []
    assert entry.exists()

    told = msgspec.json.decode(entry.read_bytes(), type=underway.Entry)
    entry.write_bytes(msgspec.json.encode(msgspec.structs.replace(told, at=told.at - 31 * 86400)))
    assert list(underway.abandoned(home)) == []
    assert not entry.exists()


@pytest.mark.parametrize("how", ["linked", "open to all", "open register", "not its name", "no JSON", "a FIFO"])
def test_what_somebody_else_could_have_written_is_not_followed(home: Path, directory: Path, how: str) -> None:
    entry = enter(home, directory)
    if how == "linked":
        entry.rename(home / "planted")
        entry.symlink_to(home / "planted")
    elif how == "open to all":
        entry.chmod(0o666)
    elif how == "open register":
        entry.parent.chmod(0o777)
    elif how == "not its name":
        entry.rename(entry.with_name("0" * 32))
    elif how == "no JSON":
        entry.write_bytes(b"\xff")
    else:
        entry.unlink()
        os.mkfifo(entry)

    assert list(underway.abandoned(home)) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="takes two users")
@pytest.mark.parametrize("whose", ["entry", "register", "left by jobs"])
def test_what_another_user_owns_is_not_followed(home: Path, directory: Path, whose: str) -> None:
    entry = enter(home, directory)
    os.chown({"entry": entry, "register": entry.parent, "left by jobs": directory / ".holdfast"}[whose], 4242, 4242)

    assert list(underway.abandoned(home)) == []


def test_an_entry_goes_while_the_directory_is_owned(
    home: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it could be the entry of the next job, which has just begun there."""
    entry = enter(home, directory)
    leave = underway.leave

    def look(*where: Path) -> None:
        with pytest.raises(HomeBusy):
            acquire_shared(directory, home)
        leave(*where)

    monkeypatch.setattr(underway, "leave", look)
    _finish_killed(home)

    assert not entry.exists()
