"""How an ordinary user gets cgroups of his own: from root by one command, or from systemd by a scope.

v1: root makes <hierarchy>/holdfast-<uid> in each hierarchy and gives it away.

v2: the same, but there a process can only be moved within the tree that was given away, so the
command moves the user's shell into it as well (leaf `login`), and what the shell starts is inside.
With systemd no root is needed: the user's own manager puts a process into a delegated scope.
"""

import os
import shlex
import shutil
import subprocess
import time

from holdfast.sandbox.cgroups import kernfs
from holdfast.sandbox.cgroups.contract import CgroupUnavailable
from holdfast.sandbox.cgroups.hierarchies import (
    V1_CONTROLLERS,
    V2_CONTROLLERS,
    Hierarchies,
    mounted,
    v2_place_of,
)

ENABLE = " ".join(f"+{name}" for name in V2_CONTROLLERS)
IN_A_CONTAINER = "start the container with: docker run --privileged --cgroupns=private"

_SYSTEMD = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
_SLICE = "app.slice"
_SCOPE_PATIENCE_S = 20.0


def directory(top: str, uid: int) -> str:
    return f"{top}/holdfast-{uid}"


def remedy(found: Hierarchies, uid: int) -> str:
    """For one who may not write: root himself is only refused where the tree is mounted read-only."""
    return IN_A_CONTAINER if uid == 0 else command(found, uid)


def command(found: Hierarchies, uid: int) -> str:
    """What the user pastes into his shell. The shell's own pid goes along, because v2 must move it."""
    return f'sudo sh -c {shlex.quote(script(found, uid))} "$$"'


def script(found: Hierarchies, uid: int) -> str:
    """Run by root with the pid to move as $0."""
    if found.v2 and "memory" not in found.v1:
        return _script_v2(found.v2.top, uid)
    return _script_v1(sorted({found.v1[name].top for name in V1_CONTROLLERS if name in found.v1}), uid)


def _script_v1(tops: list[str], uid: int) -> str:
    # The limits of the directory itself stay root's: he may cap all of the user's sessions together.
    return (
        f"set -e; for top in {shlex.join(tops)}; do mkdir -p $top/holdfast-{uid}; cd $top/holdfast-{uid}; "
        f"chown {uid} . cgroup.procs tasks; done"
    )


def _script_v2(top: str, uid: int) -> str:
    return (
        f'set -e; cd {shlex.quote(top)}; echo "{ENABLE}" > cgroup.subtree_control; '
        f"mkdir -p holdfast-{uid}/login; cd holdfast-{uid}; "
        f'echo "{ENABLE}" > cgroup.subtree_control; '
        f"chown {uid} . cgroup.procs cgroup.subtree_control cgroup.threads; "
        "echo $0 > login/cgroup.procs"
    )


def delegate(uid: int, *, pid: int) -> None:
    """As root: do what `command` tells the user to do. On v2 `pid` moves into the user's tree."""
    subprocess.run(["sh", "-c", script(mounted(), uid), str(pid)], check=True, capture_output=True)


def undelegate(uid: int) -> None:
    """Remove what `delegate` made. Processes that still live there make it fail (EBUSY)."""
    found = mounted()
    tops = {hierarchy.top for hierarchy in found.v1.values()}
    tops |= {found.v2.top} if found.v2 else set()
    for top in sorted(tops):
        for path, _, _ in os.walk(directory(top, uid), topdown=False):
            kernfs.remove(path)


def mount_command(controllers: list[str]) -> str:
    steps = [f"mkdir -p /sys/fs/cgroup/{c} && mount -t cgroup -o {c} {c} /sys/fs/cgroup/{c}" for c in controllers]
    return f"sudo sh -c {shlex.quote(' && '.join(steps))}"


def vacate_command(top: str) -> str:
    """Moves the processes of a v2 cgroup one level down, so that it may limit its children."""
    steps = (
        f"mkdir -p {top}/init; for pid in $(cat {top}/cgroup.procs); do echo $pid > {top}/init/cgroup.procs || :; done"
    )
    return f"sudo sh -c {shlex.quote(steps)}"


def controllers_remedy(directory: str, missing: set[str]) -> str:
    """Who keeps a controller from us depends on where we are."""
    above = os.path.dirname(directory)
    if "/user@" in directory:
        return _systemd_controllers_command()
    if os.path.exists(f"{above}/cgroup.subtree_control"):
        step = f'echo "{ENABLE}" > {above}/cgroup.subtree_control'
        return f"sudo sh -c {shlex.quote(step)}"
    if os.path.exists(f"{directory}/cgroup.type"):  # only the machine's root has none: a container
        return IN_A_CONTAINER
    enable = " ".join(f"cgroup_enable={name}" for name in sorted(missing))
    return f"boot with the kernel parameters cgroup_no_v1=all {enable}"


def _systemd_controllers_command() -> str:
    """Older systemd gives users no cpu controller unless told to."""
    place = "/etc/systemd/system/user@.service.d"
    steps = (
        f'mkdir -p {place} && printf "[Service]\\nDelegate={" ".join(V2_CONTROLLERS)}\\n" > '
        f"{place}/holdfast.conf && systemctl daemon-reload"
    )
    return f"sudo sh -c {shlex.quote(steps)}  # then log out everywhere and in again, or reboot"


def user_manager_present(uid: int) -> bool:
    """Whether we can ask systemd for a scope."""
    return shutil.which("busctl") is not None and _user_bus(uid) is not None


def _user_bus(uid: int) -> str | None:
    """The socket of the bus on which the user's systemd is; None where no such manager runs.

    By the place that systemd gives it, not by DBUS_SESSION_BUS_ADDRESS: that may name a bus without any systemd, and
    whoever was started by cron or sudo has no such variable, though his manager runs (`loginctl enable-linger`).
    """
    for runtime in (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{uid}"):
        # The second is the manager's own: a bus alone may belong to anybody.
        if runtime and kernfs.writable(f"{runtime}/bus", f"{runtime}/systemd/private"):
            return f"{runtime}/bus"
    return None


def scope_arguments(unit: str, pid: int, *, bus: str) -> list[str]:
    """The call that makes a delegated scope and moves a process into it."""
    properties = [
        ["Description", "s", "Holdfast sessions"],
        ["Slice", "s", _SLICE],
        ["Delegate", "b", "true"],
        ["CollectMode", "s", "inactive-or-failed"],
        ["PIDs", "au", "1", str(pid)],
    ]
    flat = [word for entry in properties for word in entry]
    call = [
        "busctl",
        f"--address=unix:path={bus}",
        "--quiet",
        "call",
        *_SYSTEMD,
        "StartTransientUnit",
        "ssa(sv)a(sa(sv))",
    ]
    return [*call, unit, "fail", str(len(properties)), *flat, "0"]


def scopes_directory(top: str, uid: int) -> str:
    return f"{top}/user.slice/user-{uid}.slice/user@{uid}.service/{_SLICE}"


def start_scope(unit: str, pid: int, *, uid: int) -> str:
    """Ask the user's systemd for the scope; its path in the v2 hierarchy, once the process is in it."""
    bus = _user_bus(uid)
    if bus is None:
        raise CgroupUnavailable("the user's systemd has ended meanwhile", remedy=command(mounted(), uid))
    made = subprocess.run(scope_arguments(unit, pid, bus=bus), capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise CgroupUnavailable(
            f"systemd did not make a scope: {made.stderr.strip()}",
            remedy=command(mounted(), uid),
        )
    # The call only queues the job.
    give_up_at = time.monotonic() + _SCOPE_PATIENCE_S
    while not (place := v2_place_of(pid)).endswith(f"/{unit}"):
        if time.monotonic() > give_up_at:
            raise CgroupUnavailable(
                f"systemd took the call, but process {pid} is still in {place}",
                remedy=command(mounted(), uid),
            )
        time.sleep(0.005)
    return place
