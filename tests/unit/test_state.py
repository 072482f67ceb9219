"""A state's name, from one version to the next: what is known of it is passed on, and never longer than it is true."""

import msgspec

from holdfast.ckpt import make
from holdfast.records import Change
from holdfast.state import MOST_NAMES, State, forgotten, next_version, sealed, with_changes, with_names
from holdfast.store.rows import NameRow


def named_anew(state: State) -> str:
    """The CKPT of a state, with nothing known of it before."""
    return str(
        make(
            state.session,
            generation=state.generation,
            version=state.version,
            manifest_sha256=state.manifest_sha256,
            names={
                name: (row.type, row.run) for name, row in state.names.items() if row.generation == state.generation
            },
        )
    )


def test_whatever_happens_to_a_state_its_name_is_that_of_what_it_holds() -> None:
    state = State(session="s1", generation=1)
    added = Change(path="a.txt", action="added", sha256="ab" * 32, bytes=1)
    steps = [
        lambda before: with_names(before, bound={"x": ("int", "r1"), "y": ("str", "r1")}, gone=[]),
        next_version,
        lambda before: sealed(before, "cd" * 32),
        next_version,
        lambda before: with_changes(before, [added]),
        next_version,
        lambda before: sealed(before, "ef" * 32),
        lambda before: with_names(before, bound={"x": ("list", "r2")}, gone=["y"]),
        next_version,
        lambda before: msgspec.structs.replace(before, generation=2),
        lambda before: sealed(before, "01" * 32),
    ]

    for step in steps:
        before = str(state.ckpt())  # known from now on
        state = step(state)
        assert str(state.ckpt()) == named_anew(state), before


def test_what_is_live_is_what_this_generation_bound() -> None:
    state = sealed(with_names(State(session="s1", generation=1), bound={"x": ("int", "r1")}, gone=[]), "ab" * 32)

    assert dict(state.live()) == {"x": ("int", "r1")}
    assert dict(msgspec.structs.replace(state, generation=2).live()) == {}


def test_of_names_of_lost_generations_the_earliest_are_forgotten() -> None:
    early = {f"a{i}": NameRow(type="int", run="r1", generation=1) for i in range(5)}
    late = {f"b{i}": NameRow(type="int", run="r2", generation=2) for i in range(MOST_NAMES - 2)}

    assert forgotten(early) == []
    assert forgotten({**late, **early}) == ["a0", "a1", "a2"]


def test_to_take_many_names_away_is_one_pass() -> None:
    names = {f"n{i}": ("int", "r1") for i in range(MOST_NAMES)}
    full = with_names(State(session="s1", generation=1), bound=names, gone=[])
    lookups = Counted(list(names))

    assert with_names(full, bound={}, gone=lookups).names == {}
    assert lookups.searched == 0


class Counted(list[str]):
    """A list that counts how often it is searched from its beginning."""

    searched = 0

    def __contains__(self, name: object) -> bool:
        self.searched += 1
        return super().__contains__(name)
