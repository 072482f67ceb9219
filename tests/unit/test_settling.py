"""How a run ends that was rolled back, by its records alone: what it had saved is applied, and nothing else is lost."""

import hashlib
import io
import os
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from holdfast import settling
from holdfast.books import Books
from holdfast.errors import DiskFull
from holdfast.journal import Journal
from holdfast.receipts import receipt
from holdfast.records import Executed, Planned, RunCard, Saved, SavedFile
from holdfast.resources import entries
from holdfast.resources.descent import Cursor, split
from holdfast.resources.saved import replacing
from holdfast.resources.workspace import Workspace
from holdfast.settling import Settlement, settle, settle_open
from holdfast.signing import SigningKey
from holdfast.store.rows import SessionRow

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["its own", "the user's"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """A directory of the user's; None: the session has its own."""
    if request.param == "its own":
        return None
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


@pytest.fixture
async def books(tmp_path: Path, shared: Path | None) -> AsyncIterator[Books]:
    journal = Journal(tmp_path / "journal.sqlite3")
    row = SessionRow(id="s1", created_at=1.0, generation=1, version=0, settings={})
    workspace = Workspace(tmp_path / "s1", shared=shared)
    workspace.create(owner=None)
    books = Books(journal, SigningKey.load_or_create(tmp_path / "keys"), workspace, row=row)
    books.register()
    yield books
    await journal.close()


async def fail(books: Books, run: str, *saves: dict[str, bytes], since_ns: int | None = None) -> Settlement:
    """A run that saves some files, once or more often, and then fails."""
    saved = [[keep(books, path, data, since_ns=since_ns) for path, data in files.items()] for files in saves]
    records = [Saved(run=run, at=2.0, files=files) for files in saved]
    await books.journal.append(*books.note(plan(run), *records))
    return await settle(books, run, reason="its code failed", blame="user")


def plan(run: str) -> Planned:
    return Planned(run=run, at=1.0, card=RunCard(run=run, session="s1", goal="", code_sha256="", base=""), code="")


def keep(books: Books, path: str, data: bytes, *, since_ns: int | None = None) -> SavedFile:
    sha256, size = books.blobs.put_stream(io.BytesIO(data))
    return replacing(SavedFile(path=path, sha256=sha256, bytes=size), books.workspace.files, since_ns=since_ns)


def on_disk(books: Books) -> dict[str, bytes]:
    data = books.workspace.files.area("data")
    return {str(path.relative_to(data)): path.read_bytes() for path in data.rglob("*") if path.is_file()}


COLLISIONS: dict[str, tuple[dict[str, bytes], list[dict[str, bytes]], dict[str, bytes]]] = {
    "a file in place of a directory": (
        {"out/x.csv": b"old", "out/deep/y.csv": b"old too", "output": b"other"},
        [{"out": b"new"}],
        {"out": b"new", "output": b"other"},
    ),
    "a directory in place of a file": (
        {"out": b"old", "out.csv": b"other"},
        [{"out/x.csv": b"new"}],
        {"out/x.csv": b"new", "out.csv": b"other"},
    ),
    "both in one run, the directory last": (
        {"k": b"1"},
        [{"out": b"a"}, {"out/x.csv": b"b"}],
        {"k": b"1", "out/x.csv": b"b"},
    ),
    "both in one run, the file last": (
        {"out/old": b"1"},
        [{"out/x.csv": b"b", "out/y.csv": b"c"}, {"out": b"a"}],
        {"out": b"a"},
    ),
    "to and fro": (
        {"out/old": b"1"},
        [{"out/x.csv": b"a"}, {"out": b"b"}, {"out/y.csv": b"c"}],
        {"out/old": b"1", "out/y.csv": b"c"},
    ),
}


@pytest.mark.parametrize("how", COLLISIONS)
async def test_what_was_saved_may_be_a_file_where_a_directory_was_and_the_reverse(books: Books, how: str) -> None:
    committed, saves, after = COLLISIONS[how]
    await fail(books, "r1", committed)
    books.blobs.forget(set())  # as retention does, sooner or later
    settlement = await fail(books, "r2", *saves)

    assert on_disk(books) == after
    assert sorted(books.state.files) == sorted(after)
    assert settlement.saved == sorted(after.keys() - committed.keys())
    gone = sorted(committed.keys() - after.keys())
    (first, _) = await books.read(lambda store: store.receipt("r2"))
    told = receipt(first.envelope).facts().changes
    assert sorted(change.path for change in told if change.action == "removed" and change.before) == gone
    assert all(hashlib.sha256(committed[path]).hexdigest() in books.blobs.digests() for path in gone)


OTHERS: dict[str, Callable[[Path], object]] = {
    "link": lambda at: at.symlink_to("nowhere"),
    "link to a directory": lambda at: at.symlink_to("."),
    "FIFO": os.mkfifo,
    "empty directory": Path.mkdir,
    "empty directories": lambda at: (at / "b" / "c").mkdir(parents=True),
    "link in a directory": lambda at: (at.mkdir(), (at / "l").symlink_to("nowhere")),
    "FIFO below": lambda at: (at.mkdir(), os.mkfifo(at / "b")),
}


@pytest.mark.parametrize("path", ["a", "a/b", "a/b/c/d"])
@pytest.mark.parametrize("kind", OTHERS)
async def test_what_was_saved_takes_the_place_of_whatever_was_there(books: Books, kind: str, path: str) -> None:
    data = books.workspace.files.area("data")
    OTHERS[kind](data / "a")
    listed = {str(each.relative_to(data)) for each in data.rglob("*")}

    settlement = await fail(books, "r1", {path: b"new"})

    assert on_disk(books) == {path: b"new"}
    assert (settlement.saved, settlement.theirs) == ([path], [])
    (first, _) = await books.read(lambda store: store.receipt("r1"))
    removed = {change.path for change in receipt(first.envelope).facts().changes if change.action == "removed"}
    assert removed == {each for each in listed if not (data / each).is_symlink() and not (data / each).exists()}


THEIR_OWN: dict[str, Callable[[Path], object]] = {
    "link": lambda at: at.symlink_to("theirs"),
    "file": lambda at: at.write_text("theirs"),
    "directory": lambda at: (at.mkdir(), (at / "b").write_text("theirs")),
}


@pytest.mark.parametrize("shared", ["the user's"], indirect=True)
@pytest.mark.parametrize("path", ["a", "a/b"])
@pytest.mark.parametrize("found", ["FIFO", "empty directories", "nothing"])
@pytest.mark.parametrize("theirs", THEIR_OWN)
async def test_a_receipt_of_savepoints_states_only_what_is_in_place(
    books: Books, shared: Path, theirs: str, found: str, path: str
) -> None:
    """The user of the directory puts something else there after the run has saved, and before it ends."""
    OTHERS.get(found, lambda at: None)(shared / "a")
    saved = Saved(run="r1", at=2.0, files=[keep(books, path, b"new"), keep(books, "other", b"1")])
    await books.journal.append(*books.note(plan("r1"), saved))
    (shared / "a").rename(shared.parent / "away") if os.path.lexists(shared / "a") else None
    THEIR_OWN[theirs](shared / "a")

    settlement = await settle(books, "r1", reason="its code failed", blame="user")

    (first, _) = await books.read(lambda store: store.receipt("r1"))
    assert settlement.saved == ["other"]
    assert path in settlement.theirs
    assert books.state.files.keys() == {"other"}
    assert (shared / "a").is_symlink() == (theirs == "link")
    with Cursor(shared) as cursor:
        for change in receipt(first.envelope).facts().changes:
            there = entries.at(cursor, split(change.path))
            assert entries.kind_of(there) == entries.kind_of(entries.after(change)), change


@pytest.mark.parametrize("shared", ["the user's"], indirect=True)
async def test_a_link_that_came_while_the_run_went_on_stays(books: Books, shared: Path) -> None:
    (shared / "a").symlink_to("theirs")
    before_ns = (shared / "a").lstat().st_ctime_ns - 1
    saved = Saved(run="r1", at=2.0, files=[keep(books, "a/b", b"new", since_ns=before_ns)])
    await books.journal.append(*books.note(plan("r1"), saved))

    settlement = await settle(books, "r1", reason="its code failed", blame="user")

    assert settlement.theirs == ["a/b"]
    assert os.readlink(shared / "a") == "theirs"
    assert [row.run for row in await books.read(lambda store: store.receipts("s1"))] == ["r1"]


async def test_a_mode_that_was_saved_is_a_version_also_where_a_crash_came_after_it_was_published(books: Books) -> None:
    await fail(books, "r1", {"job.sh": b"#!/bin/sh"})
    place = books.workspace.files.area("data") / "job.sh"
    place.chmod(0o755)  # as the host left it that was killed
    entry = msgspec.structs.replace(keep(books, "job.sh", b"#!/bin/sh"), mode=0o755, before_mode=0o644)
    await books.journal.append(*books.note(plan("r2"), Saved(run="r2", at=2.0, files=[entry])))
    settlement = await settle(books, "r2", redo=True)

    assert (settlement.saved, settlement.settled.version) == (["job.sh"], 2)
    assert stat.S_IMODE(place.stat().st_mode) == 0o755
    (first, _) = await books.read(lambda store: store.receipt("r2"))
    (change,) = receipt(first.envelope).facts().changes
    assert (change.action, change.mode, change.before_mode) == ("changed", 0o755, 0o644)


@pytest.mark.parametrize("shared", ["the user's"], indirect=True)
async def test_what_was_saved_is_not_told_as_kept_where_the_users_own_stayed(books: Books) -> None:
    place = books.workspace.files.area("data")
    await fail(books, "r1", {"old": b"1"})
    for name in ("old", "new"):
        (place / name).write_text("the user's")
    settlement = await fail(books, "r2", {"old": b"2", "new": b"3", "other": b"4"})

    assert (settlement.saved, sorted(settlement.theirs)) == (["other"], ["new", "old"])
    assert on_disk(books) == {"old": b"the user's", "new": b"the user's", "other": b"4"}


@pytest.mark.parametrize("shared", ["the user's"], indirect=True)
@pytest.mark.parametrize("more", ["a link", "an empty directory", "a file", "a change"])
async def test_a_directory_that_holds_more_than_what_would_go_stays_whole(books: Books, more: str) -> None:
    place = books.workspace.files.area("data")
    await fail(books, "r1", {"d/a.csv": b"1", "d/deep/b.csv": b"2", "other": b"3"})
    since_ns = None
    match more:
        case "a link":
            (place / "d" / "latest").symlink_to("a.csv")
            since_ns = (place / "d" / "latest").lstat().st_ctime_ns - 1
        case "an empty directory":
            (place / "d" / "deep" / "empty").mkdir()
            since_ns = (place / "d" / "deep" / "empty").lstat().st_ctime_ns - 1
        case "a file":
            (place / "d" / "own").write_text("the user's")
        case "a change":
            (place / "d" / "a.csv").write_text("the user's")
    before = on_disk(books)
    settlement = await fail(books, "r2", {"d": b"new", "other": b"4"}, since_ns=since_ns)

    assert on_disk(books) == {**before, "other": b"4"}
    assert settlement.saved == ["other"]
    assert {"d", "d/a.csv", "d/deep/b.csv"} <= set(settlement.theirs)


@pytest.mark.parametrize("shared", ["the user's"], indirect=True)
async def test_what_was_put_in_place_before_a_second_try_is_not_taken_for_the_users_own(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DiskFull("the disk is full", hint="")

    with monkeypatch.context() as while_full:
        while_full.setattr(settling, "write_manifest", full)
        with pytest.raises(DiskFull):
            await fail(books, "r1", {"new": b"1"})
    settlement = await settle(books, "r1")

    assert (settlement.saved, settlement.theirs, on_disk(books)) == (["new"], [], {"new": b"1"})


@pytest.mark.parametrize("shared", ["its own"], indirect=True)
@pytest.mark.parametrize(
    ("code", "reason", "by"),
    [
        ("exception", "division by zero", "user"),
        ("timeout", "timeout", "user"),
        ("interrupted", "the run was interrupted", "system"),
        (None, "there was no room", "system"),
    ],
)
async def test_a_run_that_is_settled_late_ended_as_its_records_say(
    books: Books, code: str | None, reason: str, by: str
) -> None:
    message = "" if code == "timeout" else reason
    ended = [Executed(run="r1", at=2.0, error_code=code, error_message=message, duration_s=1.0)] if code else []
    await books.journal.append(*books.note(plan("r1"), *ended))
    await settle_open(books, reason="there was no room")

    (row,) = await books.read(lambda store: store.receipt("r1"))
    told = receipt(row.envelope).facts()
    assert (told.status, told.reason, told.blame) == ("rolled_back", reason, by)
