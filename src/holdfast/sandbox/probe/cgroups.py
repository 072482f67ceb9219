"""The cgroups of a session: what is offered, and whether one that we make really holds."""

import dataclasses
import errno
import os
import resource
import signal
import socket
from pathlib import Path

from holdfast.sandbox import cgroups
from holdfast.sandbox.cgroups import delegation, hierarchies
from holdfast.sandbox.probe import attempts
from holdfast.sandbox.probe.finding import Finding

_CAP_BYTES = 32 << 20


def findings() -> list[Finding]:
    """The controllers, and one cgroup in action."""
    found = hierarchies.mounted()
    version = "v1" if "memory" in found.v1 else "v2" if found.v2 else ""
    rows = [_controller(name, found, version) for name in ("memory", "pids", "cpu", "freezer")]
    return [*rows, _swap(found, version), *_live_cgroup(version)]


def _controller(name: str, found: hierarchies.Hierarchies, version: str) -> Finding:
    whys = {
        "memory": "the hard RAM cap",
        "pids": "a fork bomb stays small",
        "cpu": "no session starves the others",
        "freezer": "nothing runs between two runs",
    }
    if version == "v2" and found.v2 is not None:
        # The freezer of v2 is no controller: every cgroup but the topmost has it.
        offered = Path(found.v2.top, "cgroup.controllers").read_text().split()
        ok = name == "freezer" or name in offered
        remedy = delegation.controllers_remedy(found.v2.top, {name})
    else:
        ok, remedy = name in found.v1, delegation.mount_command([name])
    return Finding(
        name=f"cgroup {name}", required=True, ok=ok, detail=version if ok else "not offered", why=whys[name],
        remedy="" if ok else remedy,
    )  # fmt: skip


def _swap(found: hierarchies.Hierarchies, version: str) -> Finding:
    swap = len(Path("/proc/swaps").read_text().splitlines()) > 1
    counted = False
    if version == "v1":
        counted = Path(found.v1["memory"].top, "memory.memsw.limit_in_bytes").exists()
    elif found.v2 is not None:  # the machine's topmost cgroup has no limits; a container's has
        top = Path(found.v2.top)
        counted = (top / "memory.swap.max").exists() or any(top.glob("*/memory.swap.max"))
    seen = "swap is counted" if counted else "swap is not counted"
    return Finding(
        name="swap accounting", required=swap, ok=counted if swap else None,
        detail=seen if swap else "the machine has no swap", why="the cap holds for swap too",
        remedy="" if counted or not swap else "sudo swapoff -a  # or boot with the kernel parameter swapaccount=1",
    )  # fmt: skip


def _live_cgroup(version: str) -> list[Finding]:
    """Make one, as a session would, and see that it holds."""
    why_own, why_cap = "limits bind all that a session starts", "a runaway cell is killed, not the machine"
    own = Finding(name="cgroup of our own", required=True, ok=True, detail=version, why=why_own)
    cap = Finding(name="memory cap", required=True, ok=None, detail="not tried: no cgroup", why=why_cap)
    try:
        tree = cgroups.find(f"probe-{os.getpid()}")
        frozen, killed = _in_a_cgroup(tree)
    except cgroups.CgroupUnavailable as error:
        weaker = 'or accept a cap that is only sampled: memory_cap="watchdog", --memory-cap watchdog'
        remedy = f"{error.remedy}\n# {weaker}"
        return [dataclasses.replace(own, ok=False, detail=error.reason, remedy=remedy), cap]
    except OSError as error:
        remedy = delegation.remedy(hierarchies.mounted(), os.geteuid())
        return [dataclasses.replace(own, ok=False, detail=str(error), remedy=remedy), cap]
    return [
        dataclasses.replace(
            own, ok=frozen,
            detail=f"made{tree.asked_of}, entered, {'frozen' if frozen else 'NOT frozen'}, removed",
            remedy="" if frozen else "boot Linux 5.2 or newer",
        ),
        dataclasses.replace(
            cap, ok=killed,
            detail=f"{'' if killed else 'NOT '}killed at {_CAP_BYTES >> 20} MiB, on its way to {2 * _CAP_BYTES >> 20}",
            remedy="" if killed else "sudo swapoff -a, and boot without the kernel parameter cgroup_disable=memory",
        ),
    ]  # fmt: skip


def _in_a_cgroup(tree: cgroups.Tree) -> tuple[bool, bool]:
    """Whether a process in a capped cgroup can be frozen, and is killed at the cap."""
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        _exceed(there)
    there.close()
    cgroup = None
    try:
        tree.adopt(pid)
        cgroup = tree.create("probe", cgroups.Limits(memory_bytes=_CAP_BYTES, pids=16, cpus=1.0))
        fds = cgroup.join_fds()
        socket.send_fds(here, [b"!"], fds)
        for fd in fds:
            os.close(fd)
        if here.recv(1) != b"!":
            raise OSError(errno.EPERM, "a process could not enter the cgroup that was made for it")
        cgroup.attach(pid)
        cgroup.freeze()
        frozen = cgroup.wait_frozen(2.0)
        cgroup.thaw()
        here.send(b"!")
        survived = here.recv(1)
        return frozen, not survived and cgroup.oom_kills() > 0
    finally:
        here.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if cgroup is not None:
            cgroup.remove()
        tree.remove()


def _exceed(there: socket.socket) -> None:
    """Enter the cgroup we are handed, then take twice what it allows."""
    try:
        signal.alarm(attempts.PATIENCE_S)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _, fds, _, _ = socket.recv_fds(there, 1, 8)
        for fd in fds:
            os.write(fd, b"0")
        there.send(b"!")
        if there.recv(1):
            taken = bytearray(b"x") * (2 * _CAP_BYTES)
            there.send(taken[:1])
    finally:
        os._exit(0)
