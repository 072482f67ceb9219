"""One run from its card to its receipt, a key that is asked twice, and what a verifier says to all of it."""

import tempfile
import time
from contextlib import closing
from pathlib import Path

from rich.markup import escape

from holdfast import cards, evidence, verify
from holdfast.blocking import Session
from holdfast.cli.demo.show import Show
from holdfast.cli.export import write_export
from holdfast.home import JOURNAL
from holdfast.store.sqlite import Store
from holdfast.verify import Report

REPORT = """\
# Ebb and flood by the hour
minutes = pd.read_csv("tides.csv")
hours = minutes.groupby(minutes.index // 60)["level"].agg(["min", "max"])
hours.to_parquet("hours.parquet")"""

BOOKING = """\
with open("bookings.csv", "a") as bookings:   # an append: done twice, it would show
    bookings.write("berth 17, one night\\n")"""


def report(show: Show, session: Session) -> None:
    """PLAN, EXECUTE, VERIFY, COMMIT, with something declared to verify."""
    show.chapter("A run is a transaction")
    show.code(REPORT)
    card = session.plan(REPORT, outputs={"hours.parquet": {"columns": ["min", "max"]}}, asserts=["len(hours) == 17"])
    show.quote(cards.render(card))
    run = session.run(card)
    show.say(f"[bold green]{run.status}[/bold green], version {run.version}, {run.duration_s * 1000:.0f} ms")
    show.facts({change.path: f"{change.action}, {change.bytes:,} bytes, {change.sha256}" for change in run.outputs})
    show.facts({check.name: check.detail or "holds" for check in run.checks if check.ok})
    made = [change.path for change in run.outputs]
    show.promise(
        "what was planned is verified, then committed",
        f"{len(run.checks)} checks; {', '.join(made)} with the table in memory",
        run.status == "committed"
        and run.id == card.run
        and made == card.outputs == card.forecast_outputs
        and all(check.ok for check in run.checks)
        and "hours" in run.names,
    )


def booking(show: Show, session: Session) -> None:
    show.chapter("The same key twice")
    show.code(BOOKING)
    first = session.run(BOOKING, key="booking-17")
    began = time.monotonic()
    again = session.run(BOOKING, key="booking-17")
    answered_ms = 1000 * (time.monotonic() - began)
    rows = session.read("bookings.csv").decode().splitlines()
    show.say(f"first: executed as {first.id}, {first.status}")
    show.say(f"again: the answer of {again.id} after {answered_ms:.0f} ms, nothing executed: {again.replayed}")
    same = first.receipt is not None and again.receipt is not None and first.receipt == again.receipt
    show.promise(
        "the same key runs once", f"asked twice: {len(rows)} row, one receipt",
        len(rows) == 1 and same and again.replayed and not first.replayed,
    )  # fmt: skip


def receipts(show: Show, session: Session, home: Path) -> None:
    """What `holdfast verify` says to this session, and to a copy of it with one bit changed."""
    show.chapter("Receipts")
    settled = session.history()
    report = check_home(home, session.id)
    show.say(f"[bold]holdfast verify {session.id}[/bold]")
    show.facts(
        {
            "verdict": "all is as its receipts say" if report.ok else report.problem,
            "receipts": f"{report.receipts}, signed by key {report.key_id[:16]}…, each naming the one before",
            "files": f"{report.files}, {report.bytes:,} bytes, each hashed",
            "head": report.head,
            "state": report.ckpt,
        }
    )
    show.promise(
        "signatures, chain, manifests and files verify",
        f"{report.receipts} receipts of {len(settled)} runs, {report.files} files",
        report.ok and report.receipts == len(settled) and report.head == settled[-1].receipt_sha256,
    )
    path, found = _tampered(session.id, home)
    show.say("the same after one flipped bit in an exported file:")
    show.quote(found.problem or "nothing noticed")
    seen = f"named: {path}" if path in found.problem else f"not named: {found.problem}"
    show.promise("one flipped bit is found and named", seen, not found.ok and path in found.problem)


def check_home(home: Path, session: str) -> Report:
    """The very check of `holdfast verify`, beside the home's owner."""
    with closing(Store(home / JOURNAL, read_only=True)) as store:
        return verify.check_in_home(store, session, home)


def _tampered(session: str, home: Path) -> tuple[str, Report]:
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as directory:
        copy = Path(directory, "export")
        write_export(session, copy, home=home)
        victim = sorted(copy.joinpath(evidence.FILES_NAME).iterdir())[-1]
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
        return escape(victim.name), verify.check(evidence.from_directory(copy))
