"""Run Cards as text: for people and models a card of at most 15 lines, for programs JSON.

Everything on a card comes from the caller or from guests: no text on it can break its line or steer a terminal.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from holdfast.records import AnyRecord, Executed, Finding, Flow, Input, RunCard, Settled, Stage, Verified
from holdfast.visible import visible

MOST_LINES = 15
_MOST_WIDE = 160
_MOST_FINDINGS = 3
"""With the header and the eleven facts, that is all there is room for."""
_MOST_ITEMS = 4
_GOAL_CHARACTERS = 80
_GOAL_LINES = 20


def render(card: RunCard) -> str:
    """
    >>> card = RunCard(run="run_1", session="s", goal="say hello", code_sha256="ab" * 32, base="CKPT-s-g1-v0-00")
    >>> print(render(card))
    Run Card run_1 · planned
    goal     say hello
    base     CKPT-s-g1-v0-00
    code     sha256 abababababab
    """
    lines = [f"Run Card {card.run} · {card.stage}"]
    lines += [f"{label:<8} {text}" for label, text in _facts(card) if text]
    lines += _findings(card.findings, room=MOST_LINES - len(lines))
    return "\n".join(_clipped(line, _MOST_WIDE) for line in lines)


def as_far(card: RunCard, records: Iterable[AnyRecord]) -> RunCard:
    """The card of a run, at the stage that its records say it has passed."""
    stage = card.stage
    for record in records:
        stage = _stage_after(record) or stage
    return msgspec.structs.replace(card, stage=stage)


def _stage_after(record: AnyRecord) -> Stage | None:
    match record:
        case Executed():
            return "executed"
        case Verified():
            return "verified"
        case Settled():
            return record.status
        case _:
            return None


def to_json(card: RunCard) -> str:
    """The card as JSON text. Every field of it is there, also one that has its default."""
    return msgspec.json.encode({name: getattr(card, name) for name in card.__struct_fields__}).decode()


def goal_of(code: str) -> str:
    """What the code seems to be for, in at most 80 characters: its first comment, else its first line.

    >>> goal_of("import pandas as pd\\n# Sum up the sales\\ndf = pd.read_csv('sales.csv')")
    'Sum up the sales'
    """
    lines = [line.strip() for line in code[:10_000].split("\n")]
    comments = [line.lstrip("#% ") for line in lines[:_GOAL_LINES] if line.startswith("#") and line[:2] != "#!"]
    statements = [line for line in lines if not line.startswith("#")]
    return _clipped(next(filter(None, comments + statements), ""), _GOAL_CHARACTERS)


def _facts(card: RunCard) -> Iterator[tuple[str, str]]:
    """Label and text of each line; an empty text leaves the line out."""
    yield "goal", card.goal
    yield "base", card.base
    yield "code", " ".join([f"sha256 {card.code_sha256[:12]}", *(["·", *card.arguments] if card.arguments else [])])
    yield "key", f"{card.key} (attempt {card.attempt})" if card.key else ""
    yield "inputs", _several([_input(given) for given in card.inputs])
    yield "reads", _several([_input(given) for given in card.forecast_inputs])
    yield "outputs", _several(card.outputs)
    yield "writes", _several(card.forecast_outputs)
    yield "flow", _several([_flow(flow) for flow in card.flows], separator="; ")
    yield "limits", _several([_limit(name, value) for name, value in card.limits.items()], most=8)
    yield "python", card.environment[:12]


def _findings(findings: Sequence[Finding], room: int) -> list[str]:
    most = min(_MOST_FINDINGS, room)
    shown = findings if len(findings) <= most else findings[: most - 1]
    lines = [f"! {finding.code}: {finding.message}" for finding in shown]
    return lines + ([f"! and {len(findings) - len(shown)} more findings"] if len(shown) < len(findings) else [])


def _several(items: Sequence[str], *, separator: str = ", ", most: int = _MOST_ITEMS) -> str:
    more = [f"and {len(items) - most} more"] if len(items) > most else []
    return separator.join([*items[:most], *more])


def _input(given: Input) -> str:
    return f"{given.path} ({given.bytes:,} bytes, {given.sha256[:8]})" if given.sha256 else f"{given.path} (not there)"


def _flow(flow: Flow) -> str:
    return f"{_several(flow.inputs)} → {flow.output}"


def _limit(name: str, value: int | float) -> str:
    if name.endswith("_bytes"):
        return f"{name.removesuffix('_bytes')} {value / 2**20:,.0f} MiB"
    if name.endswith("_s"):
        return f"{name.removesuffix('_s')} {value:g} s"
    return f"{name} {value:,}"


def _clipped(text: str, most: int) -> str:
    text = visible(text[: most + 1])
    return text if len(text) <= most else text[: most - 1] + "…"
