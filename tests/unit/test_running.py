"""Runs of a server: who joins one, and what is kept of those that are over."""

import asyncio
import gc
import types
import weakref
from typing import Any

import pytest

from holdfast import api, verbs
from holdfast.config import Limits
from holdfast.errors import InvalidSetting, SessionClosed
from holdfast.requests import RunRequest
from holdfast.server.doors.metrics import Metrics
from holdfast.server.http.running import Runs
from holdfast.sessions import LiveSession


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def runs() -> Runs:
    return Runs(Metrics(), grace_s=5)


@pytest.fixture
def session() -> Any:
    books = types.SimpleNamespace(watchers=[])
    return types.SimpleNamespace(id="abc", limits=Limits(), plans={}, books=books)


@pytest.fixture
def forever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: object, **__: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(verbs, "run", run)


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
async def test_nobody_joins_a_rehearsal_and_a_rehearsal_joins_nobody(
    runs: Runs, session: LiveSession, forever: None, first: bool, second: bool
) -> None:
    begun = runs.start(session, RunRequest(code="book()", key="k", rehearse=first, run="run_a"), stdin=False)
    other = runs.start(session, RunRequest(code="book()", key="k", rehearse=second, run="run_b"), stdin=False)

    assert (begun.id, other.id) == ("run_a", "run_b")
    await runs.stop(0)


async def test_the_same_request_with_the_same_key_joins_the_run_that_goes_on(
    runs: Runs, session: LiveSession, forever: None
) -> None:
    begun = runs.start(session, RunRequest(code="book()", key="k", run="run_a"), stdin=False)

    assert runs.start(session, RunRequest(code="book()", key="k", run="run_b"), stdin=False) is begun
    await runs.stop(0)


async def test_what_no_session_would_take_is_refused_before_anything_is_kept_of_it(
    runs: Runs, session: LiveSession
) -> None:
    with pytest.raises(InvalidSetting, match="larger than"):
        runs.start(session, RunRequest(code="#" * (9 << 20), run="run_a"), stdin=False)

    assert runs.find("abc", "run_a") is None


async def test_nothing_holds_the_request_of_a_run_that_is_over(
    runs: Runs, session: LiveSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held(list[str]):
        """Something of a request that can be watched."""

    async def refuse(session: object, request: RunRequest, **_: object) -> None:
        try:
            request.inputs[3]
        except IndexError as error:
            raise SessionClosed("it is closed", hint="open another") from error

    monkeypatch.setattr(verbs, "run", refuse)
    inputs = Held()
    watched = weakref.ref(inputs)
    run = runs.start(session, RunRequest(code="1", inputs=inputs, run="run_a"), stdin=False)
    del inputs
    await run.feed.wait_end()
    await asyncio.sleep(0.01)
    gc.collect()

    assert watched() is None
    assert runs.find("abc", "run_a") is run, "its end can still be asked for"
    assert run.error is not None
    assert run.error.code == "session_closed"


async def test_an_answer_that_is_sent_again_is_taken_as_the_first_was_and_one_to_another_question_is_refused(
    runs: Runs, session: LiveSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []

    async def ask_twice(*_: object, ask: Any, **__: object) -> None:
        said.append(await ask("who? ", False))
        said.append(await ask("and? ", False))

    monkeypatch.setattr(verbs, "run", ask_twice)
    run = runs.start(session, RunRequest(code="1", run="run_a"), stdin=True)
    await asyncio.sleep(0.01)
    first = api.Answer(text="me", number=1)
    for _ in range(2):
        run.answer(first)
        await asyncio.sleep(0.01)

    with pytest.raises(InvalidSetting, match="no question of number 7"):
        run.answer(api.Answer(text="me", number=7))
    run.answer(first)
    assert said == ["me"], "nor is it the answer to the next question"
    await runs.stop(0)
