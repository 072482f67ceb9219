"""Where a kernel is: it writes that down on our asking, in the midst of whatever it does, or in a crash."""

import os

import anyio

_MOST_BYTES = 64 << 10
_WRITING_S = 0.03


class Tracebacks:
    """Guards our end of the pipe that it writes to."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        os.set_blocking(pipe, False)

    async def wait(self, timeout_s: float) -> None:
        """Until one is there; or the time is over."""
        with anyio.move_on_after(timeout_s):
            await anyio.wait_readable(self._pipe)
            await anyio.sleep(_WRITING_S)  # it comes in pieces, and the last of them is the one that counts

    def read(self) -> str:
        """The last, or nothing."""
        try:
            return os.read(self._pipe, _MOST_BYTES).decode(errors="replace")
        except BlockingIOError:
            return ""

    def close(self) -> None:
        os.close(self._pipe)
