"""A disk whose syncs are watched, and can fail."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest


class WatchedDisk:
    """Runs Python in a child; knows the order of its syncs and renames, and makes them fail when told."""

    def __init__(self, library: Path, directory: Path) -> None:
        self._library = library
        self._log = directory / "syncs.log"
        self.failing = directory / "syncs.fail"
        """While this file exists, every sync fails with EIO."""

    def run(self, code: str, *arguments: str | Path) -> str:
        child = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=os.environ
            | {"LD_PRELOAD": str(self._library), "SYNCS_LOG": str(self._log), "SYNCS_FAIL": str(self.failing)},
            capture_output=True,
            text=True,
        )
        assert child.returncode == 0, child.stderr
        return child.stdout

    def steps(self, below: Path) -> list[str]:
        """What was synced and renamed, paths relative to a directory."""
        return [line.replace(f"{below}/", "").replace(str(below), ".") for line in self._log.read_text().splitlines()]


def watch(directories: pytest.TempPathFactory) -> WatchedDisk:
    return WatchedDisk(_library(directories.getbasetemp()), directories.mktemp("watched"))


@cache
def _library(directory: Path) -> Path:
    library = directory / "syncs.so"
    source = Path(__file__).with_name("syncs.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library
