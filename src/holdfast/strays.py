"""What a request leaves running when it is over: processes are killed, and what they were is told; so are threads."""

from collections.abc import Collection

import anyio.to_thread

from holdfast.model import Stray
from holdfast.sandbox.cgroups import Cgroup, Killed

_MOST_THREADS = 100
_NAME_LENGTH = 200


async def kill_left(cgroup: Cgroup, *, keep: Collection[int]) -> list[Killed]:
    """All but those that are kept."""
    return await anyio.to_thread.run_sync(lambda: cgroup.kill_except(keep)) if set(cgroup.pids()) - set(keep) else []


def strays(killed: list[Killed], threads: list[str]) -> list[Stray]:
    """In words."""
    processes = [Stray(kind="process", name=_plain(process.command), outcome="killed") for process in killed]
    frozen = [Stray(kind="thread", name=name[:_NAME_LENGTH], outcome="frozen") for name in threads[:_MOST_THREADS]]
    return processes + frozen


def _plain(command: str) -> str:
    """A command as its user knows it: a fork of the kernel has the zygote's command line."""
    return "python (a fork of the kernel)" if "holdfast.kernel.zygote" in command else command
