"""A pipeline whose host is killed half-way, and what the next host finds.

The host is a process of its own, with a home of its own below the demo's: it is really killed, by SIGKILL, at a moment
that it cannot know.
"""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape

from holdfast.cli.demo import host
from holdfast.cli.demo.show import Show
from holdfast.cli.demo.transactions import check_home
from holdfast.resources.workspace import remove_tree

_FATAL = "6.1"
"""The host dies when this part has been saved."""
_ALL_PARTS = [f"{step}.{part}" for step in range(1, host.STEPS + 1) for part in range(host.PARTS)]


class Told(msgspec.Struct, kw_only=True):
    """What a host said of itself, up to its end."""

    session: str = ""
    version: int = 0
    recovery: str = ""
    committed: list[int] = []
    replayed: list[int] = []
    attempts: dict[int, int] = {}
    made: list[str] = []
    rows: list[str] = []

    def hear(self, event: dict[str, Any]) -> None:
        if "step" in event:
            self._hear_step(event["step"], event)
        elif "made" in event:
            self.made.extend(event["made"])
        else:
            for name in event:
                setattr(self, name, event[name])

    def _hear_step(self, step: int, event: dict[str, Any]) -> None:
        self.attempts[step] = event["attempt"]
        if event["status"] == "committed":
            (self.replayed if event["replayed"] else self.committed).append(step)


def killed(show: Show, home: Path, env: str | None) -> Path:
    """Returns the home that it was played in."""
    show.chapter("A pipeline whose host is killed")
    show.code(host.STEP)
    with _own_home(home) as own:
        first = _run(own, env, session="", kill=True)
        show.say(
            f"steps {_range(first.committed)} of {host.STEPS} are committed, parts {_few(_begun(first))} of the next "
            "are saved; [bold red]the host is killed (SIGKILL)[/bold red]"
        )
        second = _run(own, env, session=first.session, kill=False)
        report = check_home(own, first.session)
    show.say("another host opens the same home and session:")
    show.quote(second.recovery)
    show.say(
        f"the same ten steps with the same keys: {_range(second.replayed)} replayed, {_range(second.committed)} run; "
        f"{len(second.made)} parts made"
    )
    _promise(show, first, second)
    verdict = "ok" if report.ok else report.problem
    show.say(f"[bold]holdfast verify[/bold]: {escape(verdict)}, {report.receipts} receipts, {report.files} files")
    show.promise("  and the receipts verify across the kill", f"{verdict}, {report.receipts} receipts", report.ok)
    return own


def _promise(show: Show, first: Told, second: Told) -> None:
    died_inside = 0 < len(first.committed) < host.STEPS and not first.rows
    show.promise(
        "a killed pipeline goes on from where it was",
        f"killed after {len(first.committed)} of {host.STEPS} steps, {len(second.replayed)} replayed, "
        f"{len(second.committed)} run",
        died_inside
        and set(first.committed) <= set(second.replayed)
        and sorted(second.replayed + second.committed) == list(range(1, host.STEPS + 1)),
    )
    show.promise(
        "  no row twice, none missing",
        f"{len(second.rows)} rows, {len(set(second.rows))} different",
        len(second.rows) == len(set(second.rows)) == host.STEPS * host.PARTS * host.ROWS,
    )
    again = sorted(set(first.made) & set(second.made))
    show.promise(
        "  a part that was saved is not made again",
        f"{len(first.made)} parts before the kill, {len(second.made)} after it, {len(again)} twice",
        not again and sorted(first.made + second.made) == sorted(_ALL_PARTS),
    )


def _run(home: Path, env: str | None, *, session: str, kill: bool) -> Told:
    """Start a host and listen to it until its end; or, when the fatal part is saved, be its end."""
    told = Told()
    command = [sys.executable, "-c", f"from {host.__name__} import main; main()", str(home), env or "", session]
    # In a session of its own: Ctrl-C is ours to handle, which then ends it.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            for line in process.stdout or ():
                told.hear(event := json.loads(line))
                if kill and _FATAL in event.get("made", ()):
                    process.send_signal(signal.SIGKILL)
        except BaseException:
            process.kill()
            raise
    return told


@contextmanager
def _own_home(home: Path) -> Iterator[Path]:
    """A home has one owner, and the demo is that. This one is on the same disk and has the same environments."""
    own = Path(tempfile.mkdtemp(prefix="demo-", dir=home))
    try:
        (own / "envs").symlink_to(home / "envs")
        yield own
    finally:
        remove_tree(own)


def _begun(told: Told) -> list[str]:
    """Parts of steps that had not committed."""
    return [part for part in told.made if int(part.split(".")[0]) not in told.committed]


def _range(steps: list[int]) -> str:
    return f"{steps[0]}–{steps[-1]}" if len(steps) > 1 else (str(steps[0]) if steps else "none")


def _few(parts: list[str]) -> str:
    return ", ".join(parts) or "none"
