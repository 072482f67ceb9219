"""A session's parts, driven by hand: its kernel without transactions, and its memory without a snapshot.

There is no such setting: whoever runs code through a session gets a transaction. These say what of a run's time and
of a session's memory is the kernel's own. All of it is asked for from the caller's thread, as a run is.
"""

from holdfast import Session, engine
from holdfast.kernel import wire
from holdfast.kernel.happenings import Died, Gone
from holdfast.sessions import LiveSession

from . import crowd

_PATIENCE_S = 60.0


def wake(session: Session) -> None:
    """Let the kernel stay awake between two requests, and without a snapshot, until the session's next turn."""
    live = crowd.live(session)

    async def stay_awake() -> None:
        await live.wait_settled()
        await live.computer.kernel.drop_snapshot()
        live.computer.thaw()

    engine.wait(stay_awake)


def ask_kernel(session: Session, code: str) -> str:
    """`Execute` over the control socket, and read until `Finished`: nothing else. The kernel is awake."""
    return engine.wait(lambda: _ask(crowd.live(session), code))


async def _ask(live: LiveSession, code: str) -> str:
    kernel, turn = live.computer.kernel, live.computer.next_turn()
    await kernel.send(wire.Execute(turn=turn, code=code))
    while True:
        for event in await kernel.wait(_PATIENCE_S):
            if isinstance(event, (Died, Gone)):
                raise RuntimeError(f"the kernel is lost: {event}")
            if isinstance(event, wire.Finished) and event.turn == turn:
                return event.result.data.text["text/plain"] if event.result else ""


def execute(session: Session, code: str) -> str:
    """A whole turn: thawed, executed under its limits; afterwards, without the caller, a snapshot and frozen again. No
    plan, no journal, no receipt."""
    return engine.wait(lambda: _execute(crowd.live(session), code))


async def _execute(live: LiveSession, code: str) -> str:
    async with live.turn() as computer:
        request = wire.Execute(turn=computer.next_turn(), code=code)
        execution = await computer.execute("run_bench", request, timeout_s=_PATIENCE_S)
        return execution.conduct.shelf.result or ""


def drop_snapshots(sessions: list[Session]) -> None:
    """Each session's kernel alone is left of it, as before its first run."""
    for session in sessions:
        live = crowd.live(session)
        wake(session)
        engine.call(live.computer.freeze)
