"""python -m cupy_fp8 demo: what each recipe does to a weight and an activation, or to matrices of files."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from .. import backend, diagnostics, io, kernels
from ..arrays import Array, asarray
from ..formats import float8_e4m3fn, float8_e5m2
from ..ops.scales.amax import compute_amax
from ..ops.scales.scale import compute_scale
from ..recipes import CurrentScaling, DelayedScaling, MXScaling
from ..results import Quantized
from . import demo_data, demo_table
from .demo_table import Row

#: Every recipe that the demo shows, by the name in its table: a new recipe is a line here.
RECIPES: dict[str, Any] = {
    "delayed, e4m3fn": DelayedScaling(float8_e4m3fn),
    "delayed, e5m2": DelayedScaling(float8_e5m2),
    "current, e4m3fn": CurrentScaling(float8_e4m3fn),
    "current, e5m2": CurrentScaling(float8_e5m2),
    "MX, e4m3fn": MXScaling(float8_e4m3fn),
}

#: (rows, columns) of the weight, (tokens, channels) of the activation.
SIZES = {"numpy": ((2048, 2048), (4096, 2048)), "cupy": ((4096, 4096), (8192, 4096))}
_CPU_REPEATS = 3


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        like = backend.like_module(options.array)
        sources = [io.read_matrices(path) for path in options.files]
    except (backend.DeviceError, OSError, ValueError, ImportError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    executor = executor_name(like)
    kernels.announce(lambda line: print(line, file=sys.stderr))
    try:
        rows = [row for name, x in _tensors(sources, like, options) for row in quantize_with_all(name, x)]
    finally:
        kernels.announce(None)
    if not rows:
        print(f"demo: no 2-D tensor of float64, float32, float16 or bfloat16 in {', '.join(options.files)}",
              file=sys.stderr)
        return 1
    print(f"Executor: {executor}. "
          "Both directions from one call: row-wise, and column-wise (stored transposed; MX as is).\n")
    print(demo_table.render(rows, markdown=options.markdown, summary=options.summary))
    if options.json:
        report = {"executor": executor, "platform": platform.machine(), "numpy": np.__version__,
                  "rows": [asdict(row) for row in rows]}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1, allow_nan=False)
            file.write("\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cupy_fp8 demo", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE",
                        help=".npy, .npz or .safetensors: every 2-D float tensor is quantised; without files "
                        "a made-up weight and activation")
    parser.add_argument("--array", choices=("numpy", "cupy"),
                        help="the kind of array (default: cupy where there is a GPU)")
    parser.add_argument("--seed", type=int, default=0, help="of the made-up matrices (default 0)")
    parser.add_argument("--summary", action="store_true",
                        help="first one row per kind: names that differ only in numbers")
    parser.add_argument("--markdown", action="store_true", help="tables in Markdown")
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    return parser


def _tensors(sources: list[Iterator[tuple[str, np.ndarray]]], like: Any,
             options: argparse.Namespace) -> Iterator[tuple[str, Array]]:
    if not sources:
        weight, activation = SIZES[like.__name__]
        yield "weight", demo_data.weight(*weight, like=like, seed=options.seed)
        yield "activation", demo_data.activation(*activation, like=like, seed=options.seed)
    for path, source in zip(options.files, sources, strict=True):
        for name, x in source:
            if x.size:
                yield name if len(sources) == 1 else f"{path}: {name}", asarray(x, like=like)


def quantize_with_all(name: str, x: Array) -> Iterator[Row]:
    """A Row for each of RECIPES."""
    for title, recipe in RECIPES.items():
        delayed = isinstance(recipe, DelayedScaling)
        extra = {"scale": compute_scale(compute_amax(x), dtype=recipe.dtype)} if delayed else {}

        def call(x: Array, out: Quantized | None = None, recipe: Any = recipe,
                 extra: dict[str, Array] = extra) -> Quantized:
            result: Quantized = recipe.quantize(x, columnwise=True, out=out, **extra)
            return result

        q = call(x)
        report = diagnostics.error(x, q)
        assert report.saturated is not None
        microseconds, share = timing(call, x, x.nbytes + q.nbytes)
        yield Row(name, x.shape, x.dtype.name, title, _finite(report.sqnr_db),
                  _finite(report.max_relative_error), report.saturated, report.underflowed, report.nan,
                  q.nbytes / x.size, microseconds, share)


def timing(call: Callable[..., Quantized], x: Array, traffic: int) -> tuple[float, float | None]:
    """(microseconds of call(x, out=…), share of copy speed): on a GPU as the benchmark measures them, on the
    CPU by the clock and None."""
    if backend.module_of(x) is not np:
        from ..bench.measure import measure

        def make() -> tuple[Callable[[], Any], Callable[[], None]]:
            mine = x.copy()
            out = call(mine)
            return lambda: call(mine, out=out), lambda: None        # the demo's table shows what was computed

        measured = measure(make, traffic)
        return measured.us, measured.share
    out, times = call(x), []
    for _ in range(_CPU_REPEATS):
        start = time.perf_counter()
        call(x, out=out)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6, None


def executor_name(xp: Any) -> str:
    if xp is np:
        return "NumPy reference on the CPU"
    properties = xp.cuda.runtime.getDeviceProperties(xp.cuda.runtime.getDevice())
    return f"CUDA kernels on {properties['name'].decode()}"


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
