"""User namespaces: whether one can be made and used, and what a machine may set against it."""

import os
from pathlib import Path

from holdfast.sandbox import linux
from holdfast.sandbox.probe import attempts, switches
from holdfast.sandbox.probe.finding import Finding


def findings() -> list[Finding]:
    """What is set against them, other than by AppArmor."""
    limit, clone = switches.read(switches.MAX), switches.read(switches.CLONE)
    return [
        Finding(
            name="user namespace limit", required=True, ok=limit != 0,
            detail="none" if limit is None else f"user.max_user_namespaces = {limit:,}",
            why="each session takes one user namespace", remedy=switches.raise_limit() if limit == 0 else "",
        ),
        Finding(
            name="user namespace switch", required=not attempts.is_root(),
            ok=None if attempts.is_root() or clone is None else clone != 0,
            detail=switches.told(clone), why="Debian's kernel.unprivileged_userns_clone binds ordinary users",
            remedy=switches.set_to(switches.CLONE, 1) if clone == 0 else "",
        ),
    ]  # fmt: skip


def make_and_use() -> str:
    """Make one and use it: AppArmor on Ubuntu 24.04 lets the first succeed and forbids the second."""
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER)
    if uid != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            try:
                Path(f"/proc/self/{name}").write_text(text)
            except OSError as error:
                raise OSError(error.errno, f"made, but writing {name}: {error.strerror}") from error
    try:
        linux.unshare(linux.CLONE_NEWUTS)
        linux.sethostname("holdfast")
    except OSError as error:
        raise OSError(error.errno, f"made, but without its capabilities: {error.strerror}") from error
    return "made and used"
