"""`holdfast run`: a file as one transaction over a directory. The card before, output as it comes, the outcome after.

What the file prints goes to stdout, all that we say to stderr: a pipe gets the job's own output and nothing else.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast import cards, ckpt, engine, jobs, scripts
from holdfast.blocking import watched
from holdfast.checks import NOT_EXECUTABLE, UNPUBLISHED
from holdfast.cli.interrupting import Stop, interrupting
from holdfast.cli.progress import rich_report
from holdfast.cli.screen import Screen, in_short
from holdfast.cli.status import Status
from holdfast.cli.terminal import print_json
from holdfast.config import Limits, Settings
from holdfast.egress.allowed import AllowList
from holdfast.errors import InvalidSetting
from holdfast.jobs import Job, OpenJob
from holdfast.model import Run
from holdfast.publication import Undeclared
from holdfast.records import Change
from holdfast.verbs import RunOptions
from holdfast.visible import visible
from holdfast.watching import deliverer

_MOST_FILES = 100
_MOST_NAMED = 5
_NOTED = ("outside", UNPUBLISHED, NOT_EXECUTABLE)
"""Checks of which a note is of use to a person."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What was typed."""

    file: Path
    workspace: Path
    settings: Settings
    limits: Limits
    arguments: list[str] = []
    options: RunOptions = {}
    egress: list[str] = []
    env: str | None = None
    undeclared: Undeclared = "refuse"
    executable: list[str] = []
    force: bool = False
    as_json: bool = False


def run_file(asked: Asked) -> int:
    """Run it and print what came of it; returns the exit code."""
    directory = _directory(asked.workspace)
    code, script = scripts.read(asked.file, workspace=directory, arguments=asked.arguments)
    job = Job(
        code=code, script=script, options=asked.options, limits=asked.limits, allowed=AllowList.parse(asked.egress),
        env=asked.env, undeclared=asked.undeclared, executable=asked.executable, force=asked.force,
    )  # fmt: skip
    opened = engine.wait(lambda: jobs.open_job(directory, job, settings=asked.settings))
    try:
        return _Face(opened, asked).run()
    finally:
        engine.wait(opened.close)


def _directory(named: Path) -> Path:
    try:
        return named.resolve(strict=True)
    except OSError as error:  # the shell is in a directory that is gone
        raise InvalidSetting(
            f"{named} cannot be a workspace: {error.strerror}", hint="cd to one that is there, or --workspace DIR"
        ) from error


class _Face:
    """One job, as a person or a program sees it."""

    def __init__(self, job: OpenJob, asked: Asked) -> None:
        self._job = job
        self._asked = asked

    def interrupt(self) -> bool:
        return engine.call(self._job.interrupt)

    async def _interrupt(self, caller: object) -> bool:
        return self._job.interrupt()

    def run(self) -> int:
        with interrupting(self) as stop:
            run, screen = self._carry_out(stop)
        return screen.exit_code(run)

    def _carry_out(self, stop: Stop) -> tuple[Run, Screen]:
        screen, quiet = Screen(stop), self._asked.as_json
        changed = engine.wait(self._job.look)
        engine.wait(self._job.refuse_missing)
        with rich_report() as report:
            done = engine.wait(lambda: self._job.committed_before(report))
            card = None if done else engine.wait(lambda: self._job.plan(report))
        if card is not None and not quiet:
            self._announce(screen, cards.render(card), changed, first=ckpt.parse(card.base).version == 1)
        if done is None:
            done = self._watch(Screen(stop) if quiet else screen, quiet=quiet)
        self._conclude(screen, done)
        return done, screen

    def _announce(self, screen: Screen, card: str, changed: list[Change], *, first: bool) -> None:
        screen.line(card)
        if changed:
            named = ", ".join(visible(change.path) for change in changed[:_MOST_NAMED])
            more = f" and {len(changed) - _MOST_NAMED:,} more" if len(changed) > _MOST_NAMED else ""
            since = "in the directory" if first else "changed since the last job, and taken in"
            files = "file" if len(changed) == 1 else "files"
            screen.line(f"found    {len(changed):,} {files} {since}: {named}{more}")

    def _watch(self, screen: Screen, *, quiet: bool) -> Run:
        if quiet:
            return watched(self._job.run, None, interrupt=self._interrupt)
        deliver = deliverer(screen.stdout, screen.stderr, screen.display, None)
        with Status(screen, lambda: engine.call(self._job.memory_bytes), cap_bytes=self._asked.limits.memory_bytes):
            return watched(self._job.run, deliver, interrupt=self._interrupt)

    def _conclude(self, screen: Screen, run: Run) -> None:
        if self._asked.as_json:
            print_json(run)
            return
        if run.replayed:
            _show_again(run, screen)
        screen.conclude(run, explain=run.recovery is None)
        for line in _outcome(run):
            screen.line(line)


def _show_again(run: Run, screen: Screen) -> None:
    screen.stdout(run.stdout)
    screen.stderr(run.stderr)
    for display in run.displays:
        screen.display(display)


def _outcome(run: Run) -> Iterator[str]:
    if run.replayed and run.status == "rolled_back":
        yield f"already rolled back in {run.id}, which had this key: nothing was executed"
    elif run.replayed:
        yield f"already committed by {run.id}: nothing was executed; --force repeats it"
    yield f"{run.status} · version {run.version} · {run.duration_s:.2f} s"
    yield from (_file(change, run) for change in run.outputs[:_MOST_FILES])
    if len(run.outputs) > _MOST_FILES:
        yield f"and {len(run.outputs) - _MOST_FILES:,} more files: --json has them"
    yield from (f"saved    {path}" for path in run.saved)
    yield from in_short("egress", run.egress)
    if run.recovery is None:  # which has it
        yield from in_short("earlier", run.may_have_happened)
    yield from (f"note     {check.detail}" for check in run.checks if check.name in _NOTED and check.ok)
    yield f"state    {run.ckpt}"
    if run.receipt is not None:
        yield f"receipt  {run.receipt.number} · sha256 {run.receipt.sha256}"
    if run.status == "rehearsed":
        yield from (f"fails    {check.name}: {check.detail}" for check in run.checks if not check.ok)
        yield "the directory is as it was: this was a rehearsal"
    if run.recovery is not None:
        yield run.recovery.text


def _file(change: Change, run: Run) -> str:
    would = "would be " if run.status == "rehearsed" else ""
    if change.action == "removed":
        return f"{would}removed  {change.path}"
    what = f"{change.bytes:,} bytes · sha256 {change.sha256}" if change.kind == "file" else change.kind
    return f"{would}{change.action:<8} {change.path} · {what}"
