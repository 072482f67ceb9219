"""`holdfast demo`: promises, and whether they were kept.

Nothing here is told from memory: each figure is measured, and each line of the last table is computed from what
happened a moment ago.
"""

import json
import time
from pathlib import Path
from typing import Any

from holdfast.cli.demo import deaths, large, pipeline, sandbox, transactions
from holdfast.cli.demo.show import Show
from holdfast.config import home_path


def show(*, home: Path | None, env: str | None, save: Path | None, as_json: bool = False) -> int:
    """Run it; 0 if every promise was kept. As JSON, only the table of promises is printed."""
    started = time.monotonic()
    stage = Show(quiet=as_json)
    stage.screen.print("\n[bold]Holdfast[/bold]: untrusted Python, every run a transaction, on this machine.")
    disks = _play(stage, home_path(home), env=env, save=save)
    left = [path.name for path in disks if path.exists()]
    seen = f"{len(disks) - 1} sessions' disks and the pipeline's home are gone"
    stage.promise("nothing stays behind", f"left: {', '.join(left)}" if left else seen, not left)
    stage.chapter("Promised, and checked")
    kept = stage.count_up()
    seconds = time.monotonic() - started
    if as_json:
        print(json.dumps({"kept": kept, "seconds": round(seconds, 1), "promises": stage.promises()}))
    verdict = "[green]every promise was kept[/green]" if kept else "[bold red]a promise was broken[/bold red]"
    stage.screen.print(f"  {verdict}, in {seconds:.1f} s. Your turn: [bold]holdfast exec '6 * 7'[/bold]\n")
    return 0 if kept else 1


def _play(stage: Show, home: Path, *, env: str | None, save: Path | None) -> list[Path]:
    """All scenes in order; returns the directories that they were played in."""
    common: dict[str, Any] = {"env": env, "home": home, "memory": f"{sandbox.MEMORY_MIB}M", "timeout": 20}
    with sandbox.first(stage, common) as first, sandbox.second(stage, common) as session:
        sandbox.isolation(stage, session)
        sandbox.plot(stage, session, save)
        sandbox.attacks(stage, session, home)
        before = deaths.work(stage, session)
        deaths.exception(stage, session, before)
        deaths.runaway(stage, session, before)
        deaths.segfault(stage, session, before)
        deaths.deadline(stage, session, before)
        large.csv(stage, session)
        sandbox.stray(stage, session)
        transactions.report(stage, session)
        transactions.booking(stage, session)
        transactions.receipts(stage, session, home)
        disks = [home / "sessions" / each.id for each in (first, session)]
    return [*disks, pipeline.killed(stage, home, env)]
