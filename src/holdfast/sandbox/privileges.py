"""Identity, capabilities, rlimits: what a process may do once it is inside."""

import os
import resource

from holdfast.sandbox import linux

_SPARE_FILES = 16
"""Above the limit, for the kernel itself: it opens files again whose user has opened all he may."""


def become(identity: int, *, may_set_groups: bool) -> None:
    """Take on a uid and gid of the session's user namespace and give up every capability, for good."""
    if may_set_groups:
        os.setgroups([])
    os.setresgid(identity, identity, identity)
    _empty_bounding_set()
    os.setresuid(identity, identity, identity)
    linux.prctl(linux.PR_CAP_AMBIENT, linux.PR_CAP_AMBIENT_CLEAR_ALL)
    # setresuid alone clears nothing here: uid 0 is not mapped in this namespace.
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)


def limit(*, file_bytes: int, open_files: int, processes: int | None) -> None:
    """Bounds per process; the session's bounds as a whole are its cgroup's."""
    # 1 and not 0: a core_pattern that names a program starts it, as root of the host, whatever else the limit says.
    _lower(resource.RLIMIT_CORE, 1)
    _lower(resource.RLIMIT_FSIZE, file_bytes)
    _lower(resource.RLIMIT_NOFILE, open_files, spare=_SPARE_FILES)
    _lower(resource.RLIMIT_MEMLOCK, 8 << 20)
    _lower(resource.RLIMIT_MSGQUEUE, 1 << 20)
    _lower(resource.RLIMIT_SIGPENDING, 1024)  # counted against the host's user
    _lower(resource.RLIMIT_RTPRIO, 0)
    _lower(resource.RLIMIT_NICE, 0)
    if processes is not None:
        _lower(resource.RLIMIT_NPROC, processes)


def forgo_oom_protection() -> None:
    """What the host has of it, as a service with OOMScoreAdjust= may, is not for guests. Said by who has the capability
    to lower a score, it is also how far whoever he forks can ever lower his own."""
    with open("/proc/self/oom_score_adj", "r+") as score:
        now = int(score.read())
        score.seek(0)
        score.write(str(max(0, now)))


def volunteer_for_oom_kill() -> None:
    """Out of memory, the kernel is to die and not pid 1. Lowering pid 1's score would need a capability."""
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("500")


def _lower(kind: int, value: int, *, spare: int = 0) -> None:
    _, hard = resource.getrlimit(kind)
    most = value + spare if hard == resource.RLIM_INFINITY else min(value + spare, hard)
    resource.setrlimit(kind, (min(value, most), most))


def _empty_bounding_set() -> None:
    for capability in range(64):
        try:
            linux.prctl(linux.PR_CAPBSET_DROP, capability)
        except OSError:  # EINVAL: past the last one that this kernel knows
            break
