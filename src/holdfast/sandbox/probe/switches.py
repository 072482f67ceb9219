"""What a machine's owner has set under /proc/sys, and the commands that set it otherwise."""

from pathlib import Path

from holdfast.sandbox.probe import attempts

APPARMOR = "kernel/apparmor_restrict_unprivileged_userns"
CLONE = "kernel/unprivileged_userns_clone"
MAX = "user/max_user_namespaces"


def read(name: str) -> int | None:
    """Its value; None where this kernel does not have it."""
    try:
        return int(Path("/proc/sys", name).read_text())
    except (OSError, ValueError):
        return None


def set_to(name: str, value: int) -> str:
    """The command that sets it, now and after a reboot."""
    setting = f"{name.replace('/', '.')}={value}"
    return f"echo {setting} | sudo tee /etc/sysctl.d/90-holdfast.conf && sudo sysctl -w {setting}"


def raise_limit() -> str:
    """The command that allows user namespaces in number."""
    return set_to(MAX, 65536)


def told(value: int | None) -> str:
    """In words, the value of a switch that binds ordinary users."""
    if value is None:
        return "not on this machine"
    return f"{value}; root is not bound by it" if attempts.is_root() else str(value)
