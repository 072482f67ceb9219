"""`holdfast show`: where a session stands; or what one run was to do, what became of it, and its receipt.

All of it is read from the journal, beside whoever owns the home.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast import cards
from holdfast.cli import homes, ps
from holdfast.cli.ps import Listed
from holdfast.cli.sizes import short
from holdfast.cli.terminal import print_json
from holdfast.config import home_path
from holdfast.errors import RunUnknown
from holdfast.model import HistoryEntry
from holdfast.receipts import Receipt, receipt
from holdfast.records import Change, Executed, FileEntry, Lost, Planned, RunCard, Verified, requests_sent
from holdfast.store.sqlite import Store
from holdfast.visible import visible, visible_lines
from holdfast.workfiles import history_entry

_MOST_LINES = 20


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session stands."""

    session: Listed
    history: list[HistoryEntry]
    """Oldest first."""
    files: list[FileEntry]
    names: dict[str, str]
    """Bound in its present memory, with their types; of a session that is only kept, that memory is gone."""
    losses: list[Lost]


class RunShown(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    card: RunCard
    code: str
    entry: HistoryEntry | None
    """None while it is under way."""
    executed: Executed | None
    outputs: list[Change]
    egress: list[str]
    """Requests that left, and, once it is settled, those that were refused."""
    receipt: Receipt | None


def show(session: str, run: str | None, *, home: Path | None, as_json: bool) -> int:
    where, session = homes.locate(home_path(home), session)
    found = standing(where, session) if run is None else run_of(where, session, run)
    if as_json:
        print_json(found)
    else:
        for line in _session_lines(found) if isinstance(found, Standing) else _run_lines(found):
            print(visible_lines(line))
    return 0


def standing(home: Path, session: str) -> Standing:
    listed = ps.one(home, session)
    with homes.reading(home) as store:
        assert store is not None  # it knows the session
        entries = [history_entry(store, run) for run in store.runs(session)]
        names = {name: row.type for name, row in store.names(session).items() if row.generation == listed.generation}
        return Standing(
            session=listed, history=[entry for entry in entries if entry], files=list(store.files(session).values()),
            names=names, losses=store.losses(session),
        )  # fmt: skip


def run_of(home: Path, session: str, typed: str) -> RunShown:
    with homes.reading(home) as store:
        assert store is not None
        run = resolve_run(store, session, typed)
        records = store.records(run)
        planned = next(record for record in records if isinstance(record, Planned))
        receipts = [receipt(row.envelope) for row in store.receipt(run)]
        return RunShown(
            card=cards.as_far(planned.card, records), code=planned.code, entry=history_entry(store, run),
            executed=next((record for record in records if isinstance(record, Executed)), None),
            outputs=[change for record in records if isinstance(record, Verified) for change in record.changes],
            egress=receipts[-1].facts().egress if receipts else requests_sent(records),
            receipt=receipts[-1] if receipts else None,
        )  # fmt: skip


def resolve_run(store: Store, session: str, typed: str | None) -> str:
    """The run that is meant: by its id, by the beginning of it, or without one the latest."""
    known = store.runs(session)
    if not known:
        raise RunUnknown(f"nothing ran in session {session} yet", hint="run something in it first")
    if typed is None:
        return known[-1]
    begun = [each for each in known if typed and each.removeprefix("run_").startswith(typed.removeprefix("run_"))]
    if typed in known or len(begun) == 1:
        return typed if typed in known else begun[0]
    hint = f"which: {', '.join(begun[-5:])}?" if begun else f"`holdfast show {session}` lists them"
    raise RunUnknown(f"{typed!r} is {'no run' if not begun else 'not one run'} of session {session}", hint=hint)


def _session_lines(found: Standing) -> Iterator[str]:
    at = found.session
    yield f"session  {at.id} · {at.state} · {at.mode}" + (f" · running {at.running}" if at.running else "")
    yield f"state    {at.ckpt or 'its beginning'} · version {at.version}, generation {at.generation}"
    used = "" if at.memory_bytes is None else f"{short(at.memory_bytes)} of "
    yield f"memory   {used}{short(at.memory_limit_bytes)}"
    if at.halted:
        yield f"halted   {visible(at.halted)}"
    gone = " (gone with its memory: run what made them again)" if at.state == "kept" else ""
    names = [visible(f"{name}: {kind}") for name, kind in sorted(found.names.items())]
    yield f"names    {', '.join(names) or 'none'}{gone}"
    yield from (f"lost     {_when(lost.at)} · {visible(lost.cause)}" for lost in found.losses)
    yield f"files    {len(found.files):,}"
    yield from _several([f"  {entry.sha256[:12]}  {entry.bytes:>12,}  {entry.path}" for entry in found.files])
    yield f"runs     {len(found.history):,}"
    latest = found.history[-_MOST_LINES:]
    if len(latest) < len(found.history):
        yield f"  {len(found.history) - len(latest):,} earlier ones: --json has them"
    for entry in latest:
        yield f"  {_when(entry.at)}  {entry.run}  {entry.status:<11} v{entry.version:<4} {visible(entry.goal)}"


def _run_lines(found: RunShown) -> Iterator[str]:
    entry, executed = found.entry, found.executed
    yield cards.render(found.card)
    if entry is None:
        yield "outcome  under way, or left by a host that died: the next owner of the home settles it"
    else:
        took = f" · {executed.duration_s:.2f} s" if executed else ""
        yield f"outcome  {entry.status} · {_when(entry.at)}{took} · version {entry.version}"
        yield f"state    {entry.ckpt}"
    if executed and executed.error_code:
        yield f"error    {executed.error_code}: {visible(executed.error_message)}"
    if entry and entry.reason:
        yield f"reason   {visible(entry.reason)}"
    yield from _several([f"{change.action:<8} {change.path} · {_what(change)}" for change in found.outputs])
    yield from _several([f"egress   {line}" for line in found.egress])
    if found.receipt is not None:
        yield f"receipt  {found.receipt.number} · sha256 {found.receipt.sha256}"
    yield f"code\n{found.code}"


def _what(change: Change) -> str:
    if change.action == "removed" or change.kind != "file":
        return change.kind
    return f"{change.bytes:,} bytes · sha256 {change.sha256}"


def _several(lines: list[str]) -> Iterator[str]:
    yield from lines[:_MOST_LINES]
    if len(lines) > _MOST_LINES:
        yield f"  and {len(lines) - _MOST_LINES:,} more: --json has them"


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
