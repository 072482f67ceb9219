"""The sockets that a server listens on."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.errors import InvalidSetting
from holdfast.sockets import KEEPALIVE, address_of

BACKLOG = 1024


def listen_tcp(host: str, port: int) -> socket.socket:
    """Port 0 takes a free one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidSetting(f"--host {host}: {error.strerror}", hint="name an address of this machine") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for level, option, value in KEEPALIVE:
            listening.setsockopt(level, option, value)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise InvalidSetting(
            f"{host}:{port} cannot be listened on: {error.strerror}", hint="name another: --port 0 takes a free one"
        ) from error
    return listening


@contextmanager
def listen_unix(path: Path) -> Iterator[socket.socket]:
    """For our user alone, and gone afterwards. A socket that nobody listens on any more is replaced."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with address_of(path) as address:
            _clear(path, address)
            mask = os.umask(0o177)
            try:
                listening.bind(address)
            finally:
                os.umask(mask)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise InvalidSetting(f"{path} cannot be listened on: {error.strerror}", hint="name another path") from error
    ours = _identity(path)
    try:
        yield listening
    finally:
        listening.close()
        with suppress(OSError):  # a disk that is read-only by now; whoever listens there next replaces it
            if _identity(path) == ours:  # and not that of who came after us
                path.unlink()


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _clear(path: Path, address: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise InvalidSetting(f"{path} is there, and is no socket", hint="name another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(address)
        except OSError:  # its owner is gone
            path.unlink(missing_ok=True)
            return
    raise InvalidSetting(f"somebody listens on {path}", hint="name another path, or end that server")
