"""What a session is shown of the machine: its own memory cap and its own processors, and not the machine's.

    /proc/meminfo             the cap as the total; the host writes anew what is free when the session is put to rest
    /sys/devices/system/cpu   as many processors as the session may use, which glibc counts there (`os.cpu_count()`)

Libraries choose chunk sizes and numbers of threads by these. They are only shown: cgroups keep the limits. No affinity
is set, so that a session may still use others in a burst. Both lie on mounts that are read-only for the guest,
and that only the outer user namespace could change.
"""

import os

from holdfast.sandbox import linux

MEMINFO = "/proc/meminfo"
PROCESSORS = "/sys/devices/system/cpu"
_SOURCE = "/dev/shm/.meminfo"  # noqa: S108 (nothing else is there yet, and it is unlinked at once)
_READ_ONLY = linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
_EMPTY = (
    "Buffers", "Cached", "SwapCached", "Active", "Inactive", "Active(anon)", "Inactive(anon)", "Active(file)",
    "Inactive(file)", "Unevictable", "Mlocked", "SwapTotal", "SwapFree", "Dirty", "Writeback", "AnonPages", "Mapped",
    "Shmem", "KReclaimable", "Slab", "SReclaimable", "SUnreclaim", "KernelStack", "PageTables", "Bounce",
)  # fmt: skip


def meminfo(cap_bytes: int, *, used_bytes: int = 0) -> bytes:
    """The text of /proc/meminfo. It has the same length for all sizes, so that one write replaces it whole.

    >>> print(meminfo(1 << 30, used_bytes=1 << 20).decode().splitlines()[1])
    MemFree:              1047552 kB
    """
    free = max(0, cap_bytes - used_bytes)
    sizes = {"MemTotal": cap_bytes, "MemFree": free, "MemAvailable": free, **dict.fromkeys(_EMPTY, 0)}
    sizes |= {"Active": cap_bytes - free, "AnonPages": cap_bytes - free, "Active(anon)": cap_bytes - free}
    return "".join(f"{name + ':':<16}{size >> 10:>13} kB\n" for name, size in sizes.items()).encode()


def show(*, memory_bytes: int, processors: int) -> int:
    """Mount both over what this process sees. Returns the file behind /proc/meminfo, open for whoever may write it."""
    _show_processors(processors)
    return _show_memory(memory_bytes)


def _show_memory(memory_bytes: int) -> int:
    source = os.open(_SOURCE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    os.write(source, meminfo(memory_bytes))
    linux.mount(_SOURCE, MEMINFO, flags=linux.MS_BIND)
    linux.mount(None, MEMINFO, flags=_READ_ONLY)
    os.unlink(_SOURCE)
    return source


def _show_processors(count: int) -> None:
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("tmpfs", PROCESSORS, "tmpfs", flags, "size=1m,mode=755")
    listed = "0\n" if count == 1 else f"0-{count - 1}\n"
    for name in ("online", "possible", "present"):
        _write(f"{PROCESSORS}/{name}", listed)
    for number in range(count):  # glibc counts these as well, and psutil the cores that they name
        os.makedirs(f"{PROCESSORS}/cpu{number}/topology")
        for name in ("core_cpus_list", "thread_siblings_list"):
            _write(f"{PROCESSORS}/cpu{number}/topology/{name}", f"{number}\n")
    linux.mount(None, PROCESSORS, flags=_READ_ONLY)


def _write(path: str, text: str) -> None:
    with open(path, "x") as file:
        file.write(text)
    os.chmod(path, 0o444)
