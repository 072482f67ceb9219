"""`save`: finished files are kept whatever becomes of the run.

Inside a sandbox the host copies them, and they are durable when the call returns. Outside there is no run that could be
rolled back: the files are synced to disk where they are.
"""

import os
import stat
from pathlib import Path

from holdfast.kit import inside

_MAX_STEP = 200

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class SaveRefused(RuntimeError):
    """The files were not saved; the run itself goes on."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not saved: {reason}")
        self.reason = reason


def save(*paths: AnyPath, step: str = "") -> None:
    """Keep these files even if the run fails later. Close them first: what still is in a buffer is not saved.

    `step` is a word for the receipt. A symlink stands for the file that it leads to.
    """
    files = [_regular(os.path.realpath(os.fsencode(path))) for path in paths]
    if not files:
        raise ValueError("save() needs at least one path")
    provided = inside.provided_save()
    if provided is None:
        _sync(files)
    elif refused := provided(files, _word(step)):
        raise SaveRefused(refused)


def _regular(file: bytes) -> bytes:
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise ValueError(f"{os.fsdecode(file)} is not a regular file: save() takes files, one by one")
    return file


def _word(step: str) -> str:
    """Without the lone surrogates that no encoder takes."""
    return str(step).encode(errors="replace").decode()[:_MAX_STEP]


def _sync(files: list[bytes]) -> None:
    from holdfast import durable  # here, because inside there is nothing of the host

    places = [Path(os.fsdecode(file)) for file in files]
    for directory in {place.parent for place in places}:
        durable.sync_files([place for place in places if place.parent == directory], root=directory)
