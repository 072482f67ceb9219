"""A run that is followed at a server: what its caller is told, whatever becomes of an answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.unit.test_feeds import a_run

from holdfast import api
from holdfast.errors import EventsGone, HoldfastError, InvalidSetting, ServerUnreachable
from holdfast.transports.connection import Connection
from holdfast.transports.following import Follower


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Refusing:
    """A server that asks, does not take the answer, and ends the run."""

    def __init__(self, refusal: HoldfastError) -> None:
        self._refusal = refusal
        self._answered = asyncio.Event()

    def patience(self) -> Any:
        return self

    def renew(self) -> None:
        pass

    @asynccontextmanager
    async def events(self, *_: object, **__: object) -> AsyncIterator[AsyncIterator[api.RunEvent]]:
        async def told() -> AsyncIterator[api.RunEvent]:
            yield api.Began(number=0, run="run_a", session="s")
            yield api.Asked(number=1, prompt="who? ", password=False)
            await self._answered.wait()
            await asyncio.sleep(0.01)
            yield api.Settled(number=2, run=a_run(text="ended"))

        yield told()

    async def ask(self, method: str, path: str, into: object, **_: object) -> Any:
        if path.endswith("/input"):
            self._answered.set()
            raise self._refusal
        return api.Interrupted(interrupted=False)


async def follow(refusal: HoldfastError, answer: str = "me") -> Any:
    async def ask(prompt: str, password: bool) -> str:
        return answer

    asked = api.AskedRun(code="input()", stdin=True)
    connection: Any = Refusing(refusal)
    return await Follower(connection, "s", asked, emit=None, ask=ask).follow()


@pytest.mark.parametrize("kind", [InvalidSetting, EventsGone])
async def test_an_answer_that_comes_too_late_does_not_take_the_place_of_the_result(kind: type[HoldfastError]) -> None:
    run = await follow(kind("no question waits", hint=""))

    assert run.text == "ended"


async def test_an_answer_that_does_not_get_there_is_told() -> None:
    with pytest.raises(ServerUnreachable):
        await follow(ServerUnreachable("it does not answer", hint=""))


async def test_an_answer_that_is_no_text_is_its_callers_mistake() -> None:
    with pytest.raises(InvalidSetting, match="no text"):
        await follow(ServerUnreachable("it does not answer", hint=""), answer="\udc80")


@pytest.mark.parametrize("url", ["http://[::1", "http://h:abc", "http://h:99999", "http://", "ftp://h", "h:80"])
async def test_an_address_of_no_server_is_refused_with_a_hint(url: str) -> None:
    with pytest.raises(InvalidSetting, match="is no server") as refused:
        Connection(url)

    assert "http://127.0.0.1:8765" in refused.value.hint
