"""The mounts of a session: its /proc, its root, and the overlay that stages its files."""

import errno
import os
import shutil
import sys
import tempfile
from pathlib import Path

from holdfast.sandbox import linux, mounts, namespaces, overlay
from holdfast.sandbox.probe import attempts, remedies
from holdfast.sandbox.probe.finding import Finding

_PACKAGE = Path(__file__).parents[2]


def findings(directory: Path | None) -> list[Finding]:
    """All of them, on the disk of `directory`."""
    with tempfile.TemporaryDirectory(prefix="holdfast-probe-", dir=directory, ignore_cleanup_errors=True) as scratch:
        proc = attempts.outcome(attempts.inside(fresh_proc))
        root = attempts.outcome(attempts.inside(lambda: _guest_root(scratch)))
        layers = attempts.outcome(attempts.inside(lambda: _overlay(scratch)))
    in_docker = "start the container with: docker run --security-opt systempaths=unconfined (or --privileged)"
    return [
        Finding(
            name="fresh /proc", required=True, ok=proc[0], detail=proc[1],
            why="tells nothing about the host", remedy="" if proc[0] else in_docker,
        ),
        Finding(
            name="root of its own", required=True, ok=root[0], detail=root[1],
            why="no /etc, /home or /run of the host; /usr is read-only",
            remedy="" if root[0] else remedies.allow_namespaces(),
        ),
        Finding(
            name="overlayfs", required=True, ok=layers[0], detail=layers[1],
            why="stages a run's files, so that they commit or roll back",
            remedy="" if layers[0] else "sudo modprobe overlay  # Linux 5.11 or newer; in Docker: home on a volume",
        ),
    ]  # fmt: skip


def fresh_proc() -> str:
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount(None, "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC, "hidepid=2")
    seen = [name for name in os.listdir("/proc") if name.isdigit()]
    if seen != ["1"]:
        raise OSError(errno.EEXIST, f"{len(seen)} processes are in sight")
    return "only its own processes are in sight"


def _guest_root(scratch: str) -> str:
    """The zygote's and the session's own steps, on this interpreter."""
    areas = (f"sessions/probe/files/{name}" for name in mounts.DIRECTORIES)
    for name in ("root", *areas, "sessions/probe/stages/one", "sessions/probe/stages/one.work"):
        os.makedirs(f"{scratch}/{name}")
    linux.unshare(linux.CLONE_NEWNS)
    mounts.build_root(
        root=f"{scratch}/root", prefix=sys.base_prefix, base_prefix=sys.base_prefix, package=str(_PACKAGE),
        python=os.path.realpath(getattr(sys, "_base_executable", sys.executable)), sessions=f"{scratch}/sessions",
    )  # fmt: skip
    mounts.seal_root()
    namespaces.enter_session()
    overlay.enter(f"{mounts.SESSIONS}/probe", "one")
    mounts.enter_session(shm_bytes=1 << 20)
    namespaces.name_host_and_loopback()
    if os.path.exists("/etc/shadow"):
        raise OSError(errno.EEXIST, "the host's /etc is still there")
    return "built, pivoted, sealed, entered"


def _overlay(scratch: str) -> str:
    for name in ("lower", "upper", "work", "merged"):
        os.makedirs(f"{scratch}/overlay/{name}")
    Path(f"{scratch}/overlay/lower/file").write_text("committed")
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount(None, "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    layers = ",".join(f"{name}dir={scratch}/overlay/{name}" for name in ("lower", "upper", "work"))
    own = overlay.mark_options()
    try:
        linux.mount("overlay", f"{scratch}/overlay/merged", "overlay", 0, layers + own)
        Path(f"{scratch}/overlay/merged/file").write_text("staged")
        kept = Path(f"{scratch}/overlay/lower/file").read_text()
        linux.unmount(f"{scratch}/overlay/merged")
    finally:
        shutil.rmtree(f"{scratch}/overlay")  # here: an ordinary user may not enter the kernel's work/work
    if kept != "committed":
        raise OSError(errno.EINVAL, "a write went through to the lower layer")
    return "mounted and written to" + (" in a user namespace" if own else "")
