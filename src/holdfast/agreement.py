"""Whether the journal says the same of a run as its receipt. What a receipt tells is signed; the journal is a file that
whoever can write to the home can change, and from it code, goals and ends are shown and runs are repeated.

A run has a receipt of its own, the one that its `Settled` names; where it was rolled back and had saved files on its
way, one of those before it (`savepoint`).
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast import protocol
from holdfast.errors import SessionHalted, VerifyFailed
from holdfast.model import Run
from holdfast.receipts import open_envelope, seal, signer
from holdfast.records import AnyRecord, Executed, Planned, Saved, Settled, Verified, requests_sent
from holdfast.signing import PublicKey, SigningKey
from holdfast.state import State
from holdfast.statements import RunFacts, parse_statement, statement
from holdfast.store.rows import KeyRow

_PLACE = ("session", "run", "number", "previous")
_WORDS = {
    "request_sha256": "request",
    "ckpt_before": "base", "code_sha256": "digest of the code", "started_at": "begin", "error_code": "error",
    "error_message": "error", "duration_s": "duration", "blame": "culprit", "ckpt": "CKPT",
    "saved": "list of savepoints", "inputs": "list of inputs", "exit_code": "exit code",
}  # fmt: skip


def difference(records: Sequence[AnyRecord], facts: RunFacts, body: bytes, *, sha256: str) -> str:
    """The first thing that the journal says otherwise, in words; empty: there is none."""
    if not records or not _is_in_order(records):
        return "the journal's records of its run are not those of a run"
    settled, planned = records[-1], records[0]
    if not isinstance(settled, Settled):
        return "the journal has no end of its run"
    assert isinstance(planned, Planned)  # as their order says
    if settled.receipt_sha256 == sha256:
        return _of_plan(planned, facts) or _of_end(records, settled, facts) or _of_commit(records, facts, body)
    if not any(isinstance(record, Saved) for record in records):
        return f"the journal's run ended with receipt {settled.receipt_sha256 or 'none'}"
    return _of_plan(planned, facts) or _of_savepoint(records, facts)


def _is_in_order(records: Sequence[AnyRecord]) -> bool:
    befores = [None, *(type(record) for record in records)]
    return all(protocol.is_legal(before, record) for before, record in zip(befores, records, strict=False))


def _of_plan(planned: Planned, facts: RunFacts) -> str:
    card = planned.card
    if hashlib.sha256(planned.code.encode(errors="surrogatepass")).hexdigest() != facts.code_sha256:
        return "the journal has another code"
    return _compared(
        facts, run=card.run, session=card.session, goal=card.goal, code_sha256=card.code_sha256, key=card.key,
        attempt=card.attempt, inputs=[*card.inputs, *card.forecast_inputs], environment=card.environment,
        ckpt_before=card.base, started_at=planned.at,
        request_sha256=planned.request_sha256 if facts.request_sha256 else "",  # earlier builds did not sign it
    )  # fmt: skip


def _of_end(records: Sequence[AnyRecord], settled: Settled, facts: RunFacts) -> str:
    if (settled.status, settled.version) != (facts.status, facts.version):
        return f"the journal's run ended {settled.status} at version {settled.version}"
    if facts.status != "rolled_back" and (settled.reason or settled.by):
        return "the journal says why it was rolled back, and it was not"
    sent = requests_sent(records)
    if facts.egress[: len(sent)] != sent:
        return "the journal has requests that left, and it lists others"
    done = next((record for record in records if isinstance(record, Executed)), None)
    executed = msgspec.structs.asdict(done) if done else {}
    told = {name: executed[name] for name in ("error_code", "exit_code", "peak_memory_bytes", "strays") if executed}
    return _compared(
        facts, kind=_planned_kind(records), ckpt=settled.ckpt, reason=settled.reason, blame=settled.by,
        error_message=done.error_message if done and done.error_code is not None else "",
        duration_s=done.duration_s if done else 0.0, saved=_steps(records), **told,
    )  # fmt: skip


def _of_commit(records: Sequence[AnyRecord], facts: RunFacts, body: bytes) -> str:
    for record in records:
        if isinstance(record, Verified):
            if record.receipt != body:
                return "the journal's copy of it differs"
            changes = [change for change in record.changes if change.area == "data"]
            if (record.status, record.version, changes) != (facts.status, facts.version, facts.changes):
                return "the journal has other changes"
    return ""


def _of_savepoint(records: Sequence[AnyRecord], facts: RunFacts) -> str:
    """Of the files that were saved on the way those are left out that were as they were."""
    saved = {file.path: file.sha256 for record in records if isinstance(record, Saved) for file in record.files}
    put = {
        change.path: change.sha256 for change in facts.changes if change.kind == "file" and change.action != "removed"
    }
    if not put.items() <= saved.items():
        return "the journal has other files that were saved"
    return _compared(facts, kind="savepoint", status="committed", saved=_steps(records))


def _planned_kind(records: Sequence[AnyRecord]) -> str:
    return next(record.kind for record in records if isinstance(record, Planned))


def _steps(records: Sequence[AnyRecord]) -> list[str]:
    saved = [record for record in records if isinstance(record, Saved)]
    return [record.step or f"step {number}" for number, record in enumerate(saved, 1)]


def _compared(facts: RunFacts, **said: Any) -> str:
    """As a receipt would spell it: text and times are not the same there to the last bit."""
    try:
        spelled = parse_statement(statement(msgspec.structs.replace(facts, changes=[], **said)))
    except (ValueError, OverflowError):  # a time beyond all years, a number that is none
        return "the journal has something that no receipt can say"
    for name in said:
        if getattr(spelled, name) != getattr(facts, name):
            return f"the journal has another {_WORDS.get(name, name)}"
    return ""


# -- keys --------------------------------------------------------------------------------------------------------


def key_difference(
    row: KeyRow, records: Sequence[AnyRecord], facts: RunFacts | None, *, session: str, key: str, public: PublicKey
) -> str:
    """What is wrong with the row of an idempotency key, by its run's records and its receipt (None: the run has not
    ended); empty: nothing is."""
    if (row.session, row.key) != (session, key):
        return f"its row is that of the key {row.key!r} of session {row.session}"
    planned = records[0] if records else None
    if not isinstance(planned, Planned) or planned.card.session != session:
        return f"it stands for {row.run}, which is no run of this session"
    if row.claim:
        return "" if _is_claimed(row, public) else f"nothing that this home signed lets it stand for {row.run}"
    said = row.run, row.key, row.attempt, row.request_sha256
    if said != (planned.run, planned.card.key, planned.card.attempt, planned.request_sha256):
        return f"it stands for {row.run}, which the journal has with {_with_key(planned.card.key)}"
    if facts is None:
        return ""
    stated = facts.run, facts.key, facts.attempt, facts.request_sha256 or row.request_sha256
    return "" if said == stated else f"it stands for {row.run}, whose receipt has {_with_key(facts.key)}"


def _with_key(key: str | None) -> str:
    return "no key" if key is None else f"the key {key!r}, or another attempt or request"


def claimed(row: KeyRow, key: SigningKey) -> KeyRow:
    """Sign that a key stands for a run that was not run with it."""
    return msgspec.structs.replace(row, claim=seal(_claim(row), key).envelope)


def _is_claimed(row: KeyRow, public: PublicKey) -> bool:
    try:
        named = signer(row.claim)
        signed_by = next((each for each in public.accepted if each.key_id == named), public)
        return open_envelope(row.claim, signed_by) == _claim(row)
    except VerifyFailed:
        return False


def _claim(row: KeyRow) -> bytes:
    return msgspec.json.encode(
        {"session": row.session, "key": row.key, "run": row.run, "request_sha256": row.request_sha256}, order="sorted"
    )


def answer_difference(answer: Run, facts: RunFacts) -> str:
    """What a recorded answer says otherwise than the receipt of its run; empty: nothing that a receipt states."""
    blocked = facts.error_code is None and facts.status == "rolled_back"  # then no record has an error either
    error = answer.error.code if answer.error and not blocked else None
    said = {
        "run": answer.id, "session": answer.session, "status": answer.status, "key": answer.card.key,
        "attempt": answer.attempt, "error": error, "exit code": answer.exit_code,
    }  # fmt: skip
    stated = (facts.run, facts.session, facts.status, facts.key, facts.attempt, facts.error_code, facts.exit_code)
    for (name, value), wanted in zip(said.items(), stated, strict=True):
        if value != wanted:
            return f"the recorded answer has another {name}"
    changed = [change for change in facts.changes if change.kind != "directory"]
    if facts.status != "rolled_back" and (answer.version, answer.outputs) != (facts.version, changed):
        return "the recorded answer has another version or other outputs"
    return ""


def refuse_other_statement(verified: Verified, before: State, after: State) -> None:
    """What is about to be signed must be of this run, at this place of the chain: a journal may be forged."""
    try:
        facts = parse_statement(verified.receipt)
    except (ValueError, msgspec.MsgspecError) as error:
        raise _other_statement(verified, "it cannot be read") from error
    stated = {name: getattr(facts, name) for name in _PLACE}
    wanted = dict(zip(_PLACE, (before.session, verified.run, before.receipts + 1, before.head), strict=True))
    ends = facts.version_before, facts.version, facts.manifest_sha256
    if stated != wanted or ends != (before.version, after.version, after.manifest_sha256):
        raise _other_statement(verified, "it is of another run, or of another place in the chain")


def _other_statement(verified: Verified, why: str) -> SessionHalted:
    return SessionHalted(
        f"the journal's statement of {verified.run} is not signed: {why}",
        hint="the journal was damaged or forged; `holdfast verify` says what still holds",
    )
