"""Scales of per-tensor scaling, from an amax or from a history of amaxes. Kernels:
kernels_cu/scales/scale.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import reference
from ...arrays import Array
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, Updated, one_array
from ...formats import FORMATS, FP8_DTYPES, FP8DType, choice, flag, float8_e4m3fn, float32, integer, lookup
from ...kernels import Kernel, Launch, Variant, grid_size, multiprocessors, shapes
from ...options import ALGORITHMS, Algorithm, checked_eps
from ...reference.numerics import times_power_of_two
from ...typed_array import TypedArray

_THREADS = 512
_COMPUTE_SCALE = Kernel("scales/scale", "compute_scale", block=shapes.ELEMENTWISE_THREADS)
_UPDATE = Kernel("scales/scale", "update_delayed_scaling", block=_THREADS)
_IN_FLIGHT = 8
_MOST_COLUMNS_LOG2 = 5          # 32 f32: a whole cache line of each row
_MULTIPROCESSORS_OF_CPU = 4


def compute_scale(amax: Array, *, dtype: FP8DType = float8_e4m3fn, margin: int = 0, eps: float = 0.0,
                  pow2_scale: bool = False,
                  out: Array | None = None) -> TypedArray:
    """The scale that brings a largest magnitude to the largest value of an FP8 format.

        scale = fl(fl(fp8_max * 2**-margin) / max(amax, eps))

    in f32, correctly rounded, with subnormals. The scale is 1 where that maximum is 0, Inf or NaN, and a
    quotient that is Inf becomes FLT_MAX. docs/numerics.md section 1 defines every value.

    amax : f32 array of any shape; each element by itself.
    dtype : float8_e4m3fn (448) or float8_e5m2 (57344).
    margin : integer; the scale aims 2**margin below the format's maximum.
    eps : floor of amax, finite, 0 or more (rounded to f32).
    pow2_scale : the scale is rounded down to a power of two (mantissa bits cleared).
    out : f32 array of amax's shape, written and returned; memory of its own (not amax); needed while a CUDA
        graph is captured.
    Returns f32 of amax's shape. Raises TypeError (not an array, dtypes, mixed kinds), ValueError (eps, out),
    DeviceError; nothing is written then. Bytes moved: both arrays once. Source: TransformerEngine's current
    scaling.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.compute_scale(np.array([3.5, 0.0, 3.0], np.float32), pow2_scale=True).tolist()
    [128.0, 1.0, 128.0]
    """
    return run(_COMPUTE_SCALE_OP, (amax, dtype, margin, eps, pow2_scale), out)


class TensorScaleRule(NamedTuple):
    """Members of the TensorScaleRule of kernels_cu/include/scale/scale.cuh: a scale is target / amax."""

    target: float
    eps: float
    pow2: bool

    @classmethod
    def of(cls, dtype: np.dtype[Any], eps: Any, pow2_scale: Any, margin: int = 0) -> TensorScaleRule:
        return cls(_target(dtype, margin), checked_eps(eps), bool(pow2_scale))


class _Scales(NamedTuple):
    amax: Input
    dtype: np.dtype[Any]
    margin: int
    eps: float
    pow2: bool


class _ComputeScale(Op[_Scales]):
    def arguments(self, call: Call, amax: Any, dtype: Any, margin: Any, eps: Any, pow2_scale: Any) -> _Scales:
        fmt = lookup(dtype, FP8_DTYPES, "dtype")
        margin, eps = integer(margin, "margin"), checked_eps(eps)
        return _Scales(call.read("amax", amax, (float32,)), fmt.dtype, margin, eps,
                       flag(pow2_scale, "pow2_scale"))

    def result(self, inputs: _Scales) -> Description:
        return one_array(inputs.amax.shape, float32)

    def reference(self, inputs: _Scales) -> np.ndarray:
        amax, dtype, margin, eps, pow2 = inputs
        return reference.compute_scale(amax.array, dtype=dtype, margin=margin, eps=eps, pow2_scale=pow2)

    def launches(self, call: Call, inputs: _Scales, *written: int) -> Iterator[Launch]:
        amax = inputs.amax.array
        if amax.size:
            blocks, vector = shapes.elementwise_grid(amax.size, amax.shape, 4, 4, inputs.amax.at, written[0])
            rule = TensorScaleRule.of(inputs.dtype, inputs.eps, inputs.pow2, inputs.margin)
            yield _COMPUTE_SCALE.variant().bind(amax, blocks, amax=inputs.amax.at, scale=written[0],
                                                n=amax.size, rule=rule._asdict(), vector=vector)


_COMPUTE_SCALE_OP = _ComputeScale()


def update_delayed_scaling(history: Array, scale: Array, *, dtype: FP8DType, margin: int = 0,
                           algo: Algorithm = "max",
                           amax: Array | None = None) -> tuple[TypedArray, TypedArray]:
    """The end of a training step of delayed scaling: the scales of n tensors from their amax histories, which
    roll.

        a = max(history) or history[0]            scale = fl(fl(fp8_max * 2**-margin) / a)
        history[0] goes to the last row, the others move up by one, row 0 is 0

    for each column, in place, in one launch; every edge as docs/numerics.md section 1 says. Where a is 0, Inf
    or NaN the scale stays. With `amax` (after a reduction over devices) its nonzero elements replace those of
    history[0], and a tensor whose amax is 0 in both keeps its history and scale.

    Parameters
    ----------
    history : f32 [L, n], L at least 1; row 0 belongs to the current step, the oldest is row 1. Updated
    scale : f32 [n]. Updated. scale_inv is not, since it belongs to data that is already quantised
    dtype : float8_e4m3fn (448) or float8_e5m2 (57344)
    margin : integer; the scale aims 2**margin below the format's maximum
    algo : 'max' of the history (NaN ignored) or 'most_recent'
    amax : f32 [n], read only

    Returns
    -------
    (history, scale), the arrays given.

    Raises
    ------
    TypeError (not arrays, dtypes, mixed kinds), ValueError (shapes, strides, algo, arrays that overlap),
    DeviceError; nothing is written then.

    Can be captured into a CUDA graph. Source: TransformerEngine's delayed scaling. Bytes moved: 8 per element
    of the history.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> history, scale = np.array([[7.0], [2.0], [3.5]], np.float32), np.ones(1, np.float32)
    >>> _ = fp8.update_delayed_scaling(history, scale, dtype=fp8.float8_e4m3fn)
    >>> history.ravel().tolist(), scale.tolist()
    ([0.0, 3.5, 7.0], [64.0])
    """
    run(_UPDATE_OP, (history, scale, dtype, margin, algo, amax), (history, scale))
    return history, scale


class _Update(NamedTuple):
    history: Input
    scale: Input
    dtype: np.dtype[Any]
    margin: int
    algo: str
    amax: Input | None


class _UpdateDelayedScaling(Op[_Update]):
    def arguments(self, call: Call, history: Any, scale: Any, dtype: Any, margin: Any, algo: Any,
                  amax: Any) -> _Update:
        fmt, margin = lookup(dtype, FP8_DTYPES, "dtype"), integer(margin, "margin")
        choice(algo, "algo", ALGORITHMS)
        rows = call.update("history", history, float32)
        if len(rows.shape) != 2 or not rows.shape[0]:
            raise ValueError(f"history: expected shape [L, n] with L of 1 or more, got {rows.shape}")
        n = rows.shape[1]
        scales = call.update("scale", scale, float32, (n,))
        reduced = None if amax is None else call.read("amax", amax, (float32,), (n,),
                                                      "one for each column of history")
        return _Update(rows, scales, fmt.dtype, margin, algo, reduced)

    def result(self, inputs: _Update) -> Description:
        return Updated()

    def reference(self, inputs: _Update) -> Sequence[np.ndarray]:
        history, scale, dtype, margin, algo, amax = inputs
        return reference.update_delayed_scaling(history.array, scale.array, dtype=dtype, margin=margin,
                                                algo=algo,
                                                amax=None if amax is None else amax.array)

    def launches(self, call: Call, inputs: _Update, *written: int) -> Iterator[Launch]:
        history = inputs.history.array
        length, n = history.shape
        if n:
            on_cpu = isinstance(history, np.ndarray)
            log2 = _columns_log2(length, n, _MULTIPROCESSORS_OF_CPU if on_cpu
                                 else multiprocessors(history.data.device_id))
            yield _UPDATE.variant().bind(
                history, grid_size((n - 1 >> log2) + 1, history.shape), history=inputs.history.at,
                scale=inputs.scale.at,
                amax=0 if inputs.amax is None else inputs.amax.at, length=length, n=n,
                target=_target(inputs.dtype, inputs.margin),
                most_recent=int(inputs.algo == "most_recent"), columns_log2=log2)


_UPDATE_OP = _UpdateDelayedScaling()


@functools.lru_cache
def _target(dtype: np.dtype[Any], margin: int) -> float:
    return float(times_power_of_two(FORMATS[dtype].max, -margin))


@functools.lru_cache
def _columns_log2(length: int, n: int, processors: int) -> int:
    """Return log2 of the columns per thread block: 32, or as many as there are. Fewer if a thread's rows take
    more than one round of loads while SMs are idle."""
    log2 = _MOST_COLUMNS_LOG2
    while log2 and (1 << log2 >= 2 * n or (length << log2 > _THREADS * _IN_FLIGHT and (n - 1 >> log2)
                                           + 1 < processors)):
        log2 -= 1
    return log2


def variants() -> Iterator[Variant]:
    """Yields every variant that these ops may launch."""
    yield _COMPUTE_SCALE.variant()
    yield _UPDATE.variant()
