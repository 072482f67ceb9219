"""What a receipt says of a run: an in-toto Statement v1, as canonical JSON (RFC 8785).

    _type           https://in-toto.io/Statement/v1
    subject         the files that the run added or changed: name (path relative to /mnt/data) and SHA-256
    predicateType   https://holdfast.dev/receipt/v1
    predicate       `Predicate`, shaped like in-toto's link: materials, command, environment, byproducts

1. One `RunFacts` has one text: a redo after a crash makes the same bytes, and so the same signature.
2. in-toto's verifiers refuse a statement without a subject. A run that left no file behind has the manifest as its
   subject: what it states is the state of all files after it.
3. Text from a guest may hold lone surrogates, which JSON cannot: they are written `\\udXXX`.
"""

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec
import rfc8785

from holdfast.records import Change, Check, Input, Status

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://holdfast.dev/receipt/v1"
MANIFEST_NAME = "manifest-sha256.txt"

RunKind = Literal["cell", "command", "write", "restore", "savepoint", "outside"]
"""What the receipt is for; `savepoint`: the files that a run saved on its way, whatever became of the rest."""


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All that a receipt tells of one run."""

    session: str
    run: str
    number: int
    """Of the receipt in the session's chain, from 1."""
    previous: str
    """SHA-256 of the receipt before it; empty for the first."""
    kind: RunKind
    status: Status
    version_before: int
    version: int
    generation: int
    ckpt_before: str
    ckpt: str
    manifest_sha256: str
    """Of the version after the run."""
    goal: str
    code_sha256: str
    started_at: float
    finished_at: float
    key: str | None = None
    attempt: int = 1
    request_sha256: str = ""
    """Digest of all that makes two requests with one key the same; empty: a write, a restore, or an earlier build."""
    inputs: list[Input] = []
    changes: list[Change] = []
    """In /mnt/data only."""
    checks: list[Check] = []
    environment: str = ""
    error_code: str | None = None
    error_message: str = ""
    exit_code: int | None = None
    duration_s: float = 0.0
    peak_memory_bytes: int | None = None
    strays: list[str] = []
    kernel_replaced: str = ""
    """How and when the kernel before ended, if this run had another in its place."""
    egress: list[str] = []
    """Requests that left: they may have happened, whatever became of the run."""
    reason: str = ""
    """Why it was rolled back."""
    blame: str = ""
    """On whom: `user` or `system`."""
    saved: list[str] = []
    """Steps that were saved on the way."""


# -- the format --------------------------------------------------------------------------------------------------


class Digest(msgspec.Struct, frozen=True, kw_only=True):
    sha256: str


class Resource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """in-toto's ResourceDescriptor. One without a digest was not there."""

    name: str
    digest: Digest | None = None
    annotations: dict[str, int] = {}


class Command(msgspec.Struct, frozen=True, kw_only=True):
    goal: str
    code_sha256: str
    key: str | None
    attempt: int
    request_sha256: str | msgspec.UnsetType = msgspec.UNSET


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    fingerprint: str


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str


class Byproducts(msgspec.Struct, frozen=True, kw_only=True):
    error: Failure | None
    exit_code: int | None
    duration_s: float
    peak_memory_bytes: int | None
    strays: list[str]
    egress: list[str]
    checks: list[Check]
    changes: list[Change]
    saved: list[str]
    started_at: datetime
    finished_at: datetime
    kernel_replaced: str | msgspec.UnsetType = msgspec.UNSET
    """Only where it happened: receipts without it have the bytes that they always had."""


class Before(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    ckpt: str


class After(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    generation: int
    ckpt: str
    manifest_sha256: str


class Rollback(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    blame: str
    changed: Literal["nothing"] = "nothing"


class Predicate(msgspec.Struct, frozen=True, kw_only=True):
    session: str
    run: str
    kind: RunKind
    number: int
    previous: Digest | None
    status: Status
    before: Before
    after: After
    materials: list[Resource]
    command: Command
    environment: Environment
    byproducts: Byproducts
    rollback: Rollback | None


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["https://in-toto.io/Statement/v1"] = msgspec.field(name="_type", default=STATEMENT_TYPE)
    subject: list[Resource]
    predicate_type: Literal["https://holdfast.dev/receipt/v1"] = msgspec.field(
        name="predicateType", default=PREDICATE_TYPE
    )
    predicate: Predicate


# -- there and back ----------------------------------------------------------------------------------------------


def statement(facts: RunFacts) -> bytes:
    """The statement's text: what is signed."""
    stated = Statement(subject=_subject(facts), predicate=_predicate(facts))
    if _is_ordinary(facts.duration_s):
        with suppress(UnicodeEncodeError):  # a lone surrogate somewhere
            return msgspec.json.encode(stated, order="sorted")
    return canonical(stated)


def _subject(facts: RunFacts) -> list[Resource]:
    left = [change for change in facts.changes if change.kind == "file" and change.action != "removed"]
    if not left:
        return [Resource(name=MANIFEST_NAME, digest=Digest(sha256=facts.manifest_sha256))]
    return [_resource(change.path, change.sha256, change.bytes) for change in left]


def _resource(name: str, sha256: str, size: int) -> Resource:
    if not sha256:
        return Resource(name=name)
    return Resource(name=name, digest=Digest(sha256=sha256), annotations={"bytes": size})


def _predicate(facts: RunFacts) -> Predicate:
    return Predicate(
        session=facts.session, run=facts.run, kind=facts.kind, number=facts.number, status=facts.status,
        previous=Digest(sha256=facts.previous) if facts.previous else None,
        before=Before(version=facts.version_before, ckpt=facts.ckpt_before),
        after=After(
            version=facts.version, generation=facts.generation, ckpt=facts.ckpt, manifest_sha256=facts.manifest_sha256
        ),
        materials=[_resource(each.path, each.sha256, each.bytes) for each in facts.inputs],
        command=Command(
            goal=facts.goal, code_sha256=facts.code_sha256, key=facts.key, attempt=facts.attempt,
            request_sha256=facts.request_sha256 or msgspec.UNSET,
        ),
        environment=Environment(fingerprint=facts.environment),
        byproducts=_byproducts(facts),
        rollback=Rollback(reason=facts.reason, blame=facts.blame) if facts.status == "rolled_back" else None,
    )  # fmt: skip


def _byproducts(facts: RunFacts) -> Byproducts:
    failed = facts.error_code is not None
    return Byproducts(
        error=Failure(code=facts.error_code or "", message=facts.error_message) if failed else None,
        exit_code=facts.exit_code, duration_s=facts.duration_s, peak_memory_bytes=facts.peak_memory_bytes,
        strays=facts.strays, egress=facts.egress, checks=facts.checks, changes=facts.changes, saved=facts.saved,
        started_at=datetime.fromtimestamp(facts.started_at, UTC),
        finished_at=datetime.fromtimestamp(facts.finished_at, UTC),
        kernel_replaced=facts.kernel_replaced or msgspec.UNSET,
    )  # fmt: skip


def parse_statement(body: bytes) -> RunFacts:
    """The facts that a statement tells. Raises ValueError if it is not ours."""
    stated = msgspec.json.decode(body, type=Statement)
    told, by = stated.predicate, stated.predicate.byproducts
    return RunFacts(
        session=told.session, run=told.run, number=told.number, kind=told.kind, status=told.status,
        previous=told.previous.sha256 if told.previous else "",
        version_before=told.before.version, ckpt_before=told.before.ckpt,
        version=told.after.version, generation=told.after.generation, ckpt=told.after.ckpt,
        manifest_sha256=told.after.manifest_sha256,
        goal=told.command.goal, code_sha256=told.command.code_sha256, key=told.command.key,
        attempt=told.command.attempt, request_sha256=told.command.request_sha256 or "",
        environment=told.environment.fingerprint,
        inputs=[_input(each) for each in told.materials],
        changes=by.changes, checks=by.checks, strays=by.strays, egress=by.egress, saved=by.saved,
        error_code=by.error.code if by.error else None, error_message=by.error.message if by.error else "",
        exit_code=by.exit_code, duration_s=by.duration_s, peak_memory_bytes=by.peak_memory_bytes,
        kernel_replaced=by.kernel_replaced or "",
        started_at=by.started_at.timestamp(), finished_at=by.finished_at.timestamp(),
        reason=told.rollback.reason if told.rollback else "", blame=told.rollback.blame if told.rollback else "",
    )  # fmt: skip


def _input(resource: Resource) -> Input:
    digest = resource.digest.sha256 if resource.digest else ""
    return Input(path=resource.name, sha256=digest, bytes=resource.annotations.get("bytes", 0))


# -- canonical JSON ----------------------------------------------------------------------------------------------


# `rfc8785.dumps` takes 0.3 s for a run of 10,000 files. msgspec writes the same in a fraction of that, given ASCII keys
# and well-formed text, but for numbers that the two spell differently: whole ones as floats, very small and large ones.


def _is_ordinary(number: float) -> bool:
    return 1e-3 <= number < 1e9 and not number.is_integer()


def canonical(value: Any) -> bytes:
    """RFC 8785, for anything that msgspec knows how to write."""
    return msgspec.json.encode(_plain(msgspec.to_builtins(value)), order="sorted")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return msgspec.Raw(rfc8785.dumps(value))
    if isinstance(value, str) and not value.isascii():
        return value.encode(errors="backslashreplace").decode()
    return value
