"""Which versions of a session are kept: the latest that changed something, as many as it was made with (`versions=`).

Their manifests are there, and their files can be brought back as long as their contents find room (`retention`).
"""

from collections.abc import Iterator

from holdfast.receipts import receipt
from holdfast.records import Change, Verified
from holdfast.store.rows import VersionRow
from holdfast.store.sqlite import Store

_LOOKED_AT = 200
"""Versions, so that many that changed nothing cost no start of the host its time."""


def latest(store: Store, session: str, *, most: int) -> Iterator[tuple[VersionRow, list[Change]]]:
    """Newest first, with what they changed; those that changed nothing are among them, and not counted."""
    changed = 0
    for row in store.versions(session, limit=max(_LOOKED_AT, 10 * most)):
        changes = _changes_of(store, row)
        changed += bool(changes)
        if changed > most:
            return
        yield row, changes


def _changes_of(store: Store, row: VersionRow) -> list[Change]:
    """Of a run that committed the journal says it; of savepoints that outlived their run, their receipt."""
    for record in store.records(row.run):
        if isinstance(record, Verified):
            return record.changes
    saved = (receipt(found.envelope).facts() for found in store.receipt(row.run))
    return next((facts.changes for facts in saved if facts.kind == "savepoint"), [])
