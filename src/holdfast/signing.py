"""The key that signs receipts: Ed25519, made at the first start, never out of the home.

1. The private key is readable by its owner alone. One that others can read is refused: it may have been copied.
2. It is made once. If it is gone while its public half is there, nothing is made in its place: new receipts would not
   verify with the key that people hold.
3. A key's id is the one that securesystemslib computes by default, so that its verifiers find the key by themselves.
"""

import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
from holdfast.errors import InvalidSetting

PRIVATE, PUBLIC = "ed25519.pem", "ed25519.pub.pem"


class PublicKey:
    """What anybody needs to verify receipts."""

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key
        self.pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self.key_id = _key_id(key)

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


class SigningKey:
    """The private key of a home."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = PublicKey(key.public_key())

    @classmethod
    def load_or_create(cls, directory: Path) -> "SigningKey":
        """The home's key; `directory` is made if need be."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(directory):
            found = cls._load(directory) or cls._create(directory)
            if _read(directory / PUBLIC) != found.public_pem:  # also if a crash came between the two writes
                durable.write_file(directory / PUBLIC, found.public_pem, mode=0o644)
        return found

    @classmethod
    def _load(cls, directory: Path) -> "SigningKey | None":
        path = directory / PRIVATE
        pem = _read(path, private=True)
        if pem is None:
            return None
        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InvalidSetting(f"{path} is no private key", hint="restore it from a backup") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise InvalidSetting(f"{path} is not an Ed25519 key", hint="receipts are signed with Ed25519")
        return cls(key)

    @classmethod
    def _create(cls, directory: Path) -> "SigningKey":
        if (directory / PUBLIC).exists():
            raise InvalidSetting(
                f"{directory / PRIVATE} is gone, and {PUBLIC} is there",
                hint=f"restore it from a backup; or move {PUBLIC} away to begin with a new key",
            )
        key = Ed25519PrivateKey.generate()
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        durable.write_file(directory / PRIVATE, pem, mode=0o600)
        durable.sync_directory(directory.parent)
        return cls(key)

    @property
    def key_id(self) -> str:
        return self.public.key_id

    @property
    def public_pem(self) -> bytes:
        return self.public.pem

    def sign(self, data: bytes) -> bytes:
        """Deterministic: the same data has the same signature."""
        return self._key.sign(data)


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
                hint=f"if nobody did, chmod 600 {path}; otherwise move both keys away to begin with a new one",
            )
        return os.read(file, 1 << 16)


def _key_id(key: Ed25519PublicKey) -> str:
    raw = key.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
    described = f'{{"keytype":"ed25519","keyval":{{"public":"{raw}"}},"scheme":"ed25519"}}'
    return hashlib.sha256(described.encode()).hexdigest()
