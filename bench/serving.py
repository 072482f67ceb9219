"""A server of our own for a bench: its home lies beside the other one and is gone afterwards."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.config import default_home

HOLDFAST = [sys.executable, "-m", "holdfast.cli.main"]


@contextmanager
def own_home() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=default_home()))
    (directory / "envs").symlink_to(default_home() / "envs")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def server(home: Path) -> Iterator[tuple[str, str]]:
    command = [*HOLDFAST, "serve", "--port", "0", "--json", "--home", str(home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        try:
            yield told["url"], told["token"]
        finally:
            process.terminate()
            process.wait(timeout=60)
