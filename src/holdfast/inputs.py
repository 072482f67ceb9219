"""Files that runs read: as they are on disk, and whether they still are what a run has read.

On the host somebody may have written to them: see `resources.intact`. A directory that is shared is another matter:
there `resources.census` tells.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec

from holdfast import ckpt as ckpts
from holdfast.books import Books
from holdfast.errors import DiskFailed
from holdfast.records import FileEntry, Input, Planned, RunCard
from holdfast.store.sqlite import Store

_MOST_NAMED = 100
_FEW = 5
_MOST_RUNS = 1_000
_MOST_BYTES = 1 << 30
"""Of inputs that are read again on the host; beyond that, what was committed is believed to be there."""


# -- of a run that is planned ------------------------------------------------------------------------------------


async def changed_on_host(books: Books, paths: list[str]) -> dict[str, FileEntry | None]:
    """Of these files, those that are not what was committed, and what is there instead."""
    if not paths or books.workspace.shared is not None:
        return {}
    intact, known = books.workspace.intact, books.state.files
    unsure = await books.out_of_the_loop(lambda: intact.unsure(paths, known), size=len(paths))
    return await books.in_thread(lambda: intact.strange(unsure, known)) if unsure else {}


def is_certain(books: Books, card: RunCard) -> bool:
    """Whether its inputs are what was committed, as far as that can be told without reading them."""
    return books.workspace.shared is not None or not books.workspace.intact.unsure(named(card), books.state.files)


async def as_found(books: Books, card: RunCard) -> tuple[RunCard, list[str]]:
    """The card with its inputs as they are on disk; and those that somebody has changed there since."""
    there = await changed_on_host(books, named(card))
    if not there:
        return card, []
    inputs, forecast = ([_found(one, there) for one in given] for given in (card.inputs, card.forecast_inputs))
    return msgspec.structs.replace(card, inputs=inputs, forecast_inputs=forecast), list(there)[:_MOST_NAMED]


def named(card: RunCard) -> list[str]:
    return [one.path for one in (*card.inputs, *card.forecast_inputs)]


def _found(given: Input, there: Mapping[str, FileEntry | None]) -> Input:
    if given.path not in there:
        return given
    entry = there[given.path]
    return Input(path=given.path, sha256=entry.sha256, bytes=entry.bytes) if entry else Input(path=given.path)


# -- of the runs whose names were lost ---------------------------------------------------------------------------


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """What runs have read whose names are in memory no more."""

    by_run: Mapping[str, Sequence[Input]] = {}
    """In the order in which the runs were."""
    on_host: Mapping[str, FileEntry | None] = {}
    """Of those files, what is not as committed, and what is there instead."""


async def read_for_lost_names(books: Books) -> Read:
    """By the cards of the runs. Where the journal or the disk cannot be read, what a caller is told goes by what is
    known without: it is then that he asks."""
    state = books.state
    lost = [row.run for row in state.names.values() if row.generation != state.generation]
    if not lost:
        return Read()
    runs = list(dict.fromkeys(lost))[:_MOST_RUNS]
    on_host: dict[str, FileEntry | None] = {}
    try:
        by_run = await books.read(lambda store: _read_by(store, runs))
    except DiskFailed:
        return Read()
    with suppress(OSError, DiskFailed):
        on_host = await changed_on_host(books, _affordable(one for inputs in by_run.values() for one in inputs))
    return Read(by_run=by_run, on_host=on_host)


def _read_by(store: Store, runs: Iterable[str]) -> dict[str, list[Input]]:
    """What was there when they were planned."""
    cards = [record.card for run in runs for record in store.records(run) if isinstance(record, Planned)]
    cards.sort(key=lambda card: ckpts.parse(card.base).version)
    return {card.run: [one for one in (*card.inputs, *card.forecast_inputs) if one.sha256] for card in cards}


def _affordable(inputs: Iterable[Input]) -> list[str]:
    """As many as may be read again. Whatever was read before: asked again, the answer is the same."""
    sizes = {one.path: one.bytes for one in inputs}
    paths, left = list[str](), _MOST_BYTES
    for path, size in sorted(sizes.items(), key=lambda each: each[1]):
        if (left := left - size) < 0:
            break
        paths.append(path)
    return paths


def spoilt(read: Read, files: Mapping[str, FileEntry]) -> dict[str, str]:
    """The runs that cannot be expected to do again what they did, and why: of what they read, something is not there
    any more as it was. `files` are those that are committed."""
    why = {run: _why(run, inputs, read, files) for run, inputs in read.by_run.items()}
    return {run: words for run, words in why.items() if words}


def _why(run: str, inputs: Sequence[Input], read: Read, files: Mapping[str, FileEntry]) -> str:
    changed, gone = dict[str, None](), dict[str, None]()
    for given in inputs:
        now = read.on_host[given.path] if given.path in read.on_host else files.get(given.path)
        if now is None:
            gone[given.path] = None
        elif now.sha256 != given.sha256:
            changed[given.path] = None
    return "; ".join([*_told(run, list(changed), "changed since"), *_told(run, list(gone), "been removed since")])


def _told(run: str, paths: list[str], what: str) -> list[str]:
    if not paths:
        return []
    shown = ", ".join(paths[:_FEW]) + (f" and {len(paths) - _FEW:,} more" if len(paths) > _FEW else "")
    return [f"{shown}, which {run} read, {'has' if len(paths) == 1 else 'have'} {what}"]
