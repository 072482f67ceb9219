"""What a chain of receipts states of /mnt/data: what is at each path after all of them.

1. A change states its path whole: kind, mode, and content or target. Of what its run left alone it states
   nothing.
2. The directories on the way to a stated path are stated with it, but for their modes.
3. Links have no mode, and no receipt states the modes of files that were taken in from outside.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterable

import msgspec

from holdfast import manifest, paths
from holdfast.records import Change, FileEntry, Kind
from holdfast.resources import entries
from holdfast.resources.entries import Entry
from holdfast.statements import RunFacts

ROOT = "."
"""How a change names the area itself."""
_ARTICLES: dict[Kind | None, str] = {None: "a device"}


class Stated:
    """What is at each path, after the receipts so far. The manifest's lines are kept in order, so that a receipt costs
    what it changed and one pass of SHA-256, not a sort."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.digest = manifest.digest({})
        self._order: list[bytes] = []
        self._lines: dict[bytes, bytes] = {}

    def files(self) -> dict[str, FileEntry]:
        return {
            path: FileEntry(path=path, sha256=entry.sha256, bytes=entry.bytes)
            for path, entry in self.entries.items()
            if entry.kind == "file"
        }

    def apply(self, facts: RunFacts) -> None:
        """One more receipt."""
        for change in facts.changes:
            self._apply(change, entry_of(change, facts.kind))
        if facts.changes:
            self.digest = hashlib.sha256(self.manifest_text()).hexdigest()

    def manifest_text(self) -> bytes:
        return b"".join(self._lines[name] for name in self._order)

    def _apply(self, change: Change, entry: Entry | None) -> None:
        name = paths.to_bytes(change.path)
        if entry is None:
            self.entries.pop(change.path, None)
        else:
            self.entries[change.path] = entry
        if entry is not None and entry.kind == "file":
            if name not in self._lines:
                insort(self._order, name)
            self._lines[name] = manifest.line(name, entry.sha256)
        elif self._lines.pop(name, None):
            del self._order[bisect_left(self._order, name)]


def entry_of(change: Change, kind: str) -> Entry | None:
    """What a change of a run of this kind states of its path; None: nothing is there."""
    entry = entries.after(change)
    if entry is not None and kind == "outside" and not entry.mode:
        return msgspec.structs.replace(entry, mode=None)
    return entry


def directories_of(stated: Iterable[str]) -> set[str]:
    """The directories on the way to these paths."""
    found: set[str] = set()
    for path in stated:
        while (cut := path.rfind("/")) > 0:
            path = path[:cut]
            if path in found:
                break
            found.add(path)
    return found


def difference(wanted: Entry, found: Entry) -> str:
    """What is otherwise than stated, in words; empty: nothing is."""
    if wanted.kind != found.kind:
        return f"is {named(found.kind)}, its receipt says {named(wanted.kind)}"
    if wanted.bytes != found.bytes:
        return f"has {found.bytes} bytes, its receipt says {wanted.bytes}"
    if wanted.sha256 != found.sha256:
        return f"was changed: its SHA-256 is {found.sha256}, its receipt says {wanted.sha256}"
    if wanted.target != found.target:
        return f"points to {found.target}, its receipt says {wanted.target}"
    if None not in (wanted.mode, found.mode) and wanted.mode != found.mode:
        return f"has the mode {found.mode:04o}, its receipt says {wanted.mode:04o}"
    return ""


def named(kind: Kind | None) -> str:
    """
    >>> named("fifo"), named(None)
    ('a FIFO', 'a device')
    """
    return _ARTICLES.get(kind, "a FIFO" if kind == "fifo" else f"a {kind}")
