"""Who asks a run to end. What the kernel is at hears of it; between two parts of a run, what comes next."""

from collections.abc import Callable

from holdfast.kernel.conduct import Conduct
from holdfast.kernel.outcomes import Stop
from holdfast.model import RunError

IsFollowed = Callable[[RunError | None], bool]
"""Whether more of a run is to come after a part of it that ended so."""


def never(error: RunError | None) -> bool:
    return False


class Stops:
    """Guards what of a session can be asked to end, and whether anything can."""

    def __init__(self) -> None:
        self._conduct: Conduct | None = None
        self._is_next = False
        self._early: Stop | None = None

    def ask(self, stop: Stop) -> bool:
        """Ask what runs to end, or what is about to; False if there is nothing of the kind."""
        if self._conduct is not None:
            self._conduct.stop(stop)
        elif self._is_next:
            self._early = self._early or stop
        return self._conduct is not None or self._is_next

    def expect(self, is_next: bool) -> None:
        """Whether something is about to run."""
        self._is_next, self._early = is_next, self._early if is_next else None

    def begin(self, conduct: Conduct) -> None:
        """It runs; unless somebody has asked for its end already, of which it hears first."""
        self._conduct = conduct
        if self._early is not None:
            conduct.stop(self._early)
        self.expect(False)

    def end(self) -> None:
        self._conduct = None
