"""The home directory, and that it has one owner.

    lock        its text names the owner
    epoch       counts owners: what a former one left behind carries a lower number
    id          names this home towards the outside (cgroups)
    place       which directory has that id: a copy takes another (`identity`)
    journal.sqlite3   every run of every session
    journal.seen      how far the journal was when it was written last (`store.accidents`)
    keys/       what receipts are signed with, and the hashes of API keys; no guest ever sees it
    sessions/   one directory per session
    lost+found/ what was found and belongs to no session that the journal knows
    envs/       the guests' environments
    logs/       what zygotes printed, and what the server said
    socket      where the home's server listens, if it has one
    starting.lock     held by whoever starts that server (`shared`)
    mcp/        which session an MCP client of a name had
    jobs/       in which directories of the user's a job is under way (`underway`)
    repl-history      what was typed at `holdfast repl`
    root/       empty; zygotes build the guests' root on it, each in a mount namespace of its own
    mark        in a `.holdfast`: that the user's own home made it (`marks`)

A directory of the user's that jobs run in (`acquire_shared`) has a small home of its own in its `.holdfast`, with the
journal and the sessions' directories; keys and environments stay in the user's home. It may have come with the
directory, from anybody: nothing in it is believed before its mark is, and no link in it is followed.

The lock is the directory's own (flock): the file `lock` can be deleted, and only keeps out earlier versions. Whoever
holds the lock may sweep: no live owner holds what is there. The lock falls with the owner, also by SIGKILL.
"""

import errno
import fcntl
import logging
import os
import pwd
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from holdfast import durable, marks
from holdfast.errors import HoldfastError, HomeBusy, InvalidSetting, SessionUnknown
from holdfast.identity import Identity, identity_of
from holdfast.resources import descent
from holdfast.resources.workspace import Workspace, refuse_foreign
from holdfast.signing import SigningKey
from holdfast.store.sqlite import Store

JOURNAL = "journal.sqlite3"
SOCKET = "socket"
HIDDEN = os.fsdecode(descent.HIDDEN)
_SHARED_DIRECTORIES = ("sessions", "logs", "root")
_DIRECTORIES = (*_SHARED_DIRECTORIES, "envs")
_log = logging.getLogger("holdfast.home")
_ID = re.compile(r"[0-9a-f]{8}")
_SESSION_ID = re.compile(r"[0-9a-f]{10}")
PLACE = "place"
_LOCK_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHER_HOME = "end that process, or use another home: HOLDFAST_HOME=… or home=…"


class Home:
    """An owned home. `release` gives it up."""

    def __init__(self, path: Path, locks: list[int], *, shared: Path | None = None, parent: Path | None = None) -> None:
        self.path = path
        self.shared = shared
        """The directory of the user's that is the sessions' /mnt/data; None: each has one of its own."""
        self.shared_identity = None if shared is None else descent.identity_of(shared.stat())
        """Which directory that was when we came to own it: whatever is found there later must be the same."""
        self.parent = parent or path
        """Where keys and environments are."""
        self._locks = locks
        durable.sweep(path)
        if shared is None:  # in a directory of the user's the mark tells a copy, and refuses it
            _take_new_id_if_copied(path, locks[0])
        self.id = _id_of(path)
        self.epoch = _count(path / "epoch") + 1
        _replace(path / "epoch", str(self.epoch))
        # A forked child of the host application must not keep the lock when the host is gone.
        os.register_at_fork(after_in_child=self._let_go)

    @property
    def sessions(self) -> Path:
        return self.path / "sessions"

    def workspace(self, session: str) -> Workspace:
        """Of a session by its id, which a journal may say or a caller: what is none leads nowhere."""
        if not is_session_id(session):
            raise SessionUnknown(f"no session {session!r} is in this home", hint="`holdfast ps` lists them")
        return Workspace(self.sessions / session, shared=self.shared, identity=self.shared_identity)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL

    @property
    def keys(self) -> Path:
        return self.parent / "keys"

    @property
    def root(self) -> Path:
        return self.path / "root"

    def release(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        while self._locks:
            os.close(self._locks.pop())


def is_session_id(text: str) -> bool:
    """Whether it has the form of one: it becomes a directory's name.

    >>> is_session_id("0f3c48b2a1"), is_session_id("../project")
    (True, False)
    """
    return _SESSION_ID.fullmatch(text) is not None


def acquire(path: Path) -> Home:
    """Become the owner of a home, making it if need be. Links in it are its owner's own."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o755)
        for name in _DIRECTORIES:
            (path / name).mkdir(exist_ok=True, mode=0o755)
        with _owned(path, hint=_OTHER_HOME) as locks:
            return Home(path, locks)
    except OSError as error:
        raise InvalidSetting(
            f"{path} cannot be a home: {error.strerror}", hint="name another: HOLDFAST_HOME or home="
        ) from error


def acquire_shared(directory: Path, parent: Path) -> Home:
    """Become the one who runs jobs in a directory of the user's, whose home is `parent`."""
    refuse_unfit(directory, parent)
    path, key = directory / HIDDEN, signing_key(parent)
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        refuse_foreign(path)
        with _owned(path, hint="wait for it, or end that process") as locks:
            _make_or_believe(path, key)
            return Home(path, locks, shared=directory, parent=parent)
    except OSError as error:
        raise InvalidSetting(
            f"{path} cannot be written: {error.strerror}",
            hint="run the job in a directory of your own: --workspace DIR",
        ) from error


def signing_key(home: Path) -> SigningKey:
    """Of the user's home, which nobody may have had to write to before."""
    try:
        return SigningKey.load_or_create(home / "keys", has_signed=lambda: _has_receipts(home / JOURNAL))
    except OSError as error:
        raise InvalidSetting(
            f"{home} cannot be a home: {error.strerror}", hint="name another: HOLDFAST_HOME or home="
        ) from error


def _has_receipts(journal: Path) -> bool:
    """Whether a key of this home signed anything. A journal that cannot be read may have what was signed."""
    try:
        with closing(Store(journal, read_only=True)) as store:
            return any(row.receipts for row in store.sessions())
    except InvalidSetting:
        return False
    except HoldfastError:
        return True


def _make_or_believe(path: Path, key: SigningKey) -> None:
    """We hold the lock. What is believed of a `.holdfast` that was here is only what we wrote there ourselves."""
    if marks.is_new(path, JOURNAL):
        durable.sweep(path)
        durable.write_file(path / ".gitignore", b"*\n", mode=0o644)
        durable.write_file(path / "id", f"{secrets.token_hex(4)}\n".encode(), mode=0o644)
        durable.write_file(path / JOURNAL, b"")
        marks.make(path, _id_of(path), JOURNAL, key)
    marks.refuse_unmarked(path, shared_id(path.parent) or "", JOURNAL, key)
    for name in _SHARED_DIRECTORIES:
        with suppress(FileExistsError):
            (path / name).mkdir(mode=0o755)
        refuse_foreign(path / name)


def shared_id(directory: Path) -> str | None:
    """The id of what jobs left in a directory, if that is ours; nothing is made or changed."""
    try:
        refuse_foreign(directory / HIDDEN)
        return _read(directory / HIDDEN / "id").strip()
    except (OSError, InvalidSetting):
        return None


def refuse_unfit(directory: Path, home: Path) -> None:
    """Directories whose every file a job could change, and that nobody means."""
    why = (
        "it is all there is" if directory == Path("/")
        else "it is your home directory" if directory in _users_homes()
        else "Holdfast's own home is in it" if home.resolve().is_relative_to(directory)
        else "it is in Holdfast's own home" if directory.is_relative_to(home.resolve())
        else f"it is in {HIDDEN}, which is Holdfast's own" if HIDDEN in directory.parts
        else "its name is no text" if os.fsencode(directory).decode(errors="replace") != str(directory)
        else ""
    )  # fmt: skip
    if why:
        raise InvalidSetting(
            f"{directory} cannot be a workspace: {why}", hint="name another: cd there, or --workspace DIR"
        )


def _users_homes() -> set[Path]:
    """By the environment, and by the system's own list, which need not know everybody."""
    named = [os.environ["HOME"]] if os.environ.get("HOME") else []
    with suppress(KeyError):
        named.append(pwd.getpwuid(os.geteuid()).pw_dir)
    return {Path(name).resolve() for name in named}


@contextmanager
def _owned(path: Path, *, hint: str) -> Iterator[list[int]]:
    """The locks, held; given up again if what is done with them fails."""
    locks = [os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        _lock(locks[0], path, hint=hint)
        locks.append(os.open(path / "lock", _LOCK_FILE, 0o600))
        _refuse_other_names(locks[1])
        _lock(locks[1], path, hint=hint)
        os.ftruncate(locks[1], 0)
        os.pwrite(locks[1], f"process {os.getpid()}\n".encode(), 0)
        yield locks
    except BaseException:
        for lock in locks:
            os.close(lock)
        raise


def _lock(lock: int, path: Path, *, hint: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = ""
        with suppress(OSError):
            owner = _read(path / "lock").strip()
        raise HomeBusy(f"{path} is in use by {owner or 'another process'}", hint=hint) from None


def _refuse_other_names(file: int) -> None:
    """Whatever has another name is more than a lock of ours, and is not ours to write to."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise FileExistsError(errno.EEXIST, "its lock is something else")


def _take_new_id_if_copied(path: Path, directory: int) -> None:
    """Two homes with one id would share cgroups, and the start of one would end what runs in the other."""
    now, noted = identity_of(directory), _noted_place(path)
    if noted == now:
        return
    if noted is not None and not noted.is_same(now) and (path / "id").exists():
        _replace(path / "id", secrets.token_hex(4))
        _log.warning("%s is a copy, or was moved to another disk: it has a new id now", path)
    durable.write_file(path / PLACE, msgspec.json.encode(now), mode=0o644)


def _noted_place(path: Path) -> Identity | None:
    """None: an earlier version had the home, or a power cut left nothing of it."""
    try:
        return msgspec.json.decode(_read(path / PLACE), type=Identity)
    except (OSError, msgspec.DecodeError):
        return None


def _id_of(path: Path) -> str:
    found = _read_or_make(path / "id", lambda: secrets.token_hex(4))
    if not _ID.fullmatch(found):  # it becomes a directory's name, and what runs in that is killed
        raise InvalidSetting(f"{path / 'id'} is no id of a home", hint="restore it from a backup, or name another home")
    return found


def _read_or_make(path: Path, make: Callable[[], str]) -> str:
    """A file that is empty, or of zeros, is what a power cut may have left of one."""
    with suppress(FileNotFoundError):
        if text := _read(path).strip("\0 \n"):
            return text
    text = make()
    _replace(path, text)
    return text


def _count(path: Path) -> int:
    """0 where nothing was counted, or a power cut left nothing of it."""
    with suppress(FileNotFoundError, ValueError):
        return int(_read(path))
    return 0


def _replace(path: Path, text: str) -> None:
    durable.write_file(path, f"{text}\n".encode(), mode=0o644)


def _read(path: Path) -> str:
    """A short text; never from where a link points, nor waiting for a FIFO."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), errors="replace") as file:
        return file.read(256)
