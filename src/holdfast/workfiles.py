"""A session's files from outside: read them, write them, bring an earlier version back.

What changes them is a run like any other, with a card, a receipt and a version, only that the host stages the files
itself. The kernel stays frozen meanwhile and gets the new files under it before it runs again.
"""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal, cast

import anyio
import msgspec

from holdfast import expectations
from holdfast.books import Books
from holdfast.ckpt import Ckpt
from holdfast.errors import DiskFailed, DiskLimit, FileUnknown, StateMoved, as_told
from holdfast.expectations import PathLike
from holdfast.facts import facts_of
from holdfast.faults import crashpoint
from holdfast.inputs import changed_on_host
from holdfast.model import HistoryEntry, Memory
from holdfast.receipts import Receipt, as_seen
from holdfast.records import Change, Executed, FileEntry, Planned, RunCard, Settled, Verified
from holdfast.recovery import resolve
from holdfast.resources.descent import Parts, open_file
from holdfast.resources.handles import staged_databases
from holdfast.resources.layers import read_changes
from holdfast.resources.publish import discard, prepare
from holdfast.resources.restoring import fill_stage, plan_removal, put_file
from holdfast.results import in_data
from holdfast.retention import forget_manifests
from holdfast.sessions import LiveSession, Names, new_id
from holdfast.settling import Blame, Settlement, settle, state_after, write_manifest
from holdfast.state import State, work_of
from holdfast.statements import statement
from holdfast.store.sqlite import Store
from holdfast.travel import refuse_if_too_old, way_back
from holdfast.verification import changed_outside

_MOST_RUNS = 1_000
"""That are asked which names they bound."""
Fill = Callable[[Path], list[Change]]
"""Stages files in a fresh layer and says what it changes."""


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A change of files from outside, committed."""

    id: str
    version: int
    ckpt: str
    receipt: Receipt | None
    outputs: list[Change]
    memory: Memory = "kept"
    """`restored`: it is as it was at the version asked for. `lost`: that did not work, and the kernel is new."""
    without_memory: str | None = None
    """Of a restore: why memory did not come back with the files."""
    files_not_restored: list[str] = []
    """Of a restore: what was changed on the host, past Holdfast, and is kept nowhere as it was committed (it is as it
    was changed there); and FIFOs, sockets, and what a journal of an earlier build tells too little of."""
    names_not_restored: list[str] = []
    """Of a restore: names that are not as they were: later runs bound or deleted them, or they were lost since."""
    not_restored: list[str] = []
    """Of memory that was: open things whose state lies outside it, such as sockets."""
    outside: list[str] = []
    """Files that changed since the run before, while nothing was running; they were dropped."""


# -- reading -----------------------------------------------------------------------------------------------------


def list_files(session: LiveSession) -> list[FileEntry]:
    return [entry for _, entry in sorted(session.books.state.files.items())]


def open_committed(session: LiveSession, path: PathLike) -> BinaryIO:
    """A committed file, to be read piece by piece."""
    return os.fdopen(open_file(session.workspace.files.area("data"), entry(session, path).path), "rb")


def entry(session: LiveSession, path: PathLike) -> FileEntry:
    """What is committed under a path."""
    name = one_path(session, path)
    found = session.books.state.files.get(name)
    if found is None:
        raise FileUnknown(f"/mnt/data has no file {name!r}", hint="files() lists what is committed")
    return found


async def history(books: Books, *, limit: int) -> list[HistoryEntry]:
    """The session's runs, newest first."""

    def read(store: Store) -> list[HistoryEntry]:
        told = [history_entry(store, run) for run in store.runs(books.session, limit=limit, newest_first=True)]
        return [entry for entry in told if entry is not None]

    return await books.read(read)


def history_entry(store: Store, run: str) -> HistoryEntry | None:
    """None: there is no such run, or it is not settled."""
    records = store.records(run)
    planned = next((r for r in records if isinstance(r, Planned)), None)
    settled = next((r for r in records if isinstance(r, Settled)), None)
    if planned is None or settled is None:
        return None
    return HistoryEntry(
        run=run, kind=planned.kind, at=planned.at, goal=planned.card.goal, status=settled.status,
        version=settled.version, ckpt=settled.ckpt, reason=settled.reason, receipt_sha256=settled.receipt_sha256,
    )  # fmt: skip


# -- writing -----------------------------------------------------------------------------------------------------


async def write(session: LiveSession, path: PathLike, source: BinaryIO, *, replaces: str | None = None) -> Written:
    """Put a file in place, streamed; what was there before goes to blobs. `replaces` is the SHA-256 that this must have
    had, or "" if nothing may have been there."""
    name = one_path(session, path)

    def fill(stage: Path) -> list[Change]:
        _refuse_if_another(session, name, replaces)
        workspace, bounded = session.workspace, _Bounded(source, session.computer.disk.left_bytes)
        put_file(stage, name, cast(BinaryIO, bounded), owner=workspace.owner, files=workspace.files)
        session.computer.disk.refuse_what_passes(stage)
        return read_changes(stage, workspace.files, session.books.state.files)

    return await _change(session, kind="write", goal=f"write {name}", fill=fill)


def _refuse_if_another(session: LiveSession, name: str, wanted: str | None) -> None:
    here = session.books.state.files.get(name)
    if wanted is not None and wanted != (here.sha256 if here else ""):
        found = f"has the SHA-256 {here.sha256}" if here else "is not there"
        raise StateMoved(f"{name} {found}", hint="read it again, and do it again if you still want to")


async def remove(session: LiveSession, path: PathLike, *, replaces: str | None = None) -> Written:
    """Take a file away, or a directory with all that is in it. `replaces` is the SHA-256 that the file must have."""
    name = one_path(session, path)

    def fill(stage: Path) -> list[Change]:
        _refuse_if_another(session, name, replaces)
        return plan_removal(name, files=session.workspace.files, known=session.books.state.files)

    return await _change(session, kind="write", goal=f"remove {name}", fill=fill)


async def restore(session: LiveSession, ckpt: str) -> Written:
    """The files of an earlier version, and its memory where a snapshot of it sleeps. Otherwise memory stays as it is:
    what is not as it was then is named."""
    books = session.books
    await session.wait_settled()
    target, rows = await resolve(books, ckpt)
    await books.in_thread(lambda: refuse_if_too_old(books, target))  # refused before anything is begun
    later = [row.run for row in rows if row.version > target.version]
    names = await books.read(lambda store: _names_of(store, later))
    lost = {name for reset in books.losses if reset.generation > target.generation for name in reset.names}

    not_back: list[str] = []

    def fill(stage: Path) -> list[Change]:
        way = way_back(books, target)
        not_back[:] = way.not_restored
        fill_stage(stage, way.changes, books.blobs, owner=session.workspace.owner, files=session.workspace.files)
        return way.changes

    written = await _change(session, kind="restore", goal=f"restore {target}", fill=fill, back_to=target)
    written = msgspec.structs.replace(written, files_not_restored=not_back)
    if written.memory != "kept":
        return written
    return msgspec.structs.replace(written, names_not_restored=sorted(names | lost))


def _names_of(store: Store, runs: Sequence[str]) -> set[str]:
    """What these runs bound or deleted."""
    records = (record for run in runs[:_MOST_RUNS] for record in store.records(run))
    return {name for record in records if isinstance(record, Verified) for name in record.names}


# -- one change --------------------------------------------------------------------------------------------------


class _Staged(msgspec.Struct, frozen=True, kw_only=True):
    """A change that is ready to be committed."""

    stage: str
    changes: list[Change]
    on_host: list[str]
    """Files that it replaces and that were changed on the host."""
    then: Names | str
    """The names that come back with memory; or why it does not."""
    same_inode: frozenset[Parts]


async def _change(
    session: LiveSession, *, kind: Literal["write", "restore"], goal: str, fill: Fill, back_to: Ckpt | None = None
) -> Written:
    """To its end, also for a caller who is gone: a run is never left half done."""
    async with session.quiet_turn() as computer:
        with anyio.CancelScope(shield=True):
            outside = await changed_outside(session.books, computer)
            planned = _planned(session, new_id(kind), kind=kind, goal=goal)
            session.books.journal.append_nowait(*session.books.note(planned))
            crashpoint("write.planned")
            staged = await _staged(session, planned, fill, back_to)
            settlement = await _commit(session, planned, staged)
            written = Written(
                id=planned.run, version=settlement.settled.version, ckpt=settlement.settled.ckpt,
                receipt=as_seen(settlement.receipt), outside=[*outside, *staged.on_host],
                outputs=[change for change in in_data(staged.changes) if change.kind != "directory"],
            )  # fmt: skip
            if back_to is not None:
                written = await _with_memory(session, written, back_to.version, staged.then)
    return written


async def _with_memory(session: LiveSession, written: Written, version: int, then: Names | str) -> Written:
    """After the files, which are under it when it wakes: what it has open is opened there."""
    if isinstance(then, str):
        return msgspec.structs.replace(written, without_memory=then)
    crashpoint("restore.settled")
    aftermath = await session.go_back(version)
    lost = aftermath.memory == "lost"
    return msgspec.structs.replace(
        written, memory=aftermath.memory, ckpt=str(session.books.state.ckpt()), not_restored=aftermath.not_restored,
        without_memory="its snapshot did not wake" if lost else None, names_not_restored=sorted(then) if lost else [],
    )  # fmt: skip


def _same_inode(session: LiveSession, stage: str, changes: list[Change], then: Names | str) -> frozenset[Parts]:
    """A connection that comes back with memory refuses to write to a database of another inode (see `handles`)."""
    return frozenset() if isinstance(then, str) else staged_databases(session.workspace.stage_path(stage), changes)


def _names_back(session: LiveSession, run: str, then: Names | str) -> dict[str, tuple[str, str]]:
    """What changes in the names when memory is again as it was: each has the run that bound it then."""
    if isinstance(then, str):
        return {}
    now = session.books.state.live()
    gone = {name: ("", run) for name in now if name not in then}
    return {name: bound for name, bound in then.items() if now.get(name) != bound} | gone


async def _staged(session: LiveSession, planned: Planned, fill: Fill, back_to: Ckpt | None) -> _Staged:
    """What cannot be staged is a run that was rolled back."""
    books = session.books
    stage = ""
    try:
        stage, changes = await books.in_thread(lambda: _stage(session, fill))
        replaced = [change.path for change in in_data(changes) if change.before]
        on_host = list(await changed_on_host(books, replaced))
        then = "" if back_to is None else session.names_at(back_to)
        same_inode = await books.in_thread(lambda: _same_inode(session, stage, changes, then))
        return _Staged(stage=stage, changes=changes, on_host=on_host, then=then, same_inode=same_inode)
    except Exception as error:  # a caller's source may raise anything, and no run is left without an end
        reason = as_told(error).message
        try:
            blame: Blame = "system" if isinstance(error, DiskFailed) else "user"
            await settle(books, planned.run, reason=reason, blame=blame)
        except Exception as again:
            books.halt(as_told(again))
        if stage:
            await books.in_thread(lambda: discard(session.workspace.stage_path(stage)))
        raise


async def _commit(session: LiveSession, planned: Planned, staged: _Staged) -> Settlement:
    books, before = session.books, session.books.state
    verified = Verified(
        run=planned.run, at=time.time(), status="committed", version=before.version + 1, stage=staged.stage,
        changes=staged.changes, names=_names_back(session, planned.run, staged.then), receipt=b"",
    )  # fmt: skip

    def drawn_up() -> tuple[Verified, State]:
        after = state_after(before, verified)
        facts = facts_of(planned, None, before, after)
        facts = msgspec.structs.replace(facts, changes=in_data(staged.changes), finished_at=verified.at)
        return msgspec.structs.replace(verified, receipt=statement(facts)), after

    verified, after = await books.out_of_the_loop(drawn_up, size=work_of(before, staged.changes))
    session.published = True  # from here on the files below the kernel's layer may be others
    try:
        await books.in_thread(lambda: write_manifest(books, after))
        await books.journal.append(*books.note(_executed(planned.run), verified))
        crashpoint("write.verified")
        return await settle(books, planned.run, same_inode=staged.same_inode)
    except Exception as error:  # whatever it was, nothing runs on files of which nobody knows whether they are in place
        is_verified = await books.may_be_verified(planned.run, error)
        fault = as_told(error, verified=planned.run if is_verified else "")
        books.halt(fault)
        if is_verified:
            await session.computer.end_kernel()  # its files are to be moved under it
        else:
            await books.in_thread(lambda: _forget(books, staged.stage))
        if fault is not error:
            raise fault from error
        raise


def _forget(books: Books, stage: str) -> None:
    """What was staged, and the manifest of the version that it did not become."""
    discard(books.workspace.stage_path(stage))
    with suppress(OSError):  # the next to open the session tries it again
        forget_manifests(books)


def _stage(session: LiveSession, fill: Fill) -> tuple[str, list[Change]]:
    name = session.workspace.new_stage()
    path = session.workspace.stage_path(name)
    try:
        changes = fill(path)
        prepare(path, changes)
    except BaseException:
        discard(path)
        raise
    return name, changes


def _planned(session: LiveSession, run: str, *, kind: Literal["write", "restore"], goal: str) -> Planned:
    card = RunCard(
        run=run, session=session.id, goal=goal, code_sha256=hashlib.sha256(goal.encode()).hexdigest(),
        base=str(session.books.state.ckpt()), environment=session.computer.environment.fingerprint,
    )  # fmt: skip
    return Planned(run=run, at=time.time(), card=card, code=goal, kind=kind)


def _executed(run: str) -> Executed:
    return Executed(run=run, at=time.time(), error_code=None, duration_s=0.0)


def one_path(session: LiveSession, path: PathLike) -> str:
    """A path as callers write it, or as `files()` spells one that is odd."""
    if isinstance(path, str) and path in session.books.state.files:
        return path
    (name,) = expectations.inputs([path])
    return name


class _Bounded:
    """A source that is cut off where the session's disk is full."""

    def __init__(self, source: BinaryIO, limit_bytes: int) -> None:
        self._source = source
        self._left = limit_bytes

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise DiskLimit(
                "the file is larger than what is left of the session's disk limit",
                hint="remove files first, or open a session with a larger disk=…",
            )
        return data
