"""python -m cupy_fp8 list: the ops, a line each."""

from __future__ import annotations

import argparse

from ..cases import OPS


def main(argv: list[str]) -> int:
    argparse.ArgumentParser(prog="python -m cupy_fp8 list", description=__doc__).parse_args(argv)
    for op in OPS.values():
        print(f"{op.name:18} {op.summary}")
    return 0
