"""Holdfast: a self-hosted code interpreter for AI agents.

>>> from holdfast import Session
>>> with Session(memory="512M") as s:
...     s.run("21 * 2").text
'42'
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.blocking import Session
    from holdfast.client import AsyncSession
    from holdfast.errors import HoldfastError
    from holdfast.model import Display, Name, Run, RunError, ShellResult, Stray

__all__ = [
    "AsyncSession", "Display", "HoldfastError", "Name", "Run", "RunError", "Session", "ShellResult", "Stray",
]  # fmt: skip
__version__ = "0.1.0"

_HOME_OF = {
    "AsyncSession": "client", "Session": "blocking", "HoldfastError": "errors", "Display": "model", "Name": "model",
    "Run": "model", "RunError": "model", "ShellResult": "model", "Stray": "model",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Public names load when they are first used: guests import this package too, without the host's libraries."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"holdfast.{_HOME_OF[name]}"), name)
