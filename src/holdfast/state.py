"""Where a session stands: its version, its generation, its files and names, and the CKPT that names all of it.

A `State` never changes: a run that commits makes the next one. What is true of the disk is the store's word; this is
the same in memory, so that a run does not read it back.
"""

from collections.abc import Mapping, Sequence, Sized
from functools import cached_property

import msgspec

from holdfast import manifest
from holdfast.ckpt import Ckpt, root
from holdfast.records import Change, FileEntry
from holdfast.store.rows import NameRow

MOST_NAMES = 10_000
"""Names in memory that a session's state lists, and as many of earlier generations. Each run goes through all of them.
With more names, preflight does not say that one is missing."""
_OF_CONTENT = ("_live", "_root12")


class State(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One point in a session's life."""

    session: str
    generation: int = 0
    version: int = 0
    files: Mapping[str, FileEntry] = {}
    """Of /mnt/data, by path."""
    names: Mapping[str, NameRow] = {}
    """Of this generation, and of earlier ones what has not been bound anew: see `live`."""
    manifest_sha256: str = manifest.digest({})
    lines: manifest.Lines | None = None
    """Of the manifest, so that the next one is made of what changes alone; None: nobody has rendered it yet."""
    head: str = ""
    """Digest of the last receipt."""
    receipts: int = 0

    def live(self) -> Mapping[str, tuple[str, str]]:
        """The names in memory: name -> (type, run that bound it last)."""
        return self._live

    def ckpt(self) -> Ckpt:
        return self._ckpt

    @cached_property
    def _live(self) -> Mapping[str, tuple[str, str]]:
        return {n: (row.type, row.run) for n, row in self.names.items() if row.generation == self.generation}

    @cached_property
    def _ckpt(self) -> Ckpt:
        return Ckpt(session=self.session, generation=self.generation, version=self.version, root12=self._root12)

    @cached_property
    def _root12(self) -> str:
        return root(self.manifest_sha256, self.live())[:12]


def with_changes(state: State, changes: Sequence[Change]) -> State:
    """The same with other files."""
    own = [change for change in changes if change.area == "data"]
    if not own:
        return state
    files = files_after(state.files, own)
    put = [files[change.path] for change in own if change.path in files]
    gone = [change.path for change in own if change.path not in files]
    lines = (state.lines or manifest.Lines.of(state.files)).after(put, gone)
    return msgspec.structs.replace(state, files=files, lines=lines, manifest_sha256=lines.sha256())


def files_after(before: Mapping[str, FileEntry], changes: Sequence[Change]) -> Mapping[str, FileEntry]:
    """The files of /mnt/data after some changes."""
    files = dict(before)
    for change in changes:
        if change.area != "data":
            continue
        if change.kind == "file" and change.action != "removed":
            files[change.path] = FileEntry(path=change.path, sha256=change.sha256, bytes=change.bytes)
        else:
            files.pop(change.path, None)
    return files


def work_of(state: State, changes: Sequence[Change], names: Sized = ()) -> int:
    """How many files, changes and names `with_changes` and `with_names` go through."""
    of_files = len(state.files) + len(changes) if changes else 0
    return of_files + (len(state.names) + len(names) if names else 0)


def manifest_text(state: State) -> bytes:
    return (state.lines or manifest.Lines.of(state.files)).text()


def with_names(state: State, *, bound: Mapping[str, tuple[str, str]], gone: Sequence[str]) -> State:
    """The same after some names were bound, name -> (type, run), and others taken away."""
    if not bound and not gone:
        return state
    taken = set(gone)
    names = {name: row for name, row in state.names.items() if name not in taken}
    for name, (kind, run) in bound.items():
        names[name] = NameRow(type=kind, run=run, generation=state.generation)
    return msgspec.structs.replace(state, names=names)


def forgotten(names: Mapping[str, NameRow]) -> list[str]:
    """The names of the earliest generations, where a state would list too many."""
    if len(names) <= MOST_NAMES:
        return []
    return sorted(names, key=lambda name: names[name].generation)[: len(names) - MOST_NAMES]


def next_version(state: State) -> State:
    return _knowing(msgspec.structs.replace(state, version=state.version + 1), state)


def sealed(state: State, receipt_sha256: str) -> State:
    """The same with one more receipt in its chain."""
    return _knowing(msgspec.structs.replace(state, head=receipt_sha256, receipts=state.receipts + 1), state)


def _knowing(state: State, before: State) -> State:
    """What was worked out of a state with the same files, names and generation holds for this one too. With thousands
    of names it is most of what a small run would cost."""
    state.__dict__.update({name: known for name, known in before.__dict__.items() if name in _OF_CONTENT})
    return state
