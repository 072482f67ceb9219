"""What this machine lets us build a sandbox from, by trying it.

Each probe forks a child that really does what a session will do (with the session's own functions where it can),
in namespaces that end with it, and reports the errno. Nothing is left behind: no process, mount, cgroup or file.

A missing *required* primitive means that sessions are refused. `ok` is None where a primitive is of no use to this
user on this machine.

    python -m holdfast.sandbox.probe        prints the findings as JSON

Call `find` in a process with one thread: it forks.
"""

from pathlib import Path

from holdfast.sandbox.probe import (
    apparmor,
    cgroups,
    compiled,
    file_systems,
    identity,
    kernel,
    namespaces,
    user_namespaces,
)
from holdfast.sandbox.probe.finding import Finding

__all__ = ["Finding", "find", "strict"]


def find(directory: Path | None = None) -> list[Finding]:
    """Try everything. `directory`: on the disk where sessions will live."""
    return [
        *kernel.process_calls(),
        *namespaces.findings(),
        *file_systems.findings(directory),
        *identity.findings(),
        *user_namespaces.findings(),
        apparmor.finding(),
        kernel.system_call_filter(),
        *cgroups.findings(),
        *compiled.findings(),
    ]


def strict(findings: list[Finding]) -> bool:
    """Whether a strict sandbox can be had here, by this user."""
    return all(finding.ok is not False for finding in findings if finding.required)
