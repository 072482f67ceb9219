"""Files that runs read: whether they are there, as they are on disk, and whether they still are what a run has read.

On the host somebody may have written to them: see `resources.intact`. A directory that is shared is another matter:
there `resources.census` tells.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice

import msgspec

from holdfast import ckpt as ckpts
from holdfast import expectations
from holdfast.books import Books
from holdfast.errors import DiskFailed, InputMissing, InvalidSetting, PatternsTooCostly
from holdfast.paths import to_bytes
from holdfast.patterns import Files
from holdfast.preflight import HINTS, Steps, TooManySteps, likeness
from holdfast.records import FileEntry, Input, Planned, RunCard
from holdfast.resources import entries
from holdfast.resources.descent import Cursor, Parts, split
from holdfast.resources.entries import Entry
from holdfast.store.sqlite import Store

_MOST_NAMED = 100
_FEW = 5
_MOST_RUNS = 1_000
_MOST_BYTES = 1 << 30
"""Of inputs that are read again on the host; beyond that, what was committed is believed to be there."""
_LENGTH_SHOWN = 200
_MOST_LINKS = 40
_MOST_LOOKED_AT = 200
_FILES_SEARCHED = 10_000
_FILES_COMPARED = 200
_STEPS_SEARCHED = 50_000
_ALIKE = 0.6
_LENGTH_COMPARED = 100
"""Names that are longer are not compared with a mistyped one: that takes the square of their length."""


# -- of a run that is asked for ----------------------------------------------------------------------------------


async def refuse_missing(books: Books, declared: Sequence[str]) -> None:
    """Each declared input must be there, and each pattern must match a file.

    Raises InputMissing or PatternsTooCostly."""
    if declared:
        await books.in_thread(lambda: _refuse_missing(books, declared))


def _refuse_missing(books: Books, declared: Sequence[str]) -> None:
    missing = _missing(books, declared)
    if not missing:
        return
    named = ", ".join(each[:_LENGTH_SHOWN] for each in list(missing)[:_FEW])
    more = f" and {len(missing) - _FEW:,} more" if len(missing) > _FEW else ""
    path, found = next(iter(missing.items()))
    hint = f'write "{path}/*" or "{path}/**" for the files in it' if found else _near(path, books.state.files)
    raise InputMissing(
        f"{path} is a directory, and no file" if found else f"no file {named}{more} is in {_place(books)}",
        hint=f"{hint}; nothing ran, and the run's key is not used",
    )


def _place(books: Books) -> str:
    return str(books.workspace.shared or expectations.WORKSPACE)


def _missing(books: Books, declared: Sequence[str]) -> dict[str, Entry | None]:
    """Those that are not there; and the directory, where one has that name."""
    missing, known = dict[str, Entry | None](), books.state.files
    files = Files(known)
    with Cursor(books.workspace.files) as committed:
        for path in declared:
            found = None
            with suppress(InvalidSetting):  # a pattern may be longer than any name
                found = _leads_to(committed, (b"data", *split(path)))
            if entries.kind_of(found) not in (None, "directory"):
                continue
            if path in known or not files.meant_by(path):  # or it is gone from the disk
                missing[path] = found
    return missing


def _leads_to(committed: Cursor, parts: Parts, *, links: int = _MOST_LINKS) -> Entry | None:
    """What is at a path, by way of links. One that leads out of /mnt/data stands for what is there: the host does not
    follow it."""
    found: Entry | None = None
    for depth in range(1, len(parts) + 1):
        found = entries.at(committed, parts[:depth])
        if found is None:
            return None
        if found.kind == "symlink":
            here, workspace = b"/".join(parts[1 : depth - 1]), expectations.WORKSPACE.encode()
            target = os.path.normpath(os.path.join(workspace, here, to_bytes(found.target), *parts[depth:]))
            if not target.startswith(workspace + b"/"):
                return found
            below = (b"data", *target[len(workspace) + 1 :].split(b"/"))
            return _leads_to(committed, below, links=links - 1) if links else None
    return found


def _near(path: str, files: Mapping[str, FileEntry]) -> str:
    """Files that may be meant: of the same name elsewhere, or of a name that is much like it."""
    if not files:
        return f"{expectations.WORKSPACE} holds no file yet: write it there first"
    alike = list(dict.fromkeys(islice(_alike(path, files), _FEW)))
    if alike:
        return f"did you mean {', '.join(alike)}?"
    shown = ", ".join(sorted(islice(files, _FILES_COMPARED))[:_FEW])
    return f"there are {shown}" + (f" and {len(files) - _FEW:,} more" if len(files) > _FEW else "")


def _alike(path: str, files: Mapping[str, FileEntry]) -> Iterator[str]:
    last = path.rsplit("/", 1)[-1].lower()
    by_name: dict[str, list[str]] = {}
    for each in islice(files, _FILES_SEARCHED):
        by_name.setdefault(each.rsplit("/", 1)[-1].lower(), []).append(each)
    with suppress(PatternsTooCostly):
        for name in Files(by_name, most_steps=_STEPS_SEARCHED).meant_by(last):
            yield from by_name[name]
    yield from _closest(path, islice(files, _FILES_COMPARED))


def _closest(path: str, files: Iterable[str]) -> list[str]:
    steps, found = Steps(HINTS), list[tuple[float, str]]()
    with suppress(TooManySteps):
        for each in files if len(path) <= _LENGTH_COMPARED else ():
            if len(each) <= _LENGTH_COMPARED and (alike := likeness(path, each, steps)) >= _ALIKE:
                found.append((alike, each))
    return [each for _, each in sorted(found, key=lambda pair: -pair[0])]


# -- of a run that is planned ------------------------------------------------------------------------------------


async def changed_on_host(books: Books, paths: list[str]) -> dict[str, FileEntry | None]:
    """Of these files, those that are not what was committed, and what is there instead."""
    if not paths or books.workspace.shared is not None:
        return {}
    intact, known = books.workspace.intact, books.state.files
    unsure = await books.out_of_the_loop(lambda: intact.unsure(paths, known), size=len(paths))
    return await books.in_thread(lambda: intact.strange(unsure, known)) if unsure else {}


def is_certain(books: Books, card: RunCard) -> bool:
    """Whether its inputs are what was committed, as far as the event loop can tell: it reads no file, and looks at a
    few alone."""
    if len(card.inputs) + len(card.forecast_inputs) > _MOST_LOOKED_AT:
        return False
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
