"""How to quantise: frozen descriptions that allocate results and delegate to the ops."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import backend
from .arrays import Array, Shape, _as_shape, empty, empty_beside
from .formats import FORMATS, FP8_DTYPES, float8_e4m3fn, float32, lookup
from .results import Quantized, Scaled, swap_last

ALGORITHMS = ("max", "most_recent")

_F32 = struct.Struct("f")        # rounds a number to f32 ten times faster than np.float32 does


def checked_margin(margin: Any) -> int:
    if not isinstance(margin, (int, np.integer)) or isinstance(margin, bool):
        raise TypeError(f"margin: expected an integer, got {margin!r}")
    return int(margin)


def checked_eps(eps: Any) -> float:
    """eps rounded to f32."""
    if not isinstance(eps, (int, float, np.floating, np.integer)) or isinstance(eps, bool):
        raise TypeError(f"eps: expected a number, got {eps!r}")
    if not 0 <= eps <= FORMATS[float32].max:
        raise ValueError(f"eps: expected a finite float32 of 0 or more, got {eps!r}")
    return float(_F32.unpack(_F32.pack(eps))[0])


class _PerTensor:
    """What recipes with one scale for a tensor share."""

    dtype: Any

    def empty(self, shape: Shape, *, rowwise: bool = True, columnwise: bool = False, like: Any = None,
              buffers: Mapping[str, tuple[Array, Array]] | None = None) -> Quantized:
        """A result to pass as `out=`: allocates and launches nothing else, initialises nothing.

        buffers: {'rowwise': (data, scale_inv), 'columnwise': (data, scale_inv)} to use instead of new arrays; both
        arrays of a pair are needed, since nothing says otherwise that a scale_inv belongs to the data.
        """
        shape = _as_shape(shape)
        check_directions(shape, rowwise, columnwise)
        if buffers is None:
            return empty_per_tensor(empty((1,), float32, like=like), shape, self.dtype, rowwise, columnwise)
        wanted = [name for name, on in (("rowwise", rowwise), ("columnwise", columnwise)) if on]
        if sorted(buffers) != sorted(wanted):
            raise ValueError(f"buffers: expected a (data, scale_inv) pair for each of {wanted}, got {sorted(buffers)}")
        return Quantized(**{name: _wrap(name, buffers[name], shape, self.dtype) for name in wanted})


@dataclass(frozen=True)
class DelayedScaling(_PerTensor):
    """Per-tensor scaling with a scale known before the cast, from the amax of earlier steps.

    dtype        float8_e4m3fn (forward) or float8_e5m2 (gradients, in the usual hybrid)
    margin       the scale aims 2**margin below the format's maximum
    history_len  steps of amax history, 1 or more
    algo         'max' of the history or 'most_recent'

    Source: TransformerEngine's DelayedScaling recipe; arXiv 2209.05433.
    """

    dtype: Any = float8_e4m3fn
    margin: int = 0
    history_len: int = 1024
    algo: str = "max"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", lookup(self.dtype, FP8_DTYPES, "dtype").dtype)
        if self.algo not in ALGORITHMS:
            raise ValueError(f"algo: expected one of {ALGORITHMS}, got {self.algo!r}")
        if not isinstance(self.history_len, (int, np.integer)) or self.history_len < 1:
            raise ValueError(f"history_len: expected an integer of 1 or more, got {self.history_len!r}")
        checked_margin(self.margin)

    def quantize(self, x: Array, *, rowwise: bool = True, columnwise: bool = False, scale: Any = None,
                 amax: Array | None = None, noop: Array | None = None, out: Quantized | None = None) -> Quantized:
        """`quantize_tensor` with this recipe's dtype. Delayed scaling needs a `scale`: the recipe's state holds it."""
        from .ops.cast import quantize_tensor

        if scale is None:
            raise ValueError("scale: delayed scaling needs the scale that earlier steps determined, got None")
        return quantize_tensor(x, scale, dtype=self.dtype, rowwise=rowwise, columnwise=columnwise, amax=amax, noop=noop, out=out)


@dataclass(frozen=True)
class CurrentScaling(_PerTensor):
    """Per-tensor scaling with the scale that the tensor's own amax calls for.

    dtype       float8_e4m3fn or float8_e5m2
    eps         floor of the amax, finite, 0 or more
    pow2_scale  the scale is rounded down to a power of two

    Source: TransformerEngine's Float8CurrentScaling recipe.
    """

    dtype: Any = float8_e4m3fn
    eps: float = 0.0
    pow2_scale: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", lookup(self.dtype, FP8_DTYPES, "dtype").dtype)
        checked_eps(self.eps)

    def quantize(self, x: Array, *, rowwise: bool = True, columnwise: bool = False, scale: None = None,
                 amax: Array | None = None, noop: Array | None = None, out: Quantized | None = None) -> Quantized:
        """`quantize_tensor` without a scale, with this recipe's dtype, eps and pow2_scale. `amax` receives the maximum."""
        from .ops.cast import quantize_tensor

        if scale is not None:
            raise ValueError("scale: current scaling takes it from the tensor itself; DelayedScaling quantises with a given scale")
        return quantize_tensor(x, dtype=self.dtype, rowwise=rowwise, columnwise=columnwise, amax=amax, noop=noop, eps=self.eps,
                               pow2_scale=self.pow2_scale, out=out)


def _wrap(name: str, pair: tuple[Array, Array], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Scaled:
    try:
        data, scale_inv = pair
    except (TypeError, ValueError):
        raise ValueError(f"buffers[{name!r}]: expected a (data, scale_inv) pair, got {type(pair).__name__}") from None
    xp = backend.module_of(data, f"buffers[{name!r}] data")
    backend.require_module(scale_inv, xp, f"buffers[{name!r}] scale_inv")
    transposed = name == "columnwise"
    stored = swap_last(shape) if transposed else shape
    for what, a, want_shape, want_dtype in (("data", data, stored, dtype), ("scale_inv", scale_inv, (1,), float32)):
        if a.dtype != want_dtype:
            raise TypeError(f"buffers[{name!r}] {what}: expected dtype {want_dtype}, got {a.dtype}")
        if a.shape != want_shape or not a.flags.c_contiguous:
            raise ValueError(f"buffers[{name!r}] {what}: expected a C-contiguous array of shape {want_shape}, got shape {a.shape}, "
                             f"strides {a.strides}")
    return Scaled(data, scale_inv, shape, transposed)


def check_directions(shape: tuple[int, ...], rowwise: bool, columnwise: bool) -> None:
    if not (rowwise or columnwise):
        raise ValueError("rowwise, columnwise: expected at least one of them, got neither")
    if columnwise and len(shape) < 2:
        raise ValueError(f"columnwise: expected an array of two or more dimensions, got shape {shape}")


def empty_per_tensor(scale_inv: Array, shape: tuple[int, ...], dtype: np.dtype[Any], rowwise: bool, columnwise: bool,
                     transposed: bool = True) -> Quantized:
    """Uninitialised result of per-tensor scaling, beside its scale_inv, which both directions share; where the column-wise data is
    not stored transposed they share the data too, since its bytes are the same."""
    row = Scaled(empty_beside(scale_inv, shape, dtype), scale_inv, shape) if rowwise or not transposed else None
    column = None
    if columnwise:
        column = Scaled(empty_beside(scale_inv, swap_last(shape), dtype), scale_inv, shape, True) if transposed else row
    return Quantized(row if rowwise else None, column)
