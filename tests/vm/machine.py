"""Running pytest in the test machine, and hearing what came of it.

    python tests/vm/machine.py [--user UID] [PYTEST ARGUMENTS]

runs what is named, or all of the suite that does not depend on a network, on cgroup v2: `make test-v2`.
"""

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import boot
from debian import Unavailable, prepared_kernel

HOME = "/disk/home"
# Importing the others would take the emulated processor a minute.
ONLY_PLUGINS = ("-p", "anyio", "-p", "pytest_timeout", "-o", f"cache_dir={HOME}/cache")
WHOLE = ("tests/unit", "tests/escape", "tests/journey")
# No emulated machine shows anything new about these, and each takes many minutes there.
NOT_ABOUT_CGROUPS = (
    "tests/journey/mcp",
    "tests/journey/test_http_schema.py",
    "tests/journey/test_http.py",
    "tests/journey/test_docs.py",
    "tests/journey/test_jupyter.py",
)


def skip_unless_prepared() -> None:
    """Where root has not prepared the machine."""
    try:
        prepared_kernel()
    except Unavailable as reason:
        pytest.skip(str(reason))


def pytest_inside(
    arguments: Sequence[str],
    exchange: Path,
    *,
    environment: Mapping[str, str] | None = None,
    user: int = 0,
    systemd_user: int | None = None,
    timeout_s: float,
) -> dict[str, int]:
    """Counts by outcome, and the machine's exit code, from reports that came out of the machine."""
    # The sessions' disk must be a real one; the environment is read where the host has it.
    home = f"mkdir -p {HOME} && ln -s {shlex.quote(os.environ['HOLDFAST_HOME'])}/envs {HOME}/envs"
    words = [sys.executable, "-m", "pytest", *ONLY_PLUGINS, "--timeout=900"]
    once = shlex.join([*words, *arguments, "--durations=15", "--junitxml=/exchange/report.xml"])
    # As outside (`tests/stages.py`): what failed is tried once more. It is cheaper in here than a machine of its own.
    # Files are named, and not their tests: pytest would miss those of a file in which none failed.
    files = dict.fromkeys(argument.partition("::")[0] for argument in arguments)
    words += [*files, "--last-failed", "--last-failed-no-failures=none"]
    again = shlex.join([*words, "--junitxml=/exchange/again.xml"])
    done = boot.run(
        ["sh", "-c", f"{home} || exit 126; {once}; code=$?; [ $code -eq 1 ] || exit $code; exec {again}"],
        sys.stdout.buffer,
        environment={
            "HOLDFAST_EXPECT_CGROUP": "v2",
            "HOLDFAST_HOME": HOME,
            "HOLDFAST_EMULATED": "1",
            "HOLDFAST_TRANSPORTS": "embedded",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            **(environment or {}),
        },
        exchange=exchange,
        memory_mib=4096 if systemd_user is None else 2048,
        # One is cheaper to emulate; two show what races.
        processors=2 if systemd_user is None else 1,
        timeout_s=timeout_s,
        user=user,
        systemd_user=systemd_user,
    )
    counts = counts_of(exchange / "report.xml") | {"code": done.code}
    if (exchange / "again.xml").exists():
        counts["passed"] += counts_of(exchange / "again.xml")["passed"]
        tell_of_second_tries(exchange / "again.xml")
    print(
        f"inside: {counts}; booted in {done.boot_s:.1f} s, ran for {done.run_s:.1f} s, "
        f"{done.processor_s:.0f} s of the processors"
    )
    return counts


def counts_of(report: Path) -> dict[str, int]:
    """Read from a file that came out of the machine, not from what was printed."""
    [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    return {
        **counts,
        "passed": counts["tests"] - sum(counts[name] for name in ("failures", "errors", "skipped")),
    }


def tell_of_second_tries(report: Path) -> None:
    """Past pytest, which shows nothing of what a test prints that passes."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("failure") is None and case.find("error") is None:
            name = f"{case.attrib['classname']}::{case.attrib['name']}"
            print(f"in the machine, passed at the second try: {name}", file=sys.__stderr__, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="The suite on cgroup v2, in an emulated machine. It takes hours.")
    parser.add_argument("--user", type=int, default=0, metavar="UID", help="as this ordinary user")
    parser.add_argument("--timeout-s", type=float, default=6 * 3600.0)
    options, arguments = parser.parse_known_args()
    arguments = arguments or [*WHOLE, *(f"--ignore={path}" for path in NOT_ABOUT_CGROUPS)]
    with tempfile.TemporaryDirectory() as exchange:
        counts = pytest_inside(arguments, Path(exchange), user=options.user, timeout_s=options.timeout_s)
    return counts["code"]


if __name__ == "__main__":
    sys.exit(main())
