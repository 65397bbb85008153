"""python -m cupy_fp8 inspect: what a checkpoint holds, tensor by tensor and by form, and what is odd."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from pathlib import Path
from typing import Any

from ..diagnostics.text import Column
from ..io.checkpoint import Checkpoint
from ..io.summary import Line, by_form, size_text, summarise
from . import checkpoint_options, terminal
from .arguments import file_name
from .tables import table

_LONGEST = 60


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        checkpoint = Checkpoint(Path(options.source))
        pairing = checkpoint.pairing(checkpoint_options.scales(options), checkpoint_options.sharing(options))
        lines = [line for line in summarise(checkpoint, pairing) if not options.patterns or any(
            fnmatch.fnmatchcase(line.name, pattern) for pattern in options.patterns)]
    except (OSError, ValueError) as error:
        print(f"inspect: {terminal.printable(str(error))}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(_as_json(checkpoint, lines), indent=1))
    else:
        _print(checkpoint, lines)
    return 0


def _as_json(checkpoint: Checkpoint, lines: list[Line]) -> dict[str, Any]:
    totals: dict[str, dict[str, int]] = {}
    for line in lines:
        total = totals.setdefault(line.form, {"tensors": 0, "bytes": 0})
        total["tensors"] += 1
        total["bytes"] += line.nbytes
    return {"path": str(checkpoint.path), "files": list(checkpoint.files),
            "quantization_config": checkpoint.described.raw or None,
            "tensors": [line.as_json() for line in lines], "by_form": totals,
            "odd": {line.name: line.odd for line in lines if line.odd}}


def _print(checkpoint: Checkpoint, lines: list[Line]) -> None:
    widest = [max([len(str(cells[i])) for cells in map(_cells, lines)], default=1) for i in range(5)]
    columns = [Column("tensor", min(widest[0], _LONGEST), right=False), Column("shape", max(widest[1], 5)),
               Column("form", widest[2], right=False), Column("scales", max(widest[3], 6), rank=2),
               Column("size", max(widest[4], 4), rank=1)]
    title = [str(checkpoint.path), f"{len(lines)} tensors", size_text(sum(line.nbytes for line in lines))]
    with table(title, columns) as rows:
        for line in lines:
            rows.row(_cells(line))
    print("\nby form")
    print("\n".join(by_form((line.form, line.nbytes) for line in lines)))
    if checkpoint.described.raw:
        print(f"\nquantization: {checkpoint.described.method or 'described'} ({checkpoint.described.origin})")
    odd = [line for line in lines if line.odd]
    print(f"\n{len(odd)} odd" if odd else "\nNothing is odd.")
    for line in odd:
        text = line.odd if line.name in line.odd else f"{line.name}: {line.odd}"
        terminal.say(f"  {terminal.printable(text)}", 4)


def _cells(line: Line) -> list[str]:
    scales = "" if line.scales is None else f"{line.scales[0]:.3g} … {line.scales[1]:.3g}"
    shape = "×".join(map(str, line.shape)) or "number"
    return [terminal.printable(line.name), shape, line.form, scales, size_text(line.nbytes)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cupy_fp8 inspect", description=__doc__)
    parser.add_argument("source", metavar="FILE|FOLDER", type=file_name,
                        help="a .safetensors file, a folder of shards, or an index")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="only tensors with such names")
    parser.add_argument("--json", action="store_true", help="as JSON, with the bytes of each form")
    checkpoint_options.add(parser)
    return parser
