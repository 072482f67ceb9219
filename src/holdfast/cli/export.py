"""`holdfast export`: a session's files and receipts, or those of the jobs in a directory, to be verified anywhere.

The layout is in `evidence`. Only regular files are copied, into directories that are made for them: a link, a device
or a mode of the guest's has no place in what is handed on. Each file is hashed as it is copied, and the export is
verified as a whole before it is called one.
"""

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from holdfast import durable, evidence, manifest, paths, signing, verify
from holdfast.checks import few
from holdfast.cli import homes
from holdfast.cli.terminal import print_json
from holdfast.config import home_path
from holdfast.errors import DiskFull, FileUnknown, InvalidSetting, SessionUnknown, VerifyFailed
from holdfast.home import HIDDEN, JOURNAL
from holdfast.protected import is_protected
from holdfast.records import FileEntry
from holdfast.resources import descent
from holdfast.resources.workspace import remove_tree
from holdfast.statements import MANIFEST_NAME
from holdfast.store.sqlite import Store
from holdfast.verify import Report
from holdfast.visible import visible

_CHUNK = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def export(session: str, directory: Path, *, home: Path | None = None, as_json: bool = False) -> int:
    """Write a session to a new directory; 0, or the error says what is in the way."""
    where, path = home_path(home), Path(session).expanduser()
    if (path / HIDDEN / JOURNAL).exists():
        report = _export_shared(path.resolve(), directory.expanduser(), home=where)
    else:
        report = write_export(homes.resolve(where, session), directory.expanduser(), home=where)
    if as_json:
        print_json(report)
    else:
        print(f"{report.files} files and {report.receipts} receipts of session {report.session} are in {directory}")
        print(f"check them anywhere: holdfast verify {directory}")
        print(f"or by hand: cd {directory}/{evidence.FILES_NAME} && sha256sum -c ../{MANIFEST_NAME}")
        if found := _protected(directory.expanduser() / evidence.FILES_NAME):
            print(f"tools of yours run or obey these by themselves, look at them first: {few(found)}")
    return 0


def write_export(session: str, directory: Path, *, home: Path) -> Report:
    """The export, verified. It may be made beside the home's owner."""
    with closing(Store(home / JOURNAL, read_only=True)) as store, store.view():
        _refuse_without_receipts(store, session)
        _write(store, session, directory, files=home / "sessions" / session / "files" / "data", home=home)
    return _verified(directory, session)


def _export_shared(workspace: Path, directory: Path, *, home: Path) -> Report:
    """Of a directory that jobs were run in: its files are the session's."""
    with closing(Store(workspace / HIDDEN / JOURNAL, read_only=True)) as store, store.view():
        session = next((row.id for row in store.sessions()), "")
        _refuse_without_receipts(store, session)
        _write(store, session, directory, files=workspace, home=home)
    return _verified(directory, str(workspace))


def _write(store: Store, session: str, directory: Path, *, files: Path, home: Path) -> None:
    _make(directory)
    committed = store.files(session)
    with _whole(directory):
        (directory / evidence.RECEIPTS_NAME).mkdir()
        (directory / evidence.FILES_NAME).mkdir()
        (directory / evidence.KEY_NAME).write_bytes(signing.key_of_home(home).pem)
        if len(links := signing.chain_of_home(home)) > 1:
            (directory / evidence.CHAIN_NAME).write_bytes(msgspec.json.encode(links))
        (directory / MANIFEST_NAME).write_bytes(manifest.render(committed))
        for row in store.receipts(session):
            (directory / evidence.RECEIPTS_NAME / evidence.receipt_name(row.number)).write_bytes(row.envelope)
        _copy_files(files, directory / evidence.FILES_NAME, committed)


@contextmanager
def _whole(directory: Path) -> Iterator[None]:
    """All of it or nothing: what is half made would be in the way of the next try."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            remove_tree(directory)
        if isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in _NO_ROOM):
            raise DiskFull(
                f"the export has no room in {directory}",
                hint="free some, or name another; nothing is left of it",
            ) from error
        if isinstance(error, OSError):
            raise InvalidSetting(
                f"{directory} cannot be written: {error.strerror}", hint="name another directory"
            ) from error
        raise


def _verified(directory: Path, of: str) -> Report:
    report = verify.check(evidence.from_directory(directory))
    if not report.ok:
        raise VerifyFailed(f"the export does not verify: {report.problem}", hint=f"see `holdfast verify {of}`")
    return report


def _refuse_without_receipts(store: Store, session: str) -> None:
    row = store.session(session)
    if row is None:
        latest = ", ".join(each.id for each in store.sessions()[-5:]) or "none"
        raise SessionUnknown(f"this home has no session {session!r}", hint=f"the latest in it: {latest}")
    if not row.receipts:
        raise InvalidSetting(f"session {session} has no receipt yet", hint="run something in it first")


def _protected(files: Path) -> list[str]:
    """An export is complete, or nobody could check it. So it names what `holdfast run` would not have published."""
    with descent.Cursor(files) as cursor:
        found = [paths.to_text(b"/".join(parts)) for parts, _ in cursor.walk()]
    return [path for path in found if is_protected(path)]


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise InvalidSetting(f"{directory} is not empty", hint="name a directory that does not exist yet")
    except OSError as error:
        raise InvalidSetting(f"{directory} cannot be made: {error.strerror}", hint="name another directory") from error


def _copy_files(source: Path, target: Path, files: Mapping[str, FileEntry]) -> None:
    with descent.Cursor(target) as cursor:
        for path in sorted(files, key=paths.to_bytes):  # neighbours share their way
            parts = descent.split(path)
            _go_making(cursor, parts[:-1])
            _copy(source, files[path], name=parts[-1], directory=cursor.fd)


def _go_making(cursor: descent.Cursor, parts: descent.Parts) -> None:
    """Name by name, as a path may be longer than the system takes at once."""
    if cursor.go(parts):
        return
    for name in parts[len(cursor.at) :]:
        if descent.look(name, dir_fd=cursor.fd) is None:
            os.mkdir(name, dir_fd=cursor.fd)
        cursor.enter(name)


def _copy(source: Path, entry: FileEntry, *, name: bytes, directory: int) -> None:
    try:
        reading = descent.open_file(source, entry.path)
    except FileUnknown as error:
        raise _changed(entry) from error
    with durable.closing_fd(reading):
        writing = os.open(name, _NEW, 0o644, dir_fd=directory)
        with durable.closing_fd(writing):
            if _copy_hashing(reading, writing) != entry.sha256:
                raise _changed(entry)


def _copy_hashing(reading: int, writing: int) -> str:
    digest = hashlib.sha256()
    while chunk := os.read(reading, _CHUNK):
        digest.update(chunk)
        durable.write_all(writing, chunk)
    return digest.hexdigest()


def _changed(entry: FileEntry) -> VerifyFailed:
    return VerifyFailed(
        f"file {visible(entry.path)} is not what its receipt says",
        hint="if a run ended just now, export again into another directory; if you changed it, run a job first, which "
        "takes it in; otherwise `holdfast verify` says more",
    )
