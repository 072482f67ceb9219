"""Nobody may listen to what we say beside a run's output (`2>&1 | head -3`): it happens all the same."""

import io
import os
import sys


class _Unheard(io.FileIO):
    """What is written after the reader has gone is lost, and nobody is told."""

    def write(self, data, /):  # type: ignore[no-untyped-def]  # any buffer
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def go_on() -> None:
    """For all that this process writes to stderr from now on, whoever writes it."""
    told = sys.stderr
    if told is None:  # it was closed when we began (`2>&-`)
        sys.stderr = io.TextIOWrapper(io.FileIO(os.devnull, "wb"), write_through=True)
        return
    told.flush()
    raw = _Unheard(told.fileno(), "wb", closefd=False)
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=told.encoding, errors=told.errors, line_buffering=True, write_through=True
    )
