"""A job: a script or a notebook as one transaction over a directory of the user's.

The directory itself is the session's /mnt/data (`resources.workspace`); what is kept of its jobs is in its `.holdfast`.
It may have changed since the last job, so each begins with a look at it (`resources.census`), and what is not as the
last manifest says is taken in first, as a version of its own with a receipt of its own (`outside`): what follows is a
run like any other, on a state that is what the directory is.

What others change while the job runs is noted, and is for the next look to take in. Where it is a file that the job
changes too, or one of its declared inputs, the job is rolled back (`verification`).
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from holdfast import agreement, checks, durable, expectations, inputs, once, stated, underway, verbs
from holdfast.books import Books
from holdfast.config import Limits, Settings
from holdfast.departures import NOBODY
from holdfast.egress.allowed import AllowList
from holdfast.environments import Report
from holdfast.errors import InvalidSetting
from holdfast.facts import facts_of
from holdfast.kernel.conduct import Emit
from holdfast.kernel.wire import Script
from holdfast.model import Run
from holdfast.opening import open_service
from holdfast.patterns import Files
from holdfast.publication import Publication, Undeclared, admits
from holdfast.receipts import facts_in, receipt
from holdfast.records import Change, Executed, FileEntry, Planned, RunCard, Verified
from holdfast.requests import RunRequest, refuse_nonsense
from holdfast.resources import census, descent, entries
from holdfast.resources.entries import Entry
from holdfast.resources.restoring import plan_restore
from holdfast.service import Service
from holdfast.sessions import LiveSession, new_id
from holdfast.settling import settle_at_once, state_after, write_manifest
from holdfast.statements import statement
from holdfast.store.sqlite import Store
from holdfast.verbs import RunOptions

_LOOKED_BACK = 200
"""Versions among which one that did the same is sought."""
_MOST_NAMED = 100


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be run."""

    code: str
    script: Script
    options: RunOptions = {}
    limits: Limits = Limits()
    allowed: AllowList = NOBODY
    """Whom it may reach."""
    env: str | Path | None = None
    undeclared: Undeclared = "refuse"
    executable: list[str] = []
    """Files and patterns that may be executable."""
    force: bool = False
    """Also where the directory already is what it made."""


class OpenJob:
    """A job in its directory, before, while and after it runs."""

    def __init__(self, service: Service, books: Books, job: Job) -> None:
        self._service = service
        self._books = books
        self._job = job
        self._session: LiveSession | None = None
        self._request: RunRequest | None = None
        self._outside: list[str] = []

    async def look(self) -> list[Change]:
        """Take in what changed in the directory since the last job."""
        workspace = self._books.workspace
        assert workspace.shared is not None
        directory, cache = workspace.shared, self._service.home.path / "hashes"
        found = await anyio.to_thread.run_sync(census.take, directory, cache)
        workspace.census = found
        made = await self._books.read(lambda store: _made_by_jobs(store, self._books.session, cache.with_name("made")))
        others = await anyio.to_thread.run_sync(_changed, directory, made)
        changes = await take_in(self._books, found.files, others)
        self._outside = [change.path for change in changes[:_MOST_NAMED]]
        return changes

    async def refuse_missing(self) -> None:
        """Each input that was named must be there before anything runs."""
        await inputs.refuse_missing(self._books, expectations.inputs(self._job.options.get("inputs")))

    async def committed_before(self, report: Report | None = None) -> Run | None:
        """The run that did the same and whose result the directory is; None: it is to be run. A key stands for it from
        now on, as if it had been run with that."""
        if self._job.force or self._job.options.get("rehearse"):
            return None
        if not await self._books.in_thread(self._outputs_are_there):
            return None
        environment = await self._service.environment(self._job.env, report)
        same = msgspec.structs.replace(_identity(self._job), environment=environment.fingerprint)
        manifest = self._books.state.manifest_sha256
        terms = self._new_request().publication
        run = await self._books.read(lambda store: _same_run(store, self._books.session, same, manifest, terms))
        if run is None:
            return None
        await self._claim(run.id)
        return msgspec.structs.replace(run, ckpt=str(self._books.state.ckpt()), replayed=True)

    def _new_request(self) -> RunRequest:
        job = self._job
        return _as_job(verbs.new_request(job.code, job.options, timeout_s=job.limits.timeout_s), job)

    async def _claim(self, run: str) -> None:
        request = self._new_request()
        if request.key is None:
            return
        refuse_nonsense(request, self._job.limits)
        digest, attempt = request.digest(), once.Attempt()
        if (earlier := await once.look_up(self._books, request.key)) is not None:
            answer, attempt = once.answer(earlier, key=request.key, digest=digest, retry=request.retry)
            if answer is not None:
                return
        stands = once.stand_for(self._books.session, request.key, run, digest=digest, attempt=attempt)
        row = agreement.claimed(stands.row, self._books.key)
        await self._books.journal.append(msgspec.structs.replace(stands, row=row))

    def _outputs_are_there(self) -> bool:
        declared = expectations.outputs(self._job.options.get("outputs"))
        files = Files(self._books.state.files)
        return all(files.meant_by(each.path) for each in declared)

    async def plan(self, report: Report | None = None) -> RunCard:
        """The Run Card; the kernel is up when it is there."""
        job = self._job
        session = await self._service.bring_up_shared(
            self._books, limits=job.limits, allowed=job.allowed, env=job.env, report=report
        )
        request = verbs.request(session, job.code, job.options, timeout_s=job.limits.timeout_s)
        card = await verbs.plan(session, _as_job(request, job))
        session.single_use = True
        self._session, self._request = session, session.plans[card.run]
        return card

    async def run(self, emit: Emit | None) -> Run:
        assert self._session is not None
        assert self._request is not None
        run = await verbs.run(self._session, self._request, emit=emit)
        return msgspec.structs.replace(run, outside=[*self._outside, *run.outside])

    def interrupt(self) -> bool:
        """Ask it to end; False: it does not run."""
        return self._session is not None and self._session.interrupt()

    def memory_bytes(self) -> int | None:
        return self._session.memory_bytes() if self._session else None

    async def close(self) -> None:
        """Whatever could not be settled is for the next command, wherever it is typed."""
        home = self._service.home
        if self._books.halted or not self._books.open:
            underway.leave(home.parent, home.path.parent)
        await self._service.close()


def _as_job(request: RunRequest, job: Job) -> RunRequest:
    executable = expectations.patterns(job.executable, what="executable")
    return msgspec.structs.replace(request, script=job.script, undeclared=job.undeclared, executable=executable)


async def open_job(directory: Path, job: Job, *, settings: Settings) -> OpenJob:
    """Own a directory. What a job that was killed had begun to publish there is finished first."""
    service = await open_service(msgspec.structs.replace(settings, workspace=directory))
    try:
        await anyio.to_thread.run_sync(underway.enter, service.home)
        return OpenJob(service, await service.shared_books(), job)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await service.close()
        raise


# -- changed outside ---------------------------------------------------------------------------------------------


async def take_in(books: Books, files: Mapping[str, FileEntry], others: Sequence[Change] = ()) -> list[Change]:
    """Make the directory's files those of the next version, if they are not the present one's. `others` are changes of
    what a job had made there and that is no file, or of modes."""
    changes = [msgspec.structs.replace(change, mode=0) for change in plan_restore(books.state.files, files)]
    named = {change.path for change in changes}
    changes = sorted([*changes, *(change for change in others if change.path not in named)], key=descent.parts_of)
    if not changes:
        return []
    planned = _planned(books, len(changes))
    done = Executed(run=planned.run, at=planned.at, error_code=None, duration_s=0.0)
    before = books.state
    verified = Verified(
        run=planned.run, at=planned.at, status="committed", version=before.version + 1, stage="", changes=changes,
        names={}, receipt=b"",
    )  # fmt: skip
    after = state_after(before, verified)
    facts = msgspec.structs.replace(facts_of(planned, done, before, after), changes=changes)
    verified = msgspec.structs.replace(verified, receipt=statement(facts))
    await books.in_thread(lambda: write_manifest(books, after))
    books.open[planned.run] = [planned]
    await settle_at_once(books, planned, verified, planned, done, after=after)
    await books.load()  # what was changed outside cannot be brought back: how far one can walk back is another now
    return changes


class _Made(msgspec.Struct, frozen=True, kw_only=True):
    """What jobs made in a directory beside files, and the modes that they gave, as the receipts so far state it."""

    receipts: int = 0
    head: str = ""
    entries: dict[str, Entry] = {}


def _made_by_jobs(store: Store, session: str, cache: Path) -> dict[str, Entry]:
    """The cache is a file in `.holdfast`: a job reads the receipts since the last one. It is made again if it is gone,
    or is of another chain."""
    rows, known = store.receipts(session), _Made()
    with suppress(OSError, msgspec.MsgspecError):
        known = msgspec.msgpack.decode(cache.read_bytes(), type=_Made)
    if [row.sha256 for row in rows[known.receipts - 1 : known.receipts]] != [known.head]:
        known = _Made()
    made = dict(known.entries)
    for row in rows[known.receipts :]:
        facts = facts_in(row.envelope)
        for change in facts.changes:
            entry = stated.entry_of(change, facts.kind)
            if entry is None or (entry.kind == "file" and entry.mode is None):
                made.pop(change.path, None)
            else:
                made[change.path] = entry
    if len(rows) > known.receipts:
        known = _Made(receipts=len(rows), head=rows[-1].sha256, entries=made)
        durable.write_file(cache, msgspec.msgpack.encode(known))
    return made


def _changed(directory: Path, made: Mapping[str, Entry]) -> list[Change]:
    """What of it is otherwise now. What cannot be looked at is left as it was stated."""
    changes = []
    with descent.Cursor(directory, open_shut=False) as cursor:
        for path, entry in made.items():
            try:
                found = entries.at(cursor, descent.split(path))
            except (OSError, InvalidSetting):
                continue
            if found is not None and found.kind == "file":  # what is in it `census` says
                found = msgspec.structs.replace(found, sha256=entry.sha256, bytes=entry.bytes)
            if found is not None and (found.kind is None or (found.kind == "file" and entry.kind != "file")):
                found = None
            if entries.differ(entry, found):
                changes.append(entries.leading(path, to=found, now=entry))
    return changes


def _planned(books: Books, count: int) -> Planned:
    goal = f"take in {count:,} files that changed outside"
    card = RunCard(
        run=new_id("outside"), session=books.session, goal=goal, code_sha256=hashlib.sha256(goal.encode()).hexdigest(),
        base=str(books.state.ckpt()),
    )  # fmt: skip
    return Planned(run=card.run, at=time.time(), card=card, code=goal, kind="outside")


# -- already committed -------------------------------------------------------------------------------------------


class _Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two jobs the same."""

    code_sha256: str
    arguments: list[str]
    environment: str = ""


def _identity(job: Job) -> _Identity:
    return _Identity(code_sha256=hashlib.sha256(job.code.encode()).hexdigest(), arguments=job.script.arguments)


def _same_run(store: Store, session: str, wanted: _Identity, manifest: str, terms: Publication) -> Run | None:
    for row in store.versions(session, limit=_LOOKED_BACK):
        if row.manifest_sha256 == manifest and _identity_of(store, row.run) == wanted:
            body, sealed = store.result(row.run), store.receipt(row.run)
            run = once.decode(body) if body is not None else None
            # What a run saved before it failed is a version of that run too; the run itself is still to be done.
            if run is None or not sealed or agreement.answer_difference(run, facts_in(sealed[-1].envelope)):
                continue
            if run.status in ("committed", "kept") and _published_the_same(run, terms):
                return msgspec.structs.replace(run, receipt=receipt(sealed[-1].envelope))
    return None


def _published_the_same(run: Run, terms: Publication) -> bool:
    """Whether on these terms as much of it would have been published as there was."""
    card = run.card
    if (card.outputs, card.undeclared or terms.undeclared, card.executable) == (
        terms.outputs, terms.undeclared, terms.executable,
    ):  # fmt: skip
        return True
    left_out = any(check.name in (checks.UNPUBLISHED, checks.NOT_EXECUTABLE) for check in run.checks)
    return not left_out and card.executable == terms.executable and admits(run.outputs, terms)


def _identity_of(store: Store, run: str) -> _Identity | None:
    planned = next((record for record in store.records(run) if isinstance(record, Planned)), None)
    if planned is None or planned.kind != "cell":
        return None
    card = planned.card
    return _Identity(code_sha256=card.code_sha256, arguments=card.arguments, environment=card.environment)
