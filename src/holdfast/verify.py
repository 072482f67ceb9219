"""Whether a session is what its receipts say. The first thing that is wrong is named; a check changes nothing.

For each receipt, from the first:

1. chain: numbers have no gap, each names the digest of the one before;
2. signature: by the given key, or one before it in its chain, over exactly these bytes;
3. journal: what it says of the run is the same (where there is a journal; `agreement`);
4. manifest: the changes of all receipts so far add up to the manifest that it names.

Then the manifests' texts (in a home there is one for each version that is kept), then all of /mnt/data: whatever has a
name there is what the receipts state of it (kind, mode, SHA-256 and bytes of a file, target of a link), and what is
missing or stated by no receipt is named. Last that the session stands where its last receipt says, and that no run has
ended without one.

An export holds the regular files alone. On its way it may lose permissions (a umask, git, an archive), and gain none.
In a directory of the user's, files are counted as jobs count them (`census`). What jobs made is checked there whole;
links, pipes and empty directories of the user's own are counted by no job, and are listed.

Only the public key is needed. Memory grows with the number of files and receipts, not with the size of files.

What no check can see by itself: that the last receipts of an export were cut off together with what they did. Whoever
noted a later `Report.head` can.
"""

import hashlib
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from holdfast import agreement, ckpt, durable, manifest, paths, receipts, stated, versions
from holdfast.config import written_versions
from holdfast.errors import CkptUnknown, DiskFailed, SessionHalted, VerifyFailed
from holdfast.evidence import Evidence, Stored, from_home, read_manifest
from holdfast.model import Run
from holdfast.records import Saved, Settled, Verified
from holdfast.resources import census, descent, entries, hashing
from holdfast.resources.entries import Entry
from holdfast.signing import PublicKey
from holdfast.stated import Stated
from holdfast.statements import RunFacts, parse_statement
from holdfast.store.rows import SessionRow
from holdfast.store.sqlite import Store

_EMPTY = manifest.digest({})
_LOOK = "compare with a backup or an export; nothing was changed by looking"
_REPAIR = "`holdfast repair` renders it again from the receipts"
_ATTEMPTS = 3
_MOST_LISTED = 100
_EXPORTED_MODES = {"file": 0o664, "directory": 0o775}
"""What an export gives at most by itself; git and a usual umask give no more."""
_OTHERS_WRITE = 0o022
"""Permissions that nobody gets in a session's /mnt/data but by a run."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked, and the first thing that is wrong."""

    ok: bool
    session: str
    key_id: str
    """Whose signature was checked."""
    problem: str = ""
    hint: str = ""
    """What to do about it."""
    receipts: int = 0
    manifests: int = 0
    files: int = 0
    bytes: int = 0
    version: int = 0
    head: str = ""
    """Digest of the last receipt: whoever noted it elsewhere knows that none was cut off since."""
    ckpt: str = ""
    unsettled: list[str] = []
    """Runs that go on, or that a crash cut short and the next start will end."""
    unstated: list[str] = []
    """In a directory of the user's: links, pipes and empty directories that no job made, the first of them."""


def check(evidence: Evidence, *, but_manifests: bool = False) -> Report:
    """Look at everything, until something is wrong. `but_manifests` leaves out what `repair` can render again."""
    checker = _Checker(evidence)
    try:
        checker.check_receipts()
        if not but_manifests:
            checker.check_manifests()
        checker.check_files()
        checker.check_head()
    except (VerifyFailed, SessionHalted, DiskFailed) as error:
        return checker.report(problem=error.message, hint=error.hint)
    except OSError as error:
        return checker.report(problem=f"{_shown(error.filename)} cannot be read: {error.strerror}")
    return checker.report()


def manifests_of(evidence: Evidence) -> tuple[dict[str, int], set[str]]:
    """The digests of all manifests that receipts name, each with its latest version; and those of them whose texts must
    be there. Raises VerifyFailed if a receipt is wrong."""
    checker = _Checker(evidence)
    checker.check_receipts()
    return checker.manifests()


def missing_manifests(store: Store, session: str, home: Path, *, shared: Path | None = None) -> list[int]:
    """Versions whose manifests must be there and are not, by the journal's rows: no text and no receipt is read."""
    rows = store.versions(session, limit=1)
    wanted = {rows[0].version} if rows else set[int]()
    if shared is None:
        wanted |= set(_kept(store, session))
    there = home / "sessions" / session / "manifests"
    found = (store.version(session, version) for version in sorted(wanted))
    return [
        row.version for row in found
        if row is not None and row.manifest_sha256 != _EMPTY and not (there / row.manifest_sha256).exists()
    ]  # fmt: skip


def _kept(store: Store, session: str) -> Iterator[int]:
    """The versions whose manifests must be there, the latest first: all that can be gone back over, and the one before
    these. Sessions of earlier builds had fewer."""
    row = store.session(session)
    most = written_versions(row.settings) if row is not None else None
    if most is None:
        return
    before = 0
    for version, _ in versions.latest(store, session, most=most):
        yield version.version
        before = version.version - 1
    yield before


def check_in_home(
    store: Store, session: str, home: Path, *, public: PublicKey | None = None, shared: Path | None = None
) -> Report:
    """The home's owner may be at work beside us: what is wrong counts only if the session did not move meanwhile."""
    for _ in range(_ATTEMPTS):
        before = _place(store, session)
        with store.view():
            report = check(from_home(store, session, home, public=public, shared=shared))
        if report.ok or _place(store, session) == before:
            break
    return report


def _place(store: Store, session: str) -> object:
    return store.session(session), [(run, len(store.records(run))) for _, run in store.unsettled(session)]


class _Checker:
    """How far a check got."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._store = evidence.store
        self._session = evidence.session
        self._stated = Stated()
        self._last: RunFacts | None = None
        self._head = ""
        self._versions = {0: _EMPTY}
        self._told: dict[str, RunFacts] = {}
        """Of the journal's runs that have a receipt of their own, what that states."""
        self._receipts = self._manifests = self._files = self._bytes = 0
        self._signer = 0
        """Which of the accepted keys signed last."""
        self._pending: dict[str, set[str]] = {}
        """Runs that have no end yet, and the paths that they may be about to put in place."""
        self._unstated: list[str] = []

    def report(self, problem: str = "", hint: str = "") -> Report:
        last = self._last
        return Report(
            ok=not problem, session=self._session, key_id=self._evidence.public.key_id, problem=problem, hint=hint,
            receipts=self._receipts, manifests=self._manifests, files=self._files, bytes=self._bytes,
            version=last.version if last else 0, head=self._head, ckpt=last.ckpt if last else "",
            unsettled=list(self._pending), unstated=self._unstated,
        )  # fmt: skip

    # -- receipts ----------------------------------------------------------------------------------------------

    def check_receipts(self) -> None:
        for stored in self._evidence.receipts:
            if stored.number != self._receipts + 1:
                raise _wrong(f"receipt {self._receipts + 1} is missing: the next one is {stored.number}")
            with _about(f"receipt {stored.number}"):
                self._check_receipt(stored)
            self._receipts += 1
        if not self._receipts and self._store is None:
            raise _wrong("there is no receipt")

    def _check_receipt(self, stored: Stored) -> None:
        found = hashlib.sha256(stored.envelope).hexdigest()
        if stored.sha256 and found != stored.sha256:
            raise _wrong(f"its SHA-256 is {found}, recorded was {stored.sha256}")
        body = receipts.open_envelope(stored.envelope, self._signer_of(stored.envelope))
        facts = _facts(body)
        self._check_place(stored, facts)
        if self._store is not None:
            records = self._store.records(facts.run)
            if differs := agreement.difference(records, facts, body, sha256=stored.sha256):
                raise _wrong(differs)
            if facts.kind != "savepoint":  # after which its run's own follows
                self._check_answer(self._store, facts)
                self._told[facts.run] = msgspec.structs.replace(facts, changes=[], inputs=[], checks=[])
        self._stated.apply(facts)
        if facts.manifest_sha256 != self._stated.digest:
            raise _wrong(f"the changes add up to manifest {self._stated.digest}, it names {facts.manifest_sha256}")
        self._versions[facts.version] = facts.manifest_sha256
        self._last, self._head = facts, found

    def _signer_of(self, envelope: bytes) -> PublicKey:
        """The trusted key, or one that it replaced. None signs again after it was replaced."""
        keys, named = self._evidence.public.accepted, receipts.signer(envelope)
        for at, key in enumerate(keys):
            if key.key_id == named:
                if at < self._signer:
                    raise _wrong(f"it is signed by key {named[:12]}, which was replaced before the receipt before it")
                self._signer = at
                return key
        return self._evidence.public

    def _check_answer(self, store: Store, facts: RunFacts) -> None:
        """What whoever comes with the run's key again would get. Its text and displays no receipt states."""
        body = store.result(facts.run)
        if body is None:
            return
        try:
            answer = msgspec.msgpack.decode(body, type=Run)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _wrong(f"the recorded answer cannot be read: {error}") from error
        if differs := agreement.answer_difference(answer, facts):
            raise _wrong(differs)

    def _check_place(self, stored: Stored, facts: RunFacts) -> None:
        """That it is the next in this chain, and of the run that it is kept under."""
        self._session = self._session or facts.session
        if facts.session != self._session:
            raise _wrong(f"it is of session {facts.session}, not of {self._session}")
        if facts.number != stored.number:
            raise _wrong(f"it says that it is receipt {facts.number}")
        if facts.previous != self._head:
            raise _wrong(f"it follows {facts.previous or 'nothing'}, the receipt before it is {self._head or 'none'}")
        if stored.run and facts.run != stored.run:
            raise _wrong(f"it is of run {facts.run}, kept under {stored.run}")
        if facts.version_before != (self._last.version if self._last else 0):
            raise _wrong(f"it begins at version {facts.version_before}, the receipt before it ended at another")

    # -- manifests ---------------------------------------------------------------------------------------------

    def check_manifests(self) -> None:
        made, wanted = self.manifests()
        for name, path in self._evidence.manifests:
            if name and name not in made:  # of a version that is to come, or that a crash kept from coming
                continue
            with _about(f"manifest {name[:12] or path.name}"):
                _check_manifest(read_manifest(path), digest=name or self._stated.digest)
            self._manifests += 1
        missing = wanted - {name or self._stated.digest for name, _ in self._evidence.manifests}
        if self._stated.digest in missing:
            raise _wrong(f"manifest {self._stated.digest[:12]} of the last version is missing", hint=_REPAIR)
        for name in sorted(missing, key=lambda name: -made[name]):
            raise _wrong(f"manifest {name[:12]} of version {made[name]} is missing", hint=_REPAIR)

    def manifests(self) -> tuple[dict[str, int], set[str]]:
        """Of all versions, by digest; and those whose texts must be there. No job goes back in a directory of the
        user's, so that the last one is enough there."""
        made = {digest: version for version, digest in self._versions.items()}
        kept = _kept(self._store, self._session) if self._store is not None and not self._evidence.shared else ()
        wanted = {self._stated.digest, *(self._versions.get(version, _EMPTY) for version in kept)}
        return made, wanted - {_EMPTY}

    # -- files -------------------------------------------------------------------------------------------------

    def check_files(self) -> None:
        self._find_pending()
        passed_over = set().union(*self._pending.values())
        missing = dict(self._stated.entries)
        on_the_way, strange = stated.directories_of(missing.keys() | passed_over), list[str]()
        for path, found in self._found():
            wanted = missing.pop(path, None)
            if path == stated.ROOT:
                self._check_root(found)
                continue
            if found.kind == "file":
                self._files += 1
                self._bytes += found.bytes
            if path in passed_over or not passed_over.isdisjoint(stated.directories_of([path])):
                continue
            if wanted is not None or found.kind != "directory":
                self._check_entry(path, wanted, found)
            elif path not in on_the_way:
                strange.append(path)
            elif self._evidence.exported:
                _refuse_more_permissions(path, None, found)
        self._refuse_missing(missing, passed_over)
        for path in strange:  # nothing that is in it was named
            self._check_entry(path, None, Entry(kind="directory"))

    def _check_root(self, found: Entry) -> None:
        """Its mode is stated by the receipt of a run that changed it, and by none before that."""
        wanted = self._stated.entries.get(stated.ROOT)
        if self._evidence.exported:
            _refuse_more_permissions(stated.ROOT, wanted, found)
        elif wanted is None and (found.mode or 0) & _OTHERS_WRITE:
            raise _wrong(f"directory {stated.ROOT} has the mode {found.mode or 0:04o}, and no receipt says so")
        elif wanted is not None:
            self._check_entry(stated.ROOT, wanted, found)

    def _check_entry(self, path: str, wanted: Entry | None, found: Entry) -> None:
        if wanted is None and self._evidence.shared and found.kind != "file":
            self._unstated += [path] if len(self._unstated) < _MOST_LISTED else []
            return
        if wanted is None:
            raise _wrong(
                f"{found.kind or 'device'} {path} is in no {'manifest' if found.kind == 'file' else 'receipt'}"
            )
        if self._evidence.exported:
            _refuse_more_permissions(path, wanted, found)
            found = msgspec.structs.replace(found, mode=None)
        if differs := stated.difference(wanted, found):
            raise _wrong(f"{wanted.kind} {path} {differs}")

    def _refuse_missing(self, missing: dict[str, Entry], passed_over: Collection[str]) -> None:
        for path in sorted(missing.keys() - passed_over):
            if missing[path].kind == "file" or not self._evidence.exported:
                raise _wrong(f"{missing[path].kind} {path} is missing")

    def _find_pending(self) -> None:
        """What a run that has no end yet is publishing may be there already, or not yet."""
        if self._store is None:
            return
        for _, run in self._store.unsettled(self._session):
            paths_of_run = self._pending.setdefault(run, set())
            for record in self._store.records(run):
                if isinstance(record, Verified):
                    paths_of_run |= {change.path for change in record.changes if change.area == "data"}
                elif isinstance(record, Saved):
                    saved = {file.path for file in record.files}
                    paths_of_run |= saved | stated.directories_of(saved)

    def _found(self) -> Iterator[tuple[str, Entry]]:
        """Whatever has a name, parents first; of files the SHA-256 and bytes."""
        if not self._evidence.files.is_dir():
            return
        if self._evidence.shared:
            yield from census.everything(self._evidence.files)
            return
        yield stated.ROOT, Entry(kind="directory", mode=stat.S_IMODE(self._evidence.files.stat().st_mode))
        with descent.Cursor(self._evidence.files) as cursor:
            for parts, status in cursor.walk():
                path = paths.to_text(b"/".join(parts))
                with _about(path):
                    found = entries.found_at(parts[-1], status, dir_fd=cursor.fd)
                if found.kind == "file":
                    with _about(f"file {path}"), durable.closing_fd(_open(parts[-1], cursor.fd)) as file:
                        sha256, size = hashing.digest(file)
                    found = msgspec.structs.replace(found, sha256=sha256, bytes=size)
                yield path, found

    # -- where the session stands ------------------------------------------------------------------------------

    def check_head(self) -> None:
        row = self._store.session(self._session) if self._store is not None else None
        if self._store is None or row is None:
            return
        if (row.receipts, row.head) != (self._receipts, self._head):
            raise _wrong(
                f"the session has {row.receipts} receipts, the last {row.head or 'none'}; "
                f"found were {self._receipts}, the last {self._head or 'none'}"
            )
        if row.version != (self._last.version if self._last else 0):
            raise _wrong(f"the session is at version {row.version}, its last receipt at another")
        self._check_runs(self._store)
        self._check_rows(self._store, row)
        self._check_keys(self._store)

    def _check_runs(self, store: Store) -> None:
        """Each that has ended has its receipt, and no other is taken for one that has."""
        for run in store.runs(self._session):
            if run in self._told and run in self._pending:
                raise _wrong(f"run {run} has ended, and the journal lists it as one that has not")
            if run in self._told:
                continue
            if run not in self._pending or any(isinstance(each, Settled) for each in store.records(run)):
                raise _wrong(f"run {run} is in the journal, and in no receipt")

    def _check_keys(self, store: Store) -> None:
        """Each key stands for the latest run that had it."""
        rows = store.keys(self._session)
        for key, row in rows.items():
            records, public = store.records(row.run), self._evidence.public
            facts = self._told.get(row.run)
            if wrong := agreement.key_difference(row, records, facts, session=self._session, key=key, public=public):
                raise _wrong(f"key {key!r}: {wrong}")
        for facts in self._told.values():
            stands = rows.get(facts.key) if facts.key is not None else None
            if facts.key is not None and (stands is None or (stands.attempt < facts.attempt and not stands.claim)):
                raise _wrong(f"key {facts.key!r}: the journal does not have it for run {facts.run}")

    def _check_rows(self, store: Store, row: SessionRow) -> None:
        """The journal's own lists, from which a session goes on."""
        if store.files(row.id) != self._stated.files():
            raise _wrong("the journal's list of files is not what the receipts add up to")
        for version in store.versions(row.id):
            if self._versions.get(version.version) != version.manifest_sha256:
                raise _wrong(f"the journal's version {version.version} is in no receipt, or with another manifest")
        names = {
            n: (name.type, name.run) for n, name in store.names(row.id).items() if name.generation == row.generation
        }
        made = ckpt.make(
            row.id, generation=row.generation, version=row.version, manifest_sha256=self._stated.digest, names=names
        )
        if row.ckpt and row.ckpt != str(made):
            raise _wrong(f"the session says that it is at {row.ckpt}, its files and names make {made}")
        # Memory may have been lost since, which is no run: then only the generation is another.
        if self._last and self._last.generation == row.generation and row.ckpt != self._last.ckpt:
            raise _wrong(f"the session says that it is at {row.ckpt}, its last receipt {self._last.ckpt}")


# -- the steps -----------------------------------------------------------------------------------------------------


def _facts(body: bytes) -> RunFacts:
    try:
        facts = parse_statement(body)
        ckpt.parse(facts.ckpt)
    except (ValueError, msgspec.MsgspecError) as error:
        raise _wrong(f"its statement cannot be read: {error}") from error
    except CkptUnknown as error:
        raise _wrong(error.message) from error
    if facts.status == "rolled_back" and facts.changes:
        raise _wrong("it was rolled back, and lists changes")
    return facts


def _check_manifest(text: bytes, *, digest: str) -> None:
    found = hashlib.sha256(text).hexdigest()
    if found != digest:
        raise _wrong(f"its SHA-256 is {found}, not {digest}", hint=_REPAIR)
    try:
        manifest.parse(text)
    except ValueError as error:
        raise _wrong(str(error)) from error


def _refuse_more_permissions(path: str, wanted: Entry | None, found: Entry) -> None:
    """Than an export's own and those that the receipt states."""
    own = _EXPORTED_MODES.get(found.kind or "", 0o7777)
    if (found.mode or 0) & ~(own | ((wanted and wanted.mode) or 0)):
        told = "" if wanted is None or wanted.mode is None else f", its receipt says {wanted.mode:04o}"
        raise _wrong(f"{found.kind} {path} has the mode {found.mode or 0:04o}{told}")


def _open(name: bytes, directory: int) -> int:
    try:
        return descent.open_regular(name, dir_fd=directory)
    except FileNotFoundError as error:
        raise _wrong("it went away while it was looked at") from error


@contextmanager
def _about(what: str) -> Iterator[None]:
    """Say which thing is wrong, also if the disk does not let us look."""
    try:
        yield
    except VerifyFailed as error:
        raise _wrong(f"{what}: {error.message}", hint=error.hint) from error
    except OSError as error:
        raise _wrong(f"{what}: it cannot be read: {os.strerror(error.errno or 0)}") from error


def _shown(name: object) -> str:
    return paths.to_text(name) if isinstance(name, bytes) else str(name or "a directory")


def _wrong(what: str, *, hint: str = _LOOK) -> VerifyFailed:
    return VerifyFailed(what, hint=hint)
