"""Makes output safe for terminals that only show ASCII, and for pipes whose reader has gone."""

from __future__ import annotations

import codecs
import io
import os
import sys

#: What stands for characters that an encoding lacks. "?" stands for all others.
_PLAIN = {"×": "x", "µ": "u", "σ": "sigma", "–": "-", "—": "-", "−": "-", "─": "-", "…": "...",
          "≤": "<=", "≥": ">=", "→": "->", "’": "'", "‘": "'", "“": '"', "”": '"'}
_ERRORS = "cupy_fp8.plain"


def show_any_text() -> None:
    """Makes stdout and stderr write plain characters where their encoding lacks the right ones."""
    codecs.register_error(_ERRORS, _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors=_ERRORS)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(character, "?") for character in error.object[error.start:error.end]), error.end


def drop_output() -> None:
    """Discards buffered text of stdout: Python flushes it at exit, and would report the closed pipe again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
