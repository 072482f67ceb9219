"""How a request on a kernel ended, and why we ended it."""

from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from holdfast.kernel import wire
from holdfast.kernel.happenings import Died

StopReason = Literal["timeout", "interrupted", "output_limit", "out_of_memory", "disk_limit", "killed"]


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """Why we end a run before it ends by itself."""

    reason: StopReason
    message: str
    at_once: bool = False
    """Kill without asking."""


Guard = Callable[[], Awaitable[Stop | None]]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended. Without `finished` the kernel is lost."""

    finished: wire.Finished | None
    raised: wire.Raised | None
    stop: Stop | None
    died: Died | None
    gone: str | None
    """What the kernel did that made us give it up."""
    location: str
    """A traceback that a kernel left which did not live to raise."""
    printed: bool
    duration_s: float
    begun: bool = True
    """False: it was to end before the kernel had it; or the kernel ended before it had read it."""
    lost_init: bool = False
    """The session's pid 1 ended, and every process of the session with it. Nothing inside can do that: pid 1 ends by
    itself when it has no children, but then it has reported the kernel's death."""

    @property
    def is_unstarted(self) -> bool:
        """Nobody asked it to end, and it has not begun: the kernel was gone before."""
        return self.finished is None and self.stop is None and not self.begun
