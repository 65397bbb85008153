"""Command-line options for scales of a checkpoint that cannot be read without help."""

from __future__ import annotations

import argparse

from ..io.loading import scale_names_of
from ..io.pairing import NONE, ScaleNames, Sharing
from ..io.scale_forms import Share

__all__ = ["add", "scales", "sharing"]


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale-name", action="append", default=[], type=_names, metavar="DATA=SCALES",
                        help="names or patterns: where scales of FP8 data are, such as "
                             f"'*.weight=*.my_scale'; DATA={NONE}: the codes are the values")
    parser.add_argument("--scales", choices=(NONE,), default=None,
                        help=f"{NONE}: FP8 codes without scales are the values")
    parser.add_argument("--block", action="append", default=[], type=_block, metavar="[DATA=]ROWS,COLUMNS",
                        help="what shares a scale where shapes do not say, such as 64,64 (all: the whole row "
                             "or column)")


def scales(options: argparse.Namespace) -> ScaleNames:
    if options.scales and options.scale_name:
        raise ValueError("--scales: give it alone, or --scale-name DATA=none for some tensors")
    return options.scales or scale_names_of(dict(options.scale_name) or None)


def sharing(options: argparse.Namespace) -> Sharing | bool:
    named = {name: share for name, share in options.block if name}
    for_all = [share for name, share in options.block if not name]
    if len(for_all) > 1 or (for_all and named):
        raise ValueError("--block: give one for all tensors, or each with the names that it is for")
    return for_all[0] if for_all else named or False


def _names(text: str) -> tuple[str, str | None]:
    data, sign, scale = text.partition("=")
    if not (data and sign and scale):
        raise argparse.ArgumentTypeError(f"expected DATA=SCALES, got {text!r}")
    return data, None if scale == NONE else scale


def _block(text: str) -> tuple[str, Share]:
    name, sign, sizes = text.rpartition("=")
    parts = sizes.replace("x", ",").replace("×", ",").split(",")
    if len(parts) != 2 or (sign and not name) or not all(
            part == "all" or (part.isdigit() and int(part)) for part in parts):
        raise argparse.ArgumentTypeError(f"expected ROWS,COLUMNS such as 128,128, got {text!r}")
    down, across = (None if part == "all" else int(part) for part in parts)
    return name, (down, across)
