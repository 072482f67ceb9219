"""Part of the suite again, on a kernel with cgroup v2. First `python tests/vm/boot.py --prepare` as root."""

import io
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import boot

SUITES = ("tests/unit/test_cgroups.py", "tests/journey/test_memory.py", "tests/escape/test_resources.py", "tests/stress")
"""What runs inside, relative to the clone."""

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]


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
    pytest_words = ["-m", "not vm", "-p", "no:cacheprovider", "--timeout=600"]
    command = [sys.executable, "-m", "pytest", *pytest_words, "--junitxml=/exchange/report.xml", *SUITES]

    done = boot.run(
        command,
        sys.stdout.buffer,
        environment={"HOLDFAST_EXPECT_CGROUP": "v2"},
        exchange=tmp_path,
        timeout_s=840,
    )

    counts = counts_of(tmp_path / "report.xml")
    print(f"inside: {counts}; booted in {done.boot_s:.1f} s, ran for {done.run_s:.1f} s")
    assert done.code == 0
    assert counts["passed"] > 0


def counts_of(report: Path) -> dict[str, int]:
    """Read from a file that came out of the machine, not from what was printed."""
    [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    return {
        **counts,
        "passed": counts["tests"] - sum(counts[name] for name in ("failures", "errors", "skipped")),
    }
