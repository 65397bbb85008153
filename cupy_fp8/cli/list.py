"""python -m cupy_fp8 list: the ops, a line each."""

from __future__ import annotations

import argparse

from ..cases import OPS
from . import written


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cupy_fp8 list", description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print the README's table, grouped by family")
    parser.add_argument("--write", action="store_true",
                        help="in a checkout: bring the README's table and the public names of cupy_fp8 and "
                        "cupy_fp8.reference up to date")
    options = parser.parse_args(argv)
    if options.write:
        if not written.README.exists():
            parser.error("--write needs a checkout of the repository")
        for path, text in written.files().items():
            path.write_text(text, encoding="utf-8")
    elif options.markdown:
        print(written.table(), end="")
    else:
        for op in OPS.values():
            print(f"{op.name:24} {op.summary}")
    return 0
