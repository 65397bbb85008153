"""Types of command-line arguments."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Parse a number of 1 or more."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return int(text)


def natural(text: str) -> int:
    """Parse a number of 0 or more."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got {text!r}")
    return int(text)


def file_name(text: str) -> str:
    """Parse the name of a file or a folder. An empty one would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got ''")
    return text
