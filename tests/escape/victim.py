"""A session that is hit by what others do: it runs `1 + 1` all the time, and its waits are measured.

    with victim() as watched:          # of this process's home; `home=…`, or `url=…, token=…` of a server
        attack()
    assert not watched.is_held_up, str(watched)

A machine has noise of its own. So the same session is also watched while nothing is attacked, just before and just
after, for as long as the attack took: what counts is how much longer its longest wait became.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast import Session

MOST_HINDERED_S = 0.25
_IDLE_S, _MOST_IDLE_S = 0.8, 6.0
_WARM = 5
_NOISE = 2


class Watched:
    """The waits of a victim. All of them are known when its `with` block is over."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waits: list[tuple[float, float]] = []
        """When each run was asked for, and when its answer was there."""
        self._attack = (float("inf"), float("inf"))
        self._is_over = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run_on, name="victim")

    @property
    def longest_s(self) -> float:
        """The longest wait during the attack."""
        return max((end - start for start, end in self._waits if self._is_hit(start, end)), default=0.0)

    @property
    def idle_s(self) -> float:
        """The longest wait without it."""
        return max((end - start for start, end in self._waits if not self._is_hit(start, end)), default=0.0)

    @property
    def hindered_s(self) -> float:
        """How much longer the attack made the longest wait."""
        return max(0.0, self.longest_s - self.idle_s)

    @property
    def is_held_up(self) -> bool:
        """Whether the attack made the longest wait longer than a machine's own noise does. Where other work keeps the
        processors busy, a wait that nothing hinders already takes several times as long as on a quiet machine."""
        return self.hindered_s >= max(MOST_HINDERED_S, _NOISE * self.idle_s)

    def __str__(self) -> str:
        runs = sum(self._is_hit(start, end) for start, end in self._waits)
        took = self._attack[1] - self._attack[0]
        return f"a wait of {self.longest_s:.3f} s in {runs} runs during {took:.1f} s, {self.idle_s:.3f} s without"

    def _is_hit(self, start: float, end: float) -> bool:
        return start <= self._attack[1] and end >= self._attack[0]

    def _run_on(self) -> None:
        try:
            while not self._is_over.is_set():
                start = time.monotonic()
                run = self._session.run("1 + 1")
                self._waits.append((start, time.monotonic()))
                assert run.text == "2", run.error
        except Exception as error:
            self._failure = error

    @contextmanager
    def attacked(self) -> Iterator[None]:
        self._thread.start()
        try:
            time.sleep(_IDLE_S)
            began = time.monotonic()
            self._attack = (began, float("inf"))
            yield
            self._attack = (began, time.monotonic())
            time.sleep(min(max(_IDLE_S, self._attack[1] - began), _MOST_IDLE_S))
        finally:
            self._is_over.set()
            self._thread.join()
        if self._failure is not None:
            raise self._failure


@contextmanager
def victim(**where: Any) -> Iterator[Watched]:
    """Watch a new session of a home or server, which takes what `Session` takes, while the block attacks others."""
    with Session(**{"memory": "256M", "timeout": 120, **where}) as session:
        for _ in range(_WARM):
            session.run("1 + 1")
        watched = Watched(session)
        with watched.attacked():
            yield watched
