"""The namespaces that a session is made of, each made and used."""

import errno
import os
import socket
from pathlib import Path

from holdfast.sandbox import linux
from holdfast.sandbox.probe import attempts, remedies, user_namespaces
from holdfast.sandbox.probe.finding import Finding


def findings() -> list[Finding]:
    """Each of them, and what it keeps apart."""
    rows = (
        ("user", user_namespaces.make_and_use, "the guest is nobody on the host"),
        ("mount", attempts.inside(_mount_namespace), "a file system of the guest's own"),
        ("pid", attempts.inside(_pid_namespace), "host processes are out of sight and reach"),
        ("net", attempts.inside(_net_namespace), "no network but loopback"),
        ("ipc", attempts.inside(_ipc_namespace), "no shared memory or queue of the host"),
        ("uts", attempts.inside(_uts_namespace), "a host name of the guest's own"),
    )
    found = []
    for name, body, why in rows:
        ok, detail, error = attempts.outcome(body)
        remedy = remedies.for_namespace(error, f"CONFIG_{name.upper()}_NS")
        row = Finding(name=f"{name} namespace", required=True, ok=ok, detail=detail, why=why, remedy=remedy)
        found.append(row)
    return found


def _mount_namespace() -> str:
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount(None, "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", "/mnt", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m")
    Path("/mnt/probe").touch()
    return "mounted in private"


def _pid_namespace() -> str:
    pid = os.getpid()
    if pid != 1:
        raise OSError(errno.EINVAL, f"the first process is number {pid}")
    return "the first process is number 1"


def _net_namespace() -> str:
    linux.unshare(linux.CLONE_NEWNET)
    linux.bring_up_loopback()
    return f"devices: {', '.join(name for _, name in socket.if_nameindex())}"


def _ipc_namespace() -> str:
    before = os.readlink("/proc/self/ns/ipc")
    linux.unshare(linux.CLONE_NEWIPC)
    if os.readlink("/proc/self/ns/ipc") == before:
        raise OSError(errno.EINVAL, "unshare had no effect")
    return "made"


def _uts_namespace() -> str:
    linux.unshare(linux.CLONE_NEWUTS)
    linux.sethostname("holdfast")
    return "made and named"
