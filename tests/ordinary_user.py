"""Runs the suite as an ordinary user, who has nothing but user namespaces and a delegated cgroup.

    python tests/ordinary_user.py [--ids 2] [PYTEST ARGUMENTS]

Root makes such a user out of thin air: an unused uid, a directory under /var/tmp with an environment of his own, and a
cgroup delegated to him by the very command that Holdfast prints. He has one uid to map, or (`newuidmap`) two, so that
pid 1 has its own. `--prepare` makes the directory and stops; with `--prepared` that was done before.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from holdfast.sandbox.cgroups import delegation

UID = 61_234
PLACE = Path("/var/tmp/holdfast-ordinary-user")
CACHE = PLACE / "home" / "cache"
"""Where pytest writes down what failed, unless it is told otherwise."""
CLONE = Path(__file__).parents[1]
UV = Path(sys.executable).with_name("uv")
# Not what does not depend on who runs it and takes minutes: how a host that was killed is settled, functions without a
# sandbox, and the faces, which reach a session as the tests that stay do. They ran once, with the whole suite.
FACES = (
    "tests/journey/mcp",
    "tests/journey/test_docs.py",
    "tests/journey/test_http.py",
    "tests/journey/test_http_schema.py",
    "tests/journey/test_jupyter.py",
    "tests/journey/test_jupyterlab.py",
    "tests/journey/test_raw_kernel.py",
    "tests/journey/test_remote.py",
    "tests/escape/test_doors.py",
    "tests/escape/test_server.py",
)
WITH_ONE_ID = ["tests/stress", "tests/journey", "tests/escape", *(f"--ignore={path}" for path in FACES)]
WITH_TWO_IDS = ["tests/escape/test_identity.py", "tests/escape/test_processes.py"]


def main() -> int:
    parser = argparse.ArgumentParser(description="The suite as an ordinary user.")
    parser.add_argument("--ids", type=int, choices=(1, 2), default=1)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--prepared", action="store_true")
    options, arguments = parser.parse_known_args()
    if not options.prepared:
        prepare()
    if options.prepare:
        return 0
    run = run_suite if options.ids == 1 else run_suite_with_two_ids
    delegation.delegate(UID, pid=os.getpid())
    try:
        return run(arguments or (WITH_ONE_ID if options.ids == 1 else WITH_TWO_IDS))
    finally:
        delegation.undelegate(UID)


def prepare() -> None:
    """A virtual environment and a home; the clone itself may lie where only root can read."""
    PLACE.mkdir(mode=0o755, exist_ok=True)
    python = PLACE / "venv/bin/python"
    if not python.exists():
        subprocess.run([UV, "venv", "--quiet", "--python", "/usr/bin/python3", PLACE / "venv"], check=True)
    shutil.rmtree(CLONE / "build", ignore_errors=True)  # what an older build left must not be installed
    install = [UV, "pip", "install", "--quiet", "--python", python, "--group", "dev"]
    subprocess.run([*install, "--reinstall-package", "holdfast", "."], check=True, cwd=CLONE)
    home = PLACE / "home"
    subprocess.run([python, "-m", "holdfast.cli.progress", "--home", home], check=True)
    for directory in (home, home / "envs"):
        os.chown(directory, UID, UID)
    for name in ("tests", "docs", "README.md", "pyproject.toml"):
        target = PLACE / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(CLONE / name, target) if (CLONE / name).is_dir() else shutil.copy(CLONE / name, target)


def run_suite(arguments: list[str], *, prefix: tuple[str, ...] = ()) -> int:
    environment = {
        "PATH": f"{PLACE}/venv/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(PLACE / "home"),
        "HOLDFAST_HOME": str(PLACE / "home"),
        "LOGNAME": f"holdfast-{UID}",  # pytest names its temporary directory after it
        "LANG": "C.UTF-8",
        "HOLDFAST_STRESS_KILLS": "150",
        "HOLDFAST_TRANSPORTS": "embedded",
    }
    become = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
    pytest = [PLACE / "venv/bin/python", "-m", "pytest", "-o", f"cache_dir={CACHE}", "-m", "not vm", *arguments]
    return subprocess.run([*prefix, *become, *pytest], cwd=PLACE, env=environment, check=False).returncode


def run_suite_with_two_ids(arguments: list[str]) -> int:
    """With a name and subordinate ids in /etc, as this process and its children alone see it."""
    name = f"holdfast-{UID}"
    tables = {
        "passwd": Path("/etc/passwd").read_text() + f"{name}:x:{UID}:{UID}::{PLACE}:/bin/sh\n",
        "subuid": f"{name}:{UID + 1}:1\n",
        "subgid": f"{name}:{UID + 1}:1\n",
    }
    with tempfile.TemporaryDirectory() as directory:
        steps = []
        for table, text in tables.items():
            Path(directory, table).write_text(text)
            steps.append(f"touch /etc/{table} && mount --bind {directory}/{table} /etc/{table}")
        script = " && ".join([*steps, 'exec "$@"'])
        return run_suite(arguments, prefix=("unshare", "--mount", "sh", "-c", script, "sh"))


if __name__ == "__main__":
    sys.exit(main())
