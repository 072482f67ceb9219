"""The order in which a session's two first processes are locked down. Any failure kills the session: there is
no weaker mode.
"""

import os
from collections.abc import Callable

from holdfast.kernel.wire import EGRESS_ADDRESS, ForkSession
from holdfast.sandbox import linux, mounts, namespaces, overlay, privileges, seccomp, shown


def confine_session(request: ForkSession, *, cgroup_fds: list[int], map_ids: Callable[[list[int]], None]) -> None:
    """What pid 1 and the kernel have in common. Runs as pid 1, still privileged, before the kernel is forked. With the
    request for ids go the descriptors that the host alone is to have: they are closed here."""
    for fd in cgroup_fds:
        os.write(fd, b"0")
        os.close(fd)
    os.umask(0o022)
    namespaces.enter_session()
    overlay.enter(f"{mounts.SESSIONS}/{request.session}", request.stage, request.shared)
    mounts.enter_session(shm_bytes=request.shm_bytes, shared=request.shared is not None)
    for_host = [shown.show(memory_bytes=request.memory_bytes, processors=request.processors)]
    namespaces.name_host_and_loopback()
    if request.past_proxy is not None:
        for_host.append(namespaces.listen(EGRESS_ADDRESS).detach())
    linux.unshare(linux.CLONE_NEWUSER)
    map_ids(for_host)
    for fd in for_host:
        os.close(fd)


def confine_kernel(request: ForkSession, *, program: bytes, keep_fds: set[int]) -> None:
    os.setsid()
    privileges.volunteer_for_oom_kill()
    linux.close_all_fds_except(keep_fds)
    privileges.limit(file_bytes=request.file_bytes, open_files=request.open_files, processes=request.processes)
    os.chdir(mounts.WORKSPACE)  # before the change of identity: the guest may have taken its own permission away
    privileges.become(mounts.GUEST_ID, may_set_groups=may_set_groups())
    # A change of uid clears it, and then /proc/self would belong to nobody: no debugger-free /proc/self/fd.
    linux.prctl(linux.PR_SET_DUMPABLE, 1)
    seccomp.install(program)  # last: it forbids the calls used above


def confine_init(request: ForkSession, *, program: bytes, keep_fds: set[int]) -> None:
    linux.close_all_fds_except(keep_fds)
    identity = mounts.GUEST_ID if request.init_id == request.kernel_id else mounts.INIT_ID
    privileges.become(identity, may_set_groups=may_set_groups())
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    os.chdir("/")
    seccomp.install(program)


def may_set_groups() -> bool:
    """Denied for good where an ordinary user has but one gid to map; then his groups stay, unmapped."""
    with open("/proc/self/setgroups") as file:
        return file.read().strip() == "allow"
