"""VERIFY: what a run really did, and whether that is what was declared. All of it before the point of no return.

The guest tries first what only it can try (files by format, assertions over the live names). Then the session is
frozen, and what it wrote is read from its layer and hashed: nobody can change it any more.
"""

import os
import stat
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast import checks, expectations, mappings
from holdfast.books import Books
from holdfast.computer import Computer
from holdfast.departures import Departures
from holdfast.errors import DiskFailed, PatternsTooCostly
from holdfast.executions import Execution
from holdfast.inputs import changed_on_host, named
from holdfast.paths import to_bytes, to_text
from holdfast.patterns import is_pattern
from holdfast.publication import judge
from holdfast.records import Change, Check, FileEntry, RunCard
from holdfast.requests import RunRequest
from holdfast.resources.descent import Cursor, Parts
from holdfast.resources.layers import Unreadable, read_changes
from holdfast.sandbox.mounts import DIRECTORIES
from holdfast.state import files_after, work_of

T = TypeVar("T")
_LEAST_S = 5.0
"""For hashing what a run wrote that ended just before its deadline."""
_MOST_NAMED = 100
_FAILURE_LENGTH = 2_000


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What verification found."""

    changes: list[Change] = []
    checks: list[Check] = []
    strange: list[str] = []
    """Files that it read or replaced and that were not what was committed: see `resources.intact`."""

    @property
    def passed(self) -> bool:
        return checks.passed(self.checks)


def is_declared(request: RunRequest) -> bool:
    """Whether there is something that only the guest can try."""
    return bool(request.asserts or any(expected.format for expected in request.outputs))


async def try_out(
    books: Books, computer: Computer, request: RunRequest, execution: Execution, departures: Departures
) -> tuple[list[Check], Execution]:
    """What only the guest can try; and the run with that in it, which may have ended badly by it."""
    if not is_declared(request):
        return [], execution
    within_s = request.timeout_s - execution.outcome.duration_s
    present = await _present(books, computer, request, within_s=within_s)
    try:
        probes = await _matched(
            books,
            request,
            lambda: expectations.probes(request.outputs, present, asserts=request.asserts),
            size=len(present),
        )
    except PatternsTooCostly as error:
        return [checks.refused(error)], execution
    trial = await computer.probe(execution, probes, timeout_s=request.timeout_s, departures=departures)
    if trial.outcome.finished is None or not trial.outcome.begun:
        assert trial.error is not None
        return checks.unanswered(probes, trial.error.message), execution.followed_by(trial)
    failures = [failure[:_FAILURE_LENGTH] for failure in trial.outcome.finished.failures]
    return checks.from_probes(probes, failures), execution.followed_by(trial)


async def verify(
    books: Books, computer: Computer, request: RunRequest, card: RunCard, probed: list[Check], *, within_s: float
) -> Verdict:
    """After `try_out`, with what it found. Leaves the session frozen if it wrote anything."""
    if not computer.staging.has_changes():
        try:
            found = await _compared(books, request, card, [])
        except PatternsTooCostly as error:
            return Verdict(checks=[*probed, checks.refused(error)])
        return msgspec.structs.replace(found, checks=[*found.checks, *probed])
    if not await computer.hold():
        return Verdict(checks=[Check(name="files", ok=False, detail="a process that does not stop may still write")])
    kernel = computer.kernel.pid  # strays are dead, and its snapshot sleeps
    mapped = checks.from_mappings(await books.in_thread(lambda: mappings.shared_writable_mappings([kernel])))
    try:
        changes = await changes_of(books, computer, within_s=within_s)
    except Unreadable as error:
        return Verdict(checks=[Check(name="files", ok=False, detail=str(error))])
    try:
        return await _judged(books, request, card, changes, mapped=mapped, probed=probed)
    except PatternsTooCostly as error:
        return Verdict(changes=changes, checks=[*mapped, *probed, checks.refused(error)])


async def _judged(
    books: Books, request: RunRequest, card: RunCard, changes: list[Change], *, mapped: list[Check], probed: list[Check]
) -> Verdict:
    """What may be published of the changes, and whether it is what was declared."""
    told: list[Check] = []
    if books.workspace.shared is not None:
        judged = await books.in_thread(lambda: judge(changes, request.publication, books.workspace.files))
        changes, told = judged.changes, judged.checks
    found = await _compared(books, request, card, changes)
    return msgspec.structs.replace(found, changes=changes, checks=[*mapped, *found.checks, *probed, *told])


async def _compared(books: Books, request: RunRequest, card: RunCard, changes: list[Change]) -> Verdict:
    """With what was declared and forecast, and with what others did to the same files."""
    replaced = [change.path for change in changes if change.before and change.area == "data"]
    strange = list(await changed_on_host(books, [*named(card), *replaced]))
    disturbed = await _disturbances(books, card, changes)
    told = await books.out_of_the_loop(lambda: _of_strangers(books, strange), size=len(strange))
    size, forecast = len(books.state.files) + len(changes), card.forecast_outputs
    compared = await _matched(
        books, request, lambda: _compare(books, request, card, changes), size=size, forecast=forecast
    )
    found = [*compared, *told, *disturbed]
    return Verdict(checks=found, strange=strange)


def _of_strangers(books: Books, strange: list[str]) -> list[Check]:
    lost = [path for path in strange if (was := books.state.files.get(path)) and not books.blobs.has(was.sha256)]
    return checks.from_strangers(strange, lost=lost)


async def _disturbances(books: Books, card: RunCard, changes: list[Change]) -> list[Check]:
    """What others changed meanwhile in a directory that is shared."""
    census = books.workspace.census
    if census is None:
        return []
    disturbed = await books.in_thread(census.disturbed)
    return checks.from_disturbances(disturbed, changes=changes, inputs=card.inputs)


async def changes_of(books: Books, computer: Computer, *, within_s: float) -> list[Change]:
    """What the layer holds, hashed: in `within_s`, and if that is short in a few seconds. The session is frozen."""
    stage, files, known = computer.staging.path, computer.workspace.files, books.state.files
    untouched, limit_bytes = computer.staging.untouched, computer.limits.disk_bytes
    until = time.monotonic() + max(_LEAST_S, within_s)
    return await books.in_thread(
        lambda: read_changes(stage, files, known, untouched=untouched, limit_bytes=limit_bytes, until=until)
    )


async def touched(books: Books, computer: Computer) -> list[str]:
    """The first of what the layer holds, not hashed: for whoever is told that it was taken back."""
    if computer.staging.is_gone() or not computer.staging.has_changes():
        return []
    await computer.hold()
    try:
        return await books.in_thread(lambda: _list_layer(computer.staging.path))
    except DiskFailed as error:  # a rollback does not fail over what it cannot name
        return [f"files that cannot be listed: {error.message}"]


def _list_layer(stage: Path) -> list[str]:
    with Cursor(stage) as cursor:
        found = (parts for parts, status in cursor.walk() if not stat.S_ISDIR(status.st_mode) and len(parts) > 1)
        return sorted((_shown(parts) for parts in islice(found, _MOST_NAMED)), key=lambda path: path.startswith("/"))


def _shown(parts: Parts) -> str:
    """Relative to /mnt/data; elsewhere in full."""
    area, path = os.fsdecode(parts[0]), to_text(b"/".join(parts[1:]))
    return path if area == "data" else f"{DIRECTORIES[area]}/{path}"


async def changed_outside(books: Books, computer: Computer) -> list[str]:
    """Between two runs nothing is to run; a thread may have written while the last one was put away."""
    if not computer.staging.has_changes():
        return []
    await computer.hold()
    try:
        changes = await changes_of(books, computer, within_s=0.0)
    except Unreadable as error:
        return [str(error)]
    return [_shown((os.fsencode(change.area), to_bytes(change.path))) for change in changes][:_MOST_NAMED]


async def _matched(
    books: Books, request: RunRequest, work: Callable[[], T], *, size: int, forecast: Sequence[str] = ()
) -> T:
    """Work on declared and forecast paths. The number of files does not tell what a pattern takes: their paths may be
    deep. So patterns are matched in a thread."""
    if any(is_pattern(path) for path in (*(one.path for one in request.outputs), *forecast)):
        return await books.in_thread(work)
    return await books.out_of_the_loop(work, size=size)


def _compare(books: Books, request: RunRequest, card: RunCard, changes: list[Change]) -> list[Check]:
    if not (changes or request.outputs or card.forecast_outputs):
        return []
    return checks.compare(
        request.outputs,
        card.forecast_outputs,
        changes=changes,
        files_after=files_after(books.state.files, changes),
        inputs=card.inputs,
    )


async def _present(
    books: Books, computer: Computer, request: RunRequest, *, within_s: float
) -> dict[str, FileEntry] | list[str]:
    """The files that may be meant. Only a pattern makes it necessary to read the layer once more than once."""
    named = [expected.path for expected in request.outputs]
    if not any(is_pattern(path) for path in named):
        return named
    await computer.hold()
    try:
        changes = await changes_of(books, computer, within_s=within_s)
        files, size = books.state.files, work_of(books.state, changes)
        return await books.out_of_the_loop(lambda: dict(files_after(files, changes)), size=size)
    except Unreadable:
        return named
    finally:
        computer.thaw()
