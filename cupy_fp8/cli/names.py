"""Names of ops on a command line."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence

from .. import cases


def add_ops(parser: argparse.ArgumentParser) -> None:
    """Lets a command take any number of ops."""
    parser.add_argument("ops", nargs="*", metavar="op",
                        help=f"which ops (default: all): {', '.join(cases.OPS)}")


def chosen_ops(parser: argparse.ArgumentParser, given: Sequence[str]) -> list[str]:
    """The given ops in the order of the table, or all of them. An unknown name ends the command with 2."""
    unknown = sorted(set(given) - cases.OPS.keys())
    if unknown:
        wrong = ", ".join(map(_with_suggestion, unknown))
        parser.error(f"no such op: {wrong}; the ops are {', '.join(cases.OPS)}")
    return [name for name in cases.OPS if not given or name in given]


def _with_suggestion(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), cases.OPS, n=3)
    near += [op for op in cases.OPS if len(name) > 2 and name.lower() in op and op not in near]
    return f"{name} (did you mean {' or '.join(near)}?)" if near else name
