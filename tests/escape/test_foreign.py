"""A `.holdfast` that came with a directory, out of somebody's archive or repository: nothing it says is done."""

import errno
import hashlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from holdfast import engine, manifest
from holdfast.cli.verify import check_session
from holdfast.config import Settings
from holdfast.errors import HoldfastError, InvalidSetting, NotOurs
from holdfast.home import acquire_shared
from holdfast.opening import settle_shared
from holdfast.records import Executed, Planned, RunCard, Verified
from holdfast.signing import SigningKey
from holdfast.statements import RunFacts, statement
from holdfast.store.rows import Append, PutSession, SessionRow
from holdfast.store.sqlite import Store

SESSION, RUN = "abcdef0123", "run_aaaaaaaaaaaa"
PARTS = ("files", "files/data", "files/tmp", "files/home", "stages", "view", "blobs", "manifests", "log")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    SigningKey.load_or_create(home / "keys")
    return home


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the victim unpacks it, beside what is none of its business."""
    directory = tmp_path / "work/project"
    directory.mkdir(parents=True)
    for sibling in ("thesis", "letters", "0123456789"):
        (tmp_path / "work" / sibling).mkdir()
        (tmp_path / "work" / sibling / "file").write_text("years of work\n")
    return directory


@pytest.fixture
def open_there(home: Path, directory: Path) -> Callable[[], dict[str, str]]:
    """All that `holdfast run` does there before it runs anything."""
    return lambda: engine.wait(lambda: settle_shared(Settings(home=home, workspace=directory)))


def all_below(path: Path) -> dict[str, str]:
    return {
        str(each.relative_to(path)): hashlib.sha256(each.read_bytes()).hexdigest()
        for each in path.rglob("*")
        if each.is_file() and not each.name.endswith(("-wal", "-shm"))  # a reader of a journal may leave these
    }


def beside(directory: Path) -> dict[str, str]:
    """All but what is in the directory's own `.holdfast`."""
    return {path: digest for path, digest in all_below(directory.parent).items() if ".holdfast" not in path}


def forged(session: str = SESSION) -> RunFacts:
    """A statement about somebody else's session."""
    return RunFacts(
        session=session, run="run_forged", number=7, previous="ab" * 32, kind="cell", status="committed",
        version_before=6, version=7, generation=1, ckpt_before="", ckpt=f"CKPT-{session}-g1-v7-000000000000",
        manifest_sha256=manifest.digest({}), goal="the auditors approved this", code_sha256="00" * 32,
        started_at=1.0, finished_at=2.0,
    )  # fmt: skip


def forge(kept: Path, *, stage: str = "0123abcd", session: str = SESSION, facts: RunFacts | None = None) -> None:
    """A journal with a run that only has to be published."""
    kept.mkdir(mode=0o700, exist_ok=True)
    for name in ("sessions", "logs", "root", f"sessions/{session}", *(f"sessions/{session}/{part}" for part in PARTS)):
        (kept / name).mkdir(mode=0o700, exist_ok=True)
    card = RunCard(run=RUN, session=session, goal="", code_sha256=hashlib.sha256(b"").hexdigest(), base="CKPT-x")
    verified = Verified(
        run=RUN, at=1.0, status="committed", version=1, stage=stage, changes=[], names={},
        receipt=statement(facts or forged()),
    )  # fmt: skip
    store = Store(kept / "journal.sqlite3")
    store.write([
        PutSession(
            session=session, row=SessionRow(id=session, created_at=1.0, generation=1, version=0, settings={})
        ),
        Append(session=session, record=Planned(run=RUN, at=1.0, card=card, code="")),
        Append(session=session, record=Executed(run=RUN, at=1.0, error_code=None, duration_s=0.1)),
        Append(session=session, record=verified),
    ])  # fmt: skip
    store.close()


def own(directory: Path, home: Path) -> Path:
    """One that the victim's own home made."""
    acquire_shared(directory, home).release()
    return directory / ".holdfast"


def receipts(kept: Path) -> int:
    with sqlite3.connect(kept / "journal.sqlite3") as db:
        (count,) = db.execute("select count(*) from receipts").fetchone()
    return int(count)


def test_a_link_for_the_sessions_does_not_have_the_projects_beside_it_removed(
    open_there: Callable[[], dict[str, str]], directory: Path
) -> None:
    (directory / ".holdfast").mkdir(mode=0o700)
    (directory / ".holdfast/sessions").symlink_to("../..")
    before = beside(directory)

    with pytest.raises(NotOurs, match="it came with the directory") as refused:
        open_there()

    assert f"rm -r {directory}/.holdfast" in refused.value.hint
    assert beside(directory) == before


@pytest.mark.parametrize("part", ["sessions", "logs", "root"])
def test_a_link_that_is_put_into_what_we_made_is_not_followed(
    open_there: Callable[[], dict[str, str]], directory: Path, home: Path, part: str
) -> None:
    kept = own(directory, home)
    (kept / part).rmdir()
    (kept / part).symlink_to("../..")
    before = beside(directory)

    with pytest.raises(InvalidSetting, match="it is a link"):
        open_there()

    assert beside(directory) == before


@pytest.mark.parametrize("part", ["", "stages", "blobs", "manifests"])
def test_a_link_for_a_part_of_a_session_is_not_followed(
    open_there: Callable[[], dict[str, str]], directory: Path, home: Path, part: str
) -> None:
    kept = own(directory, home)
    forge(kept)
    shutil.rmtree(kept / "sessions" / SESSION / part)
    (kept / "sessions" / SESSION / part).symlink_to(directory.parent)
    before = beside(directory)

    with pytest.raises(InvalidSetting, match="it is a link"):
        open_there()

    assert beside(directory) == before
    assert receipts(kept) == 0


def test_a_mode_that_is_put_right_costs_a_session_nothing(
    open_there: Callable[[], dict[str, str]], directory: Path, home: Path
) -> None:
    """As after `chmod -R g+w` of a whole project."""
    kept = own(directory, home)
    forge(kept)
    (kept / "sessions" / SESSION / "stages").chmod(0o770)

    with pytest.raises(InvalidSetting, match="others can write to it") as refused:
        open_there()

    assert f"chmod -R go-w {kept}" in refused.value.hint
    store = Store(kept / "journal.sqlite3", read_only=True)
    row, unsettled = store.session(SESSION), store.unsettled()
    store.close()
    assert (row is not None and not row.halted, unsettled) == (True, [(SESSION, RUN)])


def test_a_forged_journal_has_nothing_published_removed_or_signed(
    open_there: Callable[[], dict[str, str]], directory: Path
) -> None:
    forge(directory / ".holdfast", stage=str(directory.parent / "thesis"))
    before = beside(directory)

    with pytest.raises(NotOurs):
        open_there()

    assert beside(directory) == before
    assert receipts(directory / ".holdfast") == 0


def test_to_verify_a_directory_of_anybodys_changes_nothing(directory: Path, home: Path) -> None:
    forge(directory / ".holdfast", stage=str(directory.parent / "thesis"))
    before = all_below(directory.parent)

    check_session(str(directory), home=home, public_key=None, as_json=False)
    check_session(str(directory), home=None, public_key=home / "keys/ed25519.pub.pem", as_json=False)

    assert all_below(directory.parent) == before


@pytest.mark.parametrize("stage", ["/", "", "..", "../../../../../thesis", "0123abcd/../../../../../../thesis"])
def test_a_stage_that_the_journal_names_is_a_name_and_no_path(
    open_there: Callable[[], dict[str, str]], directory: Path, home: Path, stage: str
) -> None:
    kept = own(directory, home)
    empty = manifest.digest({})
    facts = msgspec.structs.replace(
        forged(), run=RUN, number=1, previous="", version_before=0, version=1, manifest_sha256=empty
    )
    forge(kept, stage=str(directory.parent / "thesis") if stage == "/" else stage, facts=facts)
    before = beside(directory)

    assert open_there() == {RUN: "halted"}

    assert beside(directory) == before
    assert (kept / "sessions" / SESSION / "stages").is_dir()


@pytest.mark.parametrize("other", [{"session": "fedcba9876"}, {"run": "run_b"}, {"number": 2}, {"previous": "ab" * 32}])
def test_a_statement_of_another_place_in_the_chain_is_not_signed(
    open_there: Callable[[], dict[str, str]], directory: Path, home: Path, other: dict[str, str]
) -> None:
    kept, fits = own(directory, home), {"run": RUN, "number": 1, "previous": "", "version_before": 0, "version": 1}
    forge(kept, facts=msgspec.structs.replace(forged(), **{**fits, **other}))

    assert open_there() == {RUN: "halted"}

    assert receipts(kept) == 0


def test_an_id_of_a_session_is_a_name_and_no_path(
    open_there: Callable[[], dict[str, str]], directory: Path, home: Path
) -> None:
    kept, outside = own(directory, home), "../../../letters"
    forge(kept, session=outside)
    before = beside(directory)

    with pytest.raises(HoldfastError, match="no session"):
        open_there()

    assert beside(directory) == before


@pytest.mark.parametrize("name", ["0badc0de", "../../../victim"])
def test_an_id_that_names_the_cgroups_of_another_home_kills_nothing(
    directory: Path, home: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own(directory, home) / "id").write_text(f"{name}\n")
    monkeypatch.setattr("holdfast.opening.cgroups.find", lambda *_, **__: pytest.fail("its cgroups were looked for"))

    with pytest.raises(HoldfastError):
        engine.wait(lambda: settle_shared(Settings(home=home, workspace=directory)))


def test_a_journal_that_is_put_in_the_place_of_ours_is_not_believed(
    open_there: Callable[[], dict[str, str]], directory: Path, home: Path
) -> None:
    kept = own(directory, home)
    (kept / "journal.sqlite3").unlink()
    forge(kept)

    with pytest.raises(NotOurs, match="put in its place"):
        open_there()


def test_a_copy_of_what_we_made_is_not_believed_and_what_was_moved_is(
    open_there: Callable[[], dict[str, str]], directory: Path, home: Path
) -> None:
    kept = own(directory, home)
    moved = directory.parent / "moved"
    directory.rename(moved)
    shutil.copytree(moved, directory)

    with pytest.raises(NotOurs, match="it is a copy"):
        open_there()
    acquire_shared(moved, home).release()
    shutil.rmtree(kept)
    assert open_there() == {}, "as the hint says"


def test_what_another_home_made_is_not_believed(directory: Path, home: Path, tmp_path: Path) -> None:
    own(directory, home)

    with pytest.raises(NotOurs, match="another home"):
        acquire_shared(directory, tmp_path / "other")


@pytest.mark.parametrize(
    "left", [(), ("lock",), ("lock", ".gitignore", "id"), ("lock", ".gitignore", "id", "journal.sqlite3")]
)
def test_one_whose_maker_was_killed_is_made_again(directory: Path, home: Path, left: tuple[str, ...]) -> None:
    kept = directory / ".holdfast"
    kept.mkdir(mode=0o700)
    for name in left:
        (kept / name).touch()

    acquire_shared(directory, home).release()
    acquire_shared(directory, home).release()


def test_a_lock_that_is_another_name_of_a_file_is_not_written_to(directory: Path, home: Path) -> None:
    (directory / ".holdfast").mkdir(mode=0o700)
    os.link(directory.parent / "thesis/file", directory / ".holdfast/lock")

    with pytest.raises(InvalidSetting, match="something else"):
        acquire_shared(directory, home)

    assert (directory.parent / "thesis/file").read_text() == "years of work\n"


def test_a_disk_that_cannot_be_read_is_not_told_as_somebody_elses(
    directory: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own(directory, home)

    def fails(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr("holdfast.marks.os.read", fails)
        with pytest.raises(InvalidSetting, match="Input/output error"):
            acquire_shared(directory, home)
    acquire_shared(directory, home).release()


def test_a_directory_for_a_mark_is_none(directory: Path, home: Path) -> None:
    kept = own(directory, home)
    (kept / "mark").unlink()
    (kept / "mark").mkdir()

    with pytest.raises(NotOurs, match="it came with the directory"):
        acquire_shared(directory, home)


def test_a_job_that_cannot_be_reached_now_is_left_for_later(
    open_there: Callable[[], dict[str, str]], directory: Path, home: Path
) -> None:
    kept = own(directory, home)
    forge(kept)
    (kept / "sessions" / SESSION / "view").rmdir()

    assert open_there() == {RUN: "unsettled"}
