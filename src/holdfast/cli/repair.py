"""`holdfast repair`: computes again what was lost and can be had from the receipts."""

from contextlib import closing
from pathlib import Path

from holdfast import engine
from holdfast.cli import homes
from holdfast.cli.terminal import print_json
from holdfast.config import Settings, home_path
from holdfast.errors import InvalidSetting, SessionHalted
from holdfast.evidence import RECEIPTS_NAME
from holdfast.home import HIDDEN, JOURNAL
from holdfast.opening import repair_home
from holdfast.repair import Repair, repair
from holdfast.signing import key_of_home
from holdfast.store.sqlite import Store
from holdfast.visible import visible

_DAMAGED = "the journal itself is damaged: restore it from a backup"


def repair_sessions(target: str | None, *, home: Path | None, dry_run: bool, as_json: bool) -> int:
    """Repair the jobs of a directory, a session by its id, or all sessions of the home; 0 if all is right now."""
    where, path = home_path(home), Path(target or ".").expanduser()
    directory = path.resolve() if (path / HIDDEN / JOURNAL).exists() else None
    if directory is None and (path / RECEIPTS_NAME).is_dir():
        raise InvalidSetting(f"{path} is an export", hint="export the session again, or get the export from its source")
    session = None if directory or target is None else homes.resolve(where, target)
    try:
        if dry_run:
            done = _planned(where, directory, session)
        else:
            settings = Settings(home=where, workspace=directory)
            done = engine.wait(lambda: repair_home(settings, session))
    except SessionHalted as error:
        raise SessionHalted(error.message, hint=_DAMAGED) from error
    _tell(done, as_json=as_json)
    return 0 if all(each.report.ok for each in done) else 1


def _planned(home: Path, directory: Path | None, session: str | None) -> list[Repair]:
    """What would be done. Only reads, also beside the home's owner."""
    path, public = (directory / HIDDEN if directory else home), key_of_home(home)
    if not (path / JOURNAL).exists():
        return []
    with closing(Store(path / JOURNAL, read_only=True)) as store, store.view():
        wanted = [row.id for row in store.sessions() if session in (None, row.id)]
        return [repair(store, each, path, public=public, shared=directory, dry_run=True) for each in wanted]


def _tell(done: list[Repair], *, as_json: bool) -> None:
    if as_json:
        print_json(done)
        return
    for each in done:
        if each.found or not each.report.ok:
            print(f"session {each.session}")
        would = "would be " if each.dry_run else ""
        for versions, what in ((each.missing, "missing"), (each.damaged, "damaged")):
            if versions:
                listed = ", ".join(map(str, versions))
                print(f"  {len(versions)} {what} manifests {would}rendered again, of versions {listed}")
        if each.removed:
            print(f"  {len(each.removed)} manifests of no version {would}removed")
        if not each.report.ok:
            print(f"  cannot be repaired: {visible(each.report.problem)}\n  hint: {visible(each.report.hint)}")
    right, found = sum(each.report.ok for each in done), sum(each.found for each in done)
    print(f"{found} of {len(done)} sessions had something to repair; {right} of them all are as their receipts say")
