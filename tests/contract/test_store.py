"""What every store does. Another implementation joins by one more parameter of the fixture `store`."""

import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import DiskFailed, HoldfastError, InvalidSetting, SessionHalted
from holdfast.records import (
    AnyRecord,
    Change,
    Executed,
    FileEntry,
    Lost,
    Planned,
    RunCard,
    Saved,
    SavedFile,
    Settled,
    Verified,
)
from holdfast.store.rows import (
    AnyWrite,
    Append,
    DropSession,
    KeyRow,
    NameRow,
    PutFiles,
    PutKey,
    PutLost,
    PutNames,
    PutReceipt,
    PutResult,
    PutSession,
    PutVersion,
    ReceiptRow,
    SessionRow,
    VersionRow,
)
from holdfast.store.sqlite import Store

SHA = "ab" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite3"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    store = Store(path)
    yield store
    store.close()


def planned(run: str) -> Planned:
    card = RunCard(run=run, session="s1", goal="sum it", code_sha256=SHA, base="CKPT-s1-g1-v0-000000000000")
    return Planned(run=run, at=1.5, card=card, code="print('é\\n')", request_sha256=SHA)


def saved(run: str, step: str = "") -> Saved:
    return Saved(run=run, at=2.0, files=[SavedFile(path="a.csv", sha256=SHA, bytes=3, mode=0o755)], step=step)


def executed(run: str) -> Executed:
    return Executed(run=run, at=3.0, error_code=None, duration_s=0.25, strays=["sleep"])


def verified(run: str) -> Verified:
    change = Change(path="a.csv", action="added", sha256=SHA, bytes=3, mode=0o644)
    names = {"df": ("DataFrame", run), "old": ("", run)}
    return Verified(
        run=run, at=4.0, status="committed", version=1, stage="st1", changes=[change], names=names, receipt=b'{"a":1}'
    )


def settled(run: str) -> Settled:
    return Settled(run=run, at=5.0, status="committed", version=1, ckpt="CKPT", receipt_sha256=SHA)


def entry(path: str, *, size: int = 3) -> FileEntry:
    return FileEntry(path=path, sha256=SHA, bytes=size)


def session_row(session: str = "s1", *, created_at: float = 1.0, version: int = 0) -> SessionRow:
    settings: dict[str, int | float | str | None] = {
        "memory_bytes": 2**33,
        "mode": "strict",
        "cpus": 1.5,
        "age_s": None,
    }
    return SessionRow(id=session, created_at=created_at, generation=1, version=version, settings=settings)


def receipt_row(number: int, run: str, session: str = "s1") -> ReceiptRow:
    return ReceiptRow(session=session, number=number, run=run, sha256=f"{number:064x}", envelope=b"{}" * number)


def version_row(version: int, *, generation: int = 1) -> VersionRow:
    ckpt = f"CKPT-s1-g{generation}-v{version}-000000000000"
    return VersionRow(
        session="s1", version=version, generation=generation, ckpt=ckpt, run="r1", at=1.0, manifest_sha256=SHA
    )


def appended(*records: AnyRecord, session: str = "s1") -> list[AnyWrite]:
    return [Append(session=session, record=record) for record in records]


# -- records -----------------------------------------------------------------------------------------------------


def test_the_records_of_a_run_come_back_as_they_were_in_order(store: Store) -> None:
    records: list[AnyRecord] = [
        planned("r1"),
        saved("r1", "one"),
        saved("r1", "two"),
        executed("r1"),
        verified("r1"),
        settled("r1"),
    ]
    for record in records:
        store.write(appended(record))

    assert store.records("r1") == records
    assert store.records("unknown") == []


@pytest.mark.parametrize(
    ("before", "record"),
    [
        ([], executed("r1")),
        ([], settled("r1")),
        ([planned("r1")], planned("r1")),
        ([planned("r1")], verified("r1")),
        ([planned("r1"), executed("r1")], saved("r1")),
        ([planned("r1"), executed("r1"), verified("r1")], executed("r1")),
        ([planned("r1"), settled("r1")], settled("r1")),
    ],
)
def test_a_record_out_of_order_is_refused_and_nothing_beside_it_is_written(
    store: Store, before: list[AnyRecord], record: AnyRecord
) -> None:
    store.write(appended(*before))

    with pytest.raises(ValueError, match="cannot follow"):
        store.write([PutSession(session="s1", row=session_row()), *appended(record)])

    assert store.records("r1") == before
    assert store.sessions() == []


def test_a_run_belongs_to_the_session_that_planned_it(store: Store) -> None:
    store.write(appended(planned("r1")))

    with pytest.raises(ValueError, match="of session s1"):
        store.write(appended(executed("r1"), session="s2"))


def test_unsettled_runs_are_found_oldest_first(store: Store) -> None:
    store.write(appended(planned("z"), planned("m"), settled("m")))
    store.write(appended(planned("b"), session="s2"))
    store.write(appended(planned("a")))

    assert store.unsettled() == [("s1", "z"), ("s2", "b"), ("s1", "a")]
    assert store.unsettled("s1") == [("s1", "z"), ("s1", "a")]
    assert store.unsettled("s3") == []


def test_runs_are_listed_in_the_order_of_their_plans(store: Store) -> None:
    for run in ("c", "a", "b"):
        store.write(appended(planned(run)))
    store.write(appended(settled("c")))

    assert store.runs("s1") == ["c", "a", "b"]
    assert store.runs("s1", limit=2) == ["c", "a"]
    assert store.runs("s1", limit=2, newest_first=True) == ["b", "a"]


def test_one_refused_list_does_not_stop_the_others_of_a_transaction(store: Store) -> None:
    store.stage(appended(planned("r1")))
    with pytest.raises(ValueError, match="cannot follow"):
        store.stage(appended(planned("r2"), verified("r2")))
    store.stage(appended(executed("r1")))
    store.commit()

    assert store.records("r1") == [planned("r1"), executed("r1")]
    assert store.records("r2") == []


@pytest.mark.parametrize(
    "write",
    [
        PutResult(session="s1", run="\ud800", body=b""),
        PutFiles(session="s1", put=[entry("a", size=2**64)]),
        PutKey(session="s1", row=KeyRow(session="s1", key="k", run="r", request_sha256="", attempt=object())),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_stored_is_refused_as_a_whole(store: Store, write: AnyWrite) -> None:
    with pytest.raises(ValueError, match=r"."):
        store.write([*appended(planned("r1")), write])

    assert store.records("r1") == []


# -- the other rows ----------------------------------------------------------------------------------------------


def test_sessions_are_put_replaced_and_listed_by_age(store: Store) -> None:
    store.write([PutSession(session="b", row=session_row("b", created_at=1.0))])
    store.write([PutSession(session="a", row=session_row("a", created_at=2.0))])
    store.write([PutSession(session="b", row=session_row("b", created_at=1.0, version=7))])

    assert [row.id for row in store.sessions()] == ["b", "a"]
    assert store.session("b") == session_row("b", created_at=1.0, version=7)
    assert store.session("c") is None


def test_files_follow_the_changes(store: Store) -> None:
    odd = "caf\u00e9/\\xff\\n"
    store.write([PutFiles(session="s1", put=[entry("a"), entry("b"), entry(odd)])])
    store.write([PutFiles(session="s1", put=[entry("a", size=9), entry("c")], gone=["b", "never there"])])

    assert store.files("s1") == {"a": entry("a", size=9), odd: entry(odd), "c": entry("c")}
    assert store.files("s2") == {}


def test_names_follow_the_changes(store: Store) -> None:
    first, second = NameRow(type="int", run="r1", generation=1), NameRow(type="str", run="r2", generation=2)
    store.write([PutNames(session="s1", put={"x": first, "y": first})])
    store.write([PutNames(session="s1", put={"x": second}, gone=["y"])])

    assert store.names("s1") == {"x": second}


def test_receipts_come_in_the_order_of_their_numbers(store: Store) -> None:
    rows = [receipt_row(1, "r1"), receipt_row(2, "r2"), receipt_row(3, "r2")]
    for row in reversed(rows):
        store.write([PutReceipt(session="s1", row=row)])

    assert store.receipts("s1") == rows
    assert store.receipt("r2") == rows[1:]
    assert store.receipt("r3") == []


def test_a_receipt_never_replaces_another(store: Store) -> None:
    store.write([PutReceipt(session="s1", row=receipt_row(1, "r1"))])

    with pytest.raises(ValueError, match="receipts"):
        store.write([PutReceipt(session="s1", row=receipt_row(1, "r2"))])

    assert store.receipts("s1") == [receipt_row(1, "r1")]


def test_versions_come_newest_first_and_follow_a_reset(store: Store) -> None:
    for version in (0, 1, 2, 10):
        store.write([PutVersion(session="s1", row=version_row(version))])
    store.write([PutVersion(session="s1", row=version_row(10, generation=2))])

    assert [row.version for row in store.versions("s1")] == [10, 2, 1, 0]
    assert store.versions("s1", limit=1) == [version_row(10, generation=2)]
    assert store.version("s1", 2) == version_row(2)
    assert store.version("s1", 3) is None


def test_a_key_stands_for_its_latest_run(store: Store) -> None:
    for attempt, run in enumerate(("r1", "r2"), 1):
        row = KeyRow(session="s1", key="pay", run=run, request_sha256=SHA, attempt=attempt)
        store.write([PutKey(session="s1", row=row), PutResult(session="s1", run=run, body=run.encode())])

    assert store.key("s1", "pay") == KeyRow(session="s1", key="pay", run="r2", request_sha256=SHA, attempt=2)
    assert store.key("s2", "pay") is None
    assert store.result("r1") == b"r1"
    assert store.result("r3") is None


def test_losses_are_kept_in_order(store: Store) -> None:
    losses = [
        Lost(at=1.0, generation=2, cause="out of memory", run="r1", names=["df"]),
        Lost(at=2.0, generation=3, cause="reset"),
    ]
    for lost in losses:
        store.write([PutLost(session="s1", lost=lost)])

    assert store.losses("s1") == losses


def everything(session: str, run: str) -> list[AnyWrite]:
    return [
        PutSession(session=session, row=session_row(session)),
        *appended(planned(run), session=session),
        PutReceipt(session=session, row=receipt_row(1, run, session)),
        PutVersion(session=session, row=version_row(1)),
        PutFiles(session=session, put=[entry("a")]),
        PutNames(session=session, put={"x": NameRow(type="int", run=run, generation=1)}),
        PutKey(session=session, row=KeyRow(session=session, key="k", run=run, request_sha256="", attempt=1)),
        PutResult(session=session, run=run, body=b"x"),
        PutLost(session=session, lost=Lost(at=1.0, generation=2, cause="reset")),
    ]


def known(store: Store, session: str, run: str) -> list[object]:
    return [
        *(store.session(session), store.records(run), store.runs(session), store.unsettled(session)),
        *(store.receipts(session), store.receipt(run), store.versions(session), store.files(session)),
        *(store.names(session), store.key(session, "k"), store.result(run), store.losses(session)),
    ]


def test_a_dropped_session_leaves_nothing_and_its_neighbour_everything(store: Store) -> None:
    store.write([*everything("s1", "r1"), *everything("s2", "r2")])
    neighbour = known(store, "s2", "r2")

    store.write([DropSession(session="s1")])

    assert not any(known(store, "s1", "r1"))
    assert known(store, "s2", "r2") == neighbour
    assert all(neighbour)


# -- the file ----------------------------------------------------------------------------------------------------


def test_a_store_opened_again_knows_it_all(store: Store, path: Path) -> None:
    store.write(everything("s1", "r1"))
    before = known(store, "s1", "r1")
    store.close()

    again = Store(path)
    assert known(again, "s1", "r1") == before
    again.close()


def test_what_was_written_survives_the_death_of_the_writer(path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys; from pathlib import Path; from holdfast.store.sqlite import Store\n"
            "from holdfast.store.rows import PutResult\n"
            "store = Store(Path(sys.argv[1]))\n"
            "store.write([PutResult(session='s1', run='r1', body=b'kept')])\n"
            "store.stage([PutResult(session='s1', run='r2', body=b'not committed')])\n"
            "os.kill(os.getpid(), 9)",
            str(path),
        ]
    )

    store = Store(path)
    assert (store.result("r1"), store.result("r2")) == (b"kept", None)
    store.close()


def test_every_commit_is_synced_and_others_may_not_read_the_file(store: Store, path: Path) -> None:
    assert store._db.execute("pragma journal_mode").fetchone() == ("wal",)
    assert store._db.execute("pragma synchronous").fetchone() == (2,)
    store.write(appended(planned("r1")))
    assert {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()} == {0o600}


def test_a_reader_beside_the_owner_sees_each_commit_and_writes_nothing(store: Store, path: Path) -> None:
    reader = Store(path, read_only=True)
    store.write(appended(planned("r1")))

    assert reader.unsettled() == [("s1", "r1")]
    with pytest.raises(DiskFailed, match="readonly"):
        reader.write(appended(planned("r2")))
    reader.close()


def test_a_view_stays_as_it_was_when_it_began(store: Store, path: Path) -> None:
    reader = Store(path, read_only=True)
    with reader.view():
        assert reader.runs("s1") == []
        store.write(appended(planned("r1")))
        assert reader.unsettled() == []
    assert reader.runs("s1") == ["r1"]
    reader.close()


READ = """
import os, sys
from pathlib import Path
from holdfast.store.sqlite import Store
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
print(Store(Path(sys.argv[1]), read_only=True).runs("s1"))
"""


def test_it_can_be_read_where_nothing_can_be_written() -> None:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own are shut to others
        path = Path(directory) / "journal.sqlite3"
        store = Store(path)
        store.write(appended(planned("r1")))
        store.close()
        path.chmod(0o444)
        path.parent.chmod(0o555)

        read = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True)

        path.parent.chmod(0o755)
        assert read.stdout == "['r1']\n", read.stderr
        assert sorted(os.listdir(directory)) == ["journal.seen", path.name]


def test_no_store_is_not_made_by_reading_it(path: Path) -> None:
    with pytest.raises(InvalidSetting, match="does not exist"):
        Store(path, read_only=True)
    assert not path.exists()


def test_a_file_of_a_later_version_is_left_alone(store: Store, path: Path) -> None:
    store._db.execute("pragma user_version = 99")
    store.close()

    with pytest.raises(InvalidSetting, match="format 99"):
        Store(path)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_that_is_no_store_is_called_damaged(path: Path, read_only: bool) -> None:
    path.write_bytes(b"this is no database, and long enough to have a header" * 99)

    with pytest.raises(SessionHalted, match="damaged"):
        Store(path, read_only=read_only)


def test_a_record_that_cannot_be_read_is_named(store: Store, path: Path) -> None:
    store.write(appended(planned("r1")))
    with sqlite3.connect(path) as other:
        other.execute("update records set body = x'81a474797065'")
    other.close()

    with pytest.raises(SessionHalted, match="a record of run r1"):
        store.records("r1")


# A disk of its own, which is soon full: a tmpfs in a mount namespace.
FILL = """
import subprocess, sys
from pathlib import Path
from holdfast.errors import DiskFailed
from holdfast.store.rows import PutResult
from holdfast.store.sqlite import Store
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", sys.argv[1]], check=True)
path = Path(sys.argv[1]) / "journal.sqlite3"
store, number = Store(path), 0
try:
    while True:
        store.write([PutResult(session="s1", run=f"r{number}", body=bytes(50_000))])
        number += 1
except DiskFailed as error:
    print(error.message)
assert store.result(f"r{number}") is None
store.close()
again = Store(path, read_only=True)
assert all(again.result(f"r{n}") for n in range(number)) and number > 3
assert again.result(f"r{number}") is None
"""


def test_a_full_disk_refuses_and_keeps_all_that_was_acknowledged(tmp_path: Path) -> None:
    unshare = ["unshare", "--mount", *(["--user", "--map-root-user"] if os.geteuid() else [])]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces")

    filled = subprocess.run([*unshare, sys.executable, "-c", FILL, tmp_path], capture_output=True, text=True)

    assert filled.returncode == 0, filled.stderr
    assert filled.stdout == "the disk is full (journal)\n"


def test_every_failure_says_what_to_do(path: Path) -> None:
    with pytest.raises(HoldfastError) as caught:
        Store(path.parent / "nowhere" / "journal.sqlite3")
    assert caught.value.hint


def steps_of_a_commit(store: Store, run: str) -> int:
    """Instructions of SQLite's virtual machine: what a commit costs, without the noise of a clock."""
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    store._db.set_progress_handler(count, 1)
    store.write(appended(planned(run), executed(run), settled(run)))
    store.unsettled("s1")
    store._db.set_progress_handler(None, 1)
    return steps


def test_a_commit_costs_the_same_after_many_runs(store: Store) -> None:
    first = steps_of_a_commit(store, "first")
    for number in range(20_000):
        store.stage(appended(planned(f"r{number}"), settled(f"r{number}")))
    store.commit()

    assert steps_of_a_commit(store, "last") <= first * 1.1


CROWDED = """
import resource, signal, sys
from pathlib import Path
from holdfast.store.sqlite import Store
from holdfast.store.rows import PutResult
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
store = Store(Path(sys.argv[1]))
store.write([PutResult(session='s1', run='r1', body=b'kept')])
print(Path(sys.argv[1] + '-wal').stat().st_size)
"""


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def test_commits_overwrite_blocks_that_the_log_has_already(store: Store, path: Path) -> None:
    laid = log_of(path).stat()
    for number in range(50):
        store.write([PutResult(session="s1", run=f"r{number}", body=b"x" * 1000)])

    assert laid.st_blocks * 512 >= laid.st_size  # no holes
    assert log_of(path).stat().st_size == laid.st_size


def test_nothing_is_read_into_the_zeros_of_a_log_whose_owner_died(path: Path, tmp_path: Path) -> None:
    store = Store(path)
    store.write([PutResult(session="s1", run="r1", body=b"kept")])
    copy = tmp_path / "copy.sqlite3"  # as a crash leaves it
    copy.write_bytes(path.read_bytes())
    log_of(copy).write_bytes(log_of(path).read_bytes())
    store.close()

    found = Store(copy)
    assert found.result("r1") == b"kept"
    found.write([PutResult(session="s1", run="r2", body=b"more")])
    assert found.result("r2") == b"more"
    found.close()


def test_where_room_is_scarce_the_log_takes_none_in_advance(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.store.connection._PLENTY", 1 << 40)
    store = Store(path)
    store.write([PutResult(session="s1", run="r1", body=b"kept")])

    assert log_of(path).stat().st_size < 1 << 20
    store.close()


def test_where_there_is_no_room_for_zeros_the_log_is_as_long_as_what_is_in_it(path: Path) -> None:
    crowded = subprocess.run([sys.executable, "-c", CROWDED, str(path)], capture_output=True, text=True)

    assert crowded.returncode == 0, crowded.stderr
    assert 0 < int(crowded.stdout) < 1 << 20
    store = Store(path)
    assert store.result("r1") == b"kept"
    store.close()
