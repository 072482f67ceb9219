"""The home directory, and that it has one owner.

    lock        held by flock for as long as the owner lives; its text names the owner
    epoch       counts owners: what a former one left behind carries a lower number
    id          names this home towards the outside (cgroups), for ever
    journal.sqlite3   every run of every session
    keys/       what receipts are signed with; no guest ever sees it
    sessions/   one directory per session
    envs/       the guests' environments
    logs/       what zygotes printed
    root/       empty; zygotes build the guests' root on it, each in a mount namespace of its own

Whoever holds the lock may sweep: no live owner holds what is there. The lock falls with the owner, also by SIGKILL.
"""

import fcntl
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import HomeBusy, InvalidSetting

_DIRECTORIES = ("sessions", "envs", "logs", "root")


class Home:
    """An owned home. `release` gives it up."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self.id = _read_or_make(path / "id", lambda: secrets.token_hex(4))
        self.epoch = int(_read_or_make(path / "epoch", lambda: "0")) + 1
        _replace(path / "epoch", str(self.epoch))
        # A forked child of the host application must not keep the lock when the host is gone.
        os.register_at_fork(after_in_child=self._let_go)

    @property
    def sessions(self) -> Path:
        return self.path / "sessions"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def journal(self) -> Path:
        return self.path / "journal.sqlite3"

    @property
    def keys(self) -> Path:
        return self.path / "keys"

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
        for name in _DIRECTORIES:
            (path / name).mkdir(exist_ok=True, mode=0o755)
        lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidSetting(
            f"{path} cannot be a home: {error.strerror}", hint="name another: HOLDFAST_HOME or home="
        ) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock_fd, 64, 0).decode(errors="replace").strip() or "another process"
        os.close(lock_fd)
        raise HomeBusy(
            f"{path} is in use by {owner}",
            hint="end that process, or use another home: HOLDFAST_HOME=… or home=…",
        ) from None
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"process {os.getpid()}\n".encode(), 0)
    return Home(path, lock_fd)


def _read_or_make(path: Path, make: Callable[[], str]) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        text = make()
        _replace(path, text)
        return text


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text + "\n")
    temporary.replace(path)
