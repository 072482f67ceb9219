"""Who the guest is: on the host nobody, and without any capability."""

import errno
import os
from pathlib import Path

from holdfast.sandbox import linux, mounts, namespaces, privileges
from holdfast.sandbox.probe import attempts, file_systems, remedies
from holdfast.sandbox.probe.finding import Finding

HOST_ID = 1_900_000_000


def findings() -> list[Finding]:
    """Become the guest, as the zygote makes it."""
    second = None if attempts.is_root() else namespaces.second_id(os.geteuid(), os.getegid())
    kernel_id, init_id = (HOST_ID, HOST_ID + 1) if attempts.is_root() else (0, 0 if second is None else 1)
    ok, detail, _ = attempts.outcome(attempts.inside(lambda: _become_guest(kernel_id, init_id)))
    two = attempts.is_root() or second is not None
    return [
        Finding(
            name="guest's identity", required=True, ok=ok, detail=detail,
            why="no capabilities; a host uid of its own if root starts it",
            remedy="" if ok else _remedy(two),
        ),
        Finding(
            name="second uid", required=False, ok=two and ok,
            detail="pid 1 has a uid of its own" if two and ok else "pid 1 and the kernel share your uid",
            why="without it pid 1 is guarded by other means (SECURITY.md)",
            remedy="" if two and ok else remedies.subordinate_ids(),
        ),
    ]  # fmt: skip


def _become_guest(kernel_id: int, init_id: int) -> str:
    """As the zygote: a child makes its user namespace, we map it, it gives everything up."""
    file_systems.fresh_proc()  # else /proc/<pid> would be the host's process of that number
    ready_read, ready_write = os.pipe()
    mapped_read, mapped_write = os.pipe()

    def guest() -> str:
        linux.unshare(linux.CLONE_NEWUSER)
        os.write(ready_write, b"!")
        os.close(mapped_write)
        if not os.read(mapped_read, 1):
            raise OSError(errno.EPERM, "its ids could not be mapped")
        groups = Path("/proc/self/setgroups").read_text().strip() == "allow"
        privileges.become(mounts.GUEST_ID, may_set_groups=groups)
        if int(attempts.own_status("CapEff"), 16) or int(attempts.own_status("CapBnd"), 16):
            raise OSError(errno.EPERM, "capabilities remain")
        return f"uid {os.getuid()}"

    def map_it(pid: int) -> None:
        os.close(ready_write)
        try:
            if os.read(ready_read, 1):
                namespaces.map_guest_ids(pid, kernel_id=kernel_id, init_id=init_id)
                os.write(mapped_write, b"!")
        finally:
            os.close(mapped_write)

    said = attempts.tried(guest, map_it)
    return f"{said}, on the host {kernel_id}" if kernel_id else f"{said}, on the host your own"


def _remedy(two: bool) -> str:
    if attempts.is_root():
        return "run holdfast as an ordinary user, or start the container with: docker run --userns=host --privileged"
    return remedies.subordinate_ids() if two else remedies.allow_namespaces()
