"""Other people's test suites, run against our kernel: how many of their tests pass, and the names of those that fail.

    python tests/suites.py [SUITE ...] [--kernel holdfast|ipykernel] [--place DIR]

pip downloads the suites' published sources, in the versions that are installed here. Their tests ask for the kernel
`python3`; our kernelspec is installed under that name, in directories of Jupyter's that last as long as the run. With
`--kernel ipykernel` the same tests are run against ipykernel, to compare. docs/jupyter.md says why the rest fails.
"""

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
NEEDED = ("flaky", "outcome", "pytest-asyncio", "sniffio", "sortedcontainers", "testpath", "trio", "xmltodict")
"""What their tests import and we do not have, with what that imports."""
TEST_S = 120
"""Longest time for one of their tests: our first kernel starts a server, too."""
_WAIT_S = 30


class Suite(NamedTuple):
    """Which tests of a package talk to a kernel."""

    package: str
    tests: tuple[str, ...]


SUITES = {
    "jupyter_kernel_test": Suite("jupyter_kernel_test", ("test_ipykernel.py",)),
    "nbclient": Suite("nbclient", ("tests",)),
    "papermill": Suite("papermill", tuple(f"papermill/tests/test_{name}.py" for name in ("autosave", "execute"))),
    "ipykernel": Suite("ipykernel", tuple(f"tests/test_{name}.py" for name in ("async", "kernel", "message_spec"))),
}


class Outcome(NamedTuple):
    """How the tests of a suite ended."""

    passed: int
    skipped: int
    failed: dict[str, str]
    """The first line of the reason, by name."""

    @property
    def total(self) -> int:
        return self.passed + self.skipped + len(self.failed)


def main() -> int:
    asked = _parser().parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = asked.place or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        environment = _environment(place, kernel=asked.kernel)
        try:
            outcomes = {name: _run(SUITES[name], place, environment) for name in asked.suites or SUITES}
        finally:
            _end_server(place / "home")
    print("\n".join(_table(outcomes, kernel=asked.kernel)))
    return int(any(outcome.failed for outcome in outcomes.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", choices=[*SUITES, []], help=", ".join(SUITES))
    parser.add_argument("--kernel", choices=("holdfast", "ipykernel"), default="holdfast")
    parser.add_argument("--place", type=Path, help="keep what is downloaded, and the tests' output, in this directory")
    return parser


def _environment(place: Path, *, kernel: str) -> dict[str, str]:
    """Directories of Jupyter's, a home of Holdfast's with the environments that are there, and our kernelspec."""
    libraries = place / "libraries"
    if not libraries.exists():
        subprocess.run([*PIP, "install", "--no-deps", "--target", libraries, *NEEDED], check=True)
    home = place / "home"
    home.mkdir(exist_ok=True)
    if not (home / "envs").exists():
        shared = Path(os.environ.get("HOLDFAST_HOME", REPOSITORY / ".home"))
        (home / "envs").symlink_to((shared / "envs").resolve())
    jupyter = place / f"jupyter-{kernel}"
    (jupyter / "ipython").mkdir(parents=True, exist_ok=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    names = {"JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTER_CONFIG_DIR": "config"}
    environment = os.environ | {name: str(jupyter / path) for name, path in names.items()}
    environment |= {
        "PATH": path,
        "JUPYTER_PATH": str(jupyter / "share" / "jupyter"),
        "IPYTHONDIR": str(jupyter / "ipython"),
        "HOLDFAST_HOME": str(home),
        "HOLDFAST_JUPYTER_MEMORY": "512M",
        # After our own: only what is not installed here is taken from there.
        "PYTHONPATH": str(libraries),
    }
    if kernel == "holdfast":
        install = [sys.executable, "-m", "holdfast.cli.main", "jupyter", "install", "--name", "python3"]
        subprocess.run([*install, "--prefix", jupyter], check=True, env=environment, stdout=subprocess.DEVNULL)
    return environment


def _run(suite: Suite, place: Path, environment: dict[str, str]) -> Outcome:
    source = _source(suite.package, place)
    report, output = place / f"{suite.package}.xml", place / f"{suite.package}.log"
    options = ["-p", "no:cacheprovider", f"--timeout={TEST_S}", f"--junitxml={report}", "-o", "log_cli=false"]
    options += ["-o", "asyncio_default_fixture_loop_scope=function"]
    with output.open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, *suite.tests],
            cwd=source, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    if not report.exists():
        raise SystemExit(f"{suite.package}: its tests did not begin\n{output.read_text()[-2000:]}")
    return _read(report)


def _source(package: str, place: Path) -> Path:
    """Its published sources, with the tests, in the version that is installed here."""
    name = f"{package}-{version(package)}"
    if not (place / name).exists():
        wanted = f"{package}=={version(package)}"
        subprocess.run([*PIP, "download", "--no-deps", "--no-binary", package, "--dest", place, wanted], check=True)
        with tarfile.open(place / f"{name}.tar.gz") as archive:
            archive.extractall(place, filter="data")
    return place / name


def _read(report: Path) -> Outcome:
    passed, skipped, failed = set[str](), set[str](), dict[str, str]()
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        if wrong is not None:
            failed.setdefault(name, (wrong.get("message") or "").partition("\n")[0])
        elif case.find("skipped") is not None:
            skipped.add(name)
        else:
            passed.add(name)
    # One that fails, and once more when it is taken down, is in there twice.
    return Outcome(passed=len(passed - failed.keys()), skipped=len(skipped - failed.keys()), failed=failed)


def _table(outcomes: dict[str, Outcome], *, kernel: str) -> Iterator[str]:
    yield f"| suite | {kernel} passes | skipped | fails |"
    yield "|---|---|---|---|"
    for name, outcome in outcomes.items():
        figures = f"{outcome.passed} of {outcome.total} | {outcome.skipped} | {len(outcome.failed)}"
        yield f"| {name} {version(SUITES[name].package)} | {figures} |"
    for name, outcome in outcomes.items():
        for test, reason in outcome.failed.items():
            yield f"{name}: {test}: {reason[:160]}"


def _end_server(home: Path) -> None:
    """The home's server would end by itself, half a minute after the last kernel."""
    lock = home / "lock"
    if not (home / "socket").exists() or not lock.exists():
        return
    owner = int(lock.read_text().split()[-1])
    os.kill(owner, signal.SIGTERM)
    end = time.monotonic() + _WAIT_S
    while Path("/proc", str(owner)).exists() and time.monotonic() < end:
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
