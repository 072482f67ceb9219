"""CKPTs: one state, one token."""

import pytest

from holdfast import ckpt
from holdfast.ckpt import Ckpt
from holdfast.errors import CkptUnknown

DIGEST = "ab" * 32
TOKEN = "CKPT-3f9a01bc77-g2-v14-0123456789ab"


def test_a_ckpt_reads_as_it_was_written() -> None:
    made = ckpt.make(
        "3f9a01bc77", generation=2, version=14, manifest_sha256=DIGEST, names={"df": ("DataFrame", "run_1")}
    )

    assert ckpt.parse(str(made)) == made
    assert str(made).startswith("CKPT-3f9a01bc77-g2-v14-")


def test_a_session_may_have_hyphens() -> None:
    made = Ckpt(session="a-g1-v2", generation=3, version=4, root12="0" * 12)

    assert ckpt.parse(str(made)) == made


def test_spaces_around_it_do_not_matter() -> None:
    assert str(ckpt.parse(f" {TOKEN}\n")) == TOKEN


@pytest.mark.parametrize(
    "text",
    ["", "CKPT", TOKEN[:-1], TOKEN + "0", TOKEN.lower(), TOKEN.upper(), TOKEN.replace("v14", "v014"),
     TOKEN.replace("v14", "v١٤"), "x" * 1_000_000, "CKPT-" + "-g1-v1" * 100_000],
)  # fmt: skip
def test_what_is_no_ckpt_is_refused_in_a_few_words(text: str) -> None:
    with pytest.raises(CkptUnknown) as refused:
        ckpt.parse(text)

    assert len(refused.value.message) < 200
    assert "CKPT-<session>" in refused.value.hint


def test_the_root_depends_on_files_names_types_and_runs() -> None:
    roots = {
        ckpt.root(DIGEST, {}),
        ckpt.root("cd" * 32, {}),
        ckpt.root(DIGEST, {"a": ("int", "run_1")}),
        ckpt.root(DIGEST, {"a": ("str", "run_1")}),
        ckpt.root(DIGEST, {"a": ("int", "run_2")}),
        ckpt.root(DIGEST, {"b": ("int", "run_1")}),
    }

    assert len(roots) == 6


def test_the_root_does_not_depend_on_the_order_of_names() -> None:
    one, two = ("int", "run_1"), ("str", "run_2")

    assert ckpt.root(DIGEST, {"a": one, "b": two}) == ckpt.root(DIGEST, {"b": two, "a": one})


def test_names_cannot_imitate_one_another() -> None:
    assert ckpt.root(DIGEST, {"a": ("b1:c", "d")}) != ckpt.root(DIGEST, {"a": ("b", "1:cd")})
    assert ckpt.root(DIGEST, {"\ud800": ("int", "r")}) != ckpt.root(DIGEST, {"?": ("int", "r")})


def test_a_known_ckpt_resolves_to_itself() -> None:
    assert ckpt.resolve(f"{TOKEN} ", [TOKEN]) == TOKEN


@pytest.mark.parametrize("typed", [TOKEN[:-1] + "c", TOKEN.lower(), TOKEN[5:], TOKEN.replace("v14", "v41")])
def test_a_mistyped_ckpt_gets_a_suggestion_and_is_not_taken(typed: str) -> None:
    with pytest.raises(CkptUnknown) as refused:
        ckpt.resolve(typed, [TOKEN, "CKPT-ffffffffff-g9-v99-ffffffffffff"])

    assert refused.value.hint == f"did you mean {TOKEN}?"


def test_a_strange_ckpt_gets_no_suggestion() -> None:
    with pytest.raises(CkptUnknown, match="names no retained state") as refused:
        ckpt.resolve("yesterday", [TOKEN])

    assert "history" in refused.value.hint
