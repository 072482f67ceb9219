"""Renaming a directory that is committed.

The overlay answers as if it lay on another disk: EXDEV. `mv` copies then, and Python's `os.rename` does not, so it is
taught to: for directories, within one area, and only after Linux has refused. A copy is made next to the target and
renamed; the source goes last, so that at no time there is less than one whole directory.
"""

import errno
import os
import secrets
import shutil
import stat
from os import rename as plain_rename
from os import replace as plain_replace
from typing import Any

from holdfast.sandbox import linux

AnyPath = str | bytes | os.PathLike[Any]


def install() -> None:
    """From now on `os.rename` and all that is built on it (pathlib, shutil) can do it."""
    os.supports_dir_fd |= {rename, replace}
    os.rename, os.replace = rename, replace


def rename(src: AnyPath, dst: AnyPath, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
    """As `os.rename`."""
    try:
        plain_rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
    except OSError as error:
        if not (error.errno == errno.EXDEV and _move(_place(src, src_dir_fd), _place(dst, dst_dir_fd))):
            raise


def replace(src: AnyPath, dst: AnyPath, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
    """As `os.replace`."""
    try:
        plain_replace(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
    except OSError as error:
        if not (error.errno == errno.EXDEV and _move(_place(src, src_dir_fd), _place(dst, dst_dir_fd))):
            raise


def _place(path: AnyPath, directory: int | None) -> bytes:
    name = os.fsencode(path).rstrip(b"/")
    return name if directory is None else os.path.join(b"/proc/self/fd/%d" % directory, name)


def _move(source: bytes, target: bytes) -> bool:
    """False: this is none of our business."""
    if not stat.S_ISDIR(os.lstat(source).st_mode) or _mount_of(source) != _mount_of(target):
        return False
    if os.path.isdir(target) and os.listdir(target):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), source, None, target)
    copy = os.path.join(os.path.dirname(target), f".rename-{secrets.token_hex(6)}".encode())
    try:
        _copy(source, copy, {})
        plain_rename(copy, target)
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)
        raise
    shutil.rmtree(source)
    return True


def _mount_of(path: bytes) -> int:
    return linux.mount_id(os.fsdecode(os.path.dirname(path) or b"."))


def _copy(source: bytes, target: bytes, linked: dict[tuple[int, int], bytes]) -> None:
    """A tree, with its links, modes and times."""
    status = os.lstat(source)
    first = linked.setdefault((status.st_dev, status.st_ino), target)
    if stat.S_ISDIR(status.st_mode):
        os.mkdir(target)
        for name in os.listdir(source):
            _copy(os.path.join(source, name), os.path.join(target, name), linked)
    elif first != target:
        os.link(first, target, follow_symlinks=False)
    elif stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISREG(status.st_mode):
        shutil.copyfile(source, target)
    else:
        os.mknod(target, status.st_mode)
    shutil.copystat(source, target, follow_symlinks=False)
