"""Names that a cell needs and that no row tells of: what became of them, from the journal, and what brings them back.

A state has rows of the names that are in memory, and of those that were lost with it. One that a run deleted, or that
going back to an earlier version took away, has none: rows kept for all of those would cost every run something, and
hardly any is ever missed. So when one is, the journal is read backwards, as far as `_LOOKED_BACK` runs.
"""

from functools import partial

import msgspec

from holdfast import ckpt as ckpts
from holdfast.books import Books
from holdfast.ckpt import Ckpt
from holdfast.preflight import HINTS, Gone, Steps, explain_missing
from holdfast.records import AnyRecord, Finding, Planned, RunCard, Verified
from holdfast.sessions import LiveSession
from holdfast.store.rows import VersionRow
from holdfast.store.sqlite import Store
from holdfast.travel import is_kept as files_are_kept

_LOOKED_BACK = 300
"""Runs: some ten milliseconds, beside the run that is planned."""


class _Trace(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal has."""

    gone: dict[str, Gone]
    is_whole: bool
    """All runs of the session were looked at."""
    versions: list[VersionRow]
    """Whose memory can be woken, the latest first."""


def is_explained(books: Books, card: RunCard) -> bool:
    """Whether all that can be said of the names that a cell lacks stands on its card already."""
    return not _unexplained(books, card)


async def explained(session: LiveSession, card: RunCard, *, is_kept: bool = False) -> RunCard:
    """The card, with what the journal knows. `is_kept`: the run that it is of becomes a version also if it fails, and
    may take the place of one that could be gone back to."""
    books, names = session.books, _unexplained(session.books, card)
    if not names:
        return card
    base, awake = ckpts.parse(card.base).version, _to_be_woken(session, is_kept=is_kept)
    trace = await books.read(lambda store: _traced(store, books.session, names, base=base, awake=awake))
    ways_back = await _ways_back(session, trace)
    steps = Steps(HINTS)
    findings = [_explain(books, finding, trace, ways_back, steps) if _unknown(books, finding) else finding
                for finding in card.findings]  # fmt: skip
    return msgspec.structs.replace(card, findings=findings)


def _unexplained(books: Books, card: RunCard) -> set[str]:
    return {name for finding in card.findings for name in finding.names if _unknown(books, finding)}


def _unknown(books: Books, finding: Finding) -> bool:
    return finding.code == "name_missing" and len(finding.names) == 1 and finding.names[0] not in books.state.names


def _explain(books: Books, finding: Finding, trace: _Trace, ways_back: dict[str, Ckpt], steps: Steps) -> Finding:
    (name,) = finding.names
    return explain_missing(
        name, past=books.state.names, losses=books.losses, generation=books.state.generation,
        gone=trace.gone.get(name), way_back=str(ways_back.get(name, "")),
        looked_back=None if trace.is_whole else _LOOKED_BACK, steps=steps,
    )  # fmt: skip


# -- the journal, backwards --------------------------------------------------------------------------------------


def _traced(store: Store, session: str, names: set[str], *, base: int, awake: set[int]) -> _Trace:
    runs = store.runs(session, limit=_LOOKED_BACK, newest_first=True)
    gone, sought = dict[str, Gone](), set(names)
    for run in runs:
        if not sought:
            break
        _look_at(store.records(run), gone, sought, base=base)
    rows = [store.version(session, version) for version in sorted(awake, reverse=True)]
    return _Trace(gone=gone, is_whole=len(runs) < _LOOKED_BACK, versions=[row for row in rows if row is not None])


def _look_at(records: list[AnyRecord], gone: dict[str, Gone], sought: set[str], *, base: int) -> None:
    """What one run did to the names that are sought; it is the latest of which nothing is known yet. Those that are
    found with the run that had bound them are sought no more."""
    for verified in records:
        if not isinstance(verified, Verified) or verified.version > base:
            continue
        for name in sought & verified.names.keys():
            kind, run = verified.names[name]
            if not kind:
                gone.setdefault(name, Gone(by=run, is_deletion=not _is_restore(records)))
            elif name in gone:
                gone[name] = msgspec.structs.replace(gone[name], run=run)
            if kind:
                sought.discard(name)


def _is_restore(records: list[AnyRecord]) -> bool:
    return any(isinstance(record, Planned) and record.kind == "restore" for record in records)


# -- ways back ---------------------------------------------------------------------------------------------------


def _to_be_woken(session: LiveSession, *, is_kept: bool) -> set[int]:
    """Versions whose memory sleeps, and will when the run is over that is planned."""
    if not session.limits.undo or session.computer.now is None:
        return set()
    kept = session.computer.protection.kept
    return kept.outlasting() if is_kept else kept.versions()


async def _ways_back(session: LiveSession, trace: _Trace) -> dict[str, Ckpt]:
    """For each name the latest version with it that a restore would really bring back: its memory, and its files."""
    books, found = session.books, dict[str, Ckpt]()
    for row in trace.versions:
        target = ckpts.parse(row.ckpt)
        then = session.names_at(target)
        back = [] if isinstance(then, str) else [name for name in trace.gone if name in then and name not in found]
        if not back:
            continue
        if await books.in_thread(partial(files_are_kept, books, target.version)):
            found |= dict.fromkeys(back, target)
    return found
