"""python -m cupy_fp8 list: the ops, by family."""

from __future__ import annotations

import argparse
from itertools import groupby

from ..cases import OPS
from . import terminal, written


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cupy_fp8 list", description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/ops.md")
    parser.add_argument("--write", action="store_true",
                        help="in a checkout: bring docs/ops.md and the public names of cupy_fp8 and "
                        "cupy_fp8.reference up to date")
    options = parser.parse_args(argv)
    if options.write:
        if not written.PAGE.exists():
            parser.error("--write needs a checkout of the repository")
        for path in written.write(written.files()):
            print(f"written: {path}")
    elif options.markdown:
        print(written.table(), end="")
    else:
        widest = max(map(len, OPS))
        for family, ops in groupby(OPS.values(), key=lambda op: op.family):
            print(written.TITLES.get(family, family))
            terminal.say_facts({f"  {op.name:{widest}}": op.summary for op in ops})
            print()
        print("help(cupy_fp8.NAME) says what an op takes and returns, with an example.")
    return 0
