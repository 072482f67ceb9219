"""The mounts of a session: its /proc, its root, and the overlay that will stage its files."""

import errno
import os
import shutil
import sys
import tempfile
from pathlib import Path

from holdfast.sandbox import linux, mounts, namespaces
from holdfast.sandbox.probe import attempts, remedies
from holdfast.sandbox.probe.finding import Finding

_PACKAGE = Path(__file__).parents[2]


def findings(directory: Path | None) -> list[Finding]:
    """All of them, on the disk of `directory`."""
    with tempfile.TemporaryDirectory(prefix="holdfast-probe-", dir=directory, ignore_cleanup_errors=True) as scratch:
        proc = attempts.outcome(attempts.inside(fresh_proc))
        root = attempts.outcome(attempts.inside(lambda: _guest_root(scratch)))
        overlay = attempts.outcome(attempts.inside(lambda: _overlay(scratch)))
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
            name="overlayfs", required=False, ok=overlay[0], detail=overlay[1],
            why="stages a run's files; not needed by this version yet",
            remedy="" if overlay[0] else "sudo modprobe overlay (Linux 5.11 or newer)",
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
    for name in ("root", *(f"sessions/probe/{name}" for name in mounts.DIRECTORIES)):
        os.makedirs(f"{scratch}/{name}")
    linux.unshare(linux.CLONE_NEWNS)
    mounts.build_root(
        root=f"{scratch}/root", prefix=sys.base_prefix, base_prefix=sys.base_prefix, package=str(_PACKAGE),
        python=os.path.realpath(getattr(sys, "_base_executable", sys.executable)), sessions=f"{scratch}/sessions",
    )  # fmt: skip
    mounts.seal_root()
    namespaces.enter_session()
    mounts.enter_session("probe", shm_bytes=1 << 20)
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
    own = "" if _is_host_root() else ",userxattr"
    try:
        linux.mount("overlay", f"{scratch}/overlay/merged", "overlay", 0, layers + own)
        Path(f"{scratch}/overlay/merged/file").write_text("staged")
        kept = Path(f"{scratch}/overlay/lower/file").read_text()
        linux.unmount(f"{scratch}/overlay/merged")
    finally:
        shutil.rmtree(f"{scratch}/overlay")  # here: an ordinary user may not enter the kernel's work/work
    if kept != "committed":
        raise OSError(errno.EINVAL, "a write went through to the lower layer")
    return "mounted and written to" + ("" if _is_host_root() else " in a user namespace")


def _is_host_root() -> bool:
    """Asked inside a namespace, where everybody is 0."""
    return Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
