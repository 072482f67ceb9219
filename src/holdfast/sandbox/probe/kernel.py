"""What the kernel itself must have: handles on processes, and a filter for system calls."""

import errno
import os
import platform

from holdfast.sandbox import linux, seccomp
from holdfast.sandbox.probe import attempts
from holdfast.sandbox.probe.finding import Finding


def process_calls() -> list[Finding]:
    """What holding and closing takes."""

    def handles() -> str:
        os.close(os.pidfd_open(os.getpid()))
        return "a process can be held"

    def close_range() -> str:
        linux.close_all_fds_except({int(name) for name in os.listdir("/proc/self/fd")})
        return "works"

    newer = "boot Linux 5.9 or newer (this is {}); 5.14 and newer also end a cgroup v2 session in one step"
    remedy = newer.format(platform.release())
    whys = {
        "pidfd": (handles, "never mistakes one process for another (Linux 5.3)"),
        "close_range": (close_range, "no descriptor leaks into a kernel (Linux 5.9)"),
    }
    found = []
    for name, (body, why) in whys.items():
        ok, detail, _ = attempts.outcome(body)
        found.append(Finding(name=name, required=True, ok=ok, detail=detail, why=why, remedy=remedy))
    return found


def system_call_filter() -> Finding:
    """A session's own filter, put in force."""

    def confined() -> str:
        program = seccomp.compile_filter()
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.install(program)
        try:
            linux.unshare(linux.CLONE_NEWUSER)
        except PermissionError:
            return f"a filter is in force ({len(program) // 8} instructions)"
        raise OSError(errno.EINVAL, "the filter was taken, yet it filters nothing")

    ok, detail, error = attempts.outcome(confined)
    config = "boot a kernel with CONFIG_SECCOMP_FILTER=y, on x86_64 or aarch64"
    return Finding(
        name="seccomp", required=True, ok=ok, detail=detail,
        why="only the system calls on our list", remedy=config if error else "",
    )  # fmt: skip
