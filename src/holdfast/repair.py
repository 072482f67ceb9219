"""Computes again what was lost of a session and can be had from elsewhere: the texts of its manifests.

1. A manifest is what the changes of all receipts up to its version add up to. Receipts are signed and name its digest,
   so that nothing else is ever written.
2. Every kept version has its manifest again, and so has any other that is there and damaged. What is named like a
   manifest, and is that of no version, is removed.
3. Receipts, files and old contents exist once. If one of them is lost or damaged, it is named and left as it is.

The caller owns the home, or only asks what would be done.
"""

import hashlib
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast import durable, verify
from holdfast.errors import VerifyFailed
from holdfast.evidence import Evidence, from_home, read_manifest
from holdfast.receipts import facts_in
from holdfast.signing import PublicKey
from holdfast.stated import Stated
from holdfast.store.sqlite import Store
from holdfast.verify import Report


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, or would be, and what a check says of all the rest."""

    session: str
    dry_run: bool
    missing: list[int]
    """Versions whose manifests were not there."""
    damaged: list[int]
    """Versions whose manifests were not as they had been written."""
    removed: list[str]
    """Manifests of no version."""
    report: Report

    @property
    def found(self) -> bool:
        """Whether there was anything to do."""
        return bool(self.missing or self.damaged or self.removed)


def repair(
    store: Store,
    session: str,
    home: Path,
    *,
    public: PublicKey | None = None,
    shared: Path | None = None,
    dry_run: bool = False,
) -> Repair:
    """Put a session's manifests in order. The other arguments are those of `verify.check_in_home`."""
    directory = home / "sessions" / session / "manifests"

    def evidence() -> Evidence:
        return from_home(store, session, home, public=public, shared=shared)

    try:
        made, wanted = verify.manifests_of(evidence())
    except VerifyFailed:  # of what receipts state nothing is written while they cannot be trusted
        report = verify.check(evidence())
        return Repair(session=session, dry_run=dry_run, missing=[], damaged=[], removed=[], report=report)
    there = {name: _is_whole(name, path) for name, path in evidence().manifests}
    has_place = directory.parent.is_dir()  # a session whose directory is gone is named by the check
    lost = {name: made[name] for name in wanted if name not in there and has_place}
    damaged = {name: made[name] for name, whole in there.items() if not whole and name in made}
    removed = [] if store.unsettled(session) else sorted(there.keys() - made.keys())
    if not dry_run:
        _render(evidence(), {*lost, *damaged}, directory)
        for name in removed:
            (directory / name).unlink()
    return Repair(
        session=session, dry_run=dry_run, missing=sorted(lost.values()), damaged=sorted(damaged.values()),
        removed=removed, report=verify.check(evidence(), but_manifests=dry_run),
    )  # fmt: skip


def _is_whole(name: str, path: Path) -> bool:
    try:
        return hashlib.sha256(read_manifest(path)).hexdigest() == name
    except OSError:
        return False


def _render(evidence: Evidence, wanted: set[str], directory: Path) -> None:
    if not wanted:
        return
    directory.mkdir(mode=0o700, exist_ok=True)
    stated = Stated()
    for stored in evidence.receipts:
        stated.apply(facts_in(stored.envelope))
        if stated.digest in wanted:
            with suppress(OSError):  # an empty directory in its place; anything else there is named by the check
                (directory / stated.digest).rmdir()
            durable.write_file(directory / stated.digest, stated.manifest_text())
            wanted.discard(stated.digest)
