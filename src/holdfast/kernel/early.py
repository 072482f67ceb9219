"""What a kernel does while no run is conducted. The next run learns of it, as far as that goes.

Threads print between two runs, and so may whatever a question runs of the user's own (`__sizeof__`, hooks). It is read
all the same, or the kernel could not answer; the first of it is shown by the next run, which does not pay for it, and
the rest is dropped: nobody asked for it, and it must not grow in the host. A thread that saves waits for the next run.
"""

from collections.abc import Sequence

from holdfast.kernel import wire
from holdfast.kernel.happenings import Died, Gone, Happening, Printed

_MOST_BYTES = 16 << 20
"""More than a thread can write while its session is put to rest: that is not to be lost."""
_PIECE_BYTES = 64 << 10
_MOST_PIECES = 512


def keep(early: list[Happening], events: Sequence[Happening]) -> None:
    """Add to what is kept already. Messages that answer nothing are none of the next run's."""
    room = _MOST_BYTES - sum(len(event.data) for event in early if isinstance(event, Printed))
    for event in events:
        if isinstance(event, (Died, Gone)) or (isinstance(event, wire.Saving) and not _saves(early)):
            early.append(event)
        elif isinstance(event, Printed) and room > 0:
            last, data = early[-1] if early else None, event.data[:room]
            room -= len(data)
            if isinstance(last, Printed) and last.stream == event.stream and len(last.data) < _PIECE_BYTES:
                early[-1] = Printed(event.stream, last.data + data)
            elif len(early) < _MOST_PIECES:
                early.append(Printed(event.stream, data))


def _saves(early: Sequence[Happening]) -> bool:
    """Whether a save waits already. An honest kernel asks for no other before that is answered."""
    return any(isinstance(event, wire.Saving) for event in early)


def is_lost(early: Sequence[Happening]) -> bool:
    return any(isinstance(event, (Died, Gone)) for event in early)
