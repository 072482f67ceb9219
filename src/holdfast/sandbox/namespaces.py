"""Which namespaces are made, in which order, and who is who inside them.

The keeper makes the outer layer: a pid namespace (and, for an ordinary user, a user namespace in which it is
root). All that Holdfast starts lives below, so that the keeper's death ends everything, whatever happened before.

A session has its own mount, ipc, uts, net and pid namespaces, made while the process still is privileged: they
belong to the outer user namespace, and nobody inside the session holds a capability over them. Its own user
namespace comes last and maps two ids and no more: the guest, and pid 1.
"""

import os
import pwd
import shutil
import socket
import subprocess

from holdfast.sandbox import linux
from holdfast.sandbox.mounts import GUEST_ID, INIT_ID

_NO_ID = 2**32 - 1
_WAITING = 128
"""Connections that the host has not taken yet."""

# The cgroup namespace hides where in the host's tree the session lies.
SESSION_NAMESPACES = (
    linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWNET | linux.CLONE_NEWCGROUP
)


def enter_outer(*, as_root: bool) -> None:
    """Make the outer layer for this process; its children will live in the new pid namespace.

    Root's keeper mounts nothing itself and stays in the host's mount namespace: a copy of that would hold every disk
    of the host for as long as the keeper lives, also those that are unmounted meanwhile. An ordinary user's copy comes
    with his user namespace; Linux makes it a slave of the host's, so that unmounts on the host reach it.
    """
    if as_root:
        linux.unshare(linux.CLONE_NEWPID)
        return
    uid, gid = os.geteuid(), os.getegid()
    second = second_id(uid, gid)
    if second is None:
        linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")
        return
    _enter_with_two_ids(uid, gid, second)


def second_id(uid: int, gid: int) -> tuple[int, int] | None:
    """The first subordinate uid and gid that newuidmap and newgidmap grant this user, if any."""
    if not (shutil.which("newuidmap") and shutil.which("newgidmap")):
        return None
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    sub_uid = _first_subordinate("/etc/subuid", {name, str(uid)})
    sub_gid = _first_subordinate("/etc/subgid", {name, str(uid)})
    return None if sub_uid is None or sub_gid is None else (sub_uid, sub_gid)


def enter_session() -> None:
    """All but the pid and user namespaces (the zygote made the first, `enter_guest_ids` the other)."""
    linux.unshare(SESSION_NAMESPACES)


def name_host_and_loopback() -> None:
    linux.sethostname("holdfast")
    linux.bring_up_loopback()


def listen(address: tuple[str, int]) -> socket.socket:
    """Within this namespace. As long as somebody has it open nobody else can listen there."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(_WAITING)
    return listener


def map_guest_ids(pid: int, *, kernel_id: int, init_id: int) -> None:
    """Give the new user namespace of `pid` its two ids. Only the parent namespace may map more than one."""
    lines = [f"{GUEST_ID} {kernel_id} 1"]
    if init_id != kernel_id:
        lines.append(f"{INIT_ID} {init_id} 1")
    _write(f"/proc/{pid}/uid_map", "\n".join(lines))
    _write(f"/proc/{pid}/gid_map", "\n".join(lines))


def mapping(uid: int, gid: int, *, shown_as: int) -> int:
    """A user namespace, as a descriptor, whose map shows one user and group as another id, and the rest as they are."""
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            linux.unshare(linux.CLONE_NEWUSER)
            there.send(os.fsencode(os.readlink("/proc/self")))  # our pid as this /proc numbers it
            there.recv(1)
        finally:
            os._exit(0)
    with here, there:
        pid = here.recv(16).decode()
        try:
            _write(f"/proc/{pid}/uid_map", _swapped(uid, shown_as))
            _write(f"/proc/{pid}/gid_map", _swapped(gid, shown_as))
            return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            here.send(b"!")
            os.waitpid(child, 0)


def _swapped(first: int, second: int) -> str:
    """All ids but for two that stand for each other.

    >>> print(_swapped(0, 5))
    0 5 1
    5 0 1
    1 1 4
    6 6 4294967289
    """
    low, high = sorted((first, second))
    kept = [(0, low), (low + 1, high), (high + 1, _NO_ID)]
    lines = [f"{low} {high} 1", f"{high} {low} 1", *(f"{a} {a} {b - a}" for a, b in kept if b > a)]
    return "\n".join(lines)


def _enter_with_two_ids(uid: int, gid: int, second: tuple[int, int]) -> None:
    # newuidmap must run outside the new namespace, hence the child made before.
    ready_read, ready_write = os.pipe()
    me = str(os.getpid())
    child = os.fork()
    if child == 0:
        os.close(ready_write)
        os.read(ready_read, 1)
        maps = (
            ["newuidmap", me, "0", str(uid), "1", "1", str(second[0]), "1"],
            ["newgidmap", me, "0", str(gid), "1", "1", str(second[1]), "1"],
        )
        os._exit(max(subprocess.run(command, check=False).returncode for command in maps))
    linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID)
    os.write(ready_write, b"!")
    os.close(ready_read)
    os.close(ready_write)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        raise OSError("newuidmap or newgidmap refused the ids of /etc/subuid and /etc/subgid")


def _first_subordinate(path: str, owners: set[str]) -> int | None:
    try:
        with open(path) as table:
            rows = [line.strip().split(":") for line in table]
    except OSError:
        return None
    return next((int(row[1]) for row in rows if len(row) == 3 and row[0] in owners and int(row[2]) > 0), None)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
