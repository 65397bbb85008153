"""Host time per call on tiny arrays, and its ratio to a bare launch of a `cupy.RawKernel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import cupy_fp8 as fp8

from .. import backend
from ..arrays import asarray
from ..cases import OPS
from .generic import host_calls
from .measure import Call, host_us

BARE = "bare RawKernel launch, four arguments"


class HostCalls(NamedTuple):
    """Calls of an op that do the same: with `out=` (or in place), and allocating if the op can."""

    name: str                           # the op's and, after a space, the call's
    with_out: Call
    allocating: Call | None = None


class HostTime(NamedTuple):
    """Microseconds per call, and their ratios to those of a bare launch."""

    name: str
    out: float
    out_ratio: float
    allocating: float | None
    allocating_ratio: float | None


def measured(ops: Sequence[str]) -> Iterator[HostTime]:
    """The host times of ops, after that of a bare launch. It is timed again beside each of them, since the
    speed of a host that others use changes within seconds."""
    launch = bare_launch()
    yield HostTime(BARE, host_us(launch), 1.0, None, None)
    for calls in all_calls(ops):
        bare = host_us(launch)
        out, allocating = host_us(calls.with_out), calls.allocating and host_us(calls.allocating)
        yield HostTime(calls.name, out, out / bare, allocating, allocating and allocating / bare)


def bare_launch() -> Call:
    """A launch of an empty kernel with CuPy alone: the cost of a launch without this library."""
    cp = backend.cupy()
    code = 'extern "C" __global__ void bare(float* a, float* b, long long n, float s) {}'
    kernel = cp.RawKernel(code, "bare")
    a, b, n, s = cp.zeros(16, cp.float32), cp.zeros(16, cp.float32), cp.int64(16), cp.float32(1)
    return lambda: kernel((1,), (128,), (a, b, n, s))


def all_calls(ops: Sequence[str]) -> Iterator[HostCalls]:
    """The calls of this module, and one for every other registered op."""
    x = asarray(backend.cupy().zeros((16, 16), backend.cupy().float32), fp8.bfloat16)
    written = [calls for family in (_quantizers, _conversions, _scales, _tensor_lists, _groups)
               for calls in family(x)]
    yield from (calls for calls in written if calls.name.split()[0] in ops)
    has_calls = {calls.name.split()[0] for calls in written}
    yield from (HostCalls(name, *host_calls(OPS[name])) for name in ops if name not in has_calls)


def _both(name: str, function: Callable[..., Any], *args: Any, into: str = "out",
          **options: Any) -> HostCalls:
    """A call that allocates, and one that writes into its result."""
    allocating = partial(function, *args, **options)
    return HostCalls(name, partial(allocating, **{into: allocating()}), allocating)


def _quantizers(x: Any) -> Iterator[HostCalls]:
    cp = backend.cupy()
    scale, amax, flag = cp.ones(1, cp.float32), cp.zeros(1, cp.float32), cp.zeros(1, cp.float32)
    row = fp8.quantize_tensor(x, scale)
    yield _both("quantize_tensor row", fp8.quantize_tensor, x, scale)
    yield HostCalls("quantize_tensor row +amax +noop",
                    partial(fp8.quantize_tensor, x, scale, amax=amax, noop=flag, out=row),
                    partial(fp8.quantize_tensor, x, scale, amax=amax))
    yield _both("cast_transpose +amax", fp8.cast_transpose, x, scale, amax=amax)
    yield _both("quantize_tensor current", fp8.quantize_tensor, x)
    yield _both("cast_transpose current (two launches)", fp8.cast_transpose, x)
    yield _both("cast_transpose +dbias", fp8.cast_transpose, x, scale, dbias=True)
    for name, function in (("quantize_mx", fp8.quantize_mx), ("quantize_block", fp8.quantize_block)):
        yield _both(f"{name} row", function, x)
        yield _both(f"{name} both", function, x, columnwise=True)
    yield _both("swiglu_quantize", fp8.swiglu_quantize, x, fp8.MXScaling())


def _conversions(x: Any) -> Iterator[HostCalls]:
    cp = backend.cupy()
    row, mx_row = fp8.quantize_tensor(x, cp.ones(1, cp.float32)), fp8.quantize_mx(x)
    yield _both("dequantize", fp8.dequantize, row, dtype=fp8.bfloat16)
    yield _both("dequantize MX", fp8.dequantize, mx_row, dtype=fp8.bfloat16)
    yield _both("astype", fp8.astype, x, fp8.float8_e4m3fn)
    yield _both("transpose", fp8.transpose, row.data)
    wide = asarray(cp.zeros((16, 128), cp.float32), fp8.bfloat16)
    blocks = fp8.quantize_block(wide, scale_layout="compact")
    yield _both("scaling_aware_transpose splits (two launches)", fp8.scaling_aware_transpose, blocks,
                splits=cp.asarray([4, 12]))


def _scales(x: Any) -> Iterator[HostCalls]:
    cp = backend.cupy()
    amax = cp.zeros(1, cp.float32)
    state = fp8.DelayedScalingState(1, fp8.DelayedScaling(history_len=16), like=amax)
    yield _both("compute_amax", fp8.compute_amax, x)
    yield _both("compute_scale", fp8.compute_scale, amax)
    yield HostCalls("update_delayed_scaling", state.update)
    yield HostCalls("update_delayed_scaling +amax", partial(state.update, amax))
    scales, splits = cp.zeros((16, 4), cp.uint8).view(fp8.float8_e8m0fnu), cp.asarray([4, 12])
    yield _both("swizzle_scales", fp8.swizzle_scales, scales)
    yield _both("unswizzle_scales", fp8.unswizzle_scales, fp8.swizzle_scales(scales), shape=(16, 4))
    yield _both("swizzle_scales groups", fp8.swizzle_scales, scales, splits=splits)


def _tensor_lists(x: Any) -> Iterator[HostCalls]:
    cp = backend.cupy()
    weights, scales = [x.copy() for _ in range(64)], cp.ones(64, cp.float32)
    for n in (8, 64):
        yield _both(f"multi_cast_transpose {n} arrays", fp8.multi_cast_transpose, weights[:n], scales[:n],
                    into="outputs")
    cache = fp8.WeightCache(fp8.CurrentScaling())
    cache.quantize(weights)
    yield HostCalls("multi_quantize WeightCache hit, 64 arrays",
                    partial(cache.quantize, weights, update=False))


def _groups(x: Any) -> Iterator[HostCalls]:
    cp = backend.cupy()
    splits = cp.asarray([4, 12])
    five = partial(fp8.splits_to_offsets, splits, strides=(1, 1, 7168, 2048, 4096),
                   dtypes=("int32", "int64", "int64", "int64", "int64"))
    yield HostCalls("splits_to_offsets five outputs", partial(five, outputs=five()),
                    partial(five, bulk_allocate=True))
    yield _both("group_quantize", fp8.group_quantize, x, splits, fp8.DelayedScaling(),
                scales=cp.ones(2, cp.float32))
    yield _both("pad_groups", fp8.pad_groups, x, splits, 16)
    routing = fp8.route(cp.asarray([[0, 1]] * 16, cp.int32), num_experts=2)
    yield _both("permute", fp8.permute, x, routing)
    yield _both("unpermute", fp8.unpermute, fp8.permute(x, routing), routing)
