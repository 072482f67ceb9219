"""A receipt is a statement, signed: a DSSE v1 envelope around it, in bytes that are the same each time.

1. The envelope's SHA-256 is the receipt's digest; the next receipt of the session names it, so that none can be
   taken out, put in or changed without the rest showing it.
2. An envelope has exactly one spelling. Another spelling of the same content (spaces, padding, a second signature)
   is refused: no bit of a receipt can change unnoticed, not even in the last of a chain.
"""

import base64
import binascii
import hashlib
from typing import Any

import msgspec

from holdfast.errors import VerifyFailed
from holdfast.records import Noun
from holdfast.signing import PublicKey, SigningKey
from holdfast.statements import Digest, RunFacts, canonical, parse_statement

PAYLOAD_TYPE = "application/vnd.in-toto+json"


class Sealed(Noun, frozen=True, kw_only=True):
    """A signed receipt, as it is stored."""

    body: bytes
    """The statement in it."""
    envelope: bytes
    sha256: str


class Receipt(Noun, frozen=True, kw_only=True):
    """What a caller gets as `run.receipt`."""

    sha256: str
    """Of the envelope: the next receipt names it."""
    number: int
    previous: str
    """SHA-256 of the receipt before it; empty for the first."""
    statement: dict[str, Any]
    """The in-toto Statement: `subject` are the files, `predicate` the rest."""
    envelope: str
    """The DSSE envelope, as JSON: what any DSSE verifier takes."""

    def to_json(self) -> str:
        """All of it as one JSON object."""
        return msgspec.json.encode(self).decode()

    def facts(self) -> RunFacts:
        """The statement as a struct."""
        return parse_statement(canonical(self.statement))


class _Signature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keyid: str
    sig: str


class _Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    payload: str
    payload_type: str = msgspec.field(name="payloadType")
    signatures: list[_Signature]


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    previous: Digest | None


class _Stated(msgspec.Struct, frozen=True, kw_only=True):
    """As much of a statement as a place in the chain takes."""

    predicate: _Place


def seal(body: bytes, key: SigningKey) -> Sealed:
    """Sign a statement. The same body and key give the same bytes."""
    envelope = _write(body, signature=key.sign(_signed_bytes(body)), key_id=key.key_id)
    return Sealed(body=body, envelope=envelope, sha256=hashlib.sha256(envelope).hexdigest())


def receipt(envelope: bytes) -> Receipt:
    """A stored envelope, as callers see it. Its signature is not looked at."""
    body = _decode(_read(envelope).payload)
    return as_seen(Sealed(body=body, envelope=envelope, sha256=hashlib.sha256(envelope).hexdigest()))


def facts_in(envelope: bytes) -> RunFacts:
    """What a stored envelope states. Its signature is not looked at."""
    try:
        return parse_statement(_decode(_read(envelope).payload))
    except ValueError as error:
        raise _refused("its payload is no statement of ours") from error


def as_seen(sealed: Sealed) -> Receipt:
    """The same of one that is at hand."""
    try:
        stated = msgspec.json.decode(sealed.body, type=_Stated).predicate
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _refused("its payload is no statement of ours") from error
    return Receipt(
        sha256=sealed.sha256, number=stated.number, previous=stated.previous.sha256 if stated.previous else "",
        statement=msgspec.json.decode(sealed.body), envelope=sealed.envelope.decode(),
    )  # fmt: skip


def signer(envelope: bytes) -> str:
    """The id of the key that an envelope names. Its signature is not looked at."""
    signatures = _read(envelope).signatures
    return signatures[0].keyid if signatures else ""


def open_envelope(envelope: bytes, public: PublicKey) -> bytes:
    """The statement in an envelope, if the key's owner signed it."""
    found = _read(envelope)
    body = _decode(found.payload)
    if len(found.signatures) != 1 or found.signatures[0].keyid != public.key_id:
        raise _refused("it is not signed by this key alone")
    signature = _decode(found.signatures[0].sig)
    if not public.verifies(signature, _signed_bytes(body)):
        raise _refused("its signature does not fit its content")
    if _write(body, signature=signature, key_id=public.key_id) != envelope:
        raise _refused("it is not spelled as it was sealed")
    return body


def _signed_bytes(body: bytes) -> bytes:
    """DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %b %d %b" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(body), body)


def _write(body: bytes, *, signature: bytes, key_id: str) -> bytes:
    sealed = _Envelope(
        payload=base64.b64encode(body).decode(), payload_type=PAYLOAD_TYPE,
        signatures=[_Signature(keyid=key_id, sig=base64.b64encode(signature).decode())],
    )  # fmt: skip
    return msgspec.json.encode(sealed, order="sorted")


def _read(envelope: bytes) -> _Envelope:
    try:
        found = msgspec.json.decode(envelope, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _refused("it is no DSSE envelope") from error
    if found.payload_type != PAYLOAD_TYPE:
        raise _refused("its payload is of another type")
    return found


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused("it holds something that is not base64") from error


def _refused(why: str) -> VerifyFailed:
    return VerifyFailed(f"a receipt cannot be trusted: {why}", hint="get it again from where it was sealed")
