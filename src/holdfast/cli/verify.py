"""`holdfast verify`: is a session what its receipts say?"""

from contextlib import closing
from pathlib import Path

from holdfast import evidence, signing, verify
from holdfast.cli import homes
from holdfast.cli.terminal import print_json
from holdfast.config import home_path
from holdfast.errors import InvalidSetting, SessionHalted
from holdfast.home import HIDDEN, JOURNAL
from holdfast.signing import PublicKey
from holdfast.store.sqlite import Store
from holdfast.verify import Report
from holdfast.visible import visible


def check_session(target: str, *, home: Path | None, public_key: Path | None, as_json: bool) -> int:
    """Check an exported directory, a session's directory in a home, or a session by its id; 0 if all is right."""
    public = evidence.read_key(public_key.expanduser()) if public_key else None
    if public is not None:  # the chain of the home leads from a key that it had to those before and after it
        public = public.within(signing.chain_of_home(home_path(home)))
    path = Path(target).expanduser()
    if (path / HIDDEN / JOURNAL).exists():
        report = _check_shared(path.resolve(), home, public)
        _tell(report, as_json=as_json, own_key=False)
        return 0 if report.ok else 1
    if target == "." and not (path / evidence.RECEIPTS_NAME).is_dir():
        raise InvalidSetting(
            "no job was run in this directory", hint="name one where it was, an exported directory or a session's id"
        )
    exported = (path / evidence.RECEIPTS_NAME).is_dir() or ("/" in target and _home_of(path) is None)
    if exported:
        report = verify.check(evidence.from_directory(path, public=public))
    else:
        report = _check_in_home(path, _home_of(path) or home, public)
    _tell(report, as_json=as_json, own_key=exported and public is None)
    return 0 if report.ok else 1


def _check_shared(directory: Path, home: Path | None, public: PublicKey | None) -> Report:
    """A directory that jobs were run in. It may have come from anybody, and is only read: what a killed job of ours
    left there was finished before any command (`telling`)."""
    public = public or signing.key_of_home(home_path(home))
    try:
        with closing(Store(directory / HIDDEN / JOURNAL, read_only=True)) as store:
            session = next((row.id for row in store.sessions()), "")
            return verify.check_in_home(store, session, directory / HIDDEN, public=public, shared=directory)
    except SessionHalted as error:  # the journal cannot even be opened
        return Report(ok=False, session="", key_id="", problem=error.message)


def _home_of(path: Path) -> Path | None:
    """The home that a session's directory is in."""
    above = path.absolute().parent
    inside = above.name == "sessions" and (above.parent / JOURNAL).exists()
    return above.parent if inside else None


def _check_in_home(path: Path, home: Path | None, public: PublicKey | None) -> Report:
    where = home_path(home)
    try:
        with closing(Store(where / JOURNAL, read_only=True)) as store:
            return verify.check_in_home(store, homes.resolve(where, path.name), where, public=public)
    except SessionHalted as error:  # the journal cannot even be opened
        return Report(ok=False, session=path.name, key_id="", problem=error.message)


def _tell(report: Report, *, as_json: bool, own_key: bool) -> None:
    if as_json:
        print_json(report)
        return
    counts = f"{report.receipts} receipts, {report.manifests} manifests, {report.files} files, {report.bytes} bytes"
    if not report.ok:
        print(f"WRONG: session {visible(report.session)}: {visible(report.problem)}\nright until then: {counts}")
        if report.hint:
            print(f"hint: {visible(report.hint)}")
        return
    print(f"ok: session {report.session}: {counts}")
    print(f"  at    {report.ckpt or 'its beginning'}\n  head  {report.head or 'none'}\n  key   {report.key_id}")
    for run in report.unsettled:
        print(f"  run {run} has not ended: what it wrote was not looked at")
    for path in report.unstated:
        print(f"  {visible(path)} is in no receipt: links, pipes and empty directories of your own are not counted")
    if own_key:
        print("  the key came with the export: compare its id with one that you trust, or give --public-key")
