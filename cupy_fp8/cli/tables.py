"""Tables whose rows appear as they are made: with rich on a terminal, else plain text, or Markdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ..diagnostics.text import Column, elided, fitting, text_head, text_row
from . import terminal
from .progress import Progress


class TextTable:
    """A table of plain text. Use it in a `with`.

    title    a line above it: its first part is shortened if it is too long
    columns  those that fit are shown; `left_out` has the titles of the others
    """

    def __init__(self, title: Sequence[str], columns: Sequence[Column]) -> None:
        self._kept = fitting(columns, terminal.width())
        self._columns = [columns[i] for i in self._kept]
        self.left_out = [c.title for i, c in enumerate(columns) if i not in self._kept]
        others = "  ".join(title[1:])
        self._title = f"{elided(title[0], max(8, terminal.width() - len(others) - 2))}  {others}".rstrip()
        self._progress = Progress()

    def __enter__(self) -> TextTable:
        self._progress.printed()
        print("\n".join([self._title, *text_head(self._columns)]), flush=True)
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.clear()

    def row(self, cells: Sequence[str]) -> None:
        self._progress.printed()
        print(text_row(self._columns, [cells[i] for i in self._kept]), flush=True)

    def working(self, text: str) -> None:
        """Show what takes time before the next row."""
        self._progress.show(text)


class MarkdownTable(TextTable):
    """A table in Markdown, with all columns."""

    def __init__(self, title: Sequence[str], columns: Sequence[Column]) -> None:
        super().__init__(title, columns)
        self._title, self._columns, self.left_out = "  ".join(title), list(columns), []

    def __enter__(self) -> MarkdownTable:
        self._progress.printed()
        rule = ["---:" if c.right else "---" for c in self._columns]
        print(f"### {_escaped(self._title)}\n")
        for cells in [c.title for c in self._columns], rule:
            print(f"| {' | '.join(cells)} |", flush=True)
        return self

    def row(self, cells: Sequence[str]) -> None:
        self._progress.printed()
        print(f"| {' | '.join(map(_escaped, cells))} |", flush=True)


class RichTable(TextTable):
    """rich's table, redrawn with every row; what is being computed is shown below it."""

    def __init__(self, title: Sequence[str], columns: Sequence[Column], console: Any) -> None:
        super().__init__(title, columns)
        from rich import box, live, table, text

        self._text, self._doing = text.Text, ""
        self._rows = table.Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for c in self._columns:
            self._rows.add_column(c.title, justify="right" if c.right else "left", min_width=c.width,
                                  no_wrap=True)
        self._live = live.Live(console=console, get_renderable=self._drawn)

    def _drawn(self) -> Any:
        from rich import console, spinner

        doing = self._text(self._doing, "dim", no_wrap=True, overflow="ellipsis")
        title = self._text(self._title, "bold")
        return console.Group(title, self._rows, *([spinner.Spinner("dots", doing)] if self._doing else []))

    def __enter__(self) -> RichTable:
        self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._doing = ""
        self._live.stop()

    def row(self, cells: Sequence[str]) -> None:
        self._rows.add_row(*(self._text(cells[i]) for i in self._kept))
        self._live.refresh()

    def working(self, text: str) -> None:
        self._doing = text
        self._live.refresh()


def table(title: Sequence[str], columns: Sequence[Column], *, markdown: bool = False) -> TextTable:
    """Return the table for the kind of stdout."""
    if markdown:
        return MarkdownTable(title, columns)
    console = terminal.rich_console(sys.stdout)
    return TextTable(title, columns) if console is None else RichTable(title, columns, console)


def _escaped(text: str) -> str:
    """Escape a name, which may contain anything: no cell may end its column, and * is not emphasis."""
    return text.replace("|", "\\|").replace("*", "\\*")
