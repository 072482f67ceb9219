"""What MCP clients hear while code runs, and how those that come back find their session."""

from pathlib import Path

import anyio
import pytest

from holdfast.errors import InvalidSetting
from holdfast.model import Output
from holdfast.server.mcp import progress
from holdfast.server.mcp.names import Named, first_free
from holdfast.server.mcp.progress import passing_on


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_client_hears_output_and_when_there_is_none_that_it_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SILENT_S", 0.05)
    monkeypatch.setattr(progress, "_OFTEN_S", 0.0)
    heard: list[tuple[float, str]] = []
    enough = anyio.Event()

    async def tell(at: float, message: str) -> None:
        heard.append((at, message))
        if len(heard) >= 4:
            enough.set()

    async with passing_on(tell) as emit:
        assert emit is not None
        await emit(Output(stream="stdout", text="rising"))
        with anyio.fail_after(10):
            await enough.wait()

    assert heard[0][1] == "rising"
    assert all(message.startswith("still running after") for _, message in heard[1:])
    assert [at for at, _ in heard] == sorted({at for at, _ in heard}), "progress only grows"


async def test_who_does_not_want_to_know_hears_nothing() -> None:
    async with passing_on(None) as emit:
        assert emit is None


def test_a_name_finds_its_session_again_and_belongs_to_its_owner(tmp_path: Path) -> None:
    Named(tmp_path, "claude", owner="ada").remember("4f1c0a9be2")

    assert Named(tmp_path, "claude", owner="ada").session() == "4f1c0a9be2"
    assert Named(tmp_path, "claude", owner="bob").session() is None
    assert Named(tmp_path, "cursor", owner="ada").session() is None


@pytest.mark.parametrize("name", ["", "a" * 101, "two\nlines", "\x1b[2J"])
def test_nonsense_is_no_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidSetting):
        Named(tmp_path, name)


def test_a_path_is_a_name_like_any_other(tmp_path: Path) -> None:
    Named(tmp_path, "../../etc/passwd").remember("4f1c0a9be2")

    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "mcp"]


def test_while_a_name_is_in_use_the_next_one_is_free(tmp_path: Path) -> None:
    first, second = first_free(tmp_path, "claude"), first_free(tmp_path, "claude")
    first.remember("a")
    second.remember("b")
    first.let_go()
    again = first_free(tmp_path, "claude")

    assert (again.session(), second.session()) == ("a", "b")
