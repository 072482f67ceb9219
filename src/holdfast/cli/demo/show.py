"""The screen of the demo, and its list of promises."""

from rich.box import ROUNDED, SIMPLE_HEAD
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from holdfast.cli.terminal import console, harmless
from holdfast.visible import visible, visible_lines


class Show:
    """Guards what was promised until it is counted up at the end."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.screen = console()
        self.screen.quiet = quiet
        self._promises: list[tuple[str, str, bool]] = []
        self._chapter = 0

    def chapter(self, title: str) -> None:
        self._chapter += 1
        self.screen.print()
        self.screen.print(Rule(f"[bold cyan]{self._chapter}[/] [bold]{title}[/]", align="left", style="dim"))

    def code(self, source: str) -> None:
        shown = Syntax(source, "python", theme="ansi_dark", background_color="default")
        self.screen.print(Panel(shown, box=ROUNDED, border_style="dim", expand=False))

    def say(self, text: str) -> None:
        self.screen.print(Padding(text, (0, 0, 0, 2)))

    def quote(self, text: str) -> None:
        """What a run or its guest said: text, whatever is in it."""
        said = Text.from_ansi(harmless(text.rstrip()))
        for line in said.wrap(self.screen, self.screen.width - 6):
            self.screen.print(Text.assemble(("  │ ", "dim"), line))

    def facts(self, rows: dict[str, str]) -> None:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(style="dim")
        table.add_column()
        for label, text in rows.items():
            table.add_row(f"  {label}", escape(visible_lines(text)))
        self.screen.print(table)

    def promise(self, words: str, seen: str, kept: bool) -> None:
        self._promises.append((words, seen, bool(kept)))

    def promises(self) -> list[dict[str, str | bool]]:
        return [{"promised": words, "seen": seen, "kept": kept} for words, seen, kept in self._promises]

    def count_up(self) -> bool:
        """Every promise with what was seen of it; True if all were kept."""
        table = Table(box=SIMPLE_HEAD, header_style="dim", pad_edge=False)
        table.add_column("promised")
        table.add_column("")
        table.add_column("checked just now")
        for words, seen, kept in self._promises:
            mark = "[green]✓[/green]" if kept else "[bold red]✗[/bold red]"
            table.add_row(words, mark, escape(visible(seen)))
        self.screen.print(table)
        return all(kept for _, _, kept in self._promises)
