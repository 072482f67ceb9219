"""Part of the suite again, on a kernel with cgroup v2. First `python tests/vm/boot.py --prepare` as root."""

import io
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import boot
import machine

# Everything is many times slower inside, so only what hangs on cgroups: caps, the freezer, kills, who is killed first.
# `make test-v2` runs every behaviour of the sandbox and the kernel there.
SUITES = (
    "tests/unit/test_cgroups.py",
    "tests/journey/test_cap.py",
    "tests/journey/test_sqlite.py",
    "tests/stress/test_kills.py::test_everything_comes_back_after_every_kind_of_death",
)
STRAYS = (
    "test_a_process_left_behind_is_killed_and_named",
    "test_a_daemon_that_detached_itself_is_killed_too",
    "test_a_thread_that_lives_on_is_named_and_frozen",
    "test_a_process_is_frozen_with_its_session",
)
DEATHS = (
    "test_a_child_that_takes_too_much_goes_and_the_cell_goes_on",
    "test_a_fork_bomb_is_ended_with_its_run",
)
MEMORY = (
    "test_a_cell_that_ignores_its_memory_error_is_killed",
    "test_when_the_reserve_is_used_up_the_snapshot_goes_and_the_run_goes_on",
    "test_a_run_that_lost_its_snapshot_and_then_dies_loses_memory_and_says_so",
)
RESOURCES = (
    "test_a_fork_bomb_that_exits_and_forks_anew_ends_with_its_run",
    "test_no_more_processes_than_allowed",
)
SNAPSHOTS = (
    "test_a_woken_kernel_is_killed_first_when_memory_is_short",
    "test_a_stray_does_not_outlive_a_rollback",
)
CHOSEN = (
    *SUITES,
    *(f"tests/journey/test_strays.py::{name}[cgroup]" for name in STRAYS),
    *(f"tests/journey/test_deaths.py::{name}" for name in DEATHS),
    *(f"tests/journey/test_memory.py::{name}" for name in MEMORY),
    *(f"tests/escape/test_resources.py::{name}" for name in RESOURCES),
    *(f"tests/escape/test_snapshots.py::{name}" for name in SNAPSHOTS),
)
KILLS = 10

pytestmark = [pytest.mark.vm, pytest.mark.timeout(2100)]


@pytest.fixture(autouse=True)
def _machine() -> None:
    machine.skip_unless_prepared()


def test_the_machine_has_cgroup_v2_and_passes_the_exit_code_on() -> None:
    output = io.BytesIO()
    look = "stat -fc %T /sys/fs/cgroup; cat /sys/fs/cgroup/cgroup.controllers; exit 7"

    done = boot.run(["sh", "-c", look], output, timeout_s=120)

    kind, controllers = output.getvalue().decode().splitlines()
    assert kind == "cgroup2fs"
    assert {"memory", "pids", "cpu"} <= set(controllers.split())
    assert done.code == 7


def test_the_suite_passes_on_cgroup_v2(tmp_path: Path) -> None:
    counts = machine.pytest_inside(CHOSEN, tmp_path, environment={"HOLDFAST_STRESS_KILLS": str(KILLS)}, timeout_s=2000)

    assert counts["code"] == 0
    assert counts["passed"] > 40
