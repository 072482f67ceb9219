"""Which versions of a session are kept: the latest that changed files, as many as it was made with (`versions=`).

Their manifests are there, and their files can be brought back as long as their contents find room (`retention`).

A run that leaves the files as they were makes a version too: so does a restore to where the session is, or a write of
the same bytes. Such a version takes no place. Each version's row names the latest version that changed files
(`VersionRow.files_version`), so that a million of these cost one step.
"""

from collections.abc import Iterator, Sequence

from holdfast.receipts import receipt
from holdfast.records import Change, Verified
from holdfast.resources import entries
from holdfast.store.rows import VersionRow
from holdfast.store.sqlite import Store


def change_files(changes: Sequence[Change]) -> bool:
    """Whether there is anything that a restore would take back. Only /mnt/data has versions."""
    own = (change for change in changes if change.area == "data")
    return any(entries.differ(entries.before(change), entries.after(change)) for change in own)


def latest(store: Store, session: str, *, most: int) -> Iterator[tuple[VersionRow, list[Change]]]:
    """The latest versions that changed files, newest first, with what they changed."""
    version = last_changed(store, session)
    for _ in range(most):
        row = store.version(session, version)
        if row is None:
            return
        yield row, _changes_of(store, row)
        version = last_changed(store, session, version - 1)


def last_changed(store: Store, session: str, version: int | None = None) -> int:
    """The version that changed files last, up to this one or the present one; 0: none has."""
    row = store.version(session, version) if version is not None else next(iter(store.versions(session, limit=1)), None)
    while row is not None and row.files_version is None:  # written by an earlier build
        if change_files(_changes_of(store, row)):
            return row.version
        row = store.version(session, row.version - 1)
    return 0 if row is None or row.files_version is None else row.files_version


def _changes_of(store: Store, row: VersionRow) -> list[Change]:
    """Of a run that committed the journal says it; of savepoints that outlived their run, their receipt."""
    for record in store.records(row.run):
        if isinstance(record, Verified):
            return record.changes
    saved = (receipt(found.envelope).facts() for found in store.receipt(row.run))
    return next((facts.changes for facts in saved if facts.kind == "savepoint"), [])
