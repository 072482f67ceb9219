"""The Linux calls that Python lacks, as thin functions that raise `OSError`.

Nothing here decides anything: policy lives in the modules that call it.
"""

import ctypes
import fcntl
import os
import platform
import socket
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_libc.syscall.restype = ctypes.c_long

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_NOATIME = 0x400
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

PR_SET_PDEATHSIG = 1
PR_GET_DUMPABLE = 3
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

_MACHINE = platform.machine()
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(_MACHINE, -1)
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}.get(_MACHINE, -1)
_SYS_STATX = {"x86_64": 332, "aarch64": 291}.get(_MACHINE, -1)
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_CLOSE_RANGE = 436
_SYS_OPENAT2 = 437
_SYS_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_STATX_MNT_ID = 0x1000
_STATX_BYTES, _STATX_MNT_ID_AT = 256, 0x90
_RESOLVE_NO_SYMLINKS = 4
_MOUNT_ATTR_RDONLY_NOSUID_NODEV = 0x1 | 0x2 | 0x4
_MOUNT_ATTR_NOSUID_NODEV = 0x2 | 0x4
_MOUNT_ATTR_IDMAP = 0x100000

IPC_KINDS = ("shm", "sem", "msg")
_IPC_RMID = 0

_CAPABILITY_VERSION_3 = 0x20080522
_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x1 | 0x40


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    """mount(2); paths are bytes on Linux, so surrogate escapes go through unharmed."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(
        _libc.mount(encoded[0], encoded[1], encoded[2], flags, encoded[3]),
        f"mount {kind or source} on {target}",
    )


def lock_tree(target: str) -> None:
    """Make a mount and every mount below it read-only, without set-uid programs and devices. Linux 5.12."""
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY_NOSUID_NODEV, 0, 0, 0)
    arguments = (_AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))
    _check(_libc.syscall(_SYS_MOUNT_SETATTR, *arguments), f"mount_setattr {target}")


def unmount(target: str, flags: int = 0) -> None:
    _check(_libc.umount2(os.fsencode(target), flags), f"unmount {target}")


def open_tree(source: str) -> int:
    """A copy of a mount, from this directory down, that is not attached anywhere yet."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    return _check(_libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(source), flags), f"open_tree {source}")


def move_mount(tree: int, target: str) -> None:
    """Attach what `open_tree` returned."""
    arguments = (tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)
    _check(_libc.syscall(_SYS_MOVE_MOUNT, *arguments), f"move_mount to {target}")


def tame_tree(tree: int) -> None:
    """Without set-uid programs and devices, what `open_tree` returned."""
    _set_attributes(tree, _MOUNT_ATTR_NOSUID_NODEV)


def map_tree(tree: int, user_namespace: int) -> None:
    """Show the owners of files in it as the map of a user namespace (a descriptor) translates them. Linux 5.12."""
    _set_attributes(tree, _MOUNT_ATTR_IDMAP, user_namespace)


def _set_attributes(tree: int, attributes: int, user_namespace: int = 0) -> None:
    packed = struct.pack("QQQQ", attributes, 0, 0, user_namespace)
    arguments = (tree, b"", _AT_EMPTY_PATH, packed, ctypes.c_size_t(len(packed)))
    _check(_libc.syscall(_SYS_MOUNT_SETATTR, *arguments), "mount_setattr")


def mount_id(path: str | int) -> int:
    """The number of the mount that a path or a descriptor is on. No two mounts that exist have the same."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    directory, name = (path, b"") if isinstance(path, int) else (_AT_FDCWD, os.fsencode(path))
    arguments = (directory, name, _AT_EMPTY_PATH, _STATX_MNT_ID, buffer)
    _check(_libc.syscall(_SYS_STATX, *arguments), f"statx {path}")
    number: int = struct.unpack_from("Q", buffer, _STATX_MNT_ID_AT)[0]
    return number


def open_without_links(path: bytes, flags: int) -> int:
    """open(2) of a path none of whose parts is a symbolic link; not to be inherited."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, 0, _RESOLVE_NO_SYMLINKS)
    arguments = (_AT_FDCWD, path, how, ctypes.c_size_t(len(how)))
    return _check(_libc.syscall(_SYS_OPENAT2, *arguments), f"open {os.fsdecode(path)}")


def pivot_root(new_root: str, put_old: str) -> None:
    _check(_libc.syscall(_SYS_PIVOT_ROOT, os.fsencode(new_root), os.fsencode(put_old)), "pivot_root")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare {flags:#x}")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def prctl(option: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> int:
    return _check(_libc.prctl(option, a, b, c, d), f"prctl {option}")


def sethostname(name: str) -> None:
    _check(_libc.sethostname(name.encode(), len(name.encode())), "sethostname")


def drop_capabilities() -> None:
    """Empty the effective, permitted and inheritable sets of this thread."""
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.syscall(_SYS_CAPSET, header, bytes(24)), "capset")


def remove_ipc(kind: str, number: int) -> None:
    """Remove a System V object, by its number in /proc/sysvipc; `kind` is one of `IPC_KINDS`."""
    arguments = (number, 0, _IPC_RMID) if kind == "sem" else (number, _IPC_RMID, None)
    _check(getattr(_libc, f"{kind}ctl")(*arguments), f"{kind}ctl {number}")


def flush_c_streams() -> None:
    """Write out what C code has printed and stdio still holds."""
    _libc.fflush(None)


def close_all_fds_except(keep: set[int]) -> None:
    """Close every descriptor above 2 that is not named: one that leaks into a kernel is a hole."""
    first = 3
    for fd in sorted(fd for fd in keep if fd > 2):
        if fd > first:
            _close_range(first, fd - 1)
        first = fd + 1
    _close_range(first, 0xFFFFFFFF)


def _close_range(first: int, last: int) -> None:
    unsigned = (ctypes.c_uint(first), ctypes.c_uint(last), ctypes.c_uint(0))
    _check(_libc.syscall(_SYS_CLOSE_RANGE, *unsigned), "close_range")


def bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", _IFF_UP_RUNNING, b""))
