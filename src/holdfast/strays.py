"""What a request, or a whole kernel, leaves running when it is over: killed, and what it was is told.

A process that Linux hangs on, inside a system call, outlives its SIGKILL. It will run no code of the user's any more;
but what it had begun it may still do to the files and the memory that it shares. So nothing of its run is kept, and
nobody waits for it twice: its cgroup stays behind, for whoever opens the home next.
"""

from collections.abc import Collection

import anyio.to_thread

from holdfast.errors import ProcessStuck
from holdfast.model import Stray
from holdfast.sandbox.cgroups import Cgroup, Killed, Tree, Unkillable
from holdfast.sandbox.cgroups.contract import DEATH_S

_MOST_THREADS = 100
_MOST_PIDS = 10
_NAME_LENGTH = 200


async def kill_left(cgroup: Cgroup, *, keep: Collection[int]) -> list[Killed]:
    """All but those that are kept. Raises ProcessStuck."""
    if not set(cgroup.pids()) - set(keep):
        return []
    try:
        return await anyio.to_thread.run_sync(lambda: cgroup.kill_except(keep))
    except Unkillable as error:
        raise _stuck(error) from error


async def discard(cgroup: Cgroup, *, patience_s: float = DEATH_S) -> None:
    """Kill all that is in it, and remove it. Raises ProcessStuck, and then it stays."""

    def end() -> None:
        cgroup.thaw()
        try:
            cgroup.kill_all(deadline_s=patience_s)
        except Unkillable as error:
            cgroup.abandon()
            raise _stuck(error) from error
        cgroup.remove()

    await anyio.to_thread.run_sync(end)


async def sweep(tree: Tree) -> None:
    """What an owner that was killed left running. Raises ProcessStuck."""
    try:
        await anyio.to_thread.run_sync(tree.sweep)
    except Unkillable as error:
        raise _stuck(error) from error


async def remove(tree: Tree) -> None:
    """An owner's tree. Where something still hangs in it, it is left to the next owner."""
    await anyio.to_thread.run_sync(lambda: None if tree.existing() else tree.remove())


def strays(killed: list[Killed], threads: list[str], tasks: list[str]) -> list[Stray]:
    """In words."""
    processes = [Stray(kind="process", name=_plain(process.command), outcome="killed") for process in killed]
    frozen = [Stray(kind="thread", name=name[:_NAME_LENGTH], outcome="frozen") for name in threads[:_MOST_THREADS]]
    waiting = [Stray(kind="task", name=name[:_NAME_LENGTH], outcome="frozen") for name in tasks[:_MOST_THREADS]]
    return processes + frozen + waiting


def _plain(command: str) -> str:
    """A command as its user knows it: a fork of the kernel has the zygote's command line."""
    return "python (a fork of the kernel)" if "holdfast.kernel.zygote" in command else command


def _stuck(error: Unkillable) -> ProcessStuck:
    pids = ", ".join(str(pid) for pid in error.survivors[:_MOST_PIDS])
    return ProcessStuck(
        f"Linux does not end what was killed: it hangs inside a system call (pid {pids})",
        hint="root sees which by `cat /proc/<pid>/stack`; it ends when that returns, or with the machine. Run it again",
    )
