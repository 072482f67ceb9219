"""What a person sees while the guests' environment is built.

    with rich_report() as report:
        await environments.ensure(home, report=report)

`python -m holdfast.cli.progress --home DIR` prepares it ahead of the first session.
"""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from holdfast.environments import Progress, Report
from holdfast.environments.__main__ import main as prepare
from holdfast.visible import visible


@contextlib.contextmanager
def rich_report(console: Console | None = None) -> Iterator[Report]:
    """Draw a bar on stderr; plain lines where it is no terminal. Draws nothing if nothing is reported."""
    console = console or Console(stderr=True)
    with _drawn(console) if console.is_terminal else _printed(console) as report:
        yield report


@contextlib.contextmanager
def _drawn(console: Console) -> Iterator[Report]:
    bar = Bar(
        SpinnerColumn(),
        TextColumn("{task.fields[phase]:<11}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        console=console,
        transient=True,
        redirect_stdout=False,  # what the caller prints there is for a pipe, not for this bar
        redirect_stderr=False,
    )
    task = bar.add_task("environment", total=None, phase="", text="")

    def report(progress: Progress) -> None:
        bar.start()
        bar.update(task, completed=progress.done, phase=progress.phase, text=visible(progress.text))
        # Set directly: to `update`, no total means the one before, and that would be a made-up share.
        bar.tasks[0].total = progress.total or None

    try:
        yield report
    finally:
        bar.stop()


@contextlib.contextmanager
def _printed(console: Console) -> Iterator[Report]:
    shown: set[str] = set()

    def report(progress: Progress) -> None:
        # One line a phase: in a log file each count would be a line of its own.
        if progress.phase not in shown:
            shown.add(progress.phase)
            line = visible(f"environment: {progress.phase} {progress.text}").rstrip()
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    yield report


def main() -> int:
    """Prepare the guests' environment and show how far it is."""
    with rich_report() as report:
        return prepare(report)


if __name__ == "__main__":
    sys.exit(main())
