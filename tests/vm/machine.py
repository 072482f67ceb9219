"""Running pytest in the test machine, and hearing what came of it.

    python tests/vm/machine.py [--user UID] [PYTEST ARGUMENTS]

runs what is named, or every behaviour of the sandbox and of the kernel in it, on cgroup v2: `make test-v2`.

A machine has one processor. To emulate two costs far more than twice as much, for each has to wait for the other
whenever memory is mapped anew, and that is what forks do. So two machines run beside one another, each with half of it.
"""

import argparse
import io
import os
import shlex
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import boot
from debian import Unavailable, prepared_kernel

HOME, TMP = "/disk/home", "/disk/tmp"
# Importing the others would take the emulated processor a minute.
ONLY_PLUGINS = ("-p", "anyio", "-p", "pytest_timeout", "-o", f"cache_dir={HOME}/cache")


def _files(directory: str, names: str) -> list[str]:
    return [f"tests/{directory}/test_{name}.py" for name in names.split()]


# Whatever meets namespaces, cgroups, mounts, signals or another Linux than the host's. Not what the host decides alone
# (journal, receipts, faces): another machine shows nothing new of it. Both halves take about as long.
COMMANDS = (  # each starts a process with everything anew, which takes a minute inside
    "output_streams_and_the_last_expression_is_printed",
    "out_of_memory_is_137_and_names_the_cap",
    "what_the_cell_left_running_is_named",
    "the_doctor_finds_a_strict_sandbox_possible",
    "the_doctor_and_the_refusal_tell_the_same_where_namespaces_are_used_up",
)
HALVES = (
    [
        *_files("escape", "channel files identity image inheritance kernel_calls neighbours network"),
        *_files("journey", "api cap home zygote input displays ipython output undo"),
        *(f"tests/journey/test_cli.py::test_{name}" for name in COMMANDS),
    ],
    [
        *_files("escape", "overlay processes resources shared snapshots"),
        *_files("journey", "deaths interrupts memory strays stuck sqlite staging full_disk ends what_comes_back"),
        *_files("unit", "cgroups seccomp probe procfs image"),
    ],
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
    output: BinaryIO | None = None,
    timeout_s: float,
) -> dict[str, int]:
    """Counts by outcome, and the machine's exit code, from reports that came out of the machine."""
    # The disk of sessions and jobs must be a real one: before Linux 6.6 a tmpfs has not all that an overlay needs.
    # The environment is read where the host has it.
    home = f"mkdir -p {HOME} {TMP} && ln -s {shlex.quote(os.environ['HOLDFAST_HOME'])}/envs {HOME}/envs"
    words = [sys.executable, "-m", "pytest", *ONLY_PLUGINS, "--timeout=900"]
    once = shlex.join([*words, *arguments, "--durations=15", "--junitxml=/exchange/report.xml"])
    # As outside (`tests/stages.py`): what failed is tried once more. It is cheaper in here than a machine of its own.
    # Files are named, and not their tests: pytest would miss those of a file in which none failed.
    files = dict.fromkeys(argument.partition("::")[0] for argument in arguments)
    words += [*files, "--last-failed", "--last-failed-no-failures=none"]
    again = shlex.join([*words, "--junitxml=/exchange/again.xml"])
    done = boot.run(
        ["sh", "-c", f"{home} || exit 126; {once}; code=$?; [ $code -eq 1 ] || exit $code; exec {again}"],
        output or sys.stdout.buffer,
        environment={
            "HOLDFAST_EXPECT_CGROUP": "v2",
            "HOLDFAST_HOME": HOME,
            "TMPDIR": TMP,
            "HOLDFAST_EMULATED": "1",
            "HOLDFAST_TRANSPORTS": "embedded",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            **(environment or {}),
        },
        exchange=exchange,
        memory_mib=4096 if systemd_user is None else 2048,
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


class Lines(io.RawIOBase):
    """What one of several machines prints, whole lines at a time, each with the machine's name before it."""

    _one_at_a_time = threading.Lock()

    def __init__(self, name: str) -> None:
        self._name = name.encode()
        self._rest = b""

    def write(self, chunk: bytes) -> int:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        with self._one_at_a_time:
            for line in lines:
                sys.stdout.buffer.write(self._name + b" | " + line + b"\n")
        return len(chunk)

    def flush(self) -> None:
        sys.stdout.buffer.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description="The suite on cgroup v2, in emulated machines.")
    parser.add_argument("--user", type=int, default=0, metavar="UID", help="as this ordinary user")
    parser.add_argument("--timeout-s", type=float, default=3 * 3600.0, help="for each machine")
    options, arguments = parser.parse_known_args()
    who = "root" if options.user == 0 else f"user {options.user}"

    def one(number: int, tests: Sequence[str]) -> dict[str, int]:
        output = Lines(f"{who}, machine {number}")
        with tempfile.TemporaryDirectory() as exchange:
            return pytest_inside(tests, Path(exchange), user=options.user, output=output, timeout_s=options.timeout_s)

    shares = [arguments] if arguments else [[*half, "-v"] for half in HALVES]
    with ThreadPoolExecutor(len(shares)) as machines:
        counts = list(machines.map(one, range(1, len(shares) + 1), shares))
    total = {name: sum(each[name] for each in counts) for name in ("passed", "skipped")}
    failed = sum(each["tests"] for each in counts) - sum(total.values())
    print(f"on cgroup v2, as {who}: {total['passed']} passed, {failed} failed, {total['skipped']} skipped")
    return max(each["code"] for each in counts)


if __name__ == "__main__":
    sys.exit(main())
