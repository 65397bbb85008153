"""Capabilities of the terminal: its width, rich's tables, plain characters if it only has ASCII; and pipes
whose reader has gone."""

from __future__ import annotations

import codecs
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

#: replacements for characters that an encoding lacks; "?" replaces all others
_PLAIN = {"×": "x", "µ": "u", "σ": "sigma", "–": "-", "—": "-", "−": "-", "─": "-", "…": "...",
          "≤": "<=", "≥": ">=", "→": "->", "’": "'", "‘": "'", "“": '"', "”": '"'}
_ERRORS = "cupy_fp8.plain"
_WIDEST = 100


def show_any_text() -> None:
    """Make stdout and stderr write plain characters where their encoding lacks the right ones."""
    codecs.register_error(_ERRORS, _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors=_ERRORS)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(character, "?") for character in error.object[error.start:error.end]), error.end


def printable(text: str) -> str:
    """Return text from a file without characters that would move the cursor or change colours."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def width() -> int:
    """Return the columns to write in: those of the terminal or of COLUMNS, but at most 100."""
    return max(20, min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns))


def say(text: str, indent: int = 2) -> None:
    """Print a sentence, wrapped to the terminal's width. indent: of all lines but the first."""
    print(textwrap.fill(text, width(), subsequent_indent=" " * indent, break_long_words=False,
                        break_on_hyphens=False), flush=True)


def say_facts(facts: Mapping[str, object]) -> None:
    """Print names and their descriptions, in two columns."""
    widest = max(map(len, facts), default=0)
    for name, text in facts.items():
        say(f"{name:{widest}}  {text}", widest + 2)


def rich_console(stream: Any) -> Any:
    """Return rich's Console for a stream that is a terminal. None elsewhere, and if rich is not installed:
    then text is plain."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, width=width(), highlight=False)


def drop_output() -> None:
    """Discard buffered text of stdout: Python flushes it at exit, and would report the closed pipe again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
