"""Reading and writing the small files of /sys/fs/cgroup, and removing its directories."""

import errno
import os
import time

_BUSY = (errno.EBUSY, errno.ENOTEMPTY)


def read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _drain(fd)
    finally:
        os.close(fd)


def _drain(fd: int) -> str:
    # The kernel hands out about a page per read, however large the buffer is.
    parts = []
    while part := os.read(fd, 65536):
        parts.append(part)
    return b"".join(parts).decode()


def read_kept(fd: int) -> str:
    """What a file of less than a page says now, through a descriptor that stays open."""
    return os.pread(fd, 4096, 0).decode()


def write(path: str, value: int | str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def write_if_present(path: str, value: int | str) -> None:
    try:
        write(path, value)
    except FileNotFoundError:
        return


def keyed(text: str, key: str) -> int:
    """The number after `key` in a file of `key number` lines; 0 where this kernel lacks the key."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def pids_in(directory: str) -> list[int]:
    """Processes of exactly this cgroup, as seen from our pid namespace; none if it is gone.

    Opened anew each time: v1 gives a descriptor that stays open the list of its first read for
    another second.
    """
    try:
        listed = read(f"{directory}/cgroup.procs").split()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return []
        raise
    # v2 shows a process outside our pid namespace as 0, and kill(0) would be our own process group.
    return [pid for pid in map(int, listed) if pid > 0]


def open_procs(directory: str) -> int:
    return os.open(f"{directory}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)


def children_of(directory: str) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def writable(*paths: str) -> bool:
    return all(os.access(path, os.W_OK, effective_ids=True) for path in paths)


def remove(directory: str, *, patience_s: float = 2.0) -> None:
    """rmdir, again and again while it is busy: the kernel needs a moment after the last death."""
    give_up_at = time.monotonic() + patience_s
    pause_s = 0.0005
    while True:
        try:
            return os.rmdir(directory)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in _BUSY or time.monotonic() > give_up_at:
                raise
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.02)


def remove_if_unused(directory: str) -> None:
    """For a directory that others may share: whoever leaves last takes it away."""
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (*_BUSY, errno.EACCES, errno.EPERM, errno.EROFS):
            raise
