"""python -m cupy_fp8 bench: time, GB/s, share of a same-bytes device copy's speed, and host time.

cupy_fp8.bench.measure tells how times are taken. Host times come with their ratios to a bare launch. `bench
moe` times steps of the expert layer beside others' (cupy_fp8.bench.steps), `bench dispatch --ranks N` experts
over several GPUs (cupy_fp8.bench.ranks).
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from .. import backend, kernels
from ..io.replace import check_replaceable
from . import bench_dispatch, info, names
from .bench_moe import moe_rows

_SMALL = 4096 * 4096 * 4        # bytes: up to here graph replay is measured too
#: measurements that are not of an op
_LAYERS = {"moe": "steps of the expert layer, beside the same in bf16 where PyTorch is installed",
           bench_dispatch.NAME: "experts over the GPUs of --ranks"}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cupy_fp8 bench", description=__doc__)
    names.add_ops(parser, _LAYERS)
    parser.add_argument("--json", type=Path, metavar="FILE",
                        help="write the results there at the end, and to FILE.partial until then")
    bench_dispatch.add_options(parser)
    options = parser.parse_intermixed_args(argv)
    ops = names.chosen_ops(parser, options.ops, _LAYERS)
    bench_dispatch.check(parser, options)
    if options.json:
        try:
            check_replaceable(options.json)
        except OSError as error:
            parser.error(f"--json: {error}")
    problem = backend.gpu_problem()
    if problem:
        print(f"bench needs a GPU: {problem}")
        return 1
    report = {"machine": info.facts(), "commit": _commit(), "date": datetime.date.today().isoformat(),
              "results": []}
    found: list[dict[str, Any]] = []
    over_ranks = bench_dispatch.dispatch_rows(options) if bench_dispatch.NAME in options.ops else ()
    rows = noted(found, chain(device_rows(ops) if ops else (), host_rows(ops) if ops else (),
                              moe_rows() if "moe" in options.ops else (), over_ranks))
    if options.json:
        write(options.json, report, rows)
    else:
        list(rows)
    return int(any("problem" in row for row in found))


def noted(found: list[dict[str, Any]], rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows, and append them to `found`."""
    for row in rows:
        found.append(row)
        yield row


def write(path: Path, report: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """Write a report and its rows. If a run is stopped, what has been measured stays in a file beside it, and
    an earlier report is kept."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")         # finds a missing folder now
    for row in rows:
        report["results"].append(row)
        partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(path)


def device_rows(ops: list[str]) -> Iterator[dict[str, Any]]:
    from ..bench import measure, specs
    from ..bench.measure import graph_us

    kernels.announce(print)
    print(f"{'op':24} {'variant':28} {'shape':>12} {'µs':>9} {'GB/s':>6} {'share':>6} {'spread':>7} "
          f"{'graph µs':>9}", flush=True)
    for spec in specs():
        if spec.op not in ops:
            continue
        m = measure(spec.make, spec.traffic)
        replay = graph_us(spec.make, spec.traffic) if spec.traffic <= _SMALL else None
        shape = "×".join(map(str, spec.shape))
        print(f"{spec.op:24} {spec.label:28} {shape:>12} {m.us:9.2f} {m.gb_per_s:6.0f} {m.share:6.3f} "
              f"{m.spread:6.1f}% " + (f"{replay:9.2f}" if replay else "")
              + (f" {spec.flops / m.us / 1e6:.0f} TFLOP/s" if spec.flops else ""), flush=True)
        yield {"op": spec.op, "variant": spec.label, "shape": list(spec.shape), "bytes": spec.traffic,
               "us": round(m.us, 3), "gb_per_s": round(m.gb_per_s), "share": round(m.share, 4),
               "spread_percent": round(m.spread, 2), "copy_us": round(m.copy_us, 3),
               "graph_us": replay and round(replay, 3),
               **({"tflops": round(spec.flops / m.us / 1e6)} if spec.flops else {})}


def host_rows(ops: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the host time per call on a tiny array and its ratio to a bare launch, in place and
    allocating."""
    from ..bench import host

    print(f"{'host µs per call (× a bare launch)':48} {'out=':>15} {'allocating':>15}")
    for time in host.measured(ops):
        shown = [f"{us:8.2f} ({ratio:4.1f})" for us, ratio in (time[1:3], time[3:5]) if us and ratio]
        print(f"{time.name:48} {' '.join(shown)}", flush=True)
        yield {"op": time.name, **{name: value and round(value, 2) for name, value in (
            ("host_us_out", time.out), ("host_us_allocating", time.allocating),
            ("host_ratio_out", time.out_ratio), ("host_ratio_allocating", time.allocating_ratio))}}


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"
