"""What a key stands for, and what the next run with it is told."""

import pytest

from holdfast import once
from holdfast.errors import KeyReused
from holdfast.records import Settled
from holdfast.store.rows import KeyRow

ROW = KeyRow(session="s", key="k", run="run_1", request_sha256="d", attempt=1)
SENT = ["POST http://api.example.com/orders"]


def by_system() -> Settled:
    return Settled(run="run_1", at=0.0, status="rolled_back", version=0, ckpt="", by="system")


def test_the_next_attempt_knows_what_those_before_it_sent() -> None:
    earlier = once.Earlier(row=ROW, settled=by_system(), result=None, sent=SENT)

    recorded, attempt = once.answer(earlier, key="k", digest="d", retry=False)

    assert recorded is None
    assert attempt == once.Attempt(number=2, may_have_happened=SENT)


def test_a_key_that_is_handed_on_to_another_run_takes_that_along() -> None:
    attempt = once.Attempt(number=2, may_have_happened=SENT)

    stands = once.stand_for("s", "k", "run_2", digest="d", attempt=attempt)

    assert (stands.row.run, stands.row.attempt, stands.row.may_have_happened) == ("run_2", 2, tuple(SENT))


def test_a_key_of_another_request_is_refused() -> None:
    with pytest.raises(KeyReused):
        once.answer(once.Earlier(row=ROW, settled=None, result=None), key="k", digest="other", retry=False)
