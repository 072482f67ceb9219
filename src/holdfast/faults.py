"""Named points at which tests let the host die. Inert outside of them.

`HOLDFAST_CRASH_AT=publish.renamed` ends the process there by SIGKILL; `publish.renamed:3` at the third passing.
"""

import os
import signal

_at, _, _times = os.environ.get("HOLDFAST_CRASH_AT", "").partition(":")
_left = int(_times or 1)


def crashpoint(name: str) -> None:
    """Die here, if a test says so."""
    global _left
    if name == _at:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
