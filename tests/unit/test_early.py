"""What is kept of a kernel between two runs is bounded, whatever it sends."""

from holdfast.kernel import early, wire
from holdfast.kernel.happenings import Died, Gone, Happening, Printed


def test_a_save_waits_for_the_next_run_and_a_flood_of_them_is_dropped() -> None:
    kept: list[Happening] = []
    for number in range(1000):
        early.keep(kept, [wire.Saving(paths=[str(number)]), wire.Cleared()])

    assert kept == [wire.Saving(paths=["0"])]


def test_what_is_printed_is_bounded_and_a_death_is_always_kept() -> None:
    kept: list[Happening] = []
    for _ in range(40):
        early.keep(kept, [Printed("stdout", b"x" * (1 << 20)), Printed("stderr", b"y")])
    early.keep(kept, [Died(9), Gone("it closed its control socket")])

    printed = [event for event in kept if isinstance(event, Printed)]
    assert sum(len(event.data) for event in printed) <= 16 << 20
    assert kept[-2:] == [Died(9), Gone("it closed its control socket")]
    assert early.is_lost(kept)
