"""What every blob store does, and what the local one promises of its files."""

import hashlib
import io
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import durable
from holdfast.blobs.local import LocalBlobs
from holdfast.errors import SessionHalted

MIB = 2**20
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "blobs"
    place.mkdir()
    return place


@pytest.fixture
def blobs(place: Path) -> LocalBlobs:
    return LocalBlobs(place)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    files = tmp_path / "files"
    files.mkdir()
    return files


@pytest.fixture
def files_fd(files: Path) -> Iterator[int]:
    with durable.closing_fd(os.open(files, os.O_RDONLY)) as fd:
        yield fd


def blob_file(place: Path, digest: str) -> Path:
    return place / digest[:2] / digest


# -- putting and getting -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"abc", os.urandom(3 * MIB + 5), bytes(2 * MIB), bytes(MIB) + b"x" + bytes(MIB)])
def test_what_was_put_comes_back(blobs: LocalBlobs, data: bytes) -> None:
    assert blobs.put_stream(io.BytesIO(data)) == (sha256(data), len(data))

    assert blobs.has(sha256(data))
    with blobs.open(sha256(data)) as found:
        assert found.read() == data
    assert blobs.digests() == {sha256(data)}


def test_the_same_bytes_are_kept_once(blobs: LocalBlobs) -> None:
    assert blobs.put_bytes(b"same") == blobs.put_bytes(b"same") == sha256(b"same")
    assert blobs.digests() == {sha256(b"same")}


def test_a_blob_is_read_only_and_leaves_no_other_name(blobs: LocalBlobs, place: Path) -> None:
    digest = blobs.put_bytes(b"abc")

    assert stat.S_IMODE(blob_file(place, digest).stat().st_mode) == 0o400
    assert os.listdir(place) == [digest[:2]]


def test_an_empty_store_holds_nothing(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path / "not made yet")

    assert (blobs.digests(), blobs.size_bytes(), blobs.has("00" * 32)) == (set(), 0, False)


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "AB" * 32, "ab" * 32 + "\n"])
def test_what_is_no_digest_is_refused(blobs: LocalBlobs, digest: str) -> None:
    with pytest.raises(ValueError, match="no SHA-256"):
        blobs.has(digest)


def test_many_threads_may_put_at_once(blobs: LocalBlobs) -> None:
    texts = [f"{number % 20}".encode() for number in range(100)]
    threads = [threading.Thread(target=blobs.put_bytes, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert blobs.digests() == {sha256(text) for text in texts}


@pytest.mark.parametrize("step", ["create", "write", "sync_file", "mkdir", "rename", "sync_directory"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_leaves_the_whole_blob_or_none(blobs: LocalBlobs, place: Path, step: str, when: str) -> None:
    put = "import sys; from pathlib import Path; from holdfast.blobs.local import LocalBlobs\n"
    put += "LocalBlobs(Path(sys.argv[1])).put_bytes(b'abc')"

    child = subprocess.run(
        [sys.executable, "-c", put, str(place)], env=os.environ | {"HOLDFAST_CRASH_AT": f"durable.{step}.{when}"}
    )

    assert child.returncode == -signal.SIGKILL
    for digest in blobs.digests():
        assert blob_file(place, digest).read_bytes() == b"abc"
    blobs.sweep()
    assert blobs.put_bytes(b"abc") in blobs.digests()
    assert os.listdir(place) == [sha256(b"abc")[:2]]


# -- copying out -------------------------------------------------------------------------------------------------


def test_a_copy_replaces_a_file_and_has_the_mode_that_was_asked_for(
    blobs: LocalBlobs, files: Path, files_fd: int
) -> None:
    (files / "a").write_text("old")

    blobs.copy_to(blobs.put_bytes(b"new"), files_fd, b"a", mode=0o4751, owner=None)

    assert (files / "a").read_bytes() == b"new"
    assert stat.S_IMODE((files / "a").stat().st_mode) == 0o4751
    assert os.listdir(files) == ["a"]


def test_a_copy_replaces_a_link_and_not_what_it_points_to(blobs: LocalBlobs, files: Path, files_fd: int) -> None:
    (files / "target").write_text("untouched")
    (files / "a").symlink_to("target")

    blobs.copy_to(blobs.put_bytes(b"new"), files_fd, "a", mode=0o644, owner=None)

    assert (files / "target").read_text() == "untouched"


@root_only
def test_a_copy_belongs_to_whom_it_is_for(blobs: LocalBlobs, files: Path, files_fd: int) -> None:
    blobs.copy_to(blobs.put_bytes(b"new"), files_fd, "a", mode=0o6755, owner=(65534, 65534))

    status = (files / "a").stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (65534, 65534, 0o6755)


def test_a_copy_of_zeros_takes_no_room(blobs: LocalBlobs, files: Path, files_fd: int) -> None:
    with (files / "sparse").open("wb") as file:
        file.truncate(64 * MIB)
    with (files / "sparse").open("rb") as file:
        digest, size = blobs.put_stream(file)

    blobs.copy_to(digest, files_fd, "copy", mode=0o644, owner=None)

    assert (files / "copy").stat().st_size == size == 64 * MIB
    assert (files / "copy").stat().st_blocks * 512 + blobs.size_bytes() < MIB


def test_a_flipped_bit_goes_nowhere(blobs: LocalBlobs, place: Path, files: Path, files_fd: int) -> None:
    digest = blobs.put_bytes(b"abc")
    blob_file(place, digest).chmod(0o600)
    blob_file(place, digest).write_bytes(b"abb")

    with pytest.raises(SessionHalted, match=f"blob {digest} holds other bytes"):
        blobs.copy_to(digest, files_fd, "a", mode=0o644, owner=None)
    assert os.listdir(files) == []

    blobs.put_bytes(b"abc")
    blobs.copy_to(digest, files_fd, "a", mode=0o644, owner=None)


def test_a_missing_blob_is_named(blobs: LocalBlobs, files_fd: int) -> None:
    with pytest.raises(SessionHalted, match="ab" * 32):
        blobs.copy_to("ab" * 32, files_fd, "a", mode=0o644, owner=None)


# -- adopting ----------------------------------------------------------------------------------------------------


def test_an_adopted_file_is_not_copied_and_becomes_the_hosts(
    blobs: LocalBlobs, place: Path, files: Path, files_fd: int
) -> None:
    (files / "a").write_bytes(b"old")
    (files / "a").chmod(0o000)
    if os.geteuid() == 0:
        os.chown(files / "a", 65534, 65534)
    inode = (files / "a").stat().st_ino

    blobs.adopt(files_fd, b"a", sha256(b"old"))
    os.unlink(files / "a")

    status = blob_file(place, sha256(b"old")).stat()
    assert (status.st_ino, status.st_uid, stat.S_IMODE(status.st_mode)) == (inode, os.geteuid(), 0o400)
    assert status.st_nlink == 1


def test_a_file_is_adopted_again_to_no_effect_also_when_it_is_gone(
    blobs: LocalBlobs, files: Path, files_fd: int
) -> None:
    (files / "a").write_bytes(b"old")
    blobs.adopt(files_fd, b"a", sha256(b"old"))
    blobs.adopt(files_fd, b"a", sha256(b"old"))
    os.unlink(files / "a")
    blobs.adopt(files_fd, b"a", sha256(b"old"))

    assert blobs.digests() == {sha256(b"old")}


def test_a_file_with_other_names_is_copied_and_they_stay_the_guests(
    blobs: LocalBlobs, files: Path, files_fd: int
) -> None:
    (files / "a").write_bytes(b"old")
    os.link(files / "a", files / "b")
    mode = (files / "b").stat().st_mode

    blobs.adopt(files_fd, b"a", sha256(b"old"))
    (files / "b").write_bytes(b"written by the guest")

    assert (files / "b").stat().st_mode == mode
    with blobs.open(sha256(b"old")) as kept:
        assert kept.read() == b"old"


def test_a_file_of_another_file_system_is_copied(blobs: LocalBlobs, place: Path) -> None:
    shared = Path("/dev/shm")
    if shared.stat().st_dev == place.stat().st_dev:
        pytest.skip("one file system for all")
    with tempfile.TemporaryDirectory(dir=shared) as far, durable.closing_fd(os.open(far, os.O_RDONLY)) as fd:
        (Path(far) / "a").write_bytes(b"far away")
        blobs.adopt(fd, b"a", sha256(b"far away"))

    assert blob_file(place, sha256(b"far away")).read_bytes() == b"far away"


def test_a_copy_whose_bytes_are_others_is_not_taken(blobs: LocalBlobs, files: Path, files_fd: int) -> None:
    (files / "a").write_bytes(b"changed behind our back")
    os.link(files / "a", files / "b")

    with pytest.raises(SessionHalted, match=sha256(b"old")):
        blobs.adopt(files_fd, b"a", sha256(b"old"))
    assert blobs.digests() == set()


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_only_regular_files_are_adopted(blobs: LocalBlobs, files: Path, files_fd: int, kind: str) -> None:
    if kind == "symlink":
        (files / "a").symlink_to("/etc/passwd")
    elif kind == "fifo":
        os.mkfifo(files / "a")
    else:
        (files / "a").mkdir()

    with pytest.raises(ValueError, match="regular files"):
        blobs.adopt(files_fd, b"a", sha256(b"old"))


ADOPT = """
import os, sys
from pathlib import Path
from holdfast.blobs.local import LocalBlobs
LocalBlobs(Path(sys.argv[1])).adopt(os.open(sys.argv[2], os.O_RDONLY), b"a", sys.argv[3])
"""


@pytest.mark.parametrize("step", ["mkdir", "link", "sync_directory"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_adoption_cut_short_can_be_done_again(
    blobs: LocalBlobs, place: Path, files: Path, files_fd: int, step: str, when: str
) -> None:
    (files / "a").write_bytes(b"old")
    child = subprocess.run(
        [sys.executable, "-c", ADOPT, place, files, sha256(b"old")],
        env=os.environ | {"HOLDFAST_CRASH_AT": f"durable.{step}.{when}"},
    )

    blobs.adopt(files_fd, b"a", sha256(b"old"))

    assert child.returncode == -signal.SIGKILL
    status = blob_file(place, sha256(b"old")).stat()
    assert (status.st_ino, stat.S_IMODE(status.st_mode)) == ((files / "a").stat().st_ino, 0o400)


# -- keeping house -----------------------------------------------------------------------------------------------


def test_what_is_not_kept_is_forgotten_and_the_room_counted(blobs: LocalBlobs) -> None:
    kept, gone = blobs.put_bytes(os.urandom(100_000)), blobs.put_bytes(os.urandom(MIB))
    before = blobs.size_bytes()

    freed = blobs.forget({kept})

    assert blobs.digests() == {kept}
    assert not blobs.has(gone)
    assert freed >= MIB
    assert blobs.size_bytes() == before - freed


def test_unfinished_files_are_no_blobs_and_are_swept(blobs: LocalBlobs, place: Path) -> None:
    (place / f"{durable.TEMPORARY}0123").write_bytes(b"half")
    assert (blobs.digests(), blobs.size_bytes()) == (set(), 0)

    blobs.sweep()

    assert os.listdir(place) == []
