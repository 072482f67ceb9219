"""Command lines: `!cmd`, `x = !cmd` and the host's `shell` verb."""

import os
import signal
import subprocess
from typing import IO


def call(command: str, *, output: IO[bytes] | None = None) -> int:
    """Run it in bash and return its exit code; with `output`, stdout and stderr go there."""
    process = subprocess.Popen(
        ["/bin/bash", "-c", command],
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,  # so that an interrupt ends the whole pipeline and not just the shell
    )
    try:
        return process.wait()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
