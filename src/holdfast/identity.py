"""Tells a directory or file from its copies, also after the machine was started anew.

1. An inode and the moment of its birth are one file's alone: nobody can set the moment, and no copy has both.
2. Copies of a whole disk have both. The file system's UUID tells some of them, where Linux gives it away. The device
   number tells those that are mounted beside the original; it may change with a reboot, and counts only until then.
"""

import ctypes
import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path

import msgspec

_AT_EMPTY_PATH, _STATX_BTIME = 0x1000, 0x800
_STATX_BYTES, _MASK_AT, _BTIME_AT = 256, 0, 80
_FS_IOC_GETFSUUID, _UUID_BYTES = 0x80111500, 16
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_libc = ctypes.CDLL(None, use_errno=True)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Of an open file or directory."""

    inode: int
    born_ns: int
    """0: the file system does not record it."""
    file_system: str = ""
    """UUID; empty: Linux does not say."""
    boot: str = ""
    """During which the device number counts."""
    device: int = 0

    def is_same(self, other: "Identity") -> bool:
        """Whether both are of one file."""
        one_boot = self.boot == other.boot != ""
        return (
            (self.inode, self.born_ns) == (other.inode, other.born_ns)
            and (not self.file_system or not other.file_system or self.file_system == other.file_system)
            and (not one_boot or self.device == other.device)
        )


def identity_of(file: int) -> Identity:
    status, boot = os.fstat(file), ""
    with suppress(OSError):
        boot = _BOOT.read_text().strip()
    return Identity(
        inode=status.st_ino, born_ns=born_ns(file), file_system=_file_system(file), boot=boot, device=status.st_dev
    )


def born_ns(file: int) -> int:
    """When an open file was made; 0: the file system does not record it."""
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(file, b"", _AT_EMPTY_PATH, _STATX_BTIME, found) != 0:
        return 0
    (mask,) = struct.unpack_from("=I", found, _MASK_AT)
    seconds, nanoseconds = struct.unpack_from("=qI", found, _BTIME_AT)
    return seconds * 10**9 + nanoseconds if mask & _STATX_BTIME else 0


def _file_system(file: int) -> str:
    try:
        answer = fcntl.ioctl(file, _FS_IOC_GETFSUUID, bytes(1 + _UUID_BYTES))
    except OSError:
        return ""
    return answer[1 : 1 + answer[0]].hex()
