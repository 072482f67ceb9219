"""What there is to verify of a session: in a home, or exported to a directory.

    directory/
      receipts/000001.json …      the envelopes, one a file
      manifest-sha256.txt         of the last version: `cd files && sha256sum -c ../manifest-sha256.txt`
      public-key.pem
      key-chain.json              the keys before that one, if there were any, and that each names the one before it
      files/                      the regular files of the last version

An export needs no home, no journal and no Holdfast to be looked at: envelopes are DSSE, the manifest is sha256sum's.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from holdfast import signing
from holdfast.errors import InvalidSetting, SessionUnknown
from holdfast.records import Noun
from holdfast.signing import PublicKey
from holdfast.statements import MANIFEST_NAME
from holdfast.store.sqlite import Store

KEY_NAME = "public-key.pem"
CHAIN_NAME = "key-chain.json"
RECEIPTS_NAME, FILES_NAME = "receipts", "files"
_RECEIPT_NAME = re.compile(r"([0-9]{6,})\.json")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SESSION = re.compile(r"[\w-]+", re.ASCII)
"""What leads to one directory, and no further."""


class Stored(Noun, frozen=True, kw_only=True):
    """A receipt as it was found."""

    number: int
    envelope: bytes
    run: str = ""
    sha256: str = ""
    """As it was recorded beside it, if it was."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that a check looks at."""

    public: PublicKey
    receipts: Iterable[Stored]
    """In the order of their numbers."""
    manifests: list[tuple[str, Path]]
    """What the digest of the file's text must be, and the file; "" stands for the last receipt's."""
    files: Path
    """The directory that stands for /mnt/data."""
    shared: bool = False
    """It is the user's own: what counts in it is what `census` counts."""
    exported: bool = False
    """It holds the regular files alone, with modes of its own."""
    session: str = ""
    """Empty: whichever the first receipt names."""
    store: Store | None = None
    """The journal, where there is one."""


def from_home(
    store: Store, session: str, home: Path, *, public: PublicKey | None = None, shared: Path | None = None
) -> Evidence:
    """A session in a home. The store may be read-only, beside the home's owner. `shared` is the user's directory
    whose home it is, if it is one's."""
    if store.session(session) is None:
        known = ", ".join(row.id for row in store.sessions()[-5:]) or "none"
        raise SessionUnknown(f"{home} has no session {session!r}", hint=f"the latest in this home: {known}")
    if not _SESSION.fullmatch(session):
        raise SessionUnknown(f"{session!r} is no id of a session", hint="the journal was damaged or forged")
    directory = home / "sessions" / session
    texts = sorted(path for path in _listed(directory / "manifests") if _DIGEST.fullmatch(path.name))
    return Evidence(
        public=public or signing.key_of_home(home),
        receipts=_from_store(store, session),
        manifests=[(path.name, path) for path in texts],
        files=shared or directory / "files" / "data",
        shared=shared is not None,
        session=session,
        store=store,
    )


def from_directory(path: Path, *, public: PublicKey | None = None) -> Evidence:
    """An exported session. Without a key the one that came with it is taken: it proves only that all fits together."""
    if not (path / RECEIPTS_NAME).is_dir():
        raise InvalidSetting(f"{path} is no exported session", hint="`holdfast export SESSION DIR` makes one")
    return Evidence(
        public=(public or read_key(path / KEY_NAME)).within(signing.read_links(path / CHAIN_NAME)),
        receipts=_from_files(path / RECEIPTS_NAME),
        manifests=[("", path / MANIFEST_NAME)],
        files=path / FILES_NAME,
        exported=True,
    )


def read_key(path: Path) -> PublicKey:
    try:
        return PublicKey.from_pem(path.read_bytes())
    except OSError as error:
        raise InvalidSetting(
            f"the public key {path} cannot be read: {error.strerror}", hint="name one: --public-key FILE"
        ) from error


def read_manifest(path: Path) -> bytes:
    """Its text; never from where a link points, nor waiting for a FIFO."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return file.read()


def receipt_name(number: int) -> str:
    """
    >>> receipt_name(12)
    '000012.json'
    """
    return f"{number:06}.json"


def _from_store(store: Store, session: str) -> Iterator[Stored]:
    for row in store.receipts(session):
        yield Stored(number=row.number, run=row.run, sha256=row.sha256, envelope=row.envelope)


def _from_files(directory: Path) -> Iterator[Stored]:
    """By number, which past a million is not the order of the names. Other files are none of ours."""
    found = [(int(named[1]), path) for path in directory.iterdir() if (named := _RECEIPT_NAME.fullmatch(path.name))]
    for number, path in sorted(found):
        yield Stored(number=number, envelope=path.read_bytes())


def _listed(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []
