"""Scales of per-tensor scaling: from an amax, and from a history of them. Kernels: kernels_cu/scale.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import backend, reference
from ..arrays import Array, bits, empty_beside
from ..formats import FORMATS, FP8_DTYPES, flag, float8_e4m3fn, float32, lookup
from ..recipes import ALGORITHMS, checked_eps, checked_margin
from ..reference.numerics import times_power_of_two
from ..runtime import Kernel, Variant, executor_of, multiprocessors
from . import checks, flat

_COMPUTE_SCALE = Kernel("scale", "compute_scale", "2PqffII")
_UPDATE = Kernel("scale", "update_delayed_scaling", "3P2qfII")
_THREADS = 512
_IN_FLIGHT = 8
_MOST_COLUMNS_LOG2 = 5          # 32 f32: a whole line of each row
_MULTIPROCESSORS_OF_CPU = 4


def compute_scale(amax: Array, *, dtype: Any = float8_e4m3fn, margin: int = 0, eps: float = 0.0, pow2_scale: bool = False,
                  out: Array | None = None) -> Array:
    """The scale that brings a largest magnitude to the largest value of an FP8 format.

        scale = fl(fl(fp8_max * 2**-margin) / max(amax, eps))        1 where that amax is 0, Inf or NaN; Inf becomes FLT_MAX

    in f32, correctly rounded, subnormals kept; every value as docs/numerics.md section 1 says.

    amax : f32 array of any shape; each element by itself.
    dtype : float8_e4m3fn (448) or float8_e5m2 (57344).
    margin : integer; the scale aims 2**margin below the format's maximum.
    eps : floor of amax, finite, 0 or more (rounded to f32).
    pow2_scale : the scale is rounded down to a power of two (mantissa bits cleared).
    out : f32 array of amax's shape, written and returned; memory of its own (not amax); needed while a CUDA graph is captured.
    Returns f32 of amax's shape. Raises TypeError (not an array, dtypes, mixed kinds), ValueError (eps, out), DeviceError; nothing is
    written then. Bytes moved: both arrays once. Source: TransformerEngine's current scaling.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.compute_scale(np.array([3.5, 0.0, 3.0], np.float32), pow2_scale=True).tolist()
    [128.0, 1.0, 128.0]
    """
    pow2_scale = flag(pow2_scale, "pow2_scale")
    fmt = lookup(dtype, FP8_DTYPES, "dtype")
    target, floor = scale_target(fmt.dtype, checked_margin(margin)), checked_eps(eps)
    amax, xp, at = checks.source(amax, (float32,), "amax")
    if executor_of(xp) == "reference":
        result = reference.compute_scale(amax, dtype=fmt.dtype, margin=margin, eps=floor, pow2_scale=pow2_scale)
        if out is None:
            return result
        checks.destination(out, amax.shape, float32, amax, xp, at)
        out[...] = result
        return out
    if out is None:
        checks.may_allocate(amax)
    result = empty_beside(amax, amax.shape, float32) if out is None else out
    result_at = checks.destination(result, amax.shape, float32, amax, xp, at)
    if amax.size:
        blocks, vector = flat.grid(amax.size, amax.shape, 4, 4, at, result_at)
        _compute_scale_variant().launch(amax, blocks, at, result_at, amax.size, target, floor, int(pow2_scale), vector)
    return result


def update_delayed_scaling(history: Array, scale: Array, *, dtype: Any, margin: int = 0, algo: str = "max",
                           amax: Array | None = None) -> tuple[Array, Array]:
    """The end of a training step of delayed scaling: the scales of n tensors from their amax histories, which roll.

        a = max(history) or history[0]            scale = fl(fl(fp8_max * 2**-margin) / a)
        history[0] goes to the last row, the others move up by one, row 0 is 0

    for each column, in place, in one launch; every edge as docs/numerics.md section 1 says. Where a is 0, Inf or NaN the scale
    stays. With `amax` (after a reduction over devices) its elements, where they are not 0, take the place of history[0], and a tensor
    whose amax is 0 in both keeps its history and scale.

    Parameters
    ----------
    history : f32 [L, n], L at least 1; row 0 belongs to the current step, the oldest is row 1. Updated
    scale : f32 [n]. Updated. No scale_inv is: that belongs to data which is already quantised
    dtype : float8_e4m3fn (448) or float8_e5m2 (57344)
    margin : integer; the scale aims 2**margin below the format's maximum
    algo : 'max' of the history (NaN ignored) or 'most_recent'
    amax : f32 [n], read only

    Returns
    -------
    (history, scale), the arrays given.

    Raises
    ------
    TypeError (not arrays, dtypes, mixed kinds), ValueError (shapes, strides, algo, arrays that overlap), DeviceError; nothing is
    written then.

    Can be captured into a CUDA graph. Source: TransformerEngine's delayed scaling. Bytes moved: 8 per element of the history.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> history, scale = np.array([[7.0], [2.0], [3.5]], np.float32), np.ones(1, np.float32)
    >>> _ = fp8.update_delayed_scaling(history, scale, dtype=fp8.float8_e4m3fn)
    >>> history.ravel().tolist(), scale.tolist()
    ([0.0, 3.5, 7.0], [64.0])
    """
    fmt = lookup(dtype, FP8_DTYPES, "dtype")
    target = scale_target(fmt.dtype, checked_margin(margin))
    if algo not in ALGORITHMS:
        raise ValueError(f"algo: expected one of {ALGORITHMS}, got {algo!r}")
    xp = np if isinstance(history, np.ndarray) else backend.module_of(history, "history")
    shape = history.shape
    at = checks.writable(history, shape, float32, history, xp, "history")
    if len(shape) != 2 or not shape[0]:
        raise ValueError(f"history: expected shape [L, n] with L of 1 or more, got {shape}")
    length, n = shape
    scale_at = checks.writable(scale, (n,), float32, history, xp, "scale")
    checks.separate(scale_at, 4 * n, at, 4 * n * length, "scale", "history")
    amax_at = 0
    if amax is not None:
        if not isinstance(amax, xp.ndarray):
            backend.require_module(amax, xp, "amax")
        amax, _, amax_at = checks.source(amax, (float32,), "amax")
        if amax.shape != (n,):
            raise ValueError(f"amax: expected shape {(n,)}, one for each column of history, got {amax.shape}")
        if xp is not np:
            checks.same_device(amax, history, "amax")
        checks.separate(amax_at, 4 * n, at, 4 * n * length, "amax", "history")
        checks.separate(amax_at, 4 * n, scale_at, 4 * n, "amax", "scale")
    if executor_of(xp) == "reference":
        fresh = reference.update_delayed_scaling(history, scale, dtype=fmt.dtype, margin=margin, algo=algo, amax=amax)
        for mine, new in zip((history, scale), fresh, strict=True):
            bits(mine)[...] = bits(new)
    elif n:
        log2 = _columns_log2(length, n, _MULTIPROCESSORS_OF_CPU if xp is np else multiprocessors(history.data.device_id))
        blocks = checks.grid_size((n - 1 >> log2) + 1, shape)
        _update_variant().launch(history, blocks, at, scale_at, amax_at, length, n, target, int(algo == "most_recent"), log2)
    return history, scale


@functools.lru_cache
def scale_target(dtype: np.dtype[Any], margin: int) -> float:
    return float(times_power_of_two(FORMATS[dtype].max, -margin))


@functools.lru_cache
def _columns_log2(length: int, n: int, processors: int) -> int:
    """How many columns a block owns: 32, but fewer where a history is so long that a thread's run of rows needs more than one round
    of loads while processors are idle, and no more than there are."""
    log2 = _MOST_COLUMNS_LOG2
    while log2 and (1 << log2 >= 2 * n or (length << log2 > _THREADS * _IN_FLIGHT and (n - 1 >> log2) + 1 < processors)):
        log2 -= 1
    return log2


@functools.cache
def _compute_scale_variant() -> Variant:
    return _COMPUTE_SCALE.variant(block=flat.THREADS)


@functools.cache
def _update_variant() -> Variant:
    return _UPDATE.variant(block=_THREADS)


def variants() -> Iterator[Variant]:
    """Every variant that these ops may launch."""
    yield _compute_scale_variant()
    yield _update_variant()
