"""python -m cupy_fp8 bench dispatch: experts over ranks, a process for each GPU, and the lines they print.

The command starts this module on each rank (`launch`); rank 0 prints, and leaves the rows in a file for it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .. import backend, kernels
from ..distributed import init
from . import launch, terminal
from .arguments import positive

NAME = "dispatch"
SECTIONS = ("exchange", "dispatch", "combine", "overlap", "layer")
_TIMEOUT = 120.0
_QUICK_BURSTS, _BURSTS = 3, 8
#: of all ranks; and of each rank, in steps that are timed forward and backward
_EXPERTS, _OF_RANK = 64, 16
_SLOTS = 8                          # of a token
_TITLES = {
    "exchange": "The exchange alone: data, scales and probs of rows that go to one rank each",
    "dispatch": "The whole dispatch: route, exchange, rows of the experts",
    "combine": "The way back, bf16",
    "two micro-batches": "Two micro-batches through the layer, forward and backward",
    "forward": "The layer, forward (route to combine), keeping nothing",
    "forward and backward": "The layer, forward and backward, with as many experts on each rank",
    "forward in one kernel": "The forward pass by one kernel, beside the first row above of this size",
}
_HEADING = (f"{'':16}{'µs':>10}{'graph':>10}{'spread':>8}{'host µs':>9}{'MB':>9}{'GB/s':>7}{'graph':>7}"
            f"{'TFLOP/s':>9}{'graph':>7}{'÷ first':>9}{'graph':>7}{'÷ exch.':>9}{'graph':>7}")
_CELLS = (("us", 10, 2), ("graph_us", 10, 2), ("spread_percent", 8, 1), ("host_us", 9, 0), ("mb", 9, 2),
          ("gb_per_s", 7, 0), ("graph_gb_per_s", 7, 0), ("tflops", 9, 0), ("graph_tflops", 7, 0),
          ("to_first", 9, 2), ("to_first_graph", 7, 2), ("to_exchange", 9, 2), ("to_exchange_graph", 7, 2))


# ---- the command ----
def add_options(parser: argparse.ArgumentParser) -> None:
    of = parser.add_argument_group("of `bench dispatch`")
    of.add_argument("--ranks", type=positive, metavar="N", help="how many processes (a GPU each)")
    of.add_argument("--quick", action="store_true", help="fewer sizes, and fewer repetitions")
    of.add_argument("--only", action="append", choices=SECTIONS, default=[],
                    help="a section; may be repeated")
    of.add_argument("--experts", type=positive, metavar="N",
                    help=f"of all ranks together ({_EXPERTS})")
    of.add_argument("--experts-of-rank", type=positive, metavar="N",
                    help=f"of each rank, in steps forward and backward ({_OF_RANK})")
    of.add_argument("--share-gpus", action="store_true",
                    help="more ranks than GPUs are fine (to try it; the times mean nothing)")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the command with 2 if options do not fit."""
    if NAME not in options.ops:
        if (options.ranks or options.quick or options.only or options.experts or options.experts_of_rank
                or options.share_gpus):
            parser.error("--ranks, --quick, --only, --experts, --experts-of-rank, --share-gpus: of "
                         f"`bench {NAME}` alone")
    elif options.ranks is None:
        parser.error(f"bench {NAME}: --ranks says how many processes to start")
    elif (experts := options.experts or _EXPERTS) % options.ranks:
        parser.error(f"--ranks: expected a divisor of the {experts} experts, got {options.ranks}")
    elif min(experts, (options.experts_of_rank or _OF_RANK) * options.ranks) < _SLOTS:
        parser.error(f"--experts, --experts-of-rank: a token has {_SLOTS} different ones")


def dispatch_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the ranks, and yield the rows that they wrote, also if they fail or are stopped."""
    count = int(backend.cupy().cuda.runtime.getDeviceCount())
    if options.ranks > count and not options.share_gpus:
        problem = f"{options.ranks} ranks, but {count} GPUs (--share-gpus lets ranks share them)"
        print(problem, flush=True)
        yield {"op": NAME, "problem": problem}
        return
    with tempfile.TemporaryDirectory(prefix="cupy_fp8_bench_") as folder:
        path = Path(folder, "rows")
        command = [sys.executable, "-m", __name__, str(path), *(["--quick"] if options.quick else []),
                   *(f"--only={name}" for name in options.only),
                   f"--experts={options.experts or _EXPERTS}",
                   f"--experts-of-rank={options.experts_of_rank or _OF_RANK}"]
        code = launch.run(command, options.ranks, share_gpus=options.share_gpus)
        if path.exists():
            yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())
    if code:
        yield {"op": NAME, "problem": f"a rank ended with exit code {code}; what it said is above"}


# ---- a rank ----
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__name__}", description=__doc__)
    parser.add_argument("rows", type=Path, help="the file for rows of rank 0")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", choices=SECTIONS, default=[])
    parser.add_argument("--experts", type=int, default=_EXPERTS)
    parser.add_argument("--experts-of-rank", type=int, default=_OF_RANK)
    options = parser.parse_args(argv)
    terminal.show_any_text()
    if os.environ.get("CUPY_FP8_SHARE_GPUS") == "1":
        # NCCL needs a GPU for each rank of a host; so each rank gets a host of its own
        os.environ["NCCL_HOSTID"] = f"rank {os.environ['RANK']}"
    with ExitStack() as entered:
        world = entered.enter_context(init(timeout=_TIMEOUT))
        ranks = _on_gpu(entered, world, _QUICK_BURSTS if options.quick else _BURSTS)
        rows = measured(ranks, quick=options.quick, only=options.only, experts=options.experts,
                        weak=options.experts_of_rank)
        if world.rank:
            for _ in rows:
                pass
            return 0
        kernels.announce(print)
        with options.rows.open("w", encoding="utf-8") as file:
            for row in shown(rows):
                file.write(json.dumps(row) + "\n")
                file.flush()
    return 0


def _on_gpu(entered: ExitStack, world: Any, bursts: int) -> Any:
    from ..bench.moe import layer_rows
    from ..bench.ranks import Ranks

    cp = backend.cupy()
    if layer_rows.torch_problem() is None:
        import torch

        torch.cuda.set_device(cp.cuda.runtime.getDevice())
    stream, clock = entered.enter_context(layer_rows.on_gpu())
    if world.rank == 0:
        properties = cp.cuda.runtime.getDeviceProperties(cp.cuda.runtime.getDevice())
        print(f"Experts over {world.size} ranks, {properties['name'].decode()}: the slowest rank's times, "
              "medians of bursts", flush=True)
    return Ranks(world, clock, stream, cp, bursts)


def measured(ranks: Any, *, quick: bool, only: Iterable[str] = (), **sizes_of: Any
             ) -> Iterator[dict[str, Any]]:
    """Yield the rows of all sections, or of some. sizes_of: members of Sizes."""
    from ..bench.moe import dispatch, dispatch_given, dispatch_layer, dispatch_overlap

    sizes = (dispatch_given.QUICK if quick else dispatch_given.FULL)._replace(**sizes_of)
    sections: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
        "exchange": dispatch.exchange_rows, "dispatch": dispatch.dispatch_rows,
        "combine": dispatch.combine_rows, "overlap": dispatch_overlap.overlap_rows,
        "layer": dispatch_layer.layer_rows}
    missing = dispatch.missing(ranks)
    for name, problem in missing.items():
        yield {"op": NAME, "variant": name, "ranks": ranks.world.size, "skipped": problem}
    transports = [name for name in dispatch.TRANSPORTS if name not in missing]
    for section, rows in sections.items():
        if section in only or not only:
            yield from rows(ranks, sizes, transports)


# ---- lines ----
def shown(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Print rows as they come."""
    section = size = ""
    for row in rows:
        if row.get("section", section) != section:
            section, size = row["section"], ""
            print(f"\n{_TITLES[section]}\n{_HEADING}", flush=True)
        if "section" in row and (found := _size(row)) != size:
            size = found
            print(size, flush=True)
        print("\n".join(lines(row)), flush=True)
        yield row


def _size(row: dict[str, Any]) -> str:
    given = [f"{row[name]} {name}" for name in ("rows", "tokens", "experts") if name in row]
    if "away" in row:
        given.append(f"{row['away']} of other ranks for each token")
    return "  " + ", ".join(given).replace("rows", "rows a rank").replace("tokens", "tokens a rank")


def lines(row: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a row."""
    if "us" in row:
        values = row | ({"mb": row["bytes"] / 1e6} if "bytes" in row else {})
        yield (f"    {row['variant']:12}" + "".join(
            " " * width if name not in values else f"{values[name]:{width}.{digits}f}"
            for name, width, digits in _CELLS)).rstrip()
    if "exchange_us" in row:
        graph = f", in a graph {row['exchange_graph_us']:.2f}" if "exchange_graph_us" in row else ""
        yield f"        the exchange alone: {row['exchange_us']:.2f} µs{graph}"
    if "calls_us" in row:
        yield f"        µs: {', '.join(f'{name} {us:.0f}' for name, us in row['calls_us'].items())}"
    for key in ("by", "note"):
        if key in row:
            yield f"        {row[key]}"
    for key in ("skipped", "problem"):
        if key in row:
            yield f"    {row.get('variant', ''):12} {key.upper() if key == 'problem' else key}: {row[key]}"


if __name__ == "__main__":
    sys.exit(main())
