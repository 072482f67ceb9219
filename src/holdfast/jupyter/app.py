"""The kernel's process: how it starts, and how it ends.

It ends when Jupyter says so (`shutdown_request`), by SIGTERM or SIGHUP, and when the process that started it is gone.
In each case the session is ended first, and no process, cgroup or file of it is left. SIGINT interrupts the cell, as it
does everywhere in Jupyter. What this process prints goes to Jupyter's log and never into a notebook.
"""

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

from ipykernel.kernelapp import IPKernelApp
from tornado import ioloop
from traitlets import Unicode

from holdfast.jupyter.desk import Desk
from holdfast.jupyter.kernel import HoldfastKernel
from holdfast.jupyter.settings import Chosen

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_LAST_WORDS_S = 10.0


class KernelApp(IPKernelApp):
    """`IPKernelApp` without what is meant for code that runs in this process."""

    name = "holdfast-kernel"
    # Clients know lines of a kernel's log by this prefix, and leave them out.
    log_format = Unicode("[IPKernelApp]%(highlevel)s %(message)s").tag(config=True)

    def __init__(self, *, chosen: Chosen, **traits: Any) -> None:
        # No captured stdout, and nothing imported from the notebook's directory.
        super().__init__(kernel_class=HoldfastKernel, outstream_class=None, ignore_cwd=True, **traits)
        self.desk = Desk(chosen)
        self._ending: asyncio.Task[None] | None = None

    def init_poller(self) -> None:
        """Not ipykernel's, which ends the process on the spot: see `_watch_parent`."""

    def init_pdb(self) -> None:
        pass

    def init_control(self, context: Any) -> None:
        super().init_control(context)
        self.shell_channel_thread = None  # for subshells, which one sandbox with one kernel cannot have

    def start(self) -> None:
        loop: asyncio.AbstractEventLoop = ioloop.IOLoop.current().asyncio_loop  # type: ignore[attr-defined]
        for number in _ENDING:
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGINT, lambda: loop.create_task(self.desk.interrupt()))
        self._watch_parent(loop)
        super().start()
        self._wait_for_control()

    def _wait_for_control(self) -> None:
        """Its last message is on its way: to an IOPub thread that has ended already it would be sent for ever."""
        if self.control_thread.is_alive():
            self.control_thread.stop()
            self.control_thread.join(_LAST_WORDS_S)

    def _watch_parent(self, loop: asyncio.AbstractEventLoop) -> None:
        """`JPY_PARENT_PID` is whoever manages this kernel; started by hand, it has nobody to end with."""
        if self.parent_handle <= 1:
            return
        for pid in (self.parent_handle, os.getppid()):  # the first may be a number of another pid namespace
            with suppress(OSError):
                loop.add_reader(os.pidfd_open(pid), self._end)
                return

    def _end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end_session())

    async def _end_session(self) -> None:
        try:
            await self.desk.close()
        finally:
            self.io_loop.stop()
