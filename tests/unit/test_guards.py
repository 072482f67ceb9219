"""The disk's limit, where others delete as much as a session writes: the file system's counters do not tell then."""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast import guards
from holdfast.config import Limits
from holdfast.guards import DiskGuard
from holdfast.kernel.outcomes import Stop
from holdfast.resources.measuring import Restless, Usage, measure
from holdfast.resources.workspace import Workspace

MIB = 1 << 20


async def nothing_to_give_up() -> bool:
    return False


class Session:
    """Moves things about, until it is held still."""

    moves, held = False, 0

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        self.moves, before = False, self.moves
        self.held += 1
        yield
        self.moves = before


def grow(path: Path, size_bytes: int) -> Path:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    return path


class Disk:
    """A session's, with a limit of 32 MiB, of which 40 are written while somebody else deletes 80."""

    def __init__(self, path: Path) -> None:
        self.session = Session()
        self.processes = 0
        self.others = grow(path / "others", 80 * MIB)
        self.workspace = Workspace(path / "session")
        self.workspace.create(owner=None)
        self.stage = self.workspace.stage_path(self.workspace.new_stage())
        self.guard = DiskGuard(
            self.workspace,
            lambda: [os.getpid()] * self.processes,
            Limits(disk_bytes=32 * MIB),
            make_room=nothing_to_give_up,
            still=self.session.still,
        )

    def write(self) -> None:
        (self.stage / "data").mkdir(exist_ok=True)
        grow(self.stage / "data" / "big", 40 * MIB)
        self.others.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


async def test_a_run_that_is_over_answers_for_what_lies_in_its_layer(disk: Disk) -> None:
    await disk.guard.take_stock()
    assert await disk.guard.at_end(disk.stage) is None

    disk.write()
    stop = await disk.guard.at_end(disk.stage)

    assert stop is not None
    assert "the session's disk holds 40 MiB, and its limit is 32 MiB" in stop.message


async def test_a_run_that_wrote_little_is_counted_although_others_deleted_more(disk: Disk) -> None:
    """What is mapped and no longer in the layer is found by a whole look alone."""
    await disk.guard.take_stock()
    before = disk.session.held
    (disk.stage / "data").mkdir()
    disk.others.unlink()

    grow(disk.stage / "data" / "small", MIB // 2)
    assert await disk.guard.at_end(disk.stage) is None
    assert disk.session.held == before
    grow(disk.stage / "data" / "noticeable", MIB)
    assert await disk.guard.at_end(disk.stage) is None
    assert disk.session.held == before + 1


async def test_holes_count_for_the_limit_and_the_words_say_so(disk: Disk) -> None:
    await disk.guard.take_stock()
    (disk.stage / "data").mkdir()
    (disk.stage / "data" / "hole").touch()
    os.truncate(disk.stage / "data" / "hole", 40 * MIB)
    stop = await disk.guard.at_end(disk.stage)

    assert stop is not None
    assert "an apparent size of 40 MiB, of which 0 MiB are written and the rest are holes" in stop.message


async def test_empty_files_under_long_paths_pass_a_limit_of_their_own(disk: Disk) -> None:
    await disk.guard.take_stock()
    (disk.stage / "data").mkdir()
    for number in range(2_000):
        (disk.stage / "data" / f"{number:0>250}").touch()
    assert await disk.guard.at_end(disk.stage) is None

    (disk.stage / "data" / ("d" * 250)).mkdir()
    for number in range(1_500):
        (disk.stage / "data" / ("d" * 250) / f"{number:0>250}").touch()
    stop = await disk.guard.at_end(disk.stage)

    assert stop is not None
    assert "paths so long that a list of them takes" in stop.message
    assert "its limit is 1,024 KiB" in stop.message


async def test_a_run_that_goes_on_is_looked_at_from_time_to_time(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_LOOK_ANYWAY_S", 0.01)
    await disk.guard.take_stock()
    disk.write()

    stop: Stop | None = None
    give_up_at = time.monotonic() + 20
    while stop is None and time.monotonic() < give_up_at:
        stop = await disk.guard()

    assert stop is not None
    assert "its limit is 32 MiB" in stop.message


@pytest.mark.parametrize(("processes", "held"), [(2, 0), (200, 1)])
async def test_a_crowd_is_held_still_for_every_look(disk: Disk, processes: int, held: int) -> None:
    await disk.guard.take_stock()
    disk.session.held, disk.processes = 0, processes
    grow(disk.workspace.path / "others", 20 * MIB)  # much is written, and it is not time yet to look in any case

    assert await disk.guard() is None
    assert disk.session.held == held


async def test_who_moves_directories_about_is_measured_while_he_is_held_still(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(_: object = ()) -> Usage:
        if disk.session.moves:
            raise Restless
        return measure([disk.stage])

    monkeypatch.setattr(disk.workspace, "usage", usage)
    await disk.guard.take_stock()
    disk.session.moves = True
    disk.write()
    stop = await disk.guard.at_end(disk.stage)

    assert stop is not None
    assert "holds 40 MiB" in stop.message
    assert disk.session.moves
