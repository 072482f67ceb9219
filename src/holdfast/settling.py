"""How every run ends: `settle`. Nothing else does, and start-up recovery is the same call.

It goes by the run's records alone. The last is `Verified`: publish (again) and settle, with the receipt that is in it.
Anything earlier: nothing of the run was published; its layer is dropped, what it saved on the way is applied as a
version of its own, and it is settled as rolled back.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypedDict, Unpack

import msgspec

from holdfast import durable
from holdfast.agreement import refuse_other_statement
from holdfast.books import Books
from holdfast.errors import DISK, DiskFull, DiskRefused, disk_failed
from holdfast.facts import Story, facts_rolled_back, facts_saved, story
from holdfast.faults import crashpoint
from holdfast.receipts import Sealed, seal
from holdfast.records import AnyRecord, Change, Check, Planned, Settled, Verified
from holdfast.resources.descent import Parts
from holdfast.resources.publish import discard, publish
from holdfast.resources.restoring import fill_stage
from holdfast.resources.saved import in_full, plan_saved
from holdfast.resources.workspace import Workspace
from holdfast.state import State, manifest_text, next_version, sealed, with_changes, with_names, work_of
from holdfast.statements import statement
from holdfast.store.rows import (
    AnyWrite,
    PutFiles,
    PutNames,
    PutReceipt,
    PutResult,
    PutSession,
    PutVersion,
    ReceiptRow,
    VersionRow,
)
from holdfast.versions import change_files

Blame = Literal["user", "system"]
Answer = Callable[[State, list[str], list[str]], bytes]
"""Of a run that is rolled back: by the state that this leads to, the files that it had saved on the way, and those in
whose place somebody else's stay."""
INTERRUPTED = "the host ended while it ran"


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended."""

    settled: Settled
    receipt: Sealed
    saved: list[str] = []
    """Files that it had saved on the way and that were applied now."""
    theirs: list[str] = []
    """Files that it changed, or saved on the way, and that somebody else changed since: those stay."""


class RolledBack(TypedDict, total=False):
    """What is said of a run if it is rolled back."""

    reason: str
    blame: Blame
    checks: Sequence[Check]
    """What was found before that."""
    refused: Sequence[str]
    """What it tried to send in vain."""
    answer: Answer
    """What whoever comes with its key again gets."""


async def settle(
    books: Books,
    run: str,
    *,
    redo: bool = False,
    same_inode: frozenset[Parts] = frozenset(),
    **back: Unpack[RolledBack],
) -> Settlement:
    """End a run, by its records alone."""
    told = story(books.open[run])
    if told.verified is not None:
        try:
            settlement = await _publish(books, told, told.verified, redo=redo, same_inode=same_inode)
        except DiskRefused as error:
            raise _committed_later(run, error) from error
    else:
        settlement = await _roll_back(books, told, **back)
    books.count_sent(books.open.pop(run))
    books.tell(settlement.settled)
    return settlement


async def settle_open(
    books: Books, *, reason: str = INTERRUPTED, endings: Mapping[str, RolledBack] | None = None
) -> None:
    """Every run that has not ended: what a start of the host does, and whoever goes on after the disk was full.

    `endings` is what was to be said of those that are rolled back, where somebody still knows; `reason` is for those
    whose records do not tell why either.
    """
    for run in list(books.open):
        back = (endings or {}).get(run, RolledBack(reason=reason))
        await settle(books, run, redo=True, **back)


async def settle_at_once(
    books: Books, planned: Planned, verified: Verified, *records: AnyRecord, after: State, result: bytes = b""
) -> Settlement:
    """A run that changed no file, or that found its changes in place, has nothing to publish: its last records are one
    write. `after` is where it leads."""
    receipt = seal(verified.receipt, books.key)
    settled = _settled(planned, after, receipt, status=verified.status)
    await books.journal.append(
        *books.note(*records, verified, settled),
        *results(books, verified.run, result),
        *_writes(books, planned, after, receipt, changes=verified.changes, names=verified.names),
    )
    books.adopt(sealed(after, receipt.sha256))
    books.count_sent(books.open.pop(verified.run))
    books.tell(settled)
    return Settlement(settled=settled, receipt=receipt)


# -- forward -----------------------------------------------------------------------------------------------------


async def _publish(
    books: Books, told: Story, verified: Verified, *, redo: bool, same_inode: frozenset[Parts]
) -> Settlement:
    size = work_of(books.state, verified.changes, verified.names)
    after = await books.out_of_the_loop(lambda: state_after(books.state, verified), size=size)
    if redo:  # by records that another process wrote: what we sign says what our books say
        refuse_other_statement(verified, books.state, after)
    theirs = await books.in_thread(lambda: _publish_files(books, verified, after, redo=redo, same_inode=same_inode))
    receipt, writes = await books.out_of_the_loop(lambda: _sealed(books, told, verified, after), size=size)
    settled = _settled(told.planned, after, receipt, status=verified.status)
    await books.journal.append(*books.note(settled), *writes)
    books.adopt(sealed(after, receipt.sha256))
    books.remember(after.version, verified.changes)
    return Settlement(settled=settled, receipt=receipt, theirs=theirs)


def _sealed(books: Books, told: Story, verified: Verified, after: State) -> tuple[Sealed, list[AnyWrite]]:
    receipt = seal(verified.receipt, books.key)
    return receipt, _writes(books, told.planned, after, receipt, changes=verified.changes, names=verified.names)


def _committed_later(run: str, error: DiskRefused) -> DiskRefused:
    when = "when there is room" if isinstance(error, DiskFull) else "when the disk lets us"
    return type(error)(
        f"{run} is verified, and will be committed {when}: {error.message}",
        hint=f"do not run it again. {error.hint.partition(', then run it again')[0].capitalize()}: the session's next "
        "request commits the run, or the next opening of the session",
    )


def _publish_files(
    books: Books, verified: Verified, after: State, *, redo: bool, same_inode: frozenset[Parts]
) -> list[str]:
    workspace = books.workspace
    stage = workspace.recorded_stage(verified.stage)
    crashpoint("settle.publish.before")
    with _refusals_of(workspace):
        theirs = publish(
            stage, workspace.files, verified.changes, books.blobs,
            redo=redo, intact=workspace.intact, same_inode=same_inode,
        )  # fmt: skip
        workspace.census = None  # as it was before this
        if workspace.shared is None:
            workspace.intact.remember(verified.changes)
        crashpoint("settle.published")
        write_manifest(books, after)
    crashpoint("settle.manifest.written")
    return theirs


@contextmanager
def _refusals_of(workspace: Workspace) -> Iterator[None]:
    """No descriptor that is free, a mode, a mount, a directory that was moved: nothing is lost, and it can be done
    again. But a part of it may be in place, and nothing runs on that before all of it is."""
    try:
        yield
    except OSError as error:
        if workspace.shared is not None:
            what, where = f"put into {workspace.shared}", "run any holdfast command in it again"
        elif error.errno in DISK:
            raise disk_failed("publish", error) from error
        else:
            what, where = "put in its place", "ask the session for anything"
        raise DiskRefused(
            f"what is to last cannot be {what}: {error}",
            hint=f"make way for it, and {where}: it finishes what was begun",
        ) from error


def write_manifest(books: Books, state: State) -> None:
    """Before the point of no return, so that a full disk is found there; again after a crash, if it is missing."""
    path = books.workspace.manifests / state.manifest_sha256
    if not path.exists():
        durable.write_file(path, manifest_text(state))


def state_after(state: State, verified: Verified) -> State:
    """Where a verified run leads."""
    bound = {name: (kind, run) for name, (kind, run) in verified.names.items() if kind}
    gone = [name for name, (kind, _) in verified.names.items() if not kind]
    return next_version(with_changes(with_names(state, bound=bound, gone=gone), verified.changes))


# -- back --------------------------------------------------------------------------------------------------------


async def _roll_back(books: Books, told: Story, **back: Unpack[RolledBack]) -> Settlement:
    """Nothing was published. What the code saved by itself on the way is applied, and has a receipt of its own."""
    planned, before, back = told.planned, books.state, _explained(told, back)
    saved, writes, theirs = before, list[AnyWrite](), list[str]()
    finished = [file for record in told.saved for file in record.files]
    size = len(before.files) if finished else 0
    changes = await books.out_of_the_loop(lambda: plan_saved(before.files, finished), size=size)
    if changes:
        changes, theirs = await books.in_thread(lambda: _publish_saved(books, changes))
    if changes:
        size = work_of(before, changes)
        saved = next_version(await books.out_of_the_loop(lambda: with_changes(before, changes), size=size))
        await books.in_thread(lambda: _list_saved(books, saved))
        receipt = seal(statement(facts_saved(before, saved, told, changes)), books.key)
        writes = _writes(books, planned, saved, receipt, changes=changes, names={})
        saved = sealed(saved, receipt.sha256)
    reason, blame, answer = back.get("reason", INTERRUPTED), back.get("blame", "system"), back.get("answer")
    checks, refused = back.get("checks", ()), back.get("refused", ())
    facts = facts_rolled_back(saved, told, reason=reason, blame=blame, checks=checks, refused=refused)
    receipt = seal(statement(facts), books.key)
    settled = _settled(planned, saved, receipt, status="rolled_back", reason=reason, by=blame)
    after = sealed(saved, receipt.sha256)
    kept = [change.path for change in changes if change.action != "removed" and change.kind == "file"]
    await books.journal.append(
        *books.note(settled),
        *writes,
        PutReceipt(session=books.session, row=receipt_row(saved, planned.run, receipt)),
        PutSession(session=books.session, row=books.row_for(after)),
        *results(books, planned.run, answer(after, kept, theirs) if answer else b""),
    )
    books.adopt(after)
    books.remember(saved.version, changes)
    return Settlement(settled=settled, receipt=receipt, saved=kept, theirs=theirs)


def _in_full(books: Books, changes: list[Change]) -> list[Change]:
    """One of the user's has no versions that one goes back to."""
    if books.workspace.shared is not None:
        return changes
    with _refusals_of(books.workspace):
        return in_full(changes, books.workspace.files)


def _publish_saved(books: Books, changes: list[Change]) -> tuple[list[Change], list[str]]:
    """From blobs, by way of a layer of its own: the same publish as any other. Returns what of it is in place now (a
    receipt states no more), and the paths that were left to the user."""
    crashpoint("settle.saved.before")
    changes = _in_full(books, changes)
    with _refusals_of(books.workspace):
        stage = books.workspace.stage_path(books.workspace.new_stage())
        try:
            fill_stage(stage, changes, books.blobs, owner=books.workspace.owner, files=books.workspace.files)
            theirs = publish(
                stage, books.workspace.files, changes, books.blobs, redo=True, intact=books.workspace.intact
            )
        finally:
            discard(stage)  # if it failed: the next try fills another, and needs the room
        if books.workspace.shared is None:
            books.workspace.intact.remember(changes)
    return [change for change in changes if change.path not in theirs], theirs


def _list_saved(books: Books, after: State) -> None:
    with _refusals_of(books.workspace):
        write_manifest(books, after)
    crashpoint("settle.saved.after")


# -- writing it down ---------------------------------------------------------------------------------------------


def _settled(
    planned: Planned,
    after: State,
    receipt: Sealed,
    *,
    status: Literal["committed", "kept", "rolled_back"],
    reason: str = "",
    by: Literal["", "user", "system"] = "",
) -> Settled:
    return Settled(
        run=planned.run, at=time.time(), status=status, version=after.version, ckpt=str(after.ckpt()),
        reason=reason, by=by, receipt_sha256=receipt.sha256,
    )  # fmt: skip


def _writes(
    books: Books,
    planned: Planned,
    after: State,
    receipt: Sealed,
    *,
    changes: list[Change],
    names: dict[str, tuple[str, str]],
) -> list[AnyWrite]:
    """What a new version is, row by row."""
    session = books.session
    writes: list[AnyWrite] = [
        PutReceipt(session=session, row=receipt_row(after, planned.run, receipt)),
        PutVersion(session=session, row=_version(books, planned, after, changes)),
        PutSession(session=session, row=books.row_for(sealed(after, receipt.sha256))),
    ]
    paths = [change.path for change in changes if change.area == "data"]
    if paths:
        put = [after.files[path] for path in paths if path in after.files]
        gone = [path for path in paths if path not in after.files]
        writes.append(PutFiles(session=session, put=put, gone=gone))
    if names:
        put_names = {name: after.names[name] for name in names if name in after.names}
        writes.append(PutNames(session=session, put=put_names, gone=[name for name in names if name not in put_names]))
    return writes


def _version(books: Books, planned: Planned, after: State, changes: Sequence[Change]) -> VersionRow:
    files_version = after.version if change_files(changes) else books.files_version
    return VersionRow(
        session=after.session, version=after.version, generation=after.generation, ckpt=str(after.ckpt()),
        run=planned.run, at=time.time(), manifest_sha256=after.manifest_sha256, files_version=files_version,
    )  # fmt: skip


def receipt_row(state: State, run: str, receipt: Sealed) -> ReceiptRow:
    """`state` is where the chain stood before it."""
    return ReceiptRow(
        session=state.session, number=state.receipts + 1, run=run, sha256=receipt.sha256, envelope=receipt.envelope
    )


def results(books: Books, run: str, result: bytes) -> list[AnyWrite]:
    return [PutResult(session=books.session, run=run, body=result)] if result else []


def _explained(told: Story, back: RolledBack) -> RolledBack:
    """Who settles a run late may not know what ended it; its records do, if the code had come to its end. Whatever kept
    the run from being settled then, it is not what failed it."""
    done = told.executed
    if "blame" in back or done is None or done.error_code is None:
        return back
    blame: Blame = "system" if done.error_code == "interrupted" else "user"
    return {**back, "reason": done.error_message or done.error_code, "blame": blame}
