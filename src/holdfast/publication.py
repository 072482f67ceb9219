"""What of a run's changes may appear in a directory of the user's. Judged before the point of no return.

1. What tools of the host run by themselves (`protected`, `protected_places`) is published only if `--out` names it
   exactly; a pattern never covers it. Adding, changing, removing, and a link that leads there, are the same. The run is
   rolled back.
2. Where outputs are declared, what none of them covers rolls the run back (`refuse`), is left unpublished (`drop`), or
   is published (`keep`). Tools' caches never fail a run.
3. Bytecode is left unpublished: Python would run it in place of a source which looks untouched.
4. A file is executable only if `executable` names it, or it was executable before. No file is set-uid, set-gid or
   sticky.

A directory that a run added is covered if something that is covered is in it.
"""

import posixpath
import stat
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import msgspec

from holdfast import checks
from holdfast.errors import HoldfastError, PatternsTooCostly, ProtectedPath, UndeclaredWrite
from holdfast.patterns import HINT, Files, is_pattern
from holdfast.protected import is_bytecode, is_cache, is_protected
from holdfast.protected_places import ProtectedPlaces
from holdfast.records import Change, Check
from holdfast.resources.descent import Cursor, Parts, Tree, look, parts_of

Undeclared = Literal["refuse", "drop", "keep"]
_SPECIAL = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX
_EXECUTE = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """What the user declared."""

    outputs: list[str] = []
    """Files and patterns."""
    undeclared: Undeclared = "refuse"
    """What becomes of writes that no output covers. Without outputs all that is not protected is published."""
    executable: list[str] = []
    """Files and patterns that may be executable; written, they are declared as well."""

    @property
    def is_closed(self) -> bool:
        """Whether only what is declared may appear."""
        return bool(self.outputs) and self.undeclared != "keep"


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be published, and what is told of the rest."""

    changes: list[Change]
    checks: list[Check] = []


def judge(changes: Sequence[Change], publication: Publication, files: Tree) -> Judgement:
    """The changes that may be published, with the modes that they are published with. `files` is the directory."""
    covered = _covered(changes, publication)
    kept = _without_silent(changes, publication, covered)
    with Cursor(files) as cursor:
        refused = _refusal(kept, publication, covered, ProtectedPlaces(changes, cursor, top=files.area("data")))
    if refused:
        return Judgement(changes=kept, checks=[refused])
    undeclared = [change.path for change in kept if publication.is_closed and change.path not in covered]
    if undeclared:
        kept = _without_emptied([change for change in kept if change.path in covered], undeclared)
    with Cursor(files) as cursor:
        if undeclared and (blocked := _blocked(kept, undeclared, cursor)):
            return Judgement(changes=kept, checks=[_of_undeclared(blocked)])
        modes = _Modes(publication, [change.path for change in kept], cursor)
        kept = [modes.of(change) for change in kept]
    return Judgement(changes=kept, checks=[*_left(undeclared), *_stripped(modes.stripped)])


def admits(changes: Sequence[Change], publication: Publication) -> bool:
    """Whether a run that published these changes would publish all of them on these terms too."""
    covered = _covered(changes, publication)
    undeclared = publication.is_closed and any(change.path not in covered for change in changes)
    return not undeclared and _refusal(changes, publication, covered, None) is None


def refuse_to_save(path: str, publication: Publication, files: Tree) -> None:
    """A savepoint is published too, by its own. Raises ProtectedPath or UndeclaredWrite."""
    change = Change(path=path, action="added")
    covered = _covered([change], publication)
    if is_bytecode(path) and path not in _exact(publication):
        raise ProtectedPath(f"{path} is bytecode, which is not published", hint=f"declare it: --out {path}")
    with Cursor(files) as cursor:
        places = ProtectedPlaces([change], cursor, top=files.area("data"))
        if (is_protected(path) or places.hold(path)) and path not in _exact(publication):
            raise _protected([path])
    if publication.is_closed and path not in covered:
        raise _undeclared([path])


def saved_mode(path: str, mode: int, publication: Publication, files: Tree) -> int:
    """The mode that a savepoint is published with."""
    change = Change(path=path, action="changed", mode=stat.S_IMODE(mode))
    with Cursor(files) as cursor:
        return _Modes(publication, [path], cursor).of(change).mode


def reason(found: Sequence[Check]) -> HoldfastError | None:
    """The refusal among checks, as an error with its code and hint. Where something that was declared is not there,
    that says more than that something else is."""
    failed = [check for check in found if not check.ok]
    for check in failed:
        if check.name == ProtectedPath.code:
            return ProtectedPath(check.detail, hint=_HINTS[check.name])
        if check.name == PatternsTooCostly.code:
            return PatternsTooCostly(check.detail, hint=HINT)
    if [check.name for check in failed] == [UndeclaredWrite.code]:
        return UndeclaredWrite(failed[0].detail, hint=_HINTS[UndeclaredWrite.code])
    return None


# -- covered -----------------------------------------------------------------------------------------------------


def _covered(changes: Sequence[Change], publication: Publication) -> set[str]:
    files = Files(change.path for change in changes)
    found = {path for pattern in [*publication.outputs, *publication.executable] for path in files.meant_by(pattern)}
    put = [change.path for change in changes if change.path in found and change.action != "removed"]
    above = _all_above(put)
    return found | {change.path for change in changes if _is_new_directory(change) and change.path in above}


def _exact(publication: Publication) -> set[str]:
    return {path for path in publication.outputs if not is_pattern(path)}


def _all_above(paths: Iterable[str]) -> set[str]:
    found = set[str]()
    for path in paths:
        while (path := posixpath.dirname(path)) and path not in found:
            found.add(path)
    return found


def _is_new_directory(change: Change) -> bool:
    return change.kind == "directory" and change.action == "added"


def _without_silent(changes: Sequence[Change], publication: Publication, covered: Collection[str]) -> list[Change]:
    """Less what is left unpublished without a word, and new directories that hold nothing else."""
    silent = {change.path for change in changes if _is_left_silently(change, publication, covered)}
    if not silent:
        return list(changes)
    others = [each.path for each in changes if each.path not in silent and not _is_new_directory(each)]
    hollow = _all_above(silent) - _all_above(others)
    return [
        each for each in changes
        if each.path not in silent and not (_is_new_directory(each) and each.path in hollow)
    ]  # fmt: skip


def _is_left_silently(change: Change, publication: Publication, covered: Collection[str]) -> bool:
    if change.action != "removed" and is_bytecode(change.path):
        return change.path not in _exact(publication)
    return publication.is_closed and is_cache(change.path) and change.path not in covered


# -- refused -----------------------------------------------------------------------------------------------------


def _refusal(
    changes: Sequence[Change], publication: Publication, covered: Collection[str], places: ProtectedPlaces | None
) -> Check | None:
    """Without `places` names alone are judged."""
    exact = _exact(publication)
    allowed = exact | _all_above(exact)
    protected = [
        change.path for change in changes
        if not _is_allowed(change, exact, allowed) and _is_protected(change, places)
    ]  # fmt: skip
    if protected:
        return checks.refused(_protected(protected))
    if publication.is_closed and publication.undeclared == "refuse":
        undeclared = [change.path for change in changes if change.path not in covered]
        return _of_undeclared(undeclared) if undeclared else None
    return None


def _is_allowed(change: Change, exact: Collection[str], allowed: Collection[str]) -> bool:
    return change.path in exact or (_is_new_directory(change) and change.path in allowed)


def _is_protected(change: Change, places: ProtectedPlaces | None) -> bool:
    if is_protected(change.path) or (places is not None and places.hold(change.path)):
        return True
    if change.kind != "symlink" or change.action == "removed":
        return False
    # By the name of the link a later write of the user's would reach its target.
    to_listed = is_protected(change.target) or is_bytecode(change.target)
    return to_listed or (places is not None and places.are_reached_by(change))


def _blocked(kept: Sequence[Change], dropped: Sequence[str], cursor: Cursor) -> list[str]:
    """What cannot be published alone: a file in place of a directory from which something stays, or a directory that a
    file or link makes way for which stays. One of the two is not declared."""
    above, put = _all_above(dropped), [change for change in kept if change.action != "removed"]
    files = [change.path for change in put if change.kind != "directory" and change.path in above]
    directories = set(dropped) & _all_above(change.path for change in put)
    return files + [path for path in sorted(directories) if not cursor.go(_place(path))]


def _place(path: str) -> Parts:
    return parts_of(Change(path=path, action="added"))


def _without_emptied(kept: list[Change], dropped: Sequence[str]) -> list[Change]:
    """A directory is not removed from which something stays."""
    above = _all_above(dropped)
    return [each for each in kept if each.action != "removed" or each.path not in above]


# -- modes -------------------------------------------------------------------------------------------------------


class _Modes:
    """The modes that files are published with."""

    def __init__(self, publication: Publication, paths: list[str], cursor: Cursor) -> None:
        self.stripped: list[str] = []
        self._cursor = cursor
        files = Files(paths)
        self._executable = {path for pattern in publication.executable for path in files.meant_by(pattern)}

    def of(self, change: Change) -> Change:
        if change.kind != "file" or change.action == "removed":
            return change
        mode = change.mode & ~_SPECIAL
        if mode & _EXECUTE and change.path not in self._executable:
            mode &= ~_EXECUTE | self._mode_before(change)
        if change.mode & _EXECUTE != mode & _EXECUTE:
            self.stripped.append(change.path)
        return change if mode == change.mode else msgspec.structs.replace(change, mode=mode)

    def _mode_before(self, change: Change) -> int:
        *parent, name = parts_of(change)
        old = look(name, dir_fd=self._cursor.fd) if self._cursor.go(parent) else None
        return old.st_mode & _EXECUTE if old is not None and stat.S_ISREG(old.st_mode) else 0


# -- words -------------------------------------------------------------------------------------------------------

_HINTS = {
    ProtectedPath.code: "tools of yours run or obey it by themselves. If you want it, name it exactly, each file with "
    "its own --out; a pattern never covers it",
    UndeclaredWrite.code: "declare it with --out; or say --undeclared drop, which leaves it unpublished, or "
    "--undeclared keep",
}


def _protected(paths: Sequence[str]) -> ProtectedPath:
    return ProtectedPath(f"it may not write {checks.few(paths)}", hint=_HINTS[ProtectedPath.code])


def _undeclared(paths: Sequence[str]) -> UndeclaredWrite:
    return UndeclaredWrite(f"no --out covers {checks.few(paths)}", hint=_HINTS[UndeclaredWrite.code])


def _of_undeclared(paths: Sequence[str]) -> Check:
    return checks.refused(_undeclared(paths))


def _left(paths: Sequence[str]) -> list[Check]:
    """Of a run whose undeclared writes are left unpublished."""
    detail = f"left unpublished, as no --out covers it: {checks.few(paths)}"
    return [Check(name=checks.UNPUBLISHED, ok=True, detail=detail)] if paths else []


def _stripped(paths: Sequence[str]) -> list[Check]:
    detail = f"published without the executable bit: {checks.few(paths)}. --executable names what may have it"
    return [Check(name=checks.NOT_EXECUTABLE, ok=True, detail=detail)] if paths else []
