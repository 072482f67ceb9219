"""Settings: name, default, one sentence each; and how people write sizes and durations."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import msgspec

from holdfast.errors import InvalidSetting
from holdfast.model import MemoryCap, Mode

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DURATION_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

MIN_MEMORY_BYTES = 64 << 20
MOST_LIST_BYTES = 32 << 20
_VERSIONS = 20
_LIST_PART = 32
"""A list may take this part of the disk limit: of files of one block each, paths of 60 bytes are listed in full."""
LEAST_JOURNAL_BYTES = 256 << 20
_JOURNAL_PART = 4
"""A journal may take this part of the disk limit: at the default limit it holds half a million short runs."""
MOST_UNDO = 16
MOST_VERSIONS = 100
# What is more than any machine has; past it neither Linux nor the journal takes the number.
_MOST_BYTES = 1 << 62
_MOST_CPUS = 10_000
_MOST_PROCESSES = 1 << 22
_MOST_SECONDS = 1e9
# What is less Linux does not take: a kernel gets its time in parts of 100 ms, of which one is at least 1 ms.
_LEAST_CPUS = 0.01
_LEAST_PROCESSES = 8
_LEAST_SECONDS = 0.001


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one session may use. Every limit has a clear error of its own."""

    memory_bytes: int = 1 << 30
    """Hard cap of the session's memory: heap, page tables, /dev/shm."""
    reserve_bytes: int | None = None
    """Memory beyond the cap for copies that exist only because of a snapshot; half of the cap unless named."""
    timeout_s: float = 60.0
    """Deadline of a run that names none itself."""
    cpus: float = 2.0
    """Processor time, in cores."""
    processes: int = 256
    """Processes and threads at once."""
    open_files: int = 4096
    """Open files per process."""
    disk_bytes: int = 10 << 30
    """What /mnt/data, /tmp and $HOME may hold together, and the largest size of one file."""
    disk_files: int = 200_000
    """Files and directories in /mnt/data, /tmp and $HOME together. See `list_bytes` too."""
    output_bytes: int = 1 << 20
    """How much of stdout, and of stderr, a result carries; past it the middle is left out."""
    log_bytes: int = 64 << 20
    """How much of a run's output is kept on disk; a run that prints more is stopped (`output_limit`)."""
    display_bytes: int = 64 << 20
    """Rich output of one run, in bytes."""
    displays: int = 1000
    """Rich outputs of one run."""
    code_bytes: int = 8 << 20
    """The largest cell."""
    undo: int = 0
    """Earlier versions whose memory is kept asleep, so that `restore` brings it back with the files."""
    versions: int = _VERSIONS
    """Latest versions that `restore` can go back over; those that changed no file cost nothing and are not counted."""
    interrupt_grace_s: float = 2.0
    """How long an interrupted cell has to end before its kernel is killed."""

    @property
    def list_bytes(self) -> int:
        """How long a list of all files and directories in /mnt/data, /tmp and $HOME may be: each counts its path and 67
        bytes. The host keeps that list in memory and on disk, for each version: the lists of all `versions` together
        take two thirds of the disk limit at most."""
        part = _LIST_PART * max(1, math.ceil(self.versions / _VERSIONS))
        return min(self.disk_bytes // part, MOST_LIST_BYTES)

    @property
    def journal_bytes(self) -> int:
        """What the journal may hold of the session's runs: their code, answers, receipts and changes."""
        return max(self.disk_bytes // _JOURNAL_PART, LEAST_JOURNAL_BYTES)

    @property
    def snapshot_reserve_bytes(self) -> int:
        return self.memory_bytes // 2 if self.reserve_bytes is None else self.reserve_bytes


_DEFAULT = Limits()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a home is opened."""

    home: Path
    """Where sessions, environments and logs live."""
    workspace: Path | None = None
    """A directory of the user's that sessions have as /mnt/data; what is to be kept of them is in its `.holdfast`."""
    memory_cap: MemoryCap = "cgroup"
    """`watchdog` samples and kills instead of a hard cap, for machines that offer no cgroup."""


def default_home() -> Path:
    """`$HOLDFAST_HOME`, or `holdfast` in the user's data directory."""
    if named := os.environ.get("HOLDFAST_HOME"):
        return Path(named).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser().absolute() / "holdfast"


def home_path(named: str | Path | None) -> Path:
    """The home that is meant."""
    return default_home() if named is None else parse_path(named, name="home")


def parse_path(value: str | Path, *, name: str) -> Path:
    """A path as callers write it, in full."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidSetting(f"{name}={shown(value)} is not a path", hint="write it as a string or a pathlib.Path")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # a user that is not there
        raise InvalidSetting(f"{name}={shown(value)} is not a path: {error}", hint="write it in full") from error


def parse_bytes(value: int | str, *, name: str) -> int:
    """
    >>> parse_bytes("512M", name="memory")
    536870912
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MOST_BYTES:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    size = float(match[1]) * _SIZE_UNITS[match[2].upper()] if match else 0.0
    if not 1 <= size < _MOST_BYTES:
        raise InvalidSetting(f"{name}={shown(value)} is not a size", hint='write bytes, or "512M", "2G"')
    return int(size)


def shown(value: object) -> str:
    """A value as it was written, within bounds: Python itself refuses to write out a number of thousands of digits."""
    try:
        return f"{value!r:.100}"
    except ValueError:
        return "a number of thousands of digits"


def parse_seconds(value: float | str, *, name: str) -> float:
    """
    >>> parse_seconds("20m", name="timeout")
    1200.0
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and _LEAST_SECONDS <= value < _MOST_SECONDS:
        return float(value)
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    seconds = float(match[1]) * _DURATION_UNITS[(match[2] or "").lower()] if match else 0.0
    if not _LEAST_SECONDS <= seconds < _MOST_SECONDS:
        raise InvalidSetting(
            f"{name}={shown(value)} is not a duration", hint='write seconds, or "90s", "20m"; the least is "1ms"'
        )
    return seconds


def parse_cap(value: MemoryCap) -> MemoryCap:
    """
    >>> parse_cap("watchdog")
    'watchdog'
    """
    if value not in get_args(MemoryCap):
        raise InvalidSetting(
            f"memory_cap={shown(value)} is not one", hint=f"write one of {', '.join(get_args(MemoryCap))}"
        )
    return value


def parse_limits(
    *,
    memory: int | str = _DEFAULT.memory_bytes,
    timeout: float | str | None = None,
    cpus: float = _DEFAULT.cpus,
    processes: int = _DEFAULT.processes,
    disk: int | str = _DEFAULT.disk_bytes,
    undo: int = _DEFAULT.undo,
    versions: int | str = _DEFAULT.versions,
) -> Limits:
    """The limits of a session, as callers write them."""
    timeout_s = _DEFAULT.timeout_s if timeout is None else parse_seconds(timeout, name="timeout")
    return Limits(
        memory_bytes=parse_bytes(memory, name="memory"), timeout_s=timeout_s, cpus=parse_cpus(cpus),
        processes=parse_processes(processes), disk_bytes=parse_bytes(disk, name="disk"), undo=parse_undo(undo),
        versions=parse_versions(versions),
    )  # fmt: skip


def parse_cpus(value: float) -> float:
    """
    >>> parse_cpus(0.5)
    0.5
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _LEAST_CPUS <= value <= _MOST_CPUS:
        raise InvalidSetting(
            f"cpus={shown(value)} is not a number of cores",
            hint=f"write a number such as 0.5; the least is {_LEAST_CPUS}, the most {_MOST_CPUS:,}",
        )
    return value


def parse_processes(value: int) -> int:
    """
    >>> parse_processes(100)
    100
    """
    if not _is_whole(value, least=_LEAST_PROCESSES, most=_MOST_PROCESSES):
        raise InvalidSetting(
            f"processes={shown(value)} is not a number of processes",
            hint=f"write a whole number; a kernel needs at least {_LEAST_PROCESSES}, and Linux has at most "
            f"{_MOST_PROCESSES:,}",
        )
    return value


def parse_undo(value: int) -> int:
    """
    >>> parse_undo(3)
    3
    """
    if not _is_whole(value, least=0, most=MOST_UNDO):
        raise InvalidSetting(f"undo={shown(value)} is not a number of versions", hint=f"write 0 to {MOST_UNDO}")
    return value


def _is_whole(value: object, *, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def parse_versions(value: int | str) -> int:
    """The number may come from an address, as text.

    >>> parse_versions("50")
    50
    """
    number = int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value, re.ASCII) else value
    if isinstance(number, str) or not _is_whole(number, least=1, most=MOST_VERSIONS):
        raise InvalidSetting(f"versions={shown(value)} is not a number of versions", hint=f"write 1 to {MOST_VERSIONS}")
    return number


def written_settings(limits: Limits, mode: Mode, env: str | Path | None) -> dict[str, int | float | str | None]:
    """What a session was asked for, as its row in the store has it."""
    return {**msgspec.structs.asdict(limits), "mode": mode, "env": None if env is None else str(env)}


def written_versions(written: Mapping[str, object]) -> int | None:
    """How many a session keeps, from its row; None: an earlier build wrote it."""
    versions = written.get("versions")
    return versions if isinstance(versions, int) and 1 <= versions <= MOST_VERSIONS else None


def read_settings(written: Mapping[str, object]) -> tuple[Limits, Mode, str | None]:
    """Limits, mode and environment of a session, from its row."""
    kept = {name: value for name, value in written.items() if name in Limits.__struct_fields__}
    mode: Mode = "notebook" if written.get("mode") == "notebook" else "strict"
    env = written.get("env")
    return msgspec.convert(kept, Limits), mode, None if env is None else str(env)
