"""Files on their way to a session. What has arrived of them counts against its disk before it is part of it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import DiskLimit
from holdfast.sessions import LiveSession


class Uploads:
    """The bytes of uploads under way, by session."""

    def __init__(self) -> None:
        self._bytes: Counter[LiveSession] = Counter()

    @contextmanager
    def counted(self, session: LiveSession) -> Iterator["Upload"]:
        upload = Upload(self._bytes, session)
        try:
            yield upload
        finally:
            upload.forget()


class Upload:
    """One of them."""

    def __init__(self, totals: Counter[LiveSession], session: LiveSession) -> None:
        self._totals, self._session = totals, session
        self._arrived = 0

    def add(self, size_bytes: int) -> None:
        """A piece, or a refusal: all that arrives for a session at once must find room on its disk."""
        self._arrived += size_bytes
        self._totals[self._session] += size_bytes
        if self._totals[self._session] > self._session.computer.disk.left_bytes:
            raise DiskLimit(
                "what is sent is larger than what is left of the session's disk limit",
                hint="remove files first, or open a session with a larger disk; uploads at one time count together",
            )

    def forget(self) -> None:
        self._totals[self._session] -= self._arrived
        if not self._totals[self._session]:
            del self._totals[self._session]
