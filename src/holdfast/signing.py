"""The key that signs receipts: Ed25519, made at the first start, never out of the home.

    keys/ed25519.pem         the private key
    keys/ed25519.pub.pem     its public half
    keys.chain, keys/chain   all public keys that this home has signed with, oldest first: twice the same

1. The private key is readable by its owner alone. One that others can read is refused: it may have been copied.
2. It is made once. If it is gone, damaged or another, no key is made in its place unless the user asks for it
   (`rotate`): new receipts would not verify with the key that people hold.
3. A new key signs the one that it replaces. Who trusts it accepts the receipts of that one as well. The old key signs
   the new one too, if it is still there: then who trusts the old one accepts the new one.
4. A key's id is the one that securesystemslib computes by default, so that its verifiers find the key by themselves.
"""

import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from holdfast import durable
from holdfast.errors import InvalidSetting, KeysLost

PRIVATE, PUBLIC, CHAIN = "ed25519.pem", "ed25519.pub.pem", "chain"


class PublicKey:
    """What anybody needs to verify receipts."""

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key
        self.pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self.key_id = _key_id(key)
        self.accepted: tuple[PublicKey, ...] = (self,)
        """Keys whose receipts are believed where this one is trusted, in the order in which they signed."""

    @property
    def raw(self) -> bytes:
        return self._key.public_bytes(Encoding.Raw, PublicFormat.Raw)

    @classmethod
    def from_raw(cls, raw: bytes) -> "PublicKey":
        return cls(Ed25519PublicKey.from_public_bytes(raw))

    def within(self, links: "Sequence[Link]") -> "PublicKey":
        """The same key, with those that a chain leads to from it. A link that is not signed leads nowhere."""
        ids = [link.public.key_id for link in links]
        if self.key_id in ids:
            first = last = ids.index(self.key_id)
            while first > 0 and links[first].vouches_for(links[first - 1]):
                first -= 1
            while last + 1 < len(links) and links[last + 1].is_vouched_for_by(links[last]):
                last += 1
            own = links[ids.index(self.key_id)]
            self.accepted = tuple(self if link is own else link.public for link in links[first : last + 1])
        return self

    @classmethod
    def from_pem(cls, pem: bytes) -> "PublicKey":
        try:
            key = load_pem_public_key(pem)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InvalidSetting("the public key cannot be read", hint="give the PEM file that came with it") from error
        if not isinstance(key, Ed25519PublicKey):
            raise InvalidSetting("the public key is not Ed25519", hint="receipts are signed with Ed25519")
        return cls(key)

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """Whether the owner of the private key signed exactly this."""
        try:
            self._key.verify(signature, data)
        except InvalidSignature:
            return False
        return True


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A key of a chain. Bytes are written as hex."""

    key: str
    at: float
    by_itself: str = ""
    """What it signed about the key before it."""
    by_previous: str = ""
    """What the key before it signed about it; empty: that one was lost."""

    @property
    def public(self) -> PublicKey:
        return PublicKey.from_raw(bytes.fromhex(self.key))

    def vouches_for(self, previous: "Link") -> bool:
        return self.public.verifies(_from_hex(self.by_itself), _succession(previous.key, self.key))

    def is_vouched_for_by(self, previous: "Link") -> bool:
        return previous.public.verifies(_from_hex(self.by_previous), _succession(previous.key, self.key))


class SigningKey:
    """The private key of a home."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = PublicKey(key.public_key())

    @classmethod
    def load_or_create(cls, directory: Path, *, has_signed: Callable[[], bool] = lambda: False) -> "SigningKey":
        """The home's key; `directory` is made if need be. `has_signed` tells whether receipts are there.

        Raises KeysLost if the key that signed so far is not there.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(directory):
            links, found = _read_chain(directory), cls._load(directory)
            if found is None:
                if links or (directory / PUBLIC).exists() or has_signed():
                    raise _lost(f"{directory / PRIVATE} is gone")
                found = cls._create(directory)
            links = links or [Link(key=found.public.raw.hex(), at=time.time())]
            if links[-1].public.key_id != found.key_id:
                raise _lost(f"{directory / PRIVATE} is another key than the one that signed last")
            _write_chain(directory, links)
            _write_public(directory, found.public)
        found.public.within(links)
        return found

    @classmethod
    def rotate(cls, directory: Path) -> "SigningKey":
        """Make a new key. The public keys that are known stay in the chain."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(directory):
            links, old = _read_chain(directory), None
            with suppress(InvalidSetting, KeysLost):  # what cannot be read, or others may have read, signs nothing
                old = cls._load(directory)
            if not links and (public := old.public if old else _known_public(directory)):
                links = [Link(key=public.raw.hex(), at=time.time())]
            new = cls(Ed25519PrivateKey.generate())
            links.append(_link(new, old, links[-1] if links else None))
            _write_chain(directory, links)  # first: a key that is in no chain could not be told from a strange one
            _write_private(directory, new)
            _write_public(directory, new.public)
        new.public.within(links)
        return new

    @classmethod
    def _load(cls, directory: Path) -> "SigningKey | None":
        path = directory / PRIVATE
        pem = _read(path, private=True)
        if pem is None:
            return None
        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise _lost(f"{path} is no private key") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise _lost(f"{path} is not an Ed25519 key")
        return cls(key)

    @classmethod
    def _create(cls, directory: Path) -> "SigningKey":
        made = cls(Ed25519PrivateKey.generate())
        _write_private(directory, made)
        durable.sync_directory(directory.parent)
        return made

    @property
    def pem(self) -> bytes:
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def key_id(self) -> str:
        return self.public.key_id

    @property
    def public_pem(self) -> bytes:
        return self.public.pem

    def sign(self, data: bytes) -> bytes:
        """Deterministic: the same data has the same signature."""
        return self._key.sign(data)


def key_of_home(home: Path) -> PublicKey:
    """The public key of a home, with those that it replaced. Reads, and changes nothing."""
    directory = home / "keys"
    links = _read_chain(directory)
    if links:
        return links[-1].public.within(links)
    if (public := _known_public(directory)) is None:
        raise _lost(f"{directory / PUBLIC} cannot be read")
    return public


def read_links(path: Path) -> list[Link]:
    """A chain of keys; none where there is no file that can be read as one."""
    try:
        links = msgspec.json.decode(path.read_bytes(), type=list[Link])
        return links if all(link.public for link in links) else []
    except (OSError, ValueError):  # `msgspec.DecodeError` is one
        return []


def chain_of_home(home: Path) -> list[Link]:
    return _read_chain(home / "keys")


def _chain_files(directory: Path) -> tuple[Path, Path]:
    return directory.with_name(f"{directory.name}.chain"), directory / CHAIN


def _read_chain(directory: Path) -> list[Link]:
    """Of two that differ the longer one: a crash came between the two writes, or one was put back."""
    return max((read_links(path) for path in _chain_files(directory)), key=len)


def _write_chain(directory: Path, links: Sequence[Link]) -> None:
    for path in _chain_files(directory):
        if read_links(path) != links:
            durable.write_file(path, msgspec.json.encode(links), mode=0o644)


def _write_private(directory: Path, key: SigningKey) -> None:
    durable.write_file(directory / PRIVATE, key.pem, mode=0o600)


def _write_public(directory: Path, public: PublicKey) -> None:
    """Also where a crash came between the writes of the two halves."""
    if _read(directory / PUBLIC) != public.pem:
        durable.write_file(directory / PUBLIC, public.pem, mode=0o644)


def _known_public(directory: Path) -> PublicKey | None:
    try:
        return PublicKey.from_pem((directory / PUBLIC).read_bytes())
    except (OSError, InvalidSetting):
        return None


def _link(new: SigningKey, old: SigningKey | None, last: Link | None) -> Link:
    own = new.public.raw.hex()
    if last is None:
        return Link(key=own, at=time.time())
    told = _succession(last.key, own)
    signs = old is not None and old.key_id == last.public.key_id
    by_previous = old.sign(told).hex() if old is not None and signs else ""
    return Link(key=own, at=time.time(), by_itself=new.sign(told).hex(), by_previous=by_previous)


def _succession(previous: str, key: str) -> bytes:
    return f"holdfast key v1\n{previous}\n{key}".encode()


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _lost(why: str) -> KeysLost:
    return KeysLost(
        f"the key that signs receipts is lost: {why}",
        hint="put it back from a backup; or make a new one: `holdfast keys rotate`. Receipts that the old one signed "
        "stay valid, as far as its public half is known",
    )


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Jobs in several directories share the keys of one home, and none of them owns it."""
    with durable.closing_fd(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _read(path: Path, *, private: bool = False) -> bytes | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with durable.closing_fd(file):
        mode = stat.S_IMODE(os.fstat(file).st_mode)
        if private and mode & 0o077:
            raise InvalidSetting(
                f"{path} has mode {mode:04o}: others may have read it",
                hint=f"if nobody did, chmod 600 {path}; otherwise make a new one: holdfast keys rotate",
            )
        return os.read(file, 1 << 16)


def _key_id(key: Ed25519PublicKey) -> str:
    raw = key.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
    described = f'{{"keytype":"ed25519","keyval":{{"public":"{raw}"}},"scheme":"ed25519"}}'
    return hashlib.sha256(described.encode()).hexdigest()
