"""Types of arguments on a command line."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A number of 1 or more."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return int(text)
