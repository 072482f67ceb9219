"""Which ids a home has on this machine, and that no other has them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import SandboxUnavailable
from holdfast.nodes import ids
from holdfast.nodes.ids import BLOCK, FIRST, IdBlock, claim_block

AT_ONCE = 8


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return tmp_path / "registry"


def home(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.mkdir(exist_ok=True)
    return path


def test_a_home_keeps_its_block_and_another_gets_the_next(tmp_path: Path, registry: Path) -> None:
    first, second, again = (claim_block(home(tmp_path, name), registry) for name in ("a", "b", "a"))

    assert (first.take(), second.take(), again.take()) == (
        (FIRST, FIRST + 1),
        (FIRST + BLOCK, FIRST + BLOCK + 1),
        (FIRST, FIRST + 1),
    )


@pytest.mark.parametrize("left", ["/nowhere/any/more", ""], ids=["gone", "killed while it claimed"])
def test_the_block_of_a_home_that_is_no_more_goes_to_the_next(tmp_path: Path, registry: Path, left: str) -> None:
    registry.mkdir()
    (registry / "0").write_text(left)

    assert claim_block(home(tmp_path, "a"), registry).take() == (FIRST, FIRST + 1)
    assert claim_block(home(tmp_path, "b"), registry).take() == (FIRST + BLOCK, FIRST + BLOCK + 1)


def test_homes_that_open_at_once_never_share_a_block(tmp_path: Path, registry: Path) -> None:
    homes = [home(tmp_path, f"home-{number}") for number in range(AT_ONCE)]
    registry.mkdir()
    for round_ in range(20):
        for number in range(2 * AT_ONCE):
            (registry / str(number)).write_text("/nowhere/any/more")
        ready = threading.Barrier(AT_ONCE)

        def claim(home: Path, ready: threading.Barrier = ready) -> IdBlock:
            ready.wait()
            return claim_block(home, registry)

        with ThreadPoolExecutor(AT_ONCE) as threads:
            taken = [block.take() for block in threads.map(claim, homes)]

        assert len(set(taken)) == AT_ONCE, round_


def test_no_block_is_left(tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "BLOCKS", 1)
    claim_block(home(tmp_path, "a"), registry)

    with pytest.raises(SandboxUnavailable, match="no block of user ids"):
        claim_block(home(tmp_path, "b"), registry)


def test_ids_are_handed_out_in_pairs_until_none_is_left() -> None:
    block = IdBlock(FIRST)
    pairs = [block.take() for _ in range(BLOCK // 2)]

    assert len({number for pair in pairs for number in pair}) == BLOCK
    with pytest.raises(SandboxUnavailable, match="4096 pairs"):
        block.take()

    block.give_back(pairs[7][0])
    assert block.take() == pairs[7]
