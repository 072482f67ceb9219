"""The results: as a table for people, as JSON for machines."""

from pathlib import Path
from statistics import median, quantiles

import msgspec
from rich.console import Console
from rich.table import Table

from bench.machine import Machine


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One row: what it is, and what each side took. Smaller is better on both."""

    name: str
    unit: str
    holdfast: float
    jupyter: float | None = None
    goal: float | None = None
    """How many times better than ipykernel Holdfast means to be."""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.jupyter is None else self.jupyter / self.holdfast

    @property
    def verdict(self) -> str:
        if self.goal is None or self.ratio is None:
            return ""
        return f"≥ {self.goal:g}×: {'met' if self.ratio >= self.goal else 'NOT met'}"


class Report(msgspec.Struct, kw_only=True):
    command: str
    machine: Machine
    figures: list[Figure] = []
    facts: dict[str, float | int | str | bool] = {}
    """What has no counterpart in Jupyter."""
    leaks: dict[str, list[str]] = {}
    """What closed sessions left behind, by kind, the first few of each."""
    samples_ms: dict[str, list[float]] = {}
    """Every single measurement behind a median."""


def p95(samples: list[float]) -> float:
    return quantiles(samples, n=20)[-1]


def timing(
    name: str, holdfast: list[float], jupyter: list[float] | None = None, *, goal: float | None = None, note: str = ""
) -> Figure:
    return Figure(
        name=name, unit="ms", holdfast=median(holdfast), jupyter=median(jupyter) if jupyter else None,
        goal=goal, note=note,
    )  # fmt: skip


def show(report: Report, console: Console) -> None:
    for line in report.machine.lines():
        console.print(line, style="dim", highlight=False)
    table = Table(title="Holdfast beside ipykernel", title_justify="left")
    table.add_column("")
    for heading in ("Holdfast", "ipykernel", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("goal", no_wrap=True)
    for figure in report.figures:
        ratio = "" if figure.ratio is None else f"{figure.ratio:.1f}×"
        style = "red" if "NOT" in figure.verdict else "green"
        name = f"{figure.name}\n[dim]{figure.note}[/dim]" if figure.note else figure.name
        table.add_row(
            name, _quantity(figure.holdfast, figure.unit), _quantity(figure.jupyter, figure.unit), ratio,
            f"[{style}]{figure.verdict}[/]" if figure.verdict else "",
        )  # fmt: skip
    console.print(table)
    facts = Table(title="Holdfast alone", title_justify="left", show_header=False)
    facts.add_column()
    facts.add_column(justify="right")
    for name, value in report.facts.items():
        facts.add_row(name, f"{value:,.2f}" if isinstance(value, float) else str(value))
    console.print(facts)


def save(report: Report, path: Path) -> None:
    rows = [
        {**msgspec.to_builtins(figure), "ratio": figure.ratio, "verdict": figure.verdict} for figure in report.figures
    ]
    whole = {**msgspec.to_builtins(report), "figures": rows}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")


def _quantity(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:,.2f} {unit}"
