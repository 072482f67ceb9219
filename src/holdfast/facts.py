"""A run as its records tell it, and what a receipt says of it by them."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from holdfast.records import AnyRecord, Change, Check, Executed, Planned, Saved, Verified, requests_sent
from holdfast.state import State
from holdfast.statements import RunFacts


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """A run's records, by what they are."""

    planned: Planned
    saved: list[Saved] = []
    sent: list[str] = []
    """Requests that left, or were just about to."""
    executed: Executed | None = None
    verified: Verified | None = None


def story(records: list[AnyRecord]) -> Story:
    return Story(
        planned=next(r for r in records if isinstance(r, Planned)),
        saved=[r for r in records if isinstance(r, Saved)],
        sent=requests_sent(records),
        executed=next((r for r in records if isinstance(r, Executed)), None),
        verified=next((r for r in records if isinstance(r, Verified)), None),
    )


def facts_of(planned: Planned, executed: Executed | None, before: State, after: State) -> RunFacts:
    """What is told of every run, however it ends; the rest is filled in by whoever knows."""
    card = planned.card
    return RunFacts(
        session=before.session,
        run=planned.run,
        number=before.receipts + 1,
        previous=before.head,
        kind=planned.kind,
        status="committed",
        version_before=before.version,
        version=after.version,
        generation=after.generation,
        ckpt_before=card.base,
        ckpt=str(after.ckpt()),
        manifest_sha256=after.manifest_sha256,
        goal=card.goal,
        code_sha256=card.code_sha256,
        started_at=planned.at,
        finished_at=executed.at if executed else planned.at,
        key=card.key,
        attempt=card.attempt,
        request_sha256=planned.request_sha256,
        inputs=[*card.inputs, *card.forecast_inputs],
        environment=card.environment,
        error_code=executed.error_code if executed else None,
        error_message=executed.error_message if executed else "",
        exit_code=executed.exit_code if executed else None,
        duration_s=executed.duration_s if executed else 0.0,
        peak_memory_bytes=executed.peak_memory_bytes if executed else None,
        strays=executed.strays if executed else [],
        kernel_replaced=executed.kernel_replaced if executed else "",
    )


def facts_rolled_back(
    state: State, told: Story, *, reason: str, blame: Literal["user", "system"], checks: Sequence[Check],
    refused: Sequence[str],
) -> RunFacts:  # fmt: skip
    """`refused` is what it tried to send in vain."""
    return msgspec.structs.replace(
        facts_of(told.planned, told.executed, state, state), status="rolled_back", reason=reason, blame=blame,
        checks=list(checks), saved=_steps(told), egress=[*told.sent, *refused],
    )  # fmt: skip


def facts_saved(before: State, after: State, told: Story, changes: list[Change]) -> RunFacts:
    """Of what it saved on its way, as a version of its own."""
    facts = facts_of(told.planned, None, before, after)
    return msgspec.structs.replace(
        facts, kind="savepoint", changes=changes, saved=_steps(told), finished_at=told.saved[-1].at
    )


def _steps(told: Story) -> list[str]:
    return [record.step or f"step {number}" for number, record in enumerate(told.saved, 1)]
