"""Whose a directory's `.holdfast` is: its mark says that this user's own home made it, here.

A `.holdfast` may come with a directory: out of an archive, a clone, a disk of somebody else's. Whoever believes what
such a one says lets its author choose what is removed, what is published and what is signed. So it is believed only
with a mark, which is a signature by the home's key over

1. its id, which names the cgroups that are killed when it is opened;
2. the mark's own file and the journal's, each by its inode and the moment of its birth, which nobody can set.

Moved within a file system it stays marked. A copy is not: its mark is another file, and it may have been changed.
"""

import errno
import os
import shlex
import stat
from pathlib import Path

from holdfast import durable
from holdfast.errors import NotOurs
from holdfast.identity import born_ns
from holdfast.signing import SigningKey

NAME = "mark"
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TITLE = "holdfast mark v1"
_FIRST = frozenset({"lock", ".gitignore", "id"})
"""What is there before the mark is, with an empty journal: whoever makes it can be killed on the way."""
_LONGEST_BYTES = 1024
_NO_MARK = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EISDIR, None)
"""There is none, or it is no file."""


def is_new(directory: Path, journal: str) -> bool:
    """Whether nothing is in it that could be believed."""
    with os.scandir(directory) as found:
        return all(_is_unfinished(entry, journal) for entry in found)


def _is_unfinished(entry: "os.DirEntry[str]", journal: str) -> bool:
    status = entry.stat(follow_symlinks=False)
    known = entry.name in _FIRST or entry.name.startswith(durable.TEMPORARY)
    return stat.S_ISREG(status.st_mode) and (known or (entry.name == journal and not status.st_size))


def make(directory: Path, own_id: str, journal: str, key: SigningKey) -> None:
    """Durable when it returns; the journal's file is there already."""
    place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with durable.closing_fd(place), durable.temporary(place) as (mark, name):
        signature = key.sign(_signed(own_id, mark, place, journal))
        durable.write_all(mark, f"{key.key_id} {signature.hex()}\n".encode())
        durable.sync_file(mark)
        durable.rename(name, NAME, src_dir=place, dst_dir=place)
        durable.sync_directory(place)
    durable.sync_directory(directory.parent)


def refuse_unmarked(directory: Path, own_id: str, journal: str, key: SigningKey) -> None:
    """Raises NotOurs."""
    try:
        place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with durable.closing_fd(place), durable.closing_fd(os.open(NAME, _FILE, dir_fd=place)) as mark:
            signer, _, signature = os.read(mark, _LONGEST_BYTES).decode(errors="replace").strip().partition(" ")
            public = next((each for each in key.public.accepted if each.key_id == signer), None)
            if public is None:
                raise _not_ours(directory, "another home, or another key of yours, made it")
            if public.verifies(_from_hex(signature), _signed(own_id, mark, place, journal)):
                return
            raise _not_ours(directory, "it is a copy, or something was put in its place")
    except OSError as error:
        if error.errno not in _NO_MARK:  # a disk that cannot be read says nothing about whose it is
            raise
    raise _not_ours(directory, "it came with the directory, or an earlier version of Holdfast made it")


def _not_ours(directory: Path, why: str) -> NotOurs:
    return NotOurs(
        f"{directory} is not believed: {why}",
        hint="`holdfast verify` and `export` still read it. To begin anew, which forgets its past, and what jobs saved "
        f"or committed there that were killed and not finished since: rm -r {shlex.quote(str(directory))}",
    )


def _signed(own_id: str, mark: int, place: int, journal: str) -> bytes:
    with durable.closing_fd(os.open(journal, _FILE, dir_fd=place)) as file:
        return "\n".join([_TITLE, own_id, _identity(mark), _identity(file)]).encode()


def _identity(file: int) -> str:
    """Of this file and no other that was ever there: inodes are used again. Where births are not recorded, its device
    must do."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"inode {status.st_ino} is no file")
    born = born_ns(file)
    return f"inode {status.st_ino} " + (f"born {born}" if born else f"device {status.st_dev}")


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
