"""A key that is lost is not replaced in silence, and a new one leaves what the old one signed valid."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import receipts, signing
from holdfast.errors import KeysLost, VerifyFailed
from holdfast.signing import PRIVATE, PUBLIC, PublicKey, SigningKey


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def delete(keys: Path) -> None:
    (keys / PRIVATE).unlink()


def delete_both(keys: Path) -> None:
    delete(keys)
    (keys / PUBLIC).unlink()


def delete_all(keys: Path) -> None:
    shutil.rmtree(keys)


def damage(keys: Path) -> None:
    (keys / PRIVATE).write_bytes(b"-----BEGIN nothing")


def exchange(keys: Path) -> None:
    SigningKey.load_or_create(keys.with_name("other"))
    shutil.copy(keys.with_name("other") / PRIVATE, keys / PRIVATE)


LOSSES: list[Callable[[Path], None]] = [delete, delete_both, delete_all, damage, exchange]


@pytest.mark.parametrize("lose", LOSSES)
def test_a_lost_key_is_named_until_the_user_rotates(keys: Path, lose: Callable[[Path], None]) -> None:
    old = SigningKey.load_or_create(keys)
    lose(keys)

    for _ in range(2):
        with pytest.raises(KeysLost) as caught:
            SigningKey.load_or_create(keys)
        assert "holdfast keys rotate" in caught.value.hint
    SigningKey.rotate(keys)
    new = SigningKey.load_or_create(keys)

    assert [key.key_id for key in new.public.accepted] == [old.key_id, new.key_id]
    assert signing.key_of_home(keys.parent).key_id == new.key_id


def test_a_lost_key_of_an_earlier_version_is_known_by_its_receipts(keys: Path) -> None:
    """It left no chain."""
    with pytest.raises(KeysLost):
        SigningKey.load_or_create(keys, has_signed=lambda: True)
    SigningKey.rotate(keys)
    assert SigningKey.load_or_create(keys, has_signed=lambda: True).public.accepted


@pytest.mark.parametrize("left", [PUBLIC, "chain", "../keys.chain"])
def test_what_can_be_made_again_is(keys: Path, left: str) -> None:
    SigningKey.load_or_create(keys)
    key = SigningKey.rotate(keys)
    before = (keys / left).read_bytes()
    for damaged in (None, b"damaged"):
        (keys / left).unlink() if damaged is None else (keys / left).write_bytes(damaged)

        again = SigningKey.load_or_create(keys)

        assert (keys / left).read_bytes() == before
        assert again.key_id == key.key_id
        assert len(again.public.accepted) == 2


def test_who_trusts_the_old_key_accepts_the_new_one_if_the_old_one_signed_it(keys: Path) -> None:
    first = SigningKey.load_or_create(keys)
    SigningKey.rotate(keys)
    delete(keys)
    third = SigningKey.rotate(keys)
    links = signing.chain_of_home(keys.parent)

    def accepted(at: int) -> list[int]:
        ids = [link.public.key_id for link in links]
        return [ids.index(key.key_id) for key in PublicKey.from_raw(links[at].public.raw).within(links).accepted]

    assert links[0].public.key_id == first.key_id
    assert links[2].public.key_id == third.key_id
    assert accepted(0) == [0, 1], "the second was lost, and could not sign the third"
    assert accepted(2) == [0, 1, 2], "each names the one before it"


def test_a_link_that_somebody_else_put_in_leads_nowhere(keys: Path) -> None:
    SigningKey.load_or_create(keys)
    SigningKey.rotate(keys)
    other = SigningKey.load_or_create(keys.with_name("other"))
    first, last = signing.chain_of_home(keys.parent)
    forged = [signing.Link(key=other.public.raw.hex(), at=0.0), last]

    assert len(last.public.within([first, last]).accepted) == 2
    assert [key.key_id for key in last.public.within(forged).accepted] == [last.public.key_id]
    with pytest.raises(VerifyFailed):
        receipts.open_envelope(receipts.seal(b"{}", other).envelope, last.public)
