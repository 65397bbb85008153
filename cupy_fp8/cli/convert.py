"""python -m cupy_fp8 convert: a checkpoint's weights from one FP8 format to another, to FP8, or back to
bfloat16."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from .. import backend
from ..io import convert, weights
from ..io.chunks import Report
from ..io.replace import check_replaceable, replacing
from .arguments import file_name, positive
from .progress import Progress


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        if options.report:
            check_replaceable(options.report)
        settings = convert.Settings(options.recipe, options.scale_format, tuple(options.include),
                                    tuple(options.exclude))
        conversion = convert.Conversion(
            Path(options.source), Path(options.destination), settings, part=options.part,
            like=backend.like_module(options.array), workers=options.workers,
            compare=bool(options.report or options.verify))
        _run(conversion, options)
    except (OSError, ValueError, backend.DeviceError) as error:
        print(f"convert: {error}", file=sys.stderr)
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
        print(f"{conversion.folder}: all {len(conversion.names)} shards are there")
    else:
        print("Other parts are missing: whichever ends last writes the index.")
    rebased = [report for report in reports if report.changes.changed]
    if rebased:
        print(f"{sum(r.changes.changed for r in rebased):,} of {sum(r.changes.elements for r in reports):,} "
              "values changed by rounding"
              + ("" if options.report or options.verify else " of re-based data"))
    if options.report:
        with replacing(options.report) as file:
            file.write(json.dumps({"recipe": options.recipe, "tensors": [r.as_json() for r in reports]},
                                  indent=1).encode())


def _convert(conversion: convert.Conversion, shard: str, where: str, reported: bool) -> list[Report]:
    """Convert a shard, showing its progress. reported: of a shard that is there already, too."""
    progress, total, start = Progress(), conversion.checkpoint.files[shard], time.perf_counter()
    size, done = sum(t.nbytes for t in total.tensors.values()), 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        progress.show(f"{where}: {done / 1e6:,.0f} of {size / 1e6:,.0f} MB")

    made = conversion.convert(shard, tell)
    if made is None:
        found = conversion.compare(shard, tell) if reported else []
        progress.clear()
        print(f"{where}: is there already")
        return found
    progress.clear()
    seconds = time.perf_counter() - start
    converted = sum(report.after != "as it is" for report in made)
    print(f"{where}: {converted} tensors converted, {len(made) - converted} as they are; "
          f"{size / 1e6:,.0f} MB in {seconds:.1f} s, {size / 1e6 / seconds:,.0f} MB/s", flush=True)
    return made


def _print_plan(conversion: convert.Conversion) -> None:
    """What is converted, and what stays, with the reason."""
    plan = conversion.plan.values()
    print(
        f"{sum(one.stored is not None for one in plan)} of {len(conversion.plan)} tensors become "
        f"{conversion.settings.recipe}.")
    reasons: dict[str, list[str]] = {}
    for one in plan:
        if one.stored is None:
            reasons.setdefault(one.why, []).append(one.name)
    for why, names in reasons.items():
        print(f"  {len(names)} stay ({why}), such as {names[0]}")


def _part(text: str) -> tuple[int, int]:
    try:
        part, parts = map(int, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected I/N, got {text!r}") from None
    return part, parts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cupy_fp8 convert", description=__doc__, epilog=(
        "These stay as they are unless --include names them: tensors of one dimension and "
        f"{', '.join(convert.STAYS)}. A conversion that was interrupted goes on where it was: give the same "
        "command again."))
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
