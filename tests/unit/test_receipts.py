"""Keys, statements and envelopes; securesystemslib is the judge of what a DSSE verifier accepts."""

import hashlib
import json
import os
import random
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
import rfc8785
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import SSlibKey

from holdfast import receipts, statements
from holdfast.errors import InvalidSetting, KeysLost, VerifyFailed
from holdfast.records import Change, Check, Input
from holdfast.signing import PRIVATE, PUBLIC, PublicKey, SigningKey
from holdfast.statements import RunFacts

FACTS = RunFacts(
    session="3f9a01bc77", run="run_1", number=2, previous="ab" * 32, kind="cell", status="committed",
    version_before=1, version=2, generation=1, ckpt_before="CKPT-3f9a01bc77-g1-v1-0123456789ab",
    ckpt="CKPT-3f9a01bc77-g1-v2-ba9876543210", manifest_sha256="cd" * 32, goal="sum the sales",
    code_sha256="ef" * 32, key="monthly", attempt=2, inputs=[Input(path="in.csv", sha256="01" * 32, bytes=7)],
    changes=[
        Change(path="out.csv", action="added", sha256="23" * 32, bytes=9, mode=0o644),
        Change(path="old.csv", action="removed", before="45" * 32),
        Change(path="plots", action="added", kind="directory", mode=0o755),
    ],
    checks=[Check(name="output out.csv", ok=True)], environment="env-1", exit_code=0, duration_s=0.25,
    peak_memory_bytes=1 << 20, strays=["process sleep"], egress=["GET https://example.org"],
    started_at=1_800_000_000.25, finished_at=1_800_000_000.5, saved=["chunk 1"],
)  # fmt: skip
ROLLED_BACK = msgspec.structs.replace(
    FACTS, status="rolled_back", version=1, changes=[], error_code="exception", error_message="ValueError: no",
    reason="the code raised ValueError", blame="user",
)  # fmt: skip


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return SigningKey.load_or_create(tmp_path / "keys")


def _stated(facts: RunFacts) -> dict[str, Any]:
    stated: dict[str, Any] = json.loads(statements.statement(facts))
    return stated


# -- keys --------------------------------------------------------------------------------------------------------


def test_a_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    first, second = SigningKey.load_or_create(tmp_path / "keys"), SigningKey.load_or_create(tmp_path / "keys")

    assert first.key_id == second.key_id
    assert first.sign(b"x") == second.sign(b"x")
    assert stat.S_IMODE((tmp_path / "keys" / PRIVATE).stat().st_mode) == 0o600
    assert (tmp_path / "keys" / PUBLIC).read_bytes() == first.public_pem


def test_a_crash_between_the_two_halves_is_mended(tmp_path: Path) -> None:
    made = SigningKey.load_or_create(tmp_path)
    (tmp_path / PUBLIC).unlink()

    SigningKey.load_or_create(tmp_path)

    assert (tmp_path / PUBLIC).read_bytes() == made.public_pem


def test_a_lost_private_key_is_not_silently_replaced(tmp_path: Path) -> None:
    SigningKey.load_or_create(tmp_path)
    (tmp_path / PRIVATE).unlink()

    with pytest.raises(KeysLost, match="is gone"):
        SigningKey.load_or_create(tmp_path)


def test_a_private_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    SigningKey.load_or_create(tmp_path)
    os.chmod(tmp_path / PRIVATE, 0o640)

    with pytest.raises(InvalidSetting, match="0640"):
        SigningKey.load_or_create(tmp_path)


@pytest.mark.parametrize("pem", [b"", b"nonsense", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"])
def test_what_is_no_public_key_is_refused(pem: bytes) -> None:
    with pytest.raises(InvalidSetting):
        PublicKey.from_pem(pem)


# -- statements --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("facts", [FACTS, ROLLED_BACK])
def test_a_statement_tells_all_the_facts(facts: RunFacts) -> None:
    assert statements.parse_statement(statements.statement(facts)) == facts


@pytest.mark.parametrize("facts", [FACTS, ROLLED_BACK])
def test_a_statement_is_canonical_json(facts: RunFacts) -> None:
    assert statements.statement(facts) == rfc8785.dumps(_stated(facts))


@pytest.mark.parametrize("number", [0.0, 1.0, 0.1, 1e-7, 1e21, 123456.789, 5e-324, 1.7976931348623157e308, 2.5e-5])
def test_numbers_are_written_as_rfc_8785_says(number: float) -> None:
    assert statements.canonical({"a": number}) == rfc8785.dumps({"a": number})


def test_durations_are_written_as_rfc_8785_says() -> None:
    drawn = random.Random(8785)
    durations = [drawn.uniform(0, 10 ** drawn.randint(-9, 12)) for _ in range(500)] + [0.0, 1.0, 1e-3, 0.00123, 1e9]

    for duration in durations:
        facts = msgspec.structs.replace(FACTS, duration_s=duration)
        assert statements.statement(facts) == rfc8785.dumps(_stated(facts))


def test_text_is_written_as_rfc_8785_says() -> None:
    text = "".join(chr(code) for code in range(0x3000) if not 0xD800 <= code < 0xE000) + "\U0001f30a\uffff\U0010ffff"

    assert statements.canonical([text]) == rfc8785.dumps([text])


def test_a_guests_text_cannot_break_the_json() -> None:
    facts = msgspec.structs.replace(ROLLED_BACK, error_message='"\ud800\x00\u2028')

    assert statements.parse_statement(statements.statement(facts)).error_message == '"\\ud800\x00\u2028'


def test_the_files_that_a_run_left_are_the_subject() -> None:
    assert _stated(FACTS)["subject"] == [
        {"name": "out.csv", "digest": {"sha256": "23" * 32}, "annotations": {"bytes": 9}}
    ]


def test_a_run_without_files_has_the_manifest_as_its_subject() -> None:
    assert _stated(ROLLED_BACK)["subject"] == [{"name": "manifest-sha256.txt", "digest": {"sha256": "cd" * 32}}]


def test_a_rolled_back_run_says_why_and_that_nothing_changed() -> None:
    predicate = _stated(ROLLED_BACK)["predicate"]

    assert predicate["rollback"] == {"reason": "the code raised ValueError", "blame": "user", "changed": "nothing"}
    assert predicate["byproducts"]["error"] == {"code": "exception", "message": "ValueError: no"}
    assert _stated(FACTS)["predicate"]["rollback"] is None


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff"])
def test_what_is_no_statement_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (of whatever kind: it is its caller who says which receipt)
        statements.parse_statement(body)


# -- envelopes ---------------------------------------------------------------------------------------------------


def test_the_same_facts_are_sealed_in_the_same_bytes(key: SigningKey) -> None:
    first, second = (receipts.seal(statements.statement(FACTS), key) for _ in range(2))

    assert first == second
    assert first.sha256 == hashlib.sha256(first.envelope).hexdigest()


def test_a_sealed_statement_can_be_opened_with_the_public_key_alone(key: SigningKey) -> None:
    sealed = receipts.seal(statements.statement(FACTS), key)

    assert receipts.open_envelope(sealed.envelope, PublicKey.from_pem(key.public_pem)) == statements.statement(FACTS)


def test_another_key_does_not_open_it(key: SigningKey, tmp_path: Path) -> None:
    other = SigningKey.load_or_create(tmp_path / "other")

    with pytest.raises(VerifyFailed, match="not signed by this key"):
        receipts.open_envelope(receipts.seal(b"{}", other).envelope, key.public)


@pytest.mark.parametrize("facts", [FACTS, ROLLED_BACK])
def test_securesystemslib_verifies_our_envelopes(key: SigningKey, facts: RunFacts) -> None:
    sealed = receipts.seal(statements.statement(facts), key)
    theirs = SSlibKey.from_crypto(load_pem_public_key(key.public_pem))

    envelope = Envelope.from_dict(json.loads(sealed.envelope))

    assert envelope.verify([theirs], 1) == {key.key_id: theirs}
    assert envelope.payload == statements.statement(facts)


def test_securesystemslib_refuses_what_we_refuse(key: SigningKey, tmp_path: Path) -> None:
    sealed = receipts.seal(statements.statement(FACTS), key)
    theirs = SSlibKey.from_crypto(load_pem_public_key(key.public_pem))
    envelope = Envelope.from_dict(json.loads(sealed.envelope))
    envelope.payload = envelope.payload.replace(b"out.csv", b"OUT.csv")

    with pytest.raises(VerificationError):
        envelope.verify([theirs], 1)


def test_no_bit_of_an_envelope_can_change(key: SigningKey) -> None:
    envelope = receipts.seal(statements.statement(FACTS), key).envelope

    for position in range(len(envelope) * 8):
        flipped = bytearray(envelope)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(VerifyFailed):
            receipts.open_envelope(bytes(flipped), key.public)


@pytest.mark.parametrize("change", [b" %b", b"%b\n"])
def test_another_spelling_is_refused(key: SigningKey, change: bytes) -> None:
    with pytest.raises(VerifyFailed, match="not spelled"):
        receipts.open_envelope(change % receipts.seal(b"{}", key).envelope, key.public)


def test_callers_see_the_receipt_as_json(key: SigningKey) -> None:
    sealed = receipts.seal(statements.statement(FACTS), key)

    receipt = receipts.receipt(sealed.envelope)

    assert (receipt.number, receipt.previous, receipt.sha256) == (2, "ab" * 32, sealed.sha256)
    assert receipt.statement == _stated(FACTS)
    assert receipt.envelope.encode() == sealed.envelope
    assert json.loads(receipt.to_json())["statement"] == _stated(FACTS)
    assert receipt.facts() == FACTS
