"""Threads and tasks that are alive at the end of a run. They do nothing until the next one."""

import asyncio
import threading
import weakref
from collections.abc import Iterable
from typing import Any

from holdfast.guest.display import text

_MOST = 100
_MAX_NAME = 200


class Unfinished:
    """Names each of them at the end of the first run that leaves it, and not again."""

    def __init__(self) -> None:
        self._named: dict[int, weakref.ref[Any]] = {}

    def fresh(self, tasks: "Iterable[asyncio.Task[Any]]") -> tuple[list[str], list[str]]:
        """Threads and tasks that no earlier run has left."""
        try:
            main = threading.main_thread()
            threads = [thread for thread in threading.enumerate() if thread is not main]
            known, tasks = self._named, list(tasks)
            self._named = {id(each): weakref.ref(each) for each in [*threads, *tasks]}
            return (
                [_shown(str(each.name)) for each in threads if not _is_known(each, known)][:_MOST],
                [_shown(_task_name(each)) for each in tasks if not _is_known(each, known)][:_MOST],
            )
        except Exception:  # the cell may have broken `threading` itself
            return [], []


def _is_known(one: object, known: dict[int, weakref.ref[Any]]) -> bool:
    return id(one) in known and known[id(one)]() is one


def _task_name(task: "asyncio.Task[Any]") -> str:
    return f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', 'a coroutine')})"


def _shown(name: str) -> str:
    return text(name[:_MAX_NAME])
