"""The home directory, and that it has one owner.

    lock        held by flock for as long as the owner lives; its text names the owner
    epoch       counts owners: what a former one left behind carries a lower number
    id          names this home towards the outside (cgroups), for ever
    journal.sqlite3   every run of every session
    keys/       what receipts are signed with, and the hashes of API keys; no guest ever sees it
    sessions/   one directory per session
    envs/       the guests' environments
    logs/       what zygotes printed, and what the server said
    socket      where the home's server listens, if it has one
    starting.lock     held by whoever starts that server (`shared`)
    mcp/        which session an MCP client of a name had
    jobs/       in which directories of the user's a job is under way (`underway`)
    repl-history      what was typed at `holdfast repl`
    root/       empty; zygotes build the guests' root on it, each in a mount namespace of its own

A directory of the user's that jobs run in (`acquire_shared`) has a small home of its own in its `.holdfast`, with the
journal and the sessions' directories; keys and environments stay in the user's home.

Whoever holds the lock may sweep: no live owner holds what is there. The lock falls with the owner, also by SIGKILL.
"""

import errno
import fcntl
import os
import pwd
import secrets
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from holdfast.errors import HomeBusy, InvalidSetting
from holdfast.resources import descent
from holdfast.resources.workspace import Workspace

JOURNAL = "journal.sqlite3"
SOCKET = "socket"
HIDDEN = os.fsdecode(descent.HIDDEN)
_SHARED_DIRECTORIES = ("sessions", "logs", "root")
_DIRECTORIES = (*_SHARED_DIRECTORIES, "envs")
_OTHER_HOME = "end that process, or use another home: HOLDFAST_HOME=… or home=…"


class Home:
    """An owned home. `release` gives it up."""

    def __init__(self, path: Path, lock_fd: int, *, shared: Path | None = None, parent: Path | None = None) -> None:
        self.path = path
        self.shared = shared
        """The directory of the user's that is the sessions' /mnt/data; None: each has one of its own."""
        self.shared_identity = None if shared is None else descent.identity_of(shared.stat())
        """Which directory that was when we came to own it: whatever is found there later must be the same."""
        self.parent = parent or path
        """Where keys and environments are."""
        self._lock_fd = lock_fd
        self.id = _read_or_make(path / "id", lambda: secrets.token_hex(4))
        self.epoch = int(_read_or_make(path / "epoch", lambda: "0")) + 1
        _replace(path / "epoch", str(self.epoch))
        # A forked child of the host application must not keep the lock when the host is gone.
        os.register_at_fork(after_in_child=self._let_go)

    @property
    def sessions(self) -> Path:
        return self.path / "sessions"

    def workspace(self, session: str) -> Workspace:
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
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def acquire(path: Path) -> Home:
    """Become the owner of a home, making it if need be."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o755)
        return Home(path, _own(path, _DIRECTORIES, hint=_OTHER_HOME))
    except OSError as error:
        raise InvalidSetting(
            f"{path} cannot be a home: {error.strerror}", hint="name another: HOLDFAST_HOME or home="
        ) from error


def acquire_shared(directory: Path, parent: Path) -> Home:
    """Become the one who runs jobs in a directory of the user's, whose home is `parent`."""
    refuse_unfit(directory, parent)
    path = directory / HIDDEN
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        _refuse_foreign(path)
        _write(path / ".gitignore", "*\n")
        lock = _own(path, _SHARED_DIRECTORIES, hint="wait for it, or end that process")
        return Home(path, lock, shared=directory, parent=parent)
    except OSError as error:
        raise InvalidSetting(
            f"{path} cannot be written: {error.strerror}",
            hint="run the job in a directory of your own: --workspace DIR",
        ) from error


def shared_id(directory: Path) -> str | None:
    """The id of what jobs left in a directory, if that is ours; nothing is made or changed."""
    try:
        _refuse_foreign(directory / HIDDEN)
        return _read(directory / HIDDEN / "id").strip()
    except (OSError, InvalidSetting):
        return None


def _refuse_foreign(path: Path) -> None:
    """Who can write there says what was run, and leads whoever trusts it to write anywhere by a link."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        what = "a link" if stat.S_ISLNK(status.st_mode) else "no directory"
        raise NotADirectoryError(errno.ENOTDIR, f"it is {what}")
    why = (
        f"it belongs to user {status.st_uid}, and you are {os.geteuid()}" if status.st_uid != os.geteuid()
        else "others can write to it" if status.st_mode & 0o022
        else ""
    )  # fmt: skip
    if why:
        raise InvalidSetting(
            f"{path} is not yours alone: {why}",
            hint="run the job as the user who ran the others there; or, if you know what is in it, remove it",
        )


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


def _own(path: Path, directories: Iterable[str], *, hint: str) -> int:
    """The lock, held."""
    for name in directories:
        (path / name).mkdir(exist_ok=True, mode=0o755)
    lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock_fd, 64, 0).decode(errors="replace").strip() or "another process"
        os.close(lock_fd)
        raise HomeBusy(f"{path} is in use by {owner}", hint=hint) from None
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"process {os.getpid()}\n".encode(), 0)
    return lock_fd


def _read_or_make(path: Path, make: Callable[[], str]) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        text = make()
        _replace(path, text)
        return text


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    _write(temporary, text + "\n")
    temporary.replace(path)


def _read(path: Path) -> str:
    """A short text; never from where a link points, nor waiting for a FIFO."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), errors="replace") as file:
        return file.read(256)


def _write(path: Path, text: str) -> None:
    """Never to where a link points."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(file, "w") as opened:
        opened.write(text)
