"""What a request did to a session's computer, and what became of memory when it was taken back."""

import re

import msgspec

from holdfast.kernel.conduct import Conduct
from holdfast.kernel.outcomes import Outcome
from holdfast.model import Memory, RunError, Stray
from holdfast.sandbox.cgroups import Cgroup

_DISK = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|Input/output error|disk is full|disk I/O error"
    r"|readonly database|SIGBUS"
)
"""How Linux, libraries and SQLite name a disk that refuses; SIGBUS: a mapped file found no room."""
_TAIL = 2_000


class Aftermath(msgspec.Struct, frozen=True, kw_only=True):
    """What became of memory."""

    memory: Memory
    discarded: list[str] = []
    not_restored: list[str] = []
    unprotected: str | None = None


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's own memory is counted from."""

    peak_is_exact: bool
    oom_kills: int


def gauge(cgroup: Cgroup) -> Gauges:
    return Gauges(peak_is_exact=cgroup.reset_peak(), oom_kills=cgroup.oom_kills())


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """What a request did, before anybody has decided what becomes of it."""

    conduct: Conduct
    outcome: Outcome
    error: RunError | None
    strays: list[Stray]
    peak_bytes: int | None
    given_up: BaseException | None
    """The caller is gone (cancelled), or its callback failed: the cell ended with it."""

    @property
    def is_from_outside(self) -> bool:
        """Whether it was ended so: an interrupt is, as is a caller who leaves. With the same key it may run again."""
        stop = self.outcome.stop
        lost = self.error is not None and self.error.code == "kernel_lost"
        return lost or self.given_up is not None or (stop is not None and stop.reason == "interrupted")

    def followed_by(self, trial: "Execution") -> "Execution":
        """The same, and after it, in the same run, what was declared of it was tried."""
        outcome = msgspec.structs.replace(
            self.outcome,
            finished=self.outcome.finished if trial.outcome.finished else None,
            stop=trial.outcome.stop or self.outcome.stop,
            duration_s=trial.outcome.duration_s,
        )
        return msgspec.structs.replace(
            self,
            outcome=outcome,
            error=trial.error or self.error,
            strays=[*self.strays, *trial.strays],
            peak_bytes=self.peak_bytes and max(self.peak_bytes, trial.peak_bytes or 0),
            given_up=self.given_up or trial.given_up,
        )


def met_disk(execution: Execution) -> str:
    """What the code says of a disk that refused it, in one line; empty: its end has nothing to do with one. Guests say
    what they like, so that this alone proves nothing: see `DiskGuard.shortage`."""
    if (error := execution.error) is not None:
        told = [error.message, error.traceback[-_TAIL:]]
    elif execution.outcome.finished is not None and execution.outcome.finished.exit_code:
        told = [execution.conduct.output.text("stderr")[-_TAIL:]]
    else:
        return ""
    found = next((line for text in told for line in text.splitlines()[::-1] if _DISK.search(line)), "")
    return found.strip()[:_TAIL]
