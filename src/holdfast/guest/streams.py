"""The kernel's standard streams: whatever a cell does to them, the next one finds them whole."""

import io
import os
import sys
from contextlib import suppress
from typing import Any, Protocol

from holdfast.sandbox import linux

_FDS = (0, 1, 2)
_OUTPUTS = {1: "stdout", 2: "stderr"}
# As Python itself sets them up under C.UTF-8: bytes that are no text pass through, and stderr never fails.
_ERRORS = {1: "surrogateescape", 2: "backslashreplace"}


class Ahead(Protocol):
    """What else the cell sends, which is to arrive before what it prints afterwards."""

    behind: bool

    def catch_up(self) -> None: ...


class StandardStreams:
    """Guards descriptors 0 to 2 and the objects that print to them."""

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead
        self._saved = {fd: os.dup(fd) for fd in _FDS}
        for fd in _OUTPUTS:
            _install(fd, ahead)

    def restore(self) -> None:
        """Flush all that was printed into the pipes, and mend what the cell closed or pointed elsewhere.

        An object of the user's own that can be written to stays: whoever sets `sys.stdout` may mean it.
        """
        for name in _OUTPUTS.values():
            _flush(getattr(sys, name, None))
        linux.flush_c_streams()
        for fd, saved in self._saved.items():
            with suppress(OSError):  # the cell closed our copies too; its next print will say so
                os.dup2(saved, fd)
        for fd, name in _OUTPUTS.items():
            if not _is_usable(getattr(sys, name, None)):
                _install(fd, self._ahead)


class _Whole(io.FileIO):
    """Unbuffered, and yet complete: a write that a signal or the freezer cuts short goes on with the rest."""

    ahead: Ahead

    def write(self, data: Any) -> int:
        if self.ahead.behind:
            self.ahead.catch_up()
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += super().write(view[done:]) or 0
        return done


def _install(fd: int, ahead: Ahead) -> None:
    # Unbuffered, so that a prompt without a newline is seen at once and C code's output falls in between.
    file = _Whole(fd, "wb", closefd=False)
    file.ahead = ahead
    stream = io.TextIOWrapper(
        file,
        encoding="utf-8",
        errors=_ERRORS[fd],
        newline="\n",
        write_through=True,
    )
    setattr(sys, _OUTPUTS[fd], stream)
    setattr(sys, f"__{_OUTPUTS[fd]}__", stream)


def _flush(stream: Any) -> None:
    with suppress(Exception):  # the cell may have put anything there; what it lost is its own
        stream.flush()


def _is_usable(stream: Any) -> bool:
    try:
        return callable(stream.write) and not getattr(stream, "closed", False)
    except Exception:  # the user's own object again
        return False
