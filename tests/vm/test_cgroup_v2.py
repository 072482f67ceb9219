"""Part of the suite again, on a kernel with cgroup v2. First `python tests/vm/boot.py --prepare` as root."""

import io
import os
import shlex
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import boot

SUITES = ("tests/unit/test_cgroups.py", "tests/journey/test_cap.py", "tests/journey/test_sqlite.py", "tests/stress")
"""What runs inside, relative to the clone. Everything is many times slower there: only what touches cgroups."""
KILLS = 15
HOME = "/disk/home"

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1200)]


@pytest.fixture(autouse=True)
def _machine() -> None:
    try:
        boot.prepared_kernel()
    except boot.Unavailable as reason:
        pytest.skip(str(reason))


def test_the_machine_has_cgroup_v2_and_passes_the_exit_code_on() -> None:
    output = io.BytesIO()
    look = "stat -fc %T /sys/fs/cgroup; cat /sys/fs/cgroup/cgroup.controllers; exit 7"

    done = boot.run(["sh", "-c", look], output, timeout_s=120)

    kind, controllers = output.getvalue().decode().splitlines()
    assert kind == "cgroup2fs"
    assert {"memory", "pids", "cpu"} <= set(controllers.split())
    assert done.code == 7


def test_the_suite_passes_on_cgroup_v2(tmp_path: Path) -> None:
    # The sessions' disk must be a real one; the environment is read where the host has it.
    prepare = f"mkdir {HOME} && ln -s {shlex.quote(os.environ['HOLDFAST_HOME'])}/envs {HOME}/envs"
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--timeout=800",
        "--junitxml=/exchange/report.xml",
    ]

    done = boot.run(
        ["sh", "-c", f"{prepare} && exec {shlex.join([*words, *SUITES])}"],
        sys.stdout.buffer,
        environment={
            "HOLDFAST_EXPECT_CGROUP": "v2",
            "HOLDFAST_HOME": HOME,
            "HOLDFAST_EMULATED": "1",
            "HOLDFAST_STRESS_KILLS": str(KILLS),
        },
        exchange=tmp_path,
        memory_mib=4096,
        timeout_s=1100,
    )

    counts = counts_of(tmp_path / "report.xml")
    print(f"inside: {counts}; booted in {done.boot_s:.1f} s, ran for {done.run_s:.1f} s")
    assert done.code == 0
    assert counts["passed"] > 30


def counts_of(report: Path) -> dict[str, int]:
    """Read from a file that came out of the machine, not from what was printed."""
    [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    return {
        **counts,
        "passed": counts["tests"] - sum(counts[name] for name in ("failures", "errors", "skipped")),
    }
