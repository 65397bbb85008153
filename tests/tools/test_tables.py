"""Tables of the command line: on terminals, as plain text and as Markdown."""

from __future__ import annotations

import io
import re
import sys

import pytest

from cupy_fp8.cli import tables, terminal
from cupy_fp8.diagnostics.text import Column

COLUMNS = [Column("recipe", 6, right=False), Column("a", 5), Column("b", 9, rank=1)]


def terminal_as_stdout(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", found := io.StringIO())
    monkeypatch.setattr(found, "isatty", lambda: True)
    return found


@pytest.mark.parametrize(("width", "left_out"), [("80", []), ("20", ["b"])])
def test_tables_on_a_terminal(width, left_out, monkeypatch):
    """They are rich's, have the rows in order, and show what is being computed below them, for as long as it
    is."""
    pytest.importorskip("rich")
    screen = terminal_as_stdout(monkeypatch)
    monkeypatch.setenv("COLUMNS", width)
    with tables.table(["name [bold]", "2×3"], COLUMNS) as shown:
        assert isinstance(shown, tables.RichTable)
        shown.working("MX")
        shown.row(["x[/]", "1.0", "2,000"])
        shown.row(["y", "3.0", "4,000"])
    assert shown.left_out == left_out
    out = screen.getvalue()
    assert "MX" in out
    lines = [re.sub(r"\x1b\[[\d;?]*[a-zA-Z]|\r", "", line).rstrip() for line in out.splitlines()]
    last = [line for line in lines if line][-5:]
    cells = [["x[/]", "1.0", "2,000"], ["y", "3.0", "4,000"]]
    assert last[0] == "name [bold]  2×3"
    assert [line.split() for line in last[-2:]] == [row[:3 - len(left_out)] for row in cells]


def test_tables_without_rich_are_plain(monkeypatch):
    screen = terminal_as_stdout(monkeypatch)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with tables.table(["name", "2×3"], COLUMNS) as shown:
        shown.row(["x", "1.0", "2,000"])
    assert screen.getvalue() == ("name  2×3\nrecipe      a          b\n──────  ─────  ─────────\n"
                                 "x         1.0      2,000\n")


def test_names_that_markdown_would_read(capsys):
    with tables.table(["a|b*", "2×3"], COLUMNS[:2], markdown=True) as shown:
        shown.row(["x|y", "*"])
    assert capsys.readouterr().out == (
        "### a\\|b\\*  2×3\n\n| recipe | a |\n| --- | ---: |\n| x\\|y | \\* |\n")


def test_width(monkeypatch):
    for columns, width in (("60", 60), ("300", 100), ("1", 20)):
        monkeypatch.setenv("COLUMNS", columns)
        assert terminal.width() == width
