"""Why a run did not end well, in words: cause, what is lost, what to do next."""

import signal

import msgspec

from holdfast.kernel import wire
from holdfast.kernel.conduct import Outcome
from holdfast.model import RunError

_MIB = 1 << 20
_LOST = "Variables are lost; files are kept; a fresh kernel is ready."
_HINTS = {
    "timeout": "give the run more time (timeout=…), or do less in one run",
    "interrupted": "run it again when you mean it",
    "output_limit": "print less, or write to a file in /mnt/data",
    "killed": "split the work so that the part that dies stands alone, and look at it there",
    "out_of_memory": "read the data in chunks, keep fewer copies (del, inplace), or give the session more memory=…",
}
_NAMES = {
    "timeout": "Timeout",
    "interrupted": "KeyboardInterrupt",
    "output_limit": "OutputLimit",
    "killed": "KernelKilled",
    "out_of_memory": "OutOfMemory",
}


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What the session's cgroup knows about a death."""

    oom_kills: int
    peak_bytes: int
    cap_bytes: int


def explain(outcome: Outcome, memory: Memory) -> RunError | None:
    """The error of a run, or None if it ended well."""
    if outcome.finished is None:
        return _explain_loss(outcome, memory)
    if outcome.stop is not None:
        return _explain_stop(outcome)
    if outcome.raised is None:
        return None
    raised = outcome.raised
    if raised.name == "KeyboardInterrupt" and raised.kind == "exception":
        return _error("interrupted", "the cell raised KeyboardInterrupt", raised)
    return RunError(
        code=raised.kind, name=raised.name, message=raised.message, traceback=raised.traceback, line=raised.line
    )


def _explain_stop(outcome: Outcome) -> RunError | None:
    """We asked it to end, and it did: memory is intact."""
    assert outcome.stop is not None
    if outcome.stop.reason == "interrupted" and outcome.raised is None:
        return None  # it was done before the interrupt reached it
    return _error(
        outcome.stop.reason, f"{outcome.stop.message}. It was interrupted; variables are kept.", outcome.raised
    )


def _explain_loss(outcome: Outcome, memory: Memory) -> RunError:
    if memory.oom_kills:
        used, cap = memory.peak_bytes // _MIB, memory.cap_bytes // _MIB
        message = (
            f"the kernel was killed at its memory cap: it held {used} MiB of {cap} MiB and asked for more. {_LOST}"
        )
        return _error("out_of_memory", message, outcome.raised)
    if outcome.stop is not None:
        message = f"{outcome.stop.message}, and did not heed an interrupt: the kernel was killed. {_LOST}"
        if outcome.stop.at_once:
            message = f"{outcome.stop.message}: the kernel was killed. {_LOST}"
        return _error(outcome.stop.reason, message, outcome.raised)
    return _error("killed", f"the kernel died: {_cause(outcome)}. {_LOST}", outcome.raised)


def _cause(outcome: Outcome) -> str:
    if outcome.died is None:
        return outcome.gone or "nobody knows why"
    status = outcome.died.status
    number = status & 0x7F
    if number == 0:
        return f"exit code {status >> 8}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "?"
    return f"signal {number} ({name})"


def _error(code: str, message: str, raised: wire.Raised | None) -> RunError:
    return RunError(
        code=code,  # type: ignore[arg-type]
        name=_NAMES[code],
        message=message,
        traceback=raised.traceback if raised else "",
        line=raised.line if raised else None,
        hint=_HINTS[code],
    )
