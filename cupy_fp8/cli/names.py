"""Names of ops on a command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from .. import cases
from ..advice import meant

_NOTHING_ELSE: Mapping[str, str] = MappingProxyType({})


def add_ops(parser: argparse.ArgumentParser, more: Mapping[str, str] = _NOTHING_ELSE) -> None:
    """Let a command take any number of ops. more: other names, and what each is."""
    others = "".join(f"; {name}: {text}" for name, text in more.items())
    parser.add_argument("ops", nargs="*", metavar="op",
                        help=f"which ops (default: all): {', '.join(cases.OPS)}{others}")


def chosen_ops(parser: argparse.ArgumentParser, given: Sequence[str],
               more: Mapping[str, str] = _NOTHING_ELSE) -> list[str]:
    """Return the given ops in the order of the table, or all of them. An unknown name ends the command with
    2."""
    known = [*cases.OPS, *more]
    unknown = sorted(set(given) - set(known))
    if unknown:
        wrong = "".join(f"no such op: {name}{meant(name, known)}\n" for name in unknown)
        others = f" Or {', '.join(more)}." if more else ""
        parser.error(f"{wrong}The ops are {', '.join(cases.OPS)}.{others}")
    return [name for name in cases.OPS if not given or name in given]
