"""Savepoints: files that a cell has finished, kept whatever becomes of the run.

They are copied to blobs and synced, then journalled as `Saved`; only then does the code go on. `settle` applies them
when the run is rolled back; when it commits they are among its files anyway.
"""

import os
import stat
import time
from typing import BinaryIO

from holdfast import paths
from holdfast.books import Books
from holdfast.computer import Computer
from holdfast.errors import FileUnknown, HoldfastError
from holdfast.faults import crashpoint
from holdfast.kernel import wire
from holdfast.kernel.saves import IsOver
from holdfast.notes import Notes
from holdfast.publication import Publication, refuse_to_save, saved_mode
from holdfast.records import Saved, SavedFile
from holdfast.resources.descent import open_file
from holdfast.resources.saved import replacing
from holdfast.retention import wanted

_MOST_FILES = 1_000
_MOST_SAVES = 10_000
_BLOCK_BYTES = 4096
"""What a file takes on disk beside its bytes, at most."""


class Savepoints:
    """What one run has saved."""

    def __init__(self, books: Books, computer: Computer, notes: Notes, *, run: str, publication: Publication) -> None:
        self.steps: list[str] = []
        self.paths: list[str] = []
        self._books = books
        self._computer = computer
        self._run = run
        self._notes = notes
        self._publication = publication
        self._refused = ""
        self._bytes = 0

    def refuse(self, why: str) -> None:
        """Every save from now on is answered with this."""
        self._refused = why

    async def save(self, saving: wire.Saving, is_over: IsOver) -> str:
        """Make these files last, unless the run is over before they are copied; returns why not, or nothing."""
        if why := self._refused or self._books.why_full(self._computer.limits):
            return why
        if len(saving.paths) > _MOST_FILES or len(self.steps) >= _MOST_SAVES:
            return f"at most {_MOST_FILES:,} files at once, and {_MOST_SAVES:,} times in a run"
        try:
            files = await self._books.in_thread(lambda: self._copy(saving.paths, is_over))
            crashpoint("save.copied")
            record = Saved(run=self._run, at=time.time(), files=files, step=saving.step[:200])
            await self._notes.write(record)  # what was refused is not applied later
            crashpoint("save.journalled")
        except (HoldfastError, OSError, ValueError) as error:
            return str(error)
        self.steps.append(record.step or f"step {len(self.steps) + 1}")
        self.paths = list(dict.fromkeys([*self.paths, *(file.path for file in files)]))
        return ""

    def _copy(self, names: list[str], is_over: IsOver) -> list[SavedFile]:
        """All of them, or nothing stays."""
        before = self._bytes
        try:
            return [self._keep(path, is_over) for path in names]
        except (HoldfastError, OSError, ValueError):
            if self._bytes > before:
                self._books.blobs.forget(wanted(self._books))
                self._bytes = before
            raise

    def _keep(self, path: str, is_over: IsOver) -> SavedFile:
        if paths.to_text(paths.to_bytes(path)) != path:
            raise ValueError(f"{path!r} is no path")
        shared = self._books.workspace.shared is not None
        if shared:
            refuse_to_save(path, self._publication, self._books.workspace.files)
        with os.fdopen(self._open(path), "rb") as source:
            status = os.fstat(source.fileno())
            size = status.st_size  # and not its blocks: holes are read and hashed as well
            self._bytes += size + _BLOCK_BYTES
            if self._bytes > self._computer.limits.disk_bytes:
                raise ValueError("the run has saved more than the session's disk may hold")
            sha256, size = self._books.blobs.put_stream(_AsOpened(source, size, is_over))
            self._books.grown = True
        mode, files = stat.S_IMODE(status.st_mode), self._books.workspace.files
        mode = saved_mode(path, mode, self._publication, files) if shared else mode
        census = self._books.workspace.census
        saved = SavedFile(path=path, sha256=sha256, bytes=size, mode=mode)
        return replacing(saved, files, since_ns=census.at_ns if census is not None else None)

    def _open(self, path: str) -> int:
        """As the cell sees it: in its layer, or below it."""
        try:
            return open_file(self._computer.staging.path / "data", path)
        except (FileUnknown, FileNotFoundError):  # nothing was written to that layer yet
            return open_file(self._computer.workspace.files.area("data"), path)


class _AsOpened:
    """As much of a file as there was when it was opened, for as long as the run goes on."""

    def __init__(self, file: BinaryIO, size_bytes: int, is_over: IsOver) -> None:
        self._file = file
        self._left = size_bytes
        self._is_over = is_over

    def read(self, size: int, /) -> bytes:
        if self._is_over():
            raise ValueError("the run was to end before it was saved")
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        return data
