"""How far back a session's files can be brought: the latest versions, within the disk limit.

An old content is kept in blobs for as long as a version needs it that can still be asked for. Manifests are small: they
stay for each of the latest versions, also where its contents had to make room, so that `verify` can tell which must be
there.

Answers to runs under keys that callers gave are kept for as long as the session is. Those under a key that a client
made for one call are needed only while that call may be sent again: the latest of them are kept.
"""

from collections.abc import Sequence

from holdfast.books import Books
from holdfast.config import Limits
from holdfast.records import Change, Saved, Verified
from holdfast.store.rows import DropResults

KEPT_CALLS = 50
"""A client sends a call again for ten seconds. One that comes later than all these is refused, and nothing runs."""
_FEW_CALLS = 5
"""The same where the journal is half full: answers may be large."""


async def trim(books: Books, limits: Limits) -> None:
    """Forget what is too old or too much."""
    await _trim_answers(books, limits)
    await _trim_contents(books, limits)


async def _trim_answers(books: Books, limits: Limits) -> None:
    if books.calls is None:
        books.calls = await books.read(lambda store: store.answered_calls(books.session))
    is_roomy = books.journal.kept_bytes(books.session) < limits.journal_bytes // 2
    most = KEPT_CALLS if is_roomy else _FEW_CALLS
    if len(books.calls) > 2 * most:  # many at once, and seldom
        gone, books.calls = books.calls[:-most], books.calls[-most:]
        books.journal.append_nowait(DropResults(session=books.session, runs=gone))


async def _trim_contents(books: Books, limits: Limits) -> None:
    """Only a version that changed files can make it too much."""
    if not books.grown:
        return
    books.grown = False
    too_old = len(books.recent) > books.kept_versions
    while len(books.recent) > books.kept_versions:
        _forget_oldest(books)
    del books.manifests[: -books.kept_versions - 1]
    if too_old or await books.in_thread(books.blobs.size_bytes) > limits.disk_bytes:
        await books.in_thread(lambda: _remove_unneeded(books, limits))


def needed(recent: Sequence[tuple[int, Sequence[Change]]]) -> set[str]:
    """Contents without which those versions cannot be walked back over."""
    return {change.before for _, changes in recent for change in changes if change.before}


def wanted(books: Books) -> set[str]:
    """Those, and what runs that have no end yet had saved, or had replaced when the disk was full."""
    wanted = needed(books.recent)
    for record in (record for records in books.open.values() for record in records):
        if isinstance(record, Saved):
            wanted |= {file.sha256 for file in record.files}
        elif isinstance(record, Verified):
            wanted |= {change.before for change in record.changes if change.before}
    return wanted


def _forget_oldest(books: Books) -> None:
    version, _ = books.recent.pop(0)
    books.oldest = version


def _remove_unneeded(books: Books, limits: Limits) -> None:
    books.blobs.forget(wanted(books))
    while books.recent and books.blobs.size_bytes() > limits.disk_bytes:
        _forget_oldest(books)
        books.blobs.forget(wanted(books))
    forget_manifests(books)


def forget_manifests(books: Books) -> None:
    """Those of versions that are too old, or never came to be."""
    keep = {books.state.manifest_sha256, *books.manifests}
    for path in books.workspace.manifests.iterdir():
        if path.name not in keep:
            path.unlink()
