"""Where hosts are killed while they play a scenario, and what is looked at when the next one opens their home."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from tests.crash.hosts import Host, Told, is_alive, wait_until
from tests.crash.scenarios import SCENARIOS
from tests.crash.sound import check_books, check_nothing_left, check_recovered, tree_of

EVERY = "HOLDFAST_CRASH_EVERYWHERE" in os.environ
"""Die at every passing of every point: minutes become an hour."""
STEPS = ("journal.Saved.after", "journal.Verified.after")
"""What cannot be taken back once it was passed: the next of a scenario's states is what will be found."""


BY_THEMSELVES = (
    "run.executed", "publish.made", "publish.emptied", "publish.written", "publish.synced", "publish.discarded",
    "remove.emptied", "egress.noted",
)  # fmt: skip
"""Points with a change before them (the last one: behind it) that is no step of `durable` or of the journal."""


class Moment(NamedTuple):
    """When to die."""

    at: str
    steps: int
    """How many of STEPS were passed by then."""


def moments(passed: Sequence[str], *, at: Sequence[str] = ("",), each: Sequence[str] = ()) -> list[Moment]:
    """The first and the last passing of each point whose name begins so (`at`); but once only of those between which
    nothing on the disk changes: a host that is killed leaves the same there. Where the names begin as in `each`, each
    point has its turn all the same."""
    places = {
        point: [place for place, name in enumerate(passed) if name == point]
        for point in dict.fromkeys(passed)
        if point.startswith(tuple(at))
    }
    states, tried, chosen = _states(passed), set[int](), set[int]()
    for point in sorted(places, key=lambda point: _commonness(point, places[point])):
        ends = places[point] if EVERY else sorted({places[point][0], places[point][-1]})
        fresh = [place for place in ends if EVERY or states[place] not in tried]
        chosen.update(fresh or (ends[:1] if point.startswith(tuple(each)) else []))
        tried.update(states[place] for place in fresh)
    return [
        Moment(f"{passed[place]}:{places[passed[place]].index(place) + 1}", _steps(passed, place))
        for place in sorted(chosen)
    ]


def _states(passed: Sequence[str]) -> list[int]:
    """At each point, which state of the disk it is: the last one's, unless something was done in between."""
    found, state = list[int](), 0
    for before, point in zip(("", *passed), passed, strict=False):
        is_step = before.endswith(".before") and point.endswith(".after") and ".sync_" not in point
        state += is_step or point in BY_THEMSELVES or before == "egress.noted"
        found.append(state)
    return found


def _commonness(point: str, places: Sequence[int]) -> tuple[bool, int, int]:
    """Of points that leave the same the one is tried that says most: what hundreds of steps pass comes last."""
    return point.startswith(("durable.", "journal.")), len(places), places[0]


def _steps(passed: Sequence[str], place: int) -> int:
    """Of records that are written in one go each has its point afterwards, and all of them are passed."""
    while place + 1 < len(passed) and _is_written(passed[place], passed[place + 1]):
        place += 1
    return sum(name in STEPS for name in passed[: place + 1])


def moments_of(scenario: str, passed: Sequence[str]) -> list[Moment]:
    """When its hosts die."""
    return moments(passed, at=SCENARIOS[scenario].at, each=SCENARIOS[scenario].each)


def _is_written(*points: str) -> bool:
    return all(point.startswith("journal.") and point.endswith(".after") for point in points)


class Crashes:
    """One home, whose hosts are killed one after the other while they play a scenario."""

    def __init__(self, home: Path, name: str) -> None:
        self.home, self.name = home, name
        self.host = Host(home)
        before = self.host.ask("create", scenario=name)
        tree = tree_of(home, before.session)
        self.played = self.host.ask("play", session=before.session, scenario=name, at="")
        self.taken_back = set(before.live) - set(self.played.live)
        self.states = SCENARIOS[name].states(before.files, self.played.files)
        self.trees = SCENARIOS[name].states(tree, tree_of(home, before.session), below="data/")

    def survive(self, check: "Check") -> None:
        """Die at each moment; `check` looks at the session that was resumed."""

        def die(moment: Moment) -> None:
            before = self._crash(moment.at)
            # A plan is not waited for: it is written by itself or in one go with the next step, as it happens.
            steps = None if moment.at.startswith("journal.Planned.after") else moment.steps
            after = self._recover(before, steps=steps)
            if steps is None:
                moment = moment._replace(steps=int(after.version > before.version))
            check_books(self.home, check(self, after, moment))

        self._at_each(moments_of(self.name, self.played.passed), die)

    def survive_restarts(self, at: str, *, steps: int) -> None:
        """Die there, and then at each moment of the next host's start."""
        before = self._crash(at)
        passed = self._recover(before, steps=steps).passed

        def die(moment: Moment) -> None:
            before = self._crash(at)
            host = Host(self.home, crash_at=moment.at)
            host.dies("resume", session=before.session, scenario=self.name)
            go_on(self, self._recover(before, steps=steps), moment)

        self._at_each(moments(passed), die)

    def _at_each(self, chosen: Sequence[Moment], die: Callable[[Moment], None]) -> None:
        """All that fails is told at the end."""
        failures: list[Exception] = []
        for moment in chosen:
            try:
                die(moment)
                self.host.close(self.session, keep=False)
            except (AssertionError, msgspec.MsgspecError) as error:
                error.add_note(f"killed at {moment.at}, after {moment.steps} steps, while it played {self.name!r}")
                failures.append(error)
                self.host.kill()
                self.host = Host(self.home)
        code = self.host.end()
        if failures:
            raise ExceptionGroup(f"{len(failures)} crashes", failures)
        assert code == 0
        check_nothing_left(self.home)

    def _crash(self, at: str) -> Told:
        """Where the session stood before."""
        before = self.host.ask("create", scenario=self.name)
        self.session = before.session
        self.host.dies("play", session=before.session, scenario=self.name, at=at)
        return before

    def _recover(self, before: Told, *, steps: int | None) -> Told:
        """None: the first step was taken or not, and nothing between; what is found tells which."""
        dead, self.host = self.host, Host(self.home)
        after = self.host.ask("resume", session=before.session, scenario=self.name)
        wait_until(lambda: not any(is_alive(pid) for pid in dead.pids))
        if steps is None:
            steps = int(after.version > before.version)
        moved = steps > 0
        check_recovered(self.home, before, after, self.states[steps], moved=moved, taken_back=self.taken_back)
        assert tree_of(self.home, after.session) == self.trees[steps]
        return after


Check = Callable[[Crashes, Told, Moment], Told]


def go_on(crashes: Crashes, after: Told, moment: Moment) -> Told:
    """The session is as good as any."""
    told = crashes.host.ask("go_on", session=after.session)
    assert told.version == after.version + 1
    assert set(told.files) == {*after.files, "afterwards.txt"}
    return told
