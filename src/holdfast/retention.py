"""How far back a session's files can be brought: the latest versions, within the disk limit.

An old content is kept in blobs for as long as a version needs it that can still be asked for.
"""

from collections.abc import Sequence

from holdfast.books import Books
from holdfast.config import Limits
from holdfast.records import Change

KEPT_VERSIONS = 20
"""Versions that changed a file; those that changed none cost nothing and are not counted."""


async def trim(books: Books, limits: Limits) -> None:
    """Forget what is too old or too much. Only a version that changed files can make it so."""
    if not books.grown:
        return
    books.grown = False
    too_old = len(books.recent) > KEPT_VERSIONS
    while len(books.recent) > KEPT_VERSIONS:
        _forget_oldest(books)
    if too_old or await books.in_thread(books.blobs.size_bytes) > limits.disk_bytes:
        await books.in_thread(lambda: _remove_unneeded(books, limits))


def needed(recent: Sequence[tuple[int, Sequence[Change]]]) -> set[str]:
    """Contents without which those versions cannot be walked back over."""
    return {change.before for _, changes in recent for change in changes if change.before}


def _forget_oldest(books: Books) -> None:
    version, _ = books.recent.pop(0)
    books.oldest = version


def _remove_unneeded(books: Books, limits: Limits) -> None:
    books.blobs.forget(needed(books.recent))
    while books.recent and books.blobs.size_bytes() > limits.disk_bytes:
        _forget_oldest(books)
        books.blobs.forget(needed(books.recent))
    keep = {books.state.manifest_sha256, *books.manifests()}
    for path in books.workspace.manifests.iterdir():
        if path.name not in keep:
            path.unlink()
