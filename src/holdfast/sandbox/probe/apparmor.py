"""AppArmor on Ubuntu 24.04: user namespaces can be made, but are empty of rights."""

import os
import sys

from holdfast.sandbox.probe import attempts, switches, user_namespaces
from holdfast.sandbox.probe.finding import Finding


def finding() -> Finding:
    """Whether it restricts ordinary users here, this interpreter included."""
    restricts = switches.read(switches.APPARMOR)
    ok: bool | None = None
    detail = switches.told(restricts)
    if restricts == 1 and not attempts.is_root():
        ok, seen, _ = attempts.outcome(user_namespaces.make_and_use)
        detail = "restricts, and a profile lets this interpreter through" if ok else f"restricts: {seen}"
    return Finding(
        name="AppArmor", required=not attempts.is_root(), ok=ok, detail=detail,
        why="Ubuntu 24.04: empties user namespaces of their rights",
        remedy=profile() if ok is False else "",
    )  # fmt: skip


def profile(interpreter: str = "") -> str:
    """The commands that exempt one interpreter, and every program that runs in it, from the restriction."""
    path = interpreter or os.path.realpath(sys.executable)
    return (
        "sudo tee /etc/apparmor.d/holdfast >/dev/null <<'EOF'\n"
        "abi <abi/4.0>,\n"
        "include <tunables/global>\n"
        f'profile holdfast "{path}" flags=(unconfined) {{\n'
        "  userns,\n"
        "}\n"
        "EOF\n"
        "sudo apparmor_parser -r /etc/apparmor.d/holdfast"
    )
