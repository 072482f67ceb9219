"""`holdfast run`: a file as one transaction. The card before, output as it comes, the outcome after.

What the file prints goes to stdout, all that we say to stderr: a pipe gets the job's own output and nothing else.
"""

import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from holdfast import cards
from holdfast.blocking import Session
from holdfast.cli.interrupting import interrupting
from holdfast.cli.progress import rich_report
from holdfast.cli.screen import Screen
from holdfast.model import Run
from holdfast.records import Change
from holdfast.verbs import RunOptions

_MOST_FILES = 100


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    code: str
    settings: dict[str, Any]
    session: str | None = None
    """A kept session to go on in; it is kept again."""
    keep: bool = False
    key: str | None = None
    outputs: list[str] = []
    as_json: bool = False

    @property
    def keeps(self) -> bool:
        return self.keep or self.session is not None


def run_job(job: Job) -> int:
    """Run it and print what came of it; returns the exit code."""
    with rich_report() as report:
        session = Session(**job.settings, resume=job.session, report=report)
    try:
        with interrupting(session) as stop:
            screen = Screen(stop)
            run = _run_quietly(session, job) if job.as_json else _run_watched(session, job, screen)
    finally:
        session.close(keep=job.keeps)
    return screen.exit_code(run)


def _run_quietly(session: Session, job: Job) -> Run:
    run = session.run(job.code, **_options(job))
    sys.stdout.write(msgspec.json.encode(run).decode() + "\n")
    return run


def _run_watched(session: Session, job: Job, screen: Screen) -> Run:
    card = session.plan(job.code, **_options(job))
    screen.line(cards.render(card))
    run = session.run(card, on_stdout=screen.stdout, on_stderr=screen.stderr, on_display=screen.display)
    if run.replayed:
        _show_again(run, screen)
    screen.conclude(run)
    for line in _outcome(run, job):
        screen.line(line)
    return run


def _show_again(run: Run, screen: Screen) -> None:
    screen.stdout(run.stdout)
    screen.stderr(run.stderr)
    for display in run.displays:
        screen.display(display)


def _options(job: Job) -> RunOptions:
    return RunOptions(mode="strict", key=job.key, outputs=job.outputs)


def _outcome(run: Run, job: Job) -> Iterator[str]:
    yield f"{run.status} · version {run.version} · {run.duration_s:.2f} s"
    if run.replayed:
        yield f"replayed {run.id}: the key has its answer already, nothing was executed"
    yield from (_file(change) for change in run.outputs[:_MOST_FILES])
    if len(run.outputs) > _MOST_FILES:
        yield f"and {len(run.outputs) - _MOST_FILES:,} more files: --json has them"
    yield from (f"saved    {path}" for path in run.saved)
    yield f"state    {run.ckpt}"
    if run.receipt is not None:
        yield f"receipt  {run.receipt.number} · sha256 {run.receipt.sha256}"
    yield f"session  {run.session} · {_fate(run, job)}"
    if run.recovery is not None:
        yield run.recovery.text


def _file(change: Change) -> str:
    if change.action == "removed":
        return f"removed  {change.path}"
    what = f"{change.bytes:,} bytes · sha256 {change.sha256}" if change.kind == "file" else change.kind
    return f"{change.action:<8} {change.path} · {what}"


def _fate(run: Run, job: Job) -> str:
    if job.keeps:
        return f"kept; go on with --session {run.session}"
    lost = [what for what, there in (("files", run.outputs or run.saved), ("key", job.key)) if there]
    return "ended" + (f", and its {' and '.join(lost)} with it; --keep keeps them" if lost else "")
