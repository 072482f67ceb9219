"""What a guest saw is what is committed; and a publish that was cut short anywhere ends in the same tree."""

import hashlib
import itertools
import os
import random
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from tests.unit.overlaid import Disk, Tree
from tests.unit.watched import WatchedDisk, watch

from holdfast.errors import SessionHalted
from holdfast.records import Change
from holdfast.resources import publish
from holdfast.resources.workspace import remove_tree

BEFORE = """
os.umask(0o022)
for name in ('keep', 'edit', 'drop', 'to_dir', 'touch'): open(name, 'w').write(name)
os.makedirs('tree/deep'); open('tree/deep/x', 'w').write('x'); open('tree/y', 'w').write('y')
os.mkdir('to_file'); open('to_file/in', 'w').write('in'); os.symlink('keep', 'link')
os.mkdir('../tmp/cache'); open('../tmp/cache/c', 'w').write('c')
"""
AFTER = """
os.umask(0o022)
open('edit', 'a').write('ed'); os.unlink('drop'); os.utime('touch', (5, 5))
os.unlink('to_dir'); os.mkdir('to_dir', 0o750); open('to_dir/new', 'w').write('new')
shutil.rmtree('to_file'); open('to_file', 'w').write('now a file')
shutil.rmtree('tree'); os.mkdir('tree'); open('tree/y', 'w').write('other')
os.unlink('link'); os.symlink('edit', 'link'); os.mkfifo('fifo'); open('a', 'w').write('a'); os.link('a', 'b')
shutil.rmtree('../tmp/cache'); open('../home/h', 'w').write('h')
"""
CHILD = """
import sys, msgspec
from pathlib import Path
from holdfast.blobs.local import LocalBlobs
from holdfast.records import Change
from holdfast.resources import publish
root = Path(sys.argv[1])
changes = msgspec.json.decode((root / "changes").read_bytes(), type=list[Change])
publish.publish(root / "stages/s1", root / "files", changes, LocalBlobs(root / "blobs"), redo=False)
"""
PREPARE = CHILD.rpartition("publish.publish")[0] + 'publish.prepare(root / "stages/s1", changes)'
POINTS = ["publish.kept", "publish.removed", "publish.made", "publish.renamed", "publish.synced", "publish.discarded"]
POINTS += [f"durable.{step}.after" for step in ("rename", "unlink", "link", "mkdir")]
POINTS += ["durable.rename.before", "durable.sync_directory.before"]


class Ready(NamedTuple):
    """A disk on which a run is about to be published."""

    disk: Disk
    changes: list[Change]
    seen: Tree

    def copy(self, path: Path) -> Disk:
        subprocess.run(["cp", "-a", self.disk.files.parent, path], check=True)
        return Disk(path)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    yield Disk(tmp_path)
    remove_tree(tmp_path)  # pytest could not: too deep, or closed


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    disk = Disk(tmp_path_factory.mktemp("ready"))
    disk.commit(BEFORE)
    seen, changes = disk.run(AFTER), disk.changes()
    publish.prepare(disk.stage, changes)
    remove_tree(disk.stage.with_name("s1.work"))  # closed to those who copy it
    (disk.files.parent / "changes").write_bytes(msgspec.json.encode(changes))
    return Ready(disk, changes, seen)


def test_what_the_guest_saw_is_committed(disk: Disk) -> None:
    disk.commit(BEFORE)
    seen = disk.commit(AFTER)

    assert disk.tree() == seen
    assert os.listdir(disk.stage.parent) == []


def test_old_contents_are_kept_by_their_digest(disk: Disk) -> None:
    disk.commit(BEFORE)
    old = {path: entry.sha256 for path, entry in disk.known.items()}
    disk.commit(AFTER)

    kept = {"edit", "drop", "to_dir", "to_file/in", "tree/deep/x", "tree/y"}
    assert disk.blobs.digests() == {old[path] for path in kept}
    with disk.blobs.open(old["edit"]) as file:
        assert file.read() == b"edit"


@pytest.mark.parametrize("redo", [False, True])
def test_what_was_edited_past_us_is_kept_under_no_false_digest(redo: bool, disk: Disk) -> None:
    disk.commit(
        "for name in ('edited', 'plain', 'gone', 'two'): open(name, 'w').write('old ' + name)\nos.link('two', 'b')"
    )
    disk.run("for name in ('edited', 'plain', 'two'): open(name, 'a').write('!')\nos.unlink('gone')")
    changes = disk.changes()
    for name in ("edited", "gone", "two"):
        (disk.files / "data" / name).write_text("by somebody else")
    disk.publish(changes, redo=redo)

    assert disk.blobs.digests() == {hashlib.sha256(b"old plain").hexdigest()}
    assert (disk.files / "data/edited").read_text() == "old edited!"


def test_nothing_is_kept_if_no_older_version_is(disk: Disk) -> None:
    disk.commit(BEFORE)
    disk.run(AFTER)
    publish.publish(disk.stage, disk.files, disk.changes(), disk.blobs, redo=False, keep_old=False)

    assert disk.blobs.digests() == set()


def test_a_redo_never_takes_the_new_content_for_the_old(disk: Disk) -> None:
    disk.commit("open('a', 'w').write('old')")
    disk.run("open('a', 'w').write('new')")
    changes = disk.changes()
    publish.publish(disk.stage, disk.files, changes, disk.blobs, redo=False, keep_old=False)
    publish.publish(disk.stage, disk.files, changes, disk.blobs, redo=True)

    assert disk.blobs.digests() == set()


def test_directories_keep_the_times_that_the_guest_saw(disk: Disk) -> None:
    disk.commit("os.mkdir('d')")
    disk.commit("open('d/x', 'w').write('x'); os.utime('d', (7, 7)); os.mkdir('e'); os.utime('e', (8, 8))")

    assert [(disk.files / "data" / name).stat().st_mtime for name in "de"] == [7, 8]


def test_a_second_publish_of_the_same_changes_finds_all_done(disk: Disk) -> None:
    disk.commit(BEFORE)
    seen = disk.run(AFTER)
    changes = disk.changes()
    for redo in (False, True, False):
        publish.publish(disk.stage, disk.files, changes, disk.blobs, redo=redo)

    assert disk.tree() == seen


@pytest.mark.parametrize("point", POINTS)
def test_a_publish_that_is_killed_is_finished_by_the_next(point: str, ready: Ready, tmp_path: Path) -> None:
    for times in itertools.count(1):
        disk = ready.copy(tmp_path / str(times))
        done = publish_in_child(disk, crash_at=f"{point}:{times}")
        if done == 0:
            break
        assert done == -signal.SIGKILL
        publish.publish(disk.stage, disk.files, ready.changes, disk.blobs, redo=True)
        assert disk.tree() == ready.seen, f"{point}:{times}"
        assert os.listdir(disk.stage.parent) == []
        assert {change.before for change in ready.changes if is_replaced(change)} <= disk.blobs.digests()
    assert times > 1, f"{point} was never passed"


def publish_in_child(disk: Disk, *, crash_at: str) -> int:
    command = [sys.executable, "-c", CHILD, disk.files.parent]
    return subprocess.run(command, env={**os.environ, "HOLDFAST_CRASH_AT": crash_at}, check=False).returncode


def is_replaced(change: Change) -> bool:
    return change.before not in ("", change.sha256)


# -- what is synced, and when: a kill cannot tell, because the page cache outlives it ----------------------------


@pytest.fixture
def watched_disk(tmp_path_factory: pytest.TempPathFactory) -> WatchedDisk:
    return watch(tmp_path_factory)


def write_changes(disk: Disk) -> Path:
    (disk.files.parent / "changes").write_bytes(msgspec.json.encode(disk.changes()))
    return disk.files.parent


def test_what_is_staged_is_synced_with_every_directory_above_it(disk: Disk, watched_disk: WatchedDisk) -> None:
    disk.run("os.mkdir('d'); open('d/a', 'w').write('x'); os.symlink('x', 'l')")
    root = write_changes(disk)
    watched_disk.run(PREPARE, root)

    assert watched_disk.steps(root / "stages") == [
        "fsync s1/data/d/a",
        *("fsync s1", "fsync s1/data", "fsync s1/data/d"),
        "fsync .",
    ]


def test_old_contents_last_before_a_name_changes_and_the_new_names_before_the_stage_goes(
    disk: Disk, watched_disk: WatchedDisk
) -> None:
    disk.commit("open('a', 'w').write('old'); os.mkdir('d'); open('d/gone', 'w').write('gone')")
    blobs = {f"fsync blobs/{disk.known[path].sha256[:2]}" for path in ("a", "d/gone")} | {"fsync blobs"}
    disk.run("open('a', 'w').write('new'); os.unlink('d/gone')")
    root = write_changes(disk)
    watched_disk.run(CHILD, root)

    steps = watched_disk.steps(root)
    first = steps.index("rename a")
    assert set(steps[:first]) == blobs
    assert steps[first + 1 : first + 3] == ["fsync files/data", "fsync files/data/d"]


def test_many_files_are_synced_at_one_go(disk: Disk, watched_disk: WatchedDisk) -> None:
    disk.run("[(os.mkdir(str(i)), open(f'{i}/x', 'w').write('x')) for i in range(20)]")
    root = write_changes(disk)
    watched_disk.run(PREPARE + "\n" + CHILD, root)

    syncs = [step for step in watched_disk.steps(root) if not step.startswith("rename ")]
    assert syncs == ["syncfs stages/s1", "syncfs files"]


def test_a_sync_that_fails_leaves_the_stage_for_the_redo(disk: Disk, watched_disk: WatchedDisk) -> None:
    seen = disk.run("open('a', 'w').write('x')")
    changes = disk.changes()
    watched_disk.failing.touch()
    said = watched_disk.run(
        f"try:\n{textwrap.indent(CHILD, ' ')}\nexcept Exception as e: print(e)", write_changes(disk)
    )

    assert "disk_failed" in said
    assert disk.stage.exists()
    disk.publish(changes, redo=True)
    assert disk.tree() == seen


# -- what is not as it was ---------------------------------------------------------------------------------------


def test_a_staged_file_that_changed_since_halts_the_redo_before_it_is_published(disk: Disk) -> None:
    disk.commit("open('a', 'w').write('old')")
    disk.run("open('a', 'w').write('new')")
    changes = disk.changes()
    (disk.stage / "data/a").write_text("bad")

    with pytest.raises(SessionHalted, match=f"data/a .*expected {changes[0].sha256}, found "):
        publish.publish(disk.stage, disk.files, changes, disk.blobs, redo=True)
    assert (disk.files / "data/a").read_text() == "old"


@pytest.mark.parametrize("redo", [True, False])
def test_a_file_that_is_neither_staged_nor_in_place_halts(redo: bool, disk: Disk) -> None:
    disk.run("open('a', 'w').write('new')")
    changes = disk.changes()
    (disk.stage / "data/a").unlink()

    with pytest.raises(SessionHalted, match="found nothing"):
        publish.publish(disk.stage, disk.files, changes, disk.blobs, redo=redo)


def test_a_published_file_that_changed_since_halts_the_redo(disk: Disk) -> None:
    disk.run("open('a', 'w').write('new'); os.symlink('x', 'l')")
    changes = disk.changes()
    publish.publish(disk.stage, disk.files, changes, disk.blobs, redo=False)
    (disk.files / "data/l").unlink()
    (disk.files / "data/l").symlink_to("elsewhere")

    with pytest.raises(SessionHalted, match="elsewhere"):
        publish.publish(disk.stage, disk.files, changes, disk.blobs, redo=True)


# -- whatever a guest does ---------------------------------------------------------------------------------------


def test_closed_directories_are_published_closed(disk: Disk) -> None:
    disk.commit("os.mkdir('d'); open('d/a', 'w').write('1'); os.chmod('d', 0o500)")
    disk.run("os.chmod('d', 0o700); open('d/b', 'w').write('2'); os.chmod('d/b', 0); os.chmod('d', 0)")
    disk.publish(disk.changes())

    directory = disk.files / "data/d"
    assert stat.S_IMODE(directory.stat().st_mode) == 0
    directory.chmod(0o700)
    assert sorted(os.listdir(directory)) == ["a", "b"]


def test_no_link_leads_a_publish_out_of_the_tree(disk: Disk, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (disk.files / "data/d").symlink_to(outside)
    (disk.stage / "data/d").mkdir(parents=True)
    (disk.stage / "data/d/x").write_text("x")

    publish.publish(disk.stage, disk.files, disk.changes(), disk.blobs, redo=False)

    assert os.listdir(outside) == []
    assert (disk.files / "data/d/x").read_text() == "x"


def test_discarding_what_is_not_there_is_fine(disk: Disk) -> None:
    publish.discard(disk.stage)
    publish.discard(disk.stage)

    assert os.listdir(disk.stage.parent) == []


OPERATIONS = """
import random
rng, names = random.Random(SEED), ['a', 'b', 'c', b'\\xff\\n'.decode(errors='surrogateescape')]
def path(): return '/'.join(rng.choice(names) for _ in range(rng.randint(1, 3)))
def remove(p): shutil.rmtree(p) if os.path.isdir(p) and not os.path.islink(p) else os.unlink(p)
def replace(p): remove(p); os.mkdir(p)
OPS = [
    lambda p: open(p, 'w').write(str(rng.random())), lambda p: open(p, 'a').write('more'), os.mkdir, remove, remove,
    lambda p: os.symlink(path(), p), lambda p: os.chmod(p, rng.choice([0o600, 0o644, 0o755, 0o700])),
    lambda p: os.rename(p, path()), lambda p: os.link(p, path()), lambda p: os.mkfifo(p), lambda p: os.utime(p, (9, 9)),
    lambda p: os.truncate(p, 5000), replace, os.makedirs, lambda p: open(p, 'a').close(),
]
for _ in range(60):
    os.chdir(merged + '/' + rng.choice(['data', 'data', 'data', 'tmp', 'home']))
    p = path()
    # No FIFO is opened: that would wait for ever.
    if os.path.exists(p) and stat.S_ISFIFO(os.stat(p).st_mode): remove(p)
    try: rng.choice(OPS)(p)
    except (OSError, shutil.Error): pass
"""


@pytest.mark.parametrize("seed", range(6))
def test_whatever_a_guest_does_is_committed_as_it_saw_it(seed: int, disk: Disk) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        seen = disk.commit(OPERATIONS.replace("SEED", str(rng.random())))
        assert disk.tree() == seen
        found = {path[5:]: about[2] for path, about in seen.items() if path.startswith("data/") and is_file(about)}
        assert {entry.path.encode(): entry.sha256 for entry in disk.known.values()} == {
            path.replace("\xff\n", "\\xff\\n").encode(): digest for path, digest in found.items()
        }


def is_file(about: list[int | str]) -> bool:
    return stat.S_ISREG(int(about[0]))
