"""The legal order of a run's records."""

from holdfast.records import AnyRecord, Executed, Planned, Saved, Sent, Settled, Unsent, Verified

NEXT: dict[type[AnyRecord] | None, tuple[type[AnyRecord], ...]] = {
    None: (Planned,),
    Planned: (Saved, Sent, Executed, Settled),
    Saved: (Saved, Sent, Unsent, Executed, Settled),
    Sent: (Saved, Sent, Unsent, Executed, Settled),
    Unsent: (Saved, Sent, Unsent, Executed, Settled),
    Executed: (Verified, Settled),
    Verified: (Settled,),
    Settled: (),
}


def is_legal(last: type[AnyRecord] | None, record: AnyRecord) -> bool:
    """Whether a record may follow."""
    return type(record) in NEXT[last]
