"""What leads back to the files of an earlier version, and what of them cannot come back.

What later runs did is undone, as their changes tell it. What somebody did on the host, past Holdfast, is not told
anywhere: a file is put back where its content is kept, and otherwise it stays, and is named.
"""

from collections.abc import Container, Sequence

import msgspec

from holdfast.books import Books
from holdfast.ckpt import Ckpt
from holdfast.errors import CkptUnknown
from holdfast.records import Change
from holdfast.resources import entries
from holdfast.resources.descent import Cursor, split
from holdfast.resources.restoring import hold_others, not_kept, plan_back, put_again

_MOST_NAMED = 10


class WayBack(msgspec.Struct, frozen=True, kw_only=True):
    changes: list[Change]
    not_restored: list[str]


def way_back(books: Books, target: Ckpt) -> WayBack:
    """By the journal, and by what is there now: nothing runs meanwhile. Raises CkptUnknown as `refuse_if_too_old`."""
    changes, gone = _told(books, target)
    strange = _strange(books, changes)
    again = _put_again(books, strange, but={change.path for change in changes})
    stay = [path for path in strange if not books.blobs.has(books.state.files[path].sha256)]
    stay += hold_others(changes, books.workspace.files)
    changes = [change for change in changes if change.path not in stay] + again
    return WayBack(changes=changes, not_restored=sorted({*gone, *stay}))


def refuse_if_too_old(books: Books, target: Ckpt) -> None:
    """Raises CkptUnknown if not all of that version's files are kept."""
    _told(books, target)


def is_kept(books: Books, version: int) -> bool:
    """Whether what later runs did to an earlier version's files can be undone. Looks at the disk."""
    return version >= books.oldest and not not_kept(_undone(books, version)[0], books.blobs)


def _told(books: Books, target: Ckpt) -> tuple[list[Change], list[str]]:
    """What leads back by the journal, and what of it cannot be made again."""
    if target.version < books.oldest:
        raise CkptUnknown(
            f"the files of version {target.version} are not kept any more",
            hint=f"the oldest that can be brought back is version {books.oldest}",
        )
    changes, gone = _undone(books, target.version)
    _refuse_if_lost(books, target, changes)
    return changes, gone


def _undone(books: Books, version: int) -> tuple[list[Change], list[str]]:
    return plan_back(changes for later, changes in reversed(books.recent) if later > version)


def _refuse_if_lost(books: Books, target: Ckpt, changes: Sequence[Change]) -> None:
    if gone := not_kept(changes, books.blobs):
        names = ", ".join(gone[:_MOST_NAMED]) + (", …" if len(gone) > _MOST_NAMED else "")
        raise CkptUnknown(
            f"of the files of version {target.version} {names} cannot be brought back: what was committed is not kept "
            "(it is too old, or was changed on the host, past Holdfast, before a run replaced it)",
            hint="restore a version that has them with another content, or read what is there now",
        )


def _strange(books: Books, changes: Sequence[Change]) -> list[str]:
    """Files whose content no version since has changed, but somebody on the host has."""
    if books.workspace.shared is not None:
        return []
    intact, known = books.workspace.intact, books.state.files
    same = known.keys() - {change.path for change in changes if change.sha256 != change.before}
    return sorted(intact.strange(intact.unsure(same, known), known))


def _put_again(books: Books, strange: Sequence[str], *, but: Container[str]) -> list[Change]:
    known = books.state.files
    kept = [path for path in strange if path not in but and books.blobs.has(known[path].sha256)]
    return [put_again(known[path], _committed_mode(books, path)) for path in kept]


def _committed_mode(books: Books, path: str) -> int | None:
    """As the latest version that changed it says; else as it is there, for whoever edits a file leaves that alone."""
    for _, changes in reversed(books.recent):
        for change in changes:
            if (change.area, change.path) == ("data", path):
                return change.mode
    with Cursor(books.workspace.files) as cursor:
        found = entries.at(cursor, (b"data", *split(path)))
    return found.mode if entries.kind_of(found) == "file" and found else None
