"""What a caller gets of a run: put together from what the kernel said, what was verified, and how it was settled."""

import time
from collections.abc import Mapping
from itertools import islice

import msgspec

from holdfast import checks as checking
from holdfast import publication
from holdfast.errors import HoldfastError, PatternsTooCostly, ProtectedPath, UndeclaredWrite
from holdfast.executions import Aftermath, Execution
from holdfast.kernel import wire
from holdfast.model import ErrorCode, MemoryCap, NextInput, Run, RunError
from holdfast.preflight import Reading
from holdfast.records import Change, Check, Executed, Finding, RunCard, Status
from holdfast.state import MOST_NAMES

_MESSAGE = 2_000
_NAME_LENGTH = 200
_CODES: Mapping[type[HoldfastError], ErrorCode] = {
    ProtectedPath: "protected_path", UndeclaredWrite: "undeclared_write", PatternsTooCostly: "patterns_too_costly",
}  # fmt: skip


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, as far as it is not in its execution."""

    status: Status
    version: int
    generation: int
    ckpt: str
    aftermath: Aftermath
    error: RunError | None = None
    changes: list[Change] = []
    names: dict[str, tuple[str, str]] = {}
    checks: list[Check] = []
    saved: list[str] = []
    outside: list[str] = []
    egress: list[str] = []
    may_have_happened: list[str] = []


def result(
    card: RunCard, execution: Execution | None, ending: Ending, *, memory_cap: MemoryCap, kernel_replaced: str = ""
) -> Run:
    """The run, but for its receipt and its recovery."""
    conduct = execution.conduct if execution else None
    finished = execution.outcome.finished if execution else None
    return Run(
        id=card.run,
        session=card.session,
        status=ending.status,
        version=ending.version,
        ckpt=ending.ckpt,
        card=msgspec.structs.replace(card, stage=ending.status),
        receipt=None,
        outputs=[change for change in in_data(ending.changes) if change.kind != "directory"],
        names={name: kind for name, (kind, _) in ending.names.items() if kind},
        names_gone=sorted(name for name, (kind, _) in ending.names.items() if not kind),
        checks=ending.checks,
        recovery=None,
        findings=card.findings,
        saved=ending.saved,
        outside=ending.outside,
        egress=ending.egress,
        may_have_happened=ending.may_have_happened,
        attempt=card.attempt,
        replayed=False,
        generation=ending.generation,
        memory=ending.aftermath.memory,
        discarded=ending.aftermath.discarded,
        not_restored=ending.aftermath.not_restored,
        unprotected=ending.aftermath.unprotected,
        kernel_replaced=kernel_replaced,
        count=finished.count if finished else 0,
        exit_code=finished.exit_code if finished else None,
        text=conduct.shelf.result if conduct else None,
        next_input=next_input(finished.next_input) if finished and finished.next_input else None,
        stdout=conduct.output.text("stdout") if conduct else "",
        stderr=conduct.output.text("stderr") if conduct else "",
        dropped_bytes=conduct.output.dropped_bytes if conduct else 0,
        displays=conduct.shelf.displays if conduct else [],
        dropped_displays=conduct.shelf.dropped if conduct else 0,
        error=ending.error,
        strays=execution.strays if execution else [],
        duration_s=execution.outcome.duration_s if execution else 0.0,
        peak_memory_bytes=execution.peak_bytes if execution else None,
        memory_cap=memory_cap,
    )


def next_input(offered: wire.NextInput) -> NextInput:
    """What the guest offered, as callers see it."""
    return NextInput(text=offered.text, replace=offered.replace)


def executed(run: str, execution: Execution, error: RunError | None, *, kernel_replaced: str = "") -> Executed:
    """The record that the code has ended."""
    finished = execution.outcome.finished
    return Executed(
        run=run,
        at=time.time(),
        error_code=error.code if error else None,
        error_message=error.message[:_MESSAGE] if error else "",
        duration_s=execution.outcome.duration_s,
        exit_code=finished.exit_code if finished else None,
        peak_memory_bytes=execution.peak_bytes,
        strays=[f"{stray.kind} {stray.name} ({stray.outcome})" for stray in execution.strays][:100],
        kernel_replaced=kernel_replaced,
    )


def names_after(
    reading: Reading, execution: Execution, live: Mapping[str, tuple[str, str]], *, run: str
) -> dict[str, tuple[str, str]]:
    """What the run did to names: by identity, as the guest tells, and by what its text binds."""
    finished = execution.outcome.finished
    if finished is None:
        return {}
    bound = {n: kind for n, kind in islice(finished.names.items(), MOST_NAMES) if len(n) <= _NAME_LENGTH}
    for name in live.keys() & set(reading.binds) - set(finished.gone):
        bound.setdefault(name, live[name][0])
    gone = {name: ("", run) for name in finished.gone[:MOST_NAMES] if name in live}
    room = max(0, MOST_NAMES - len(live.keys() - gone.keys()))
    new = set(islice((name for name in bound if name not in live), room))
    names = {n: (kind[:_NAME_LENGTH] or "object", run) for n, kind in bound.items() if n in new or n in live}
    return names | gone


def in_data(changes: list[Change]) -> list[Change]:
    return [change for change in changes if change.area == "data"]


def verification_error(checks: list[Check]) -> RunError:
    if (refusal := publication.reason(checks)) is not None:
        return RunError(
            code=_CODES[type(refusal)], name=type(refusal).__name__, message=refusal.message, hint=refusal.hint
        )
    mapped = any(check.name == checking.MAPPINGS and not check.ok for check in checks)
    way = "close what is still mapped" if mapped else "declare what the code really makes, or make the code do it"
    return RunError(
        code="verification",
        name="VerificationFailed",
        message=checking.reason(checks),
        hint=f"run.checks has each check; {way}",
    )


def lost_error(death: str, names: list[str]) -> RunError:
    """Of code that was not started, because memory was lost between two runs."""
    return RunError(
        code="kernel_lost",
        name="KernelLost",
        message=f"not started: {death}. Memory was lost with it, and the code needs {', '.join(names[:10])}",
        hint="make these names again (run.recovery has the runs that made them), then run it again, also with its key",
    )


def blocked_error(missing: list[Finding]) -> RunError:
    if missing[0].code == "not_looked_at":
        return RunError(
            code="exception",
            name="NotLookedAt",
            message=f"not started: {missing[0].message}",
            hint=f"{missing[0].hint}, or run with preflight='warn'",
        )
    names = ", ".join(name for finding in missing for name in finding.names)
    return RunError(
        code="exception",
        name="NameError",
        message=f"not started: {'; '.join(finding.message for finding in missing)}",
        line=missing[0].line,
        hint=f"define {names} first, or run with preflight='warn'",
    )
