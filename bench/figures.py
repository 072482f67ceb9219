"""What the benches without a counterpart share: figures by name, and how they are taken and shown."""

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table


def timed(call: Callable[[], object]) -> float:
    """In milliseconds."""
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def ok(run: Any) -> str:
    assert run.error is None, run.error
    return str(run.text)


def show(title: str, figures: dict[str, float], console: Console) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.2f}")
    console.print(table)
