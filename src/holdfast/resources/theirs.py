"""What in a directory of the user's is neither what a run found there nor what it left: the user's, who changed it
since. `publish` leaves it to him.
"""

import os
import stat
from collections.abc import Mapping

from holdfast import durable
from holdfast.paths import to_text
from holdfast.records import Change
from holdfast.resources import entries
from holdfast.resources.descent import Cursor, Parts, kind_of, look, open_regular
from holdfast.resources.handles import is_copied_in_part, is_database
from holdfast.resources.hashing import digest

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def is_changed(change: Change, name: bytes, *, place: int, staged: int) -> bool:
    """Whether what a change would replace is something else than what the run found there."""
    old = look(name, dir_fd=place)
    if old is None or (change.kind == "directory" and stat.S_ISDIR(old.st_mode)):
        return False
    if change.action == "added":
        return True
    if not stat.S_ISREG(old.st_mode):
        return not _is_known(change, name, old, place)
    found = digest_of(name, place)
    if _sign(old) != _sign(look(name, dir_fd=place)):  # while it was read, which may take a while
        return True
    return found not in (change.before, change.sha256 or change.before) and not _is_half_written(name, place, staged)


def is_relinked(change: Change, name: bytes, *, place: int) -> bool:
    """Whether a link that is to go points elsewhere than the run found."""
    return bool(change.before_target) and to_text(os.readlink(name, dir_fd=place)) != change.before_target


def _is_known(change: Change, name: bytes, status: os.stat_result, place: int) -> bool:
    """Whether what is no regular file is what the run found there, or what it put there. Journals of earlier builds do
    not tell what was there."""
    if not change.before and change.before_kind is None:
        return True
    found, known = entries.found_at(name, status, dir_fd=place), (entries.before(change), entries.after(change))
    return any(each is not None and (found.kind, found.target) == (each.kind, each.target) for each in known)


def has_arrived(change: Change, name: bytes, *, place: int) -> bool:
    """A new file is in place already: what is staged is filled again from blobs before each try."""
    old = look(name, dir_fd=place) if change.action == "added" and change.sha256 else None
    return old is not None and stat.S_ISREG(old.st_mode) and digest_of(name, place) == change.sha256


def holds_more(parts: Parts, going: Mapping[Parts, Change], place: Cursor) -> bool:
    """Whether something is in a directory that is not, just as it is, among what is to go."""
    *parent, name = parts
    old = look(name, dir_fd=place.fd) if place.go(parent) else None
    if old is None or not stat.S_ISDIR(old.st_mode):
        return False
    try:
        place.enter(name)
    except PermissionError:  # another user's, and nobody knows what is in it
        return True
    except (FileNotFoundError, NotADirectoryError):  # removed in this very moment
        return False
    found = place.walk(into=lambda *_: True)
    return any(not _goes(going.get((*parts, *below)), below[-1], status, place.fd) for below, status in found)


def digest_of(name: bytes, directory: int) -> str:
    """Of a file of the user's. As in a census, what the caller may not read has none."""
    try:
        with durable.closing_fd(os.open(name, _FILE, dir_fd=directory)) as file:
            return digest(file)[0]
    except PermissionError:
        return ""


def _goes(change: Change | None, name: bytes, status: os.stat_result, directory: int) -> bool:
    if change is None or kind_of(status) != change.kind:
        return False
    return not stat.S_ISREG(status.st_mode) or digest_of(name, directory) == change.before


def _is_half_written(name: bytes, place: int, staged: int) -> bool:
    """By ourselves (`publish`, into files that keep their inode)."""
    try:
        with durable.closing_fd(open_regular(name, dir_fd=staged)) as source:
            if not is_database(source):
                return False
            with durable.closing_fd(open_regular(name, dir_fd=place)) as target:
                return is_copied_in_part(source, target)
    except (FileNotFoundError, PermissionError):
        return False


def _sign(status: os.stat_result | None) -> tuple[int, int, int] | None:
    return status and (status.st_ino, status.st_size, status.st_mtime_ns)
