"""An ordinary user's cgroup from his own systemd: `inside/test_user_manager.py`, in a machine that systemd runs.

First `python tests/vm/boot.py --prepare` as root.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import machine

UID = 61_234

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1200)]


def test_a_user_gets_his_cgroup_from_systemd_or_the_command_that_gives_him_one(tmp_path: Path) -> None:
    machine.skip_unless_prepared()

    counts = machine.pytest_inside(["--noconftest", "tests/vm/inside"], tmp_path, systemd_user=UID, timeout_s=1100)

    assert counts["code"] == 0
    assert counts["passed"] == counts["tests"] == 5
