"""Where jobs are under way, so that whoever comes next finishes those that were killed.

A home has one small file in `jobs/` for each directory in which a job of it runs. It is durable before anything of the
job is, and goes when nothing of the job is left to do; so one whose job is gone names a directory where something may
be half done. Any command looks here first (`cli.telling`), and finishes it as the next job there would.

What is found is a hint and no more. One that another user wrote is not read, and one whose job lives is left alone.
The directory is opened as for any job: by its lock, and only if its `.holdfast` is ours. One that is not there may come
back, with a disk that is not mounted yet: it is remembered for a while.
"""

import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast import durable
from holdfast.home import Home, shared_id

DIRECTORY = "jobs"
_REMEMBERED_S = 30 * 86400.0
_LARGEST_BYTES = 64 << 10
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A job, and by whom it is run."""

    directory: str
    home: str
    """The id in the directory's `.holdfast`: another one there is another story."""
    process: int
    born: str
    """When that process began, in the kernel's own count: numbers of processes are used again."""
    at: float


def enter(home: Home) -> None:
    """Before the first record of a job."""
    assert home.shared is not None
    entry = Entry(
        directory=str(home.shared), home=home.id, process=os.getpid(), born=_born(os.getpid()), at=time.time()
    )
    place = home.parent / DIRECTORY
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    durable.write_file(place / _name(entry.directory), msgspec.json.encode(entry))


def leave(home: Path, directory: Path | str) -> None:
    """Nothing is left to do there."""
    with suppress(FileNotFoundError):
        (home / DIRECTORY / _name(str(directory))).unlink()


def abandoned(home: Path) -> Iterator[Path]:
    """Directories whose jobs are gone and may have left something to do. Costs next to nothing where there is none."""
    place = home / DIRECTORY
    try:
        names = sorted(os.listdir(place)) if _is_ours(os.lstat(place), stat.S_IFDIR) else []
    except OSError:  # no job was ever run, or it is none of ours
        return
    for name in names:
        entry = _read(place / name)
        if entry is None or name != _name(entry.directory) or _lives(entry):
            continue
        directory = Path(entry.directory)
        if shared_id(directory) == entry.home:
            if (place / name).exists():  # its job may have ended since we read it
                yield directory
        elif directory.exists() or time.time() - entry.at > _REMEMBERED_S:
            leave(home, entry.directory)


def _name(directory: str) -> str:
    return hashlib.sha256(directory.encode()).hexdigest()[:32]


def _read(path: Path) -> Entry | None:
    try:
        with durable.closing_fd(os.open(path, _FILE)) as file:
            if not _is_ours(os.fstat(file), stat.S_IFREG):
                return None
            return msgspec.json.decode(os.read(file, _LARGEST_BYTES), type=Entry)
    except (OSError, msgspec.DecodeError):
        return None


def _is_ours(status: os.stat_result, kind: int) -> bool:
    """Who can write it says what is looked at."""
    return stat.S_IFMT(status.st_mode) == kind and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _lives(entry: Entry) -> bool:
    """Seen from here: in another container the directory's lock tells it."""
    try:
        return _born(entry.process) == entry.born
    except OSError:
        return False


def _born(process: int) -> str:
    # The second field is the program's name in brackets, and may hold anything.
    return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
