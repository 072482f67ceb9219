"""Snapshots that sleep on while others are born: those that a session can go back to (`Session(undo=…)`).

Every snapshot is born on one socket, which the kernel has as well, and only one at a time may sleep there: nobody could
say who would hear a word that is sent to several. So the host gives a snapshot that is to sleep on a socket of its own,
a bed. It travels once, over the socket that the snapshot sleeps on by now, and the snapshot says on it that it sleeps.

1. Who lies in a bed is known by the number that Linux attests of that word. A thread of the kernel may steal the bed on
   its way; then the word has the wrong sender, or none comes, and the snapshot is given up.
2. Nobody else can reach a bed: the other end is ours, and who sleeps is not dumpable.
3. We send descriptors to guests, and never take one from them.
"""

import array
import signal
import socket
from contextlib import suppress

import anyio

from holdfast.kernel import framing
from holdfast.kernel.attested import hear_only_words, receive
from holdfast.kernel.happenings import Snapshot
from holdfast.kernel.pidfds import Pidfds

_LYING_DOWN_S = 2.0
_BURIAL_S = 5.0


class Beds:
    """The snapshots of one session that sleep apart, in the order of their birth."""

    def __init__(self, wake: socket.socket, pidfds: Pidfds) -> None:
        self._wake = wake
        self._pidfds = pidfds
        self._lines: dict[Snapshot, socket.socket] = {}

    def sleepers(self) -> list[Snapshot]:
        return list(self._lines)

    async def lay(self, snapshot: Snapshot) -> bool:
        """Give the one that sleeps where all are born a bed of its own. False: it is not to be had, and was buried:
        it would hear what is meant for the next."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        hear_only_words(ours)
        lies = False
        try:
            self._pidfds.signal(snapshot.pid, signal.SIGCONT)  # user code may have stopped it
            with theirs, suppress(OSError):
                rights = array.array("i", [theirs.fileno()])
                self._wake.sendmsg([b"bed"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            with anyio.move_on_after(_LYING_DOWN_S), suppress(OSError, framing.ProtocolViolation):
                await anyio.wait_readable(ours)
                lies = receive(ours, 64) == (b"asleep", snapshot.pid)
        finally:
            if lies:
                self._lines[snapshot] = ours
            else:
                ours.close()
                with anyio.CancelScope(shield=True):
                    await self.bury(snapshot)
        return lies

    def wake(self, snapshot: Snapshot) -> None:
        """The word, and the end of the bed. Raises OSError if nobody is there to hear it."""
        with self._lines.pop(snapshot) as line:
            self._pidfds.signal(snapshot.pid, signal.SIGCONT)
            line.send(b"wake")

    def forget(self, pid_inside: int) -> None:
        """Reaped: user code may kill whom it likes of its own."""
        for snapshot in self.sleepers():
            if snapshot.pid_inside == pid_inside:
                self._lines.pop(snapshot).close()
                self._pidfds.part_from(snapshot.pid)

    async def bury(self, snapshot: Snapshot | None) -> None:
        """Kill it and wait until it is gone: who is frozen while he dies keeps his memory until the thaw."""
        if snapshot is not None and (line := self._lines.pop(snapshot, None)) is not None:
            line.close()
        if snapshot is None or snapshot.pid not in self._pidfds:
            return
        self._pidfds.signal(snapshot.pid, signal.SIGKILL)
        with anyio.move_on_after(_BURIAL_S):
            await anyio.wait_readable(self._pidfds[snapshot.pid])
        self._pidfds.part_from(snapshot.pid)

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines.clear()
