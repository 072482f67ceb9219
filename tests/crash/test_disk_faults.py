"""Faults of the disk under a live session. All 60 are run by `python -m tests.disk_faults 60`."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")


@pytest.mark.parametrize("seed", [17, 23])
def test_no_run_is_lost_none_blamed_and_no_session_wedged(seed: int) -> None:
    command = [sys.executable, "-W", "error", "-m", "tests.disk_faults", "6", "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)

    assert done.returncode == 0, done.stderr
