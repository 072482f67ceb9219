"""What must hold of a home whose owner was killed, once another has opened it."""

import hashlib
import os
import stat
from pathlib import Path

from tests.crash.hosts import Told

from holdfast import ckpt, durable, manifest
from holdfast.receipts import receipt
from holdfast.records import FileEntry, Settled, requests_sent
from holdfast.store.sqlite import Store
from holdfast.verify import check_in_home


def check_recovered(
    home: Path, before: Told, after: Told, files: dict[str, str], *, moved: bool, taken_back: set[str]
) -> None:
    """That a session is where one state of its scenario leaves it, and not between two of them. `taken_back` are names
    that it is to forget when it moves."""
    assert after.files == files
    assert after.version == before.version + moved
    check_memory(before, after, taken_back=taken_back if moved else set())
    assert after.ckpt == ckpt_of(after)
    check_books(home, after)
    check_residue(home, after)


def check_memory(before: Told, after: Told, *, taken_back: set[str]) -> None:
    assert after.generation > before.generation
    assert after.live == []
    assert set(after.labels) >= set(before.live) - taken_back
    assert not set(after.labels) & taken_back
    assert set(after.labels.values()) == {"recomputable"}
    assert "restarted" in after.cause


def check_books(home: Path, told: Told) -> None:
    store = Store(home / "journal.sqlite3", read_only=True)
    try:
        assert store.unsettled() == []
        for run in store.runs(told.session):
            records = store.records(run)
            assert [type(record) for record in records].count(Settled) == 1
            assert isinstance(records[-1], Settled)
            assert records[-1].receipt_sha256 in {row.sha256 for row in store.receipt(run)}
            egress = receipt(store.receipt(run)[-1].envelope).facts().egress
            assert [line for line in egress if not line.startswith("refused: ")] == requests_sent(records)
        losses = [lost.generation for lost in store.losses(told.session)]
        assert losses == sorted(set(losses))
        manifests = {row.manifest_sha256 for row in store.versions(told.session)}
        assert set(os.listdir(home / "sessions" / told.session / "manifests")) <= manifests
        report = check_in_home(store, told.session, home)
        assert report.ok, report.problem
        assert (report.version, report.unsettled) == (told.version, [])
    finally:
        store.close()


def check_residue(home: Path, told: Told) -> None:
    """Of the dead host nothing is left: no layer, no file that is not finished, no mount."""
    session = home / "sessions" / told.session
    assert set(os.listdir(session / "stages")) == {told.stage, f"{told.stage}.work"}
    left = (durable.TEMPORARY, ".holdfast-remove-", "removed-")
    assert [path for path in (*session.rglob("*"), *(home / "keys").iterdir()) if path.name.startswith(left)] == []
    assert str(home) not in Path("/proc/self/mountinfo").read_text()


def check_nothing_left(home: Path) -> None:
    """After a host that closed its home."""
    name = (home / "id").read_text().strip()
    assert [path for path, _, _ in os.walk("/sys/fs/cgroup") if name in path] == []
    assert str(home) not in Path("/proc/self/mountinfo").read_text()


def tree_of(home: Path, session: str) -> dict[str, str]:
    """What is committed in /mnt/data, /tmp and $HOME: of each path its kind, its mode, and what is there."""
    files = home / "sessions" / session / "files"
    return {str(path.relative_to(files)): f"{_mode(path)} {_content(path)}" for path in files.rglob("*")}


def _mode(path: Path) -> str:
    return stat.filemode(path.lstat().st_mode)


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"-> {path.readlink()}"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def ckpt_of(told: Told) -> str:
    """Worked out again, from the files alone: memory is empty."""
    entries = {path: FileEntry(path=path, sha256=sha256, bytes=0) for path, sha256 in told.files.items()}
    digest = manifest.digest(entries)
    return str(
        ckpt.make(told.session, generation=told.generation, version=told.version, manifest_sha256=digest, names={})
    )
