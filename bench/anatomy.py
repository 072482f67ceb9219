"""Where the time of a session's start goes, as the host sees it: its own steps, timed one by one.

The host waits for two processes: the zygote (fork pid 1, namespaces, mounts, ids) until it answers, then the kernel
(second fork, privileges, seccomp) until it is ready. What lies within those two waits only a tracer can tell.
"""

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from statistics import median
from typing import Any

from holdfast import Session
from holdfast.kernel.client import Kernel
from holdfast.nodes.local import Line, LocalNode
from holdfast.resources.workspace import Workspace
from holdfast.service import Service

_STEPS: dict[str, tuple[type, str]] = {
    "the session's directories": (Workspace, "create"),
    "zygote: fork pid 1, cgroup, namespaces, mounts, ids": (Line, "ask"),
    "kernel: second fork, privileges, seccomp, first message": (Kernel, "wait_ready"),
}
_AROUND: dict[str, tuple[type, str]] = {
    "fork": (LocalNode, "fork"),
    "create": (Service, "create_session"),
}


def of_a_start(repetitions: int) -> dict[str, float]:
    """Median milliseconds per step.

    What lies between the steps is taken per start, before any median: one step waits for the kernel's RCU now and
    then, and medians of such times must not be subtracted from each other.
    """
    starts = [_one_start() for _ in range(repetitions)]
    return {step: median(start[step] for start in starts) for step in starts[0]}


def _one_start() -> dict[str, float]:
    taken: dict[str, float] = {}
    with ExitStack() as patches:
        for name, (owner, method) in {**_STEPS, **_AROUND}.items():
            patches.enter_context(_timed(owner, method, partial(taken.__setitem__, name)))
        started = time.perf_counter()
        with Session():
            whole = (time.perf_counter() - started) * 1000
    steps = {name: taken[name] for name in _STEPS}
    directories, zygote, ready = steps.values()
    steps["cgroup: made and limited, descriptors"] = taken["fork"] - zygote - ready
    steps["freeze, and the service's book-keeping"] = taken["create"] - taken["fork"] - directories
    steps["caller's thread to the engine's and back"] = whole - taken["create"]
    return steps


@contextmanager
def _timed(owner: type, method: str, note: Callable[[float], None]) -> Iterator[None]:
    original = getattr(owner, method)

    @wraps(original)
    async def timed_async(*args: Any, **keywords: Any) -> Any:
        started = time.perf_counter()
        try:
            return await original(*args, **keywords)
        finally:
            note((time.perf_counter() - started) * 1000)

    @wraps(original)
    def timed(*args: Any, **keywords: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(*args, **keywords)
        finally:
            note((time.perf_counter() - started) * 1000)

    setattr(owner, method, timed_async if inspect.iscoroutinefunction(original) else timed)
    try:
        yield
    finally:
        setattr(owner, method, original)
