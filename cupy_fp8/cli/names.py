"""Names of commands and ops on a command line."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence

from .. import cases


def add_ops(parser: argparse.ArgumentParser) -> None:
    """Lets a command take any number of ops."""
    parser.add_argument("ops", nargs="*", metavar="op",
                        help=f"which ops (default: all): {', '.join(cases.OPS)}")


def chosen_ops(parser: argparse.ArgumentParser, given: Sequence[str]) -> list[str]:
    """The given ops in the order of the table, or all of them. An unknown name ends the command with 2."""
    unknown = sorted(set(given) - cases.OPS.keys())
    if unknown:
        wrong = ", ".join(with_suggestion(name, cases.OPS) for name in unknown)
        parser.error(f"no such op: {wrong}; the ops are {', '.join(cases.OPS)}")
    return [name for name in cases.OPS if not given or name in given]


def with_suggestion(name: str, known: Iterable[str]) -> str:
    """The name, and those that may have been meant."""
    known = list(known)
    near = difflib.get_close_matches(name.lower(), known, n=3)
    near += [other for other in known if len(name) > 2 and name.lower() in other and other not in near]
    return f"{name} (did you mean {' or '.join(near)}?)" if near else name
