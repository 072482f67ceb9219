"""Named points at which tests let the host die. Inert outside of them.

`HOLDFAST_CRASH_AT=publish.renamed` ends the process there by SIGKILL; `publish.renamed:3` at the third passing.
"""

import os
import signal

_at, _left = "", 0


def arm(at: str) -> None:
    """Die at that passing, counted from now on; the same from within."""
    global _at, _left
    _at, _, times = at.partition(":")
    _left = int(times or 1)


def is_armed() -> bool:
    return _left > 0


def crashpoint(name: str) -> None:
    """Die here, if a test says so."""
    global _left
    if name == _at:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get("HOLDFAST_CRASH_AT", ""))
