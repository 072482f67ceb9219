"""What to type where a namespace or an identity cannot be had."""

import errno

from holdfast.sandbox.cgroups import delegation
from holdfast.sandbox.probe import apparmor, attempts, switches


def for_namespace(error: OSError | None, option: str) -> str:
    """Where a namespace ended with `error`; `option` is what the kernel must have been built with."""
    if error is None:
        return ""
    if error.errno in (errno.ENOSPC, errno.EUSERS) or switches.read(switches.MAX) == 0:
        return switches.raise_limit()
    if not attempts.is_root() and switches.read(switches.CLONE) == 0:
        return switches.set_to(switches.CLONE, 1)
    if not attempts.is_root() and switches.read(switches.APPARMOR) == 1:
        return apparmor.profile()
    if error.errno in (errno.EINVAL, errno.ENOSYS):
        return f"boot a kernel with {option}=y"
    if not attempts.is_root() and isinstance(error, PermissionError) and "newuidmap" in str(error.strerror):
        return subordinate_ids()
    return allow_namespaces()


def allow_namespaces() -> str:
    """Where whoever put us here forbids them."""
    if attempts.own_status("Seccomp") not in ("0", "") or attempts.is_root():
        return delegation.IN_A_CONTAINER
    return "ask who runs this machine to allow user namespaces, or run holdfast as root"


def subordinate_ids() -> str:
    """Where an ordinary user has no uid but his own."""
    ids = "--add-subuids 100000-165535 --add-subgids 100000-165535"
    return f'sudo apt-get install -y uidmap && sudo usermod {ids} "$(id -un)"'
