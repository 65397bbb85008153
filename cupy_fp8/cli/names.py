"""Names of ops on a command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .. import cases
from ..advice import meant


def add_ops(parser: argparse.ArgumentParser) -> None:
    """Lets a command take any number of ops."""
    parser.add_argument("ops", nargs="*", metavar="op",
                        help=f"which ops (default: all): {', '.join(cases.OPS)}")


def chosen_ops(parser: argparse.ArgumentParser, given: Sequence[str]) -> list[str]:
    """The given ops in the order of the table, or all of them. An unknown name ends the command with 2."""
    unknown = sorted(set(given) - cases.OPS.keys())
    if unknown:
        wrong = "".join(f"no such op: {name}{meant(name, cases.OPS)}\n" for name in unknown)
        parser.error(f"{wrong}The ops are {', '.join(cases.OPS)}.")
    return [name for name in cases.OPS if not given or name in given]
