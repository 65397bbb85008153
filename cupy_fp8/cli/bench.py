"""python -m cupy_fp8 bench: time, GB/s, share of a same-bytes device copy, host time; measured as cupy_fp8.bench.measure says."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

from .. import backend, kernels
from ..arrays import asarray
from . import info, names

_SMALL = 4096 * 4096 * 4        # bytes: up to here graph replay is measured too


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cupy_fp8 bench", description=__doc__)
    names.add_ops(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_intermixed_args(argv)
    ops = names.chosen_ops(parser, options.ops)
    problem = backend.gpu_problem()
    if problem:
        print(f"bench needs a GPU: {problem}")
        return 1
    rows = run(ops)
    if options.json:
        options.json.write_text(json.dumps({"machine": info.facts(), "commit": _commit(), "date": datetime.date.today().isoformat(),
                                            "results": rows}, indent=1) + "\n")
    return 0


def run(ops: list[str]) -> list[dict[str, Any]]:
    from ..bench import SPECS, measure
    from ..bench.measure import graph_us

    kernels.announce(print)
    print(f"{'op':16} {'variant':28} {'shape':>12} {'µs':>9} {'GB/s':>6} {'share':>6} {'spread':>7} {'graph µs':>9}", flush=True)
    rows = []
    for spec in SPECS:
        if spec.op not in ops:
            continue
        m = measure(spec.make, spec.traffic)
        replay = graph_us(spec.make, spec.traffic) if spec.traffic <= _SMALL else None
        shape = "×".join(map(str, spec.shape))
        print(f"{spec.op:16} {spec.label:28} {shape:>12} {m.us:9.2f} {m.gb_per_s:6.0f} {m.share:6.3f} {m.spread:6.1f}% "
              + (f"{replay:9.2f}" if replay else ""), flush=True)
        rows.append({"op": spec.op, "variant": spec.label, "shape": list(spec.shape), "bytes": spec.traffic, "us": round(m.us, 3),
                     "gb_per_s": round(m.gb_per_s), "share": round(m.share, 4), "spread_percent": round(m.spread, 2),
                     "copy_us": round(m.copy_us, 3), "graph_us": replay and round(replay, 3)})
    return rows + _host(ops)


def _host(ops: list[str]) -> list[dict[str, Any]]:
    """Host time per call on a tiny array: with out= (or in place) and, where the op allocates, without."""
    from ..bench.measure import host_us

    print(f"{'host µs per call':45} {'out=':>8} {'allocating':>11}")
    rows = []
    for name, (with_out, allocating) in _host_calls().items():
        if name.split()[0] not in ops:
            continue
        a, b = host_us(with_out), host_us(allocating) if allocating else None
        print(f"{name:45} {a:8.2f} " + (f"{b:11.2f}" if b else ""), flush=True)
        rows.append({"op": name, "host_us_out": round(a, 2), "host_us_allocating": b and round(b, 2)})
    return rows


def _host_calls() -> dict[str, Any]:
    import cupy_fp8 as fp8

    cp = backend.cupy()
    x = asarray(cp.zeros((16, 16), cp.float32), fp8.bfloat16)
    scale, amax, flag = cp.ones(1, cp.float32), cp.zeros(1, cp.float32), cp.zeros(1, cp.float32)
    state = fp8.DelayedScalingState(1, fp8.DelayedScaling(history_len=16))
    row, both, with_dbias = fp8.quantize_tensor(x, scale), fp8.cast_transpose(x, scale), fp8.cast_transpose(x, scale, dbias=True)
    values, data, flipped = row.dequantize(fp8.bfloat16), fp8.astype(x, fp8.float8_e4m3fn), fp8.transpose(row.data)
    scales, splits = cp.zeros((16, 4), cp.uint8).view(fp8.float8_e8m0fnu), cp.asarray([4, 12])
    mx_row, mx_both = fp8.quantize_mx(x), fp8.quantize_mx(x, columnwise=True)
    block_row, block_both = fp8.quantize_block(x), fp8.quantize_block(x, columnwise=True)
    swizzled, grouped = fp8.swizzle_scales(scales), fp8.swizzle_scales(scales, splits=splits)
    five: dict[str, Any] = {"strides": (1, 1, 7168, 2048, 4096), "dtypes": ("int32", "int64", "int64", "int64", "int64")}
    offsets = fp8.splits_to_offsets(splits, **five)
    return {
        "quantize_tensor row": (lambda: fp8.quantize_tensor(x, scale, out=row), lambda: fp8.quantize_tensor(x, scale)),
        "quantize_tensor row +amax +noop": (lambda: fp8.quantize_tensor(x, scale, amax=amax, noop=flag, out=row),
                                            lambda: fp8.quantize_tensor(x, scale, amax=amax)),
        "cast_transpose +amax": (lambda: fp8.cast_transpose(x, scale, amax=amax, out=both),
                                 lambda: fp8.cast_transpose(x, scale, amax=amax)),
        "quantize_tensor current": (lambda: fp8.quantize_tensor(x, out=row), lambda: fp8.quantize_tensor(x)),
        "cast_transpose current (two launches)": (lambda: fp8.cast_transpose(x, out=both), lambda: fp8.cast_transpose(x)),
        "cast_transpose +dbias": (lambda: fp8.cast_transpose(x, scale, dbias=True, out=with_dbias),
                                  lambda: fp8.cast_transpose(x, scale, dbias=True)),
        "quantize_mx row": (lambda: fp8.quantize_mx(x, out=mx_row), lambda: fp8.quantize_mx(x)),
        "quantize_mx both": (lambda: fp8.quantize_mx(x, columnwise=True, out=mx_both), lambda: fp8.quantize_mx(x, columnwise=True)),
        "quantize_block row": (lambda: fp8.quantize_block(x, out=block_row), lambda: fp8.quantize_block(x)),
        "quantize_block both": (lambda: fp8.quantize_block(x, columnwise=True, out=block_both),
                                lambda: fp8.quantize_block(x, columnwise=True)),
        "compute_amax": (lambda: fp8.compute_amax(x, out=amax), lambda: fp8.compute_amax(x)),
        "dequantize": (lambda: fp8.dequantize(row, dtype=fp8.bfloat16, out=values), lambda: fp8.dequantize(row, dtype=fp8.bfloat16)),
        "dequantize MX": (lambda: fp8.dequantize(mx_row, dtype=fp8.bfloat16, out=values),
                          lambda: fp8.dequantize(mx_row, dtype=fp8.bfloat16)),
        "astype": (lambda: fp8.astype(x, fp8.float8_e4m3fn, out=data), lambda: fp8.astype(x, fp8.float8_e4m3fn)),
        "compute_scale": (lambda: fp8.compute_scale(amax, out=flag), lambda: fp8.compute_scale(amax)),
        "update_delayed_scaling": (lambda: state.update(), None),
        "update_delayed_scaling +amax": (lambda: state.update(amax), None),
        "transpose": (lambda: fp8.transpose(row.data, out=flipped), lambda: fp8.transpose(row.data)),
        "swizzle_scales": (lambda: fp8.swizzle_scales(scales, out=swizzled), lambda: fp8.swizzle_scales(scales)),
        "unswizzle_scales": (lambda: fp8.unswizzle_scales(swizzled, shape=(16, 4), out=scales),
                             lambda: fp8.unswizzle_scales(swizzled, shape=(16, 4))),
        "splits_to_offsets five outputs": (lambda: fp8.splits_to_offsets(splits, **five, outputs=offsets),
                                           lambda: fp8.splits_to_offsets(splits, **five, bulk_allocate=True)),
        "swizzle_scales groups": (lambda: fp8.swizzle_scales(scales, splits=splits, out=grouped),
                                  lambda: fp8.swizzle_scales(scales, splits=splits)),
        **_host_calls_of_many(x, splits),
    }


def _host_calls_of_many(x: Any, splits: Any) -> dict[str, Any]:
    """Of lists, groups and tokens."""
    import cupy_fp8 as fp8

    cp = backend.cupy()
    weights, scales = [x.copy() for _ in range(64)], cp.ones(64, cp.float32)
    eight, many = (fp8.multi_cast_transpose(weights[:n], scales[:n]) for n in (8, 64))
    few, few_scales = weights[:8], scales[:8]
    cache = fp8.WeightCache(fp8.CurrentScaling())
    cache.quantize(weights)
    groups = fp8.group_quantize(x, splits, fp8.DelayedScaling(), scales=scales[:2])
    padded, two_scales = fp8.pad_groups(x, splits, 16), scales[:2]
    routing = fp8.route(cp.asarray([[0, 1]] * 16, cp.int32), num_experts=2)
    rows, gated = fp8.permute(x, routing), fp8.swiglu_quantize(x, fp8.MXScaling())
    tokens = fp8.unpermute(rows, routing)
    wide = fp8.quantize_block(asarray(cp.zeros((16, 128), cp.float32), fp8.bfloat16), scale_layout="compact")
    columns = fp8.scaling_aware_transpose(wide, splits=splits)
    return {
        "multi_cast_transpose 8 arrays": (lambda: fp8.multi_cast_transpose(few, few_scales, outputs=eight),
                                          lambda: fp8.multi_cast_transpose(few, few_scales)),
        "multi_cast_transpose 64 arrays": (lambda: fp8.multi_cast_transpose(weights, scales, outputs=many),
                                           lambda: fp8.multi_cast_transpose(weights, scales)),
        "multi_quantize WeightCache hit, 64 arrays": (lambda: cache.quantize(weights, update=False), None),
        "group_quantize": (lambda: fp8.group_quantize(x, splits, fp8.DelayedScaling(), scales=two_scales, out=groups),
                           lambda: fp8.group_quantize(x, splits, fp8.DelayedScaling(), scales=two_scales)),
        "pad_groups": (lambda: fp8.pad_groups(x, splits, 16, out=padded), lambda: fp8.pad_groups(x, splits, 16)),
        "permute": (lambda: fp8.permute(x, routing, out=rows), lambda: fp8.permute(x, routing)),
        "unpermute": (lambda: fp8.unpermute(rows, routing, out=tokens), lambda: fp8.unpermute(rows, routing)),
        "swiglu_quantize": (lambda: fp8.swiglu_quantize(x, fp8.MXScaling(), out=gated), lambda: fp8.swiglu_quantize(x, fp8.MXScaling())),
        "scaling_aware_transpose splits (two launches)": (lambda: fp8.scaling_aware_transpose(wide, splits=splits, out=columns),
                                                          lambda: fp8.scaling_aware_transpose(wide, splits=splits)),
    }


def _commit() -> str:
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"
