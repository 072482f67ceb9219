"""Where hosts are killed while they play a scenario, and what is looked at when the next one opens their home."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from tests.crash.hosts import Host, Told, is_alive, wait_until
from tests.crash.scenarios import SCENARIOS
from tests.crash.sound import check_books, check_nothing_left, check_recovered

EVERY = "HOLDFAST_CRASH_EVERYWHERE" in os.environ
"""Die at every passing of every point: minutes become an hour."""
STEPS = ("journal.Saved.after", "journal.Verified.after")
"""What cannot be taken back once it was passed: the next of a scenario's states is what will be found."""


class Moment(NamedTuple):
    """When to die."""

    at: str
    steps: int
    """How many of STEPS were passed by then."""


def moments(passed: Sequence[str], *, thorough: bool) -> list[Moment]:
    """The first and the last passing of each point. Not thorough: of those alone after which the disk is another,
    and of the many steps of `durable` one of each kind."""
    chosen: dict[str, int] = {}
    for point in dict.fromkeys(passed):
        places = [place for place, name in enumerate(passed) if name == point]
        for number in _numbers(point, len(places), thorough=thorough):
            chosen[f"{point}:{number}"] = places[number - 1]
    return [Moment(at, _steps(passed, place)) for at, place in chosen.items()]


def _numbers(point: str, times: int, *, thorough: bool) -> Sequence[int]:
    """Which passings of a point to die at."""
    if EVERY:
        return range(1, times + 1)
    if thorough:
        return sorted({1, times})
    if point.endswith(".before") or point.startswith(("durable.sync_file.", "durable.sync_directory.")):
        return []
    return [times // 2 + 1] if point.startswith("durable.") else sorted({1, times})


def _steps(passed: Sequence[str], place: int) -> int:
    """Of records that are written in one go each has its point afterwards, and all of them are passed."""
    while place + 1 < len(passed) and _is_written(passed[place], passed[place + 1]):
        place += 1
    return sum(name in STEPS for name in passed[: place + 1])


def _is_written(*points: str) -> bool:
    return all(point.startswith("journal.") and point.endswith(".after") for point in points)


class Crashes:
    """One home, whose hosts are killed one after the other while they play a scenario."""

    def __init__(self, home: Path, name: str) -> None:
        self.home, self.name = home, name
        self.host = Host(home)
        before = self.host.ask("create", scenario=name)
        self.played = self.host.ask("play", session=before.session, scenario=name, at="")
        self.taken_back = set(before.live) - set(self.played.live)
        self.states = SCENARIOS[name].states(before.files, self.played.files)

    def survive(self, check: "Check", *, thorough: bool = False, near: str = "") -> None:
        """Die at each moment; `check` looks at the session that was resumed. `near`: only where a point's name has
        that."""

        def die(moment: Moment) -> None:
            before = self._crash(moment.at)
            # A plan is not waited for: it is written by itself or in one go with the next step, as it happens.
            steps = None if moment.at.startswith("journal.Planned.after") else moment.steps
            after = self._recover(before, steps=steps)
            if steps is None:
                moment = moment._replace(steps=int(after.version > before.version))
            check_books(self.home, check(self, after, moment))

        chosen = moments(self.played.passed, thorough=thorough)
        self._at_each([moment for moment in chosen if near in moment.at], die)

    def survive_restarts(self, at: str, *, steps: int) -> None:
        """Die there, and then at each moment of the next host's start."""
        before = self._crash(at)
        passed = self._recover(before, steps=steps).passed

        def die(moment: Moment) -> None:
            before = self._crash(at)
            host = Host(self.home, crash_at=moment.at)
            host.dies("resume", session=before.session, scenario=self.name)
            go_on(self, self._recover(before, steps=steps), moment)

        self._at_each(moments(passed, thorough=False), die)

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
        files, moved = self.states[steps], steps > 0
        check_recovered(self.home, before, after, files, moved=moved, taken_back=self.taken_back)
        return after


Check = Callable[[Crashes, Told, Moment], Told]


def go_on(crashes: Crashes, after: Told, moment: Moment) -> Told:
    """The session is as good as any."""
    told = crashes.host.ask("go_on", session=after.session)
    assert told.version == after.version + 1
    assert set(told.files) == {*after.files, "afterwards.txt"}
    return told
