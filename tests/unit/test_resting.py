"""Sessions are put to rest a few at a time, and none keeps the others from it."""

import anyio
import pytest

from holdfast.nodes import local

pytestmark = pytest.mark.anyio


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> local.LocalNode:
    monkeypatch.setattr(local, "_REST_S", 0.01)
    node = object.__new__(local.LocalNode)  # of a node this is all that is looked at
    node._rest = anyio.Semaphore(1)
    return node


async def test_who_keeps_us_waiting_keeps_no_other_waiting(node: local.LocalNode) -> None:
    with anyio.fail_after(10):
        async with node.resting(), node.resting():
            pass


async def test_a_place_is_given_back_once(node: local.LocalNode) -> None:
    async with node.resting():
        await anyio.sleep(0.05)
    async with node.resting():
        assert node._rest.value == 0
    assert node._rest.value == 1
