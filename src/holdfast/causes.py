"""Why a run did not end well, in words, from the evidence that it left."""

import re
import signal
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from holdfast.kernel import wire
from holdfast.kernel.happenings import Died, Gone
from holdfast.kernel.outcomes import Outcome
from holdfast.model import Memory, Mode, RunError

_MIB = 1 << 20
_SHORT, _MOST_NAME = 2_000, 200
_MOST_TEXT = wire.MAX_TEXT + 200
"""An honest guest cuts first, and then says which cell of a notebook it was."""
_FATES = {
    "kept": "Variables are as the cell left them.",
    "restored": "Variables are as they were before the run.",
    "lost": "Variables are lost; files are kept; a fresh kernel is ready.",
}
_NO_KERNEL = "Variables are lost; files are kept; no other kernel came up yet: the next request tries again."
_HINTS = {
    "timeout": "give the run more time (timeout=…), or do less in one run",
    "interrupted": "run it again when you mean it",
    "disk_limit": "write less, remove files first, or give the session a larger disk=…",
    "output_limit": "print less, or write to a file in /mnt/data",
    "killed": "split the work so that the part that dies stands alone, and look at it there",
    "kernel_lost": "the code is not the reason: run it again as it is, also with the same key",
    "out_of_memory": "read the data in chunks, keep fewer copies (del, inplace), or give the session more memory=…",
}
_NAMES = {
    "timeout": "Timeout",
    "interrupted": "KeyboardInterrupt",
    "disk_limit": "DiskLimit",
    "output_limit": "OutputLimit",
    "killed": "KernelKilled",
    "kernel_lost": "KernelLost",
    "out_of_memory": "OutOfMemory",
}


_INIT = "the session's first process was ended from outside, and with it all of the session's processes,"


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the session's cgroup knows about a death."""

    oom_kills: int
    peak_bytes: int
    cap_bytes: int
    keeper_ended_at: float | None = None
    """When the keeper ended below which it ran."""


_NO_DEATH = Evidence(oom_kills=0, peak_bytes=0, cap_bytes=0)


def explain(outcome: Outcome, memory: Evidence = _NO_DEATH) -> RunError | None:
    """The error of a run, or None if it ended well."""
    if outcome.raised is not None:
        outcome = msgspec.structs.replace(outcome, raised=_bounded(outcome.raised))
    if outcome.finished is None:
        loss = _explain_loss(outcome, memory)
        return msgspec.structs.replace(loss, line=loss.line or _last_line_in_cell(outcome.location))
    if outcome.stop is not None:
        return _explain_stop(outcome)
    if outcome.raised is None:
        return None
    raised = outcome.raised
    if raised.name == "KeyboardInterrupt" and raised.kind == "exception":
        return _error("interrupted", "the cell raised KeyboardInterrupt", raised)
    if raised.name == "MemoryError":
        message = raised.message or "the cell ran out of memory"
        return msgspec.structs.replace(_error("out_of_memory", message, raised), name="MemoryError")
    return RunError(
        code=raised.kind, name=raised.name, message=raised.message, traceback=raised.traceback, line=raised.line,
        hint=raised.hint, blocks=raised.blocks,
    )  # fmt: skip


def in_short(error: RunError) -> str:
    """For the journal and for receipts."""
    return f"{error.name}: {error.message}"[:_SHORT]


def with_fate(error: RunError, memory: Memory, unprotected: str | None, *, has_kernel: bool = True) -> RunError:
    """The error, and in its message what became of memory (where that is not plain from the code)."""
    if error.code in ("exception", "syntax"):
        return error
    why = f" ({unprotected})" if memory == "lost" and unprotected else ""
    fate = _FATES[memory] if has_kernel or memory != "lost" else _NO_KERNEL
    return msgspec.structs.replace(error, message=f"{error.message.rstrip('.')}. {fate}{why}")


def of_keeper(at: float) -> str:
    return f"Holdfast's keeper was ended, and with it every session's processes, at {_when(at)}"


def between_runs(deaths: Sequence[Died | Gone], *, lost_init: bool, after: float, found: float) -> str:
    """How a kernel ended that had nothing to do, and when: after it was seen alive, and before it was found dead."""
    how = _INIT if lost_init else f"the kernel was ended ({_how(deaths)})"
    return f"{how} between two runs: after {_when(after)} and before {_when(found)}"


def keeps_memory(error: RunError, mode: Mode) -> bool:
    """Whether a failure leaves memory as the cell left it. Nothing ran of what does not parse."""
    return error.code == "syntax" or (mode == "notebook" and error.code in ("exception", "interrupted"))


def _bounded(raised: wire.Raised) -> wire.Raised:
    """No longer than an honest guest sends it."""
    return msgspec.structs.replace(
        raised,
        name=raised.name[:_MOST_NAME],
        message=wire.cut_end(raised.message, _MOST_TEXT),
        traceback=wire.cut_middle(raised.traceback, _MOST_TEXT),
        blocks=raised.blocks if len(raised.traceback) <= _MOST_TEXT else [],
        hint=raised.hint[:_SHORT],
    )


def _explain_stop(outcome: Outcome) -> RunError | None:
    """We asked it to end, and it did: memory is intact."""
    assert outcome.stop is not None
    if outcome.stop.reason == "interrupted" and outcome.raised is None:
        return None  # it was done before the interrupt reached it
    how = ". It was interrupted." if outcome.begun else " before its code began."
    return _error(outcome.stop.reason, f"{outcome.stop.message}{how}", outcome.raised)


def _explain_loss(outcome: Outcome, memory: Evidence) -> RunError:
    if memory.oom_kills and (outcome.died is None or outcome.died.status & 0x7F == signal.SIGKILL):
        used, cap = memory.peak_bytes // _MIB, memory.cap_bytes // _MIB
        message = f"the kernel was killed at its memory cap: it held {used} MiB of {cap} MiB and asked for more."
        return _error("out_of_memory", message, outcome.raised)
    if outcome.stop is not None:
        message = f"{outcome.stop.message}, and did not heed an interrupt: the kernel was killed."
        if outcome.stop.at_once:
            message = f"{outcome.stop.message}: the kernel was killed."
        return _error(outcome.stop.reason, message, outcome.raised)
    if memory.keeper_ended_at is not None and outcome.died is None:
        begun = "" if outcome.begun else ", before the code began"
        return _error("kernel_lost", f"{of_keeper(memory.keeper_ended_at)}{begun}.", outcome.raised)
    if outcome.lost_init:
        begun = "" if outcome.begun else ", before the code began"
        return _error("kernel_lost", f"{_INIT} at {_when(time.time())}{begun}.", outcome.raised)
    if outcome.is_unstarted:
        message = f"the kernel was ended ({_cause(outcome)}) at {_when(time.time())}, before the code began."
        return _error("kernel_lost", message, outcome.raised)
    return _error("killed", f"the kernel died: {_cause(outcome)}.", outcome.raised)


def _last_line_in_cell(location: str) -> int | None:
    """From what faulthandler wrote: most recent call first."""
    found = re.findall(r'File "(<ipython-input-[^"]*)", line (\d{1,9})', location)
    # The outermost is the cell that runs; further in may be functions of earlier cells, with lines of their own.
    return next((int(line) for name, line in found if name == found[-1][0]), None)


def _cause(outcome: Outcome) -> str:
    if outcome.gone or outcome.died is None:
        return outcome.gone or "nobody knows why"
    return _ending(outcome.died.status)


def _how(deaths: Sequence[Died | Gone]) -> str:
    """A status that pid 1 reports says more than a socket that was closed."""
    for death in deaths:
        if isinstance(death, Died):
            return _ending(death.status)
    return next((death.reason for death in deaths if isinstance(death, Gone)), "nobody knows why")


def _when(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _ending(status: int) -> str:
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
        blocks=raised.blocks if raised else [],
        line=raised.line if raised else None,
        hint=_HINTS[code],
    )
