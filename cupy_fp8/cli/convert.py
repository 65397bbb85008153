"""python -m cupy_fp8 convert: a checkpoint's weights from one FP8 format to another, to FP8, or back to
bfloat16."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from .. import backend
from ..io import convert, weights
from ..io.chunks import Report
from ..io.loading import shortened
from ..io.replace import check_replaceable, replacing
from ..io.summary import size_text
from ..io.weights import Changes
from . import checkpoint_options, terminal
from .arguments import file_name, positive
from .progress import Progress


def main(argv: list[str]) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        if options.report:
            check_replaceable(options.report)
        settings = convert.Settings(options.recipe, options.scale_format, tuple(options.include),
                                    tuple(options.exclude), checkpoint_options.scales(options),
                                    checkpoint_options.sharing(options))
        conversion = convert.Conversion(
            Path(options.source), Path(options.destination), settings, part=options.part,
            like=backend.like_module(options.array), workers=options.workers)
        with conversion:
            _run(conversion, options)
    except (OSError, ValueError, backend.DeviceError) as error:
        print(f"convert: {terminal.printable(str(error))}", file=sys.stderr)
        return 1
    return 0


def _run(conversion: convert.Conversion, options: argparse.Namespace) -> None:
    _print_plan(conversion)
    reports: list[Report] = []
    for number, shard in enumerate(conversion.shards, 1):
        where = f"{number}/{len(conversion.shards)} {conversion.names[shard]}"
        reports += _convert(conversion, shard, where, bool(options.report))
        if options.verify:
            conversion.compare(shard, lambda count: None, np)
            print(f"{where}: verified, every byte as the NumPy reference makes it")
    if conversion.finish():
        before, after = conversion.sizes
        print(f"{conversion.folder}: all {len(conversion.names)} shards are there; {size_text(before)} "
              f"before, {size_text(after)} after")
    else:
        print("Other parts are missing: whichever ends last writes the index.")
    _print_losses(reports)
    if options.report:
        with replacing(options.report) as file:
            file.write(json.dumps(_report(conversion, reports), indent=1).encode())


def _report(conversion: convert.Conversion, reports: list[Report]) -> dict[str, Any]:
    before, after = conversion.sizes
    total = sum((report.changes for report in reports), Changes())
    return {"recipe": conversion.settings.recipe, "bytes_before": before, "bytes_after": after,
            "sqnr_db": total.sqnr_db, "removed": conversion.plan.removed, "files": conversion.rewritten,
            "tensors": [report.as_json() for report in reports]}


def _print_losses(reports: list[Report]) -> None:
    """Print how large the values are relative to what rounding changed."""
    converted = [report for report in reports if report.after != "as it is"]
    measured = [report for report in converted if report.changes.sqnr_db is not None]
    if not measured:
        if converted:
            print("No value changed.")
        return
    total = sum((report.changes for report in converted), Changes())
    worst = min(measured, key=lambda report: report.changes.sqnr_db or 0.0)
    exact = len(converted) - len(measured)
    print(f"SQNR {total.sqnr_db:.1f} dB over the values that were rounded; least {worst.changes.sqnr_db:.1f} "
          f"dB: {terminal.printable(worst.name)}"
          + (f"; {exact} of {len(converted)} tensors keep every value" if exact else ""))


def _convert(conversion: convert.Conversion, shard: str, where: str, reported: bool) -> list[Report]:
    """Convert a shard, showing its progress. reported: report a shard that exists already, too."""
    progress, size, start, done = Progress(), conversion.nbytes(shard), time.perf_counter(), 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        progress.show(f"{where}: {size_text(done)} of {size_text(size)}")

    made = conversion.convert(shard, tell)
    if made is None:
        found = conversion.compare(shard, tell) if reported else []
        progress.clear()
        print(f"{where}: is there already")
        return found
    progress.clear()
    seconds = time.perf_counter() - start
    converted = sum(report.after != "as it is" for report in made)
    print(f"{where}: {converted} tensors converted, {len(made) - converted} as they are; {size_text(done)} "
          f"of {size_text(size)} in {seconds:.1f} s, {size_text(int(done / seconds))}/s", flush=True)
    return made


def _print_plan(conversion: convert.Conversion) -> None:
    """Print what is converted, what stays, with the reason, and what is dropped."""
    plan = conversion.plan.tensors.values()
    number = sum(one.stored is not None for one in plan)
    print(f"{number} of {len(plan)} tensors become {conversion.settings.recipe}.")
    reasons: dict[str, list[str]] = {}
    for one in plan:
        if one.stored is None:
            reasons.setdefault(one.why, []).append(one.name)
    for why, names in reasons.items():
        print(f"  {len(names)} stay ({why}), such as {terminal.printable(names[0])}")
    gone: dict[str, list[str]] = {}
    for name, what in conversion.plan.removed.items():
        gone.setdefault(what, []).append(name)
    for what, names in gone.items():
        print(f"  {len(names)} go ({what}): {terminal.printable(shortened(names))}")
    for name, what in conversion.rewritten.items():
        print(f"  {name} is {what}: it describes the old form")
    for pattern in conversion.plan.idle_patterns:
        print(f"  no tensor is called {pattern!r}")


def _part(text: str) -> tuple[int, int]:
    try:
        part, parts = map(int, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected I/N, got {text!r}") from None
    return part, parts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cupy_fp8 convert", description=__doc__, epilog=(
        "These stay as they are unless --include names them: tensors of one dimension, norms, embeddings, "
        "gates, convolutions, output heads, and what the source's configuration excludes. A conversion that "
        "was interrupted goes on where it was: give the same command again."))
    parser.add_argument("source", metavar="IN", type=file_name,
                        help="a .safetensors file, or a folder of shards")
    parser.add_argument("destination", metavar="OUT", type=file_name,
                        help="a folder, or a .safetensors file for a source of one file")
    parser.add_argument("--recipe", required=True, choices=weights.RECIPES, help=(
        "block128: 128x128 blocks (DeepSeek); mxfp8: 1x32, E8M0; row: a scale for each row; tensor: one "
        "scale; bf16: dequantised"))
    parser.add_argument("--scale-format", default="", choices=weights.SCALE_FORMATS["block128"],
                        help="of block128 (default f32; mxfp8 has E8M0)")
    parser.add_argument("--include", action="append", default=[], metavar="PATTERN",
                        help="convert these although they stay by default")
    parser.add_argument("--exclude", action="append", default=[], metavar="PATTERN",
                        help="leave these as they are")
    checkpoint_options.add(parser)
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N",
                        help="only this share of the shards")
    parser.add_argument("--verify", action="store_true",
                        help="read the result again and compare every byte with the NumPy reference")
    parser.add_argument("--report", metavar="FILE.json", type=file_name,
                        help="write what changed in each tensor")
    parser.add_argument("--array", default=None, choices=("numpy", "cupy"),
                        help="where values are computed (default: the GPU if there is one)")
    parser.add_argument("--workers", type=positive, default=None,
                        help="threads that read, compute and write")
    return parser
