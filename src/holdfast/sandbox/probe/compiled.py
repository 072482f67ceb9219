"""What is written in C: pid 1, and the fork that keeps every thread. Sessions run without either, but worse."""

import importlib
import importlib.util
import shlex
import shutil
import subprocess
import sys

from holdfast.sandbox import pid1
from holdfast.sandbox.probe.finding import Finding

_SNAPSHOT = "holdfast._snapshot"
_SHUT = "this user may not enter the directory of pid 1"


def findings() -> list[Finding]:
    """Both parts in one row, and the compiler that would build them."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    init_is_there, init_works, init = _pid1()
    fork_works, fork = _snapshot()
    whole = init_works and fork_works
    reinstall = "pip install --force-reinstall --no-deps --no-cache-dir holdfast"
    compile_them = f"sudo apt-get install -y gcc libc6-dev && {shlex.quote(sys.executable)} -m {reinstall}"
    return [
        Finding(
            # A pid 1 that is there is the one that sessions start; without one they use Python's.
            name="compiled parts", required=init_is_there and not init_works, ok=whole,
            detail=f"{init}; {fork}",
            why="without pid 1 each session costs about 2 MiB more; without the thread-keeping fork, kernels that have "
            "started threads cannot be rolled back in memory (`unprotected`), and each takes about twice the memory",
            remedy="" if whole else "install Holdfast where this user can read it" if init == _SHUT else compile_them,
        ),
        Finding(
            name="C compiler", required=False, ok=True if compiler else None if whole else False,
            detail=compiler or ("none, and none is needed any more" if whole else "none"),
            why="builds the compiled parts at installation",
            remedy="" if compiler or whole else "sudo apt-get install -y gcc libc6-dev",
        ),
    ]  # fmt: skip


def _pid1() -> tuple[bool, bool, str]:
    """Whether it is there, whether it runs, and both in words.

    Without an argument it only complains, with status 2: enough to know that it is for this machine.
    """
    try:
        pid1.EXECUTABLE.stat()
        runs = subprocess.run([pid1.EXECUTABLE], capture_output=True, timeout=5, check=False).returncode == 2
    except FileNotFoundError:
        return False, False, "pid 1 runs in Python"
    except PermissionError:
        return True, False, _SHUT
    except (OSError, subprocess.TimeoutExpired):
        runs = False
    return True, runs, "pid 1 is compiled" if runs else "pid 1 does not run on this machine"


def _snapshot() -> tuple[bool, str]:
    """Importing it does nothing but load it."""
    if importlib.util.find_spec(_SNAPSHOT) is None:
        return False, "the thread-keeping fork is missing"
    try:
        importlib.import_module(_SNAPSHOT)
    except ImportError as error:
        return False, f"the thread-keeping fork does not load: {error}"
    return True, "the thread-keeping fork loads"
