"""How to quantise: frozen descriptions that allocate results and delegate to the ops."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from . import backend
from .arrays import Array, Shape, _as_shape, empty, empty_beside
from .formats import FORMATS, FP8_DTYPES, flags, float8_e4m3fn, float8_e8m0fnu, float32, lookup
from .layouts import scale_shape
from .results import Quantized, Scaled, swap_last

__all__ = ["BlockScaling", "CurrentScaling", "DelayedScaling", "MXScaling"]

ALGORITHMS = ("max", "most_recent")
MX_MODES = ("rceil", "floor", "ceil", "even")
MX_PROFILES = ("te", "torchao")
MX_BLOCKS = ((1, 32), (32, 32))
MX_SCALE_LAYOUTS = ("compact", "swizzled")
_MX_OPTIONS = frozenset(product(MX_MODES, MX_PROFILES, MX_BLOCKS, MX_SCALE_LAYOUTS))

class BlockProfile(NamedTuple):
    """How a library finds and applies the f32 scale of a block (docs/numerics.md, section 3): what its
    options are by default."""

    eps: float
    pow2_scale: bool


BLOCK_PROFILES = {"te": BlockProfile(0.0, True), "deepgemm": BlockProfile(1e-4, False),
                  "tilekernels": BlockProfile(1e-4, False), "vllm": BlockProfile(1e-10, False),
                  "sglang": BlockProfile(1e-10, False), "torchao": BlockProfile(1e-12, False)}
BLOCKS: tuple[tuple[int | None, int | None], ...] = (
    (1, 128), (128, 1), (128, 128), (1, 64), (64, 1), (1, 32), (32, 1), (1, None), (None, 1))
BLOCK_SCALE_LAYOUTS = ("gemm_ready", "compact", "deepgemm_sm90")
_BLOCK_OPTIONS = frozenset(o for o in product(BLOCKS, BLOCK_PROFILES, BLOCK_SCALE_LAYOUTS)
                           if o[0] != (128, 128) or o[2] != "deepgemm_sm90")

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


def check_mx_options(mode: str, profile: str, block: tuple[int, int], scale_layout: str) -> None:
    given = mode, profile, block, scale_layout
    try:
        if given in _MX_OPTIONS and not any(isinstance(extent, float) for extent in block):
            return
    except TypeError:                               # something that is not even hashable
        pass
    for name, value, allowed in zip(("mode", "profile", "block", "scale_layout"), given,
                                    (MX_MODES, MX_PROFILES, MX_BLOCKS, MX_SCALE_LAYOUTS), strict=True):
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise ValueError(f"{name}: expected one of {allowed}, got {value!r}")


def check_block_options(block: tuple[int | None, int | None], profile: str, scale_layout: str) -> None:
    given = block, profile, scale_layout
    try:
        if given in _BLOCK_OPTIONS:
            return
    except TypeError:                               # something that is not even hashable
        pass
    for name, value, allowed in zip(("block", "profile", "scale_layout"), given,
                                    (BLOCKS, tuple(BLOCK_PROFILES), BLOCK_SCALE_LAYOUTS), strict=True):
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise ValueError(f"{name}: expected one of {allowed}, got {value!r}")
    raise ValueError("scale_layout: 'deepgemm_sm90' belongs to blocks along one line; DeepGEMM takes scales "
                     "of 128 x 128 blocks compact")


def block_eps(eps: Any, profile: str) -> float:
    return float(_F32.unpack(_F32.pack(BLOCK_PROFILES[profile].eps))[0]) if eps is None else checked_eps(eps)


def block_pow2(pow2_scale: Any, profile: str) -> bool:
    if pow2_scale is None:
        return BLOCK_PROFILES[profile].pow2_scale
    if not isinstance(pow2_scale, (bool, np.bool_)):
        raise TypeError(f"pow2_scale: expected True, False or None (the profile's own), got {pow2_scale!r}")
    return bool(pow2_scale)


class Form(NamedTuple):
    """What one direction of a result is, but for its memory: the attributes of a Scaled, and the scales'
    dtype and shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    transposed: bool
    block: tuple[int | None, int | None] | None
    scale_layout: str | None
    scale_dtype: np.dtype[Any]
    scale_shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the data in memory."""
        return swap_last(self.shape) if self.transposed else self.shape

    def of(self, data: Array, scale_inv: Array) -> Scaled:
        return Scaled._of(data, scale_inv, self.shape, self.transposed, self.block, self.scale_layout)


class _PerTensor:
    """What recipes with one scale for a tensor share."""

    dtype: Any

    def empty(self, shape: Shape, *, rowwise: bool = True, columnwise: bool = False, dbias: bool = False,
              like: Any = None, buffers: Mapping[str, tuple[Array, Array]] | None = None) -> Quantized:
        """A result to pass as `out=`: allocates and launches nothing else, initialises nothing.

        dbias: with room for the bias gradient.
        buffers: {'rowwise': (data, scale_inv), 'columnwise': (data, scale_inv)} to use instead of new arrays;
        both arrays of a pair are needed, since nothing says otherwise that a scale_inv belongs to the data.
        """
        shape = _as_shape(shape)
        check_directions(shape, rowwise, columnwise, dbias)
        if buffers is None:
            return empty_per_tensor(empty((1,), float32, like=like), shape, self.dtype, rowwise, columnwise,
                                    dbias=dbias)
        parts = _wrapped(buffers,
                         {name: Form(self.dtype, shape, name == "columnwise", None, None, float32, (1,))
                                   for name, on in (("rowwise", rowwise), ("columnwise", columnwise)) if on})
        sums = empty_beside(next(iter(parts.values())).scale_inv, dbias_shape(shape),
                            float32) if dbias else None
        return Quantized(**parts, dbias=sums)


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
        if not isinstance(self.algo, str) or self.algo not in ALGORITHMS:
            raise ValueError(f"algo: expected one of {ALGORITHMS}, got {self.algo!r}")
        if not isinstance(self.history_len, (int, np.integer)) or self.history_len < 1:
            raise ValueError(f"history_len: expected an integer of 1 or more, got {self.history_len!r}")
        checked_margin(self.margin)

    def quantize(self, x: Array, *, rowwise: bool = True, columnwise: bool = False, scale: Any = None,
                 amax: Array | None = None, noop: Array | None = None, dbias: bool = False,
                 out: Quantized | None = None) -> Quantized:
        """`quantize_tensor` with this recipe's dtype. Delayed scaling needs a `scale`: the recipe's state
        holds it."""
        from .ops.quantize.tensor import quantize_tensor

        if scale is None:
            raise ValueError("scale: delayed scaling needs the scale that earlier steps determined, got None")
        return quantize_tensor(x, scale, dtype=self.dtype, rowwise=rowwise, columnwise=columnwise, amax=amax,
                               noop=noop, dbias=dbias, out=out)


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
                 amax: Array | None = None, noop: Array | None = None, dbias: bool = False,
                 out: Quantized | None = None) -> Quantized:
        """`quantize_tensor` without a scale, with this recipe's dtype, eps and pow2_scale. `amax` receives
        the maximum."""
        from .ops.quantize.tensor import quantize_tensor

        if scale is not None:
            raise ValueError("scale: current scaling takes it from the tensor itself; DelayedScaling "
                             "quantises with a given scale")
        return quantize_tensor(x, dtype=self.dtype, rowwise=rowwise, columnwise=columnwise, amax=amax,
                               noop=noop, dbias=dbias, eps=self.eps, pow2_scale=self.pow2_scale, out=out)


@dataclass(frozen=True)
class MXScaling:
    """MX: blocks of 32 elements, each with a power of two as its scale (one E8M0 byte).

    dtype         float8_e4m3fn or float8_e5m2
    mode          how an amax becomes a scale: 'rceil' (nothing saturates), 'floor' (OCP MX v1.0), 'ceil',
                  'even'
    profile       what NaN and Inf do: 'te' (NaN stays by itself, Inf becomes the maximum) or 'torchao'
                  (either makes its block NaN)
    block         (1, 32), column-wise (32, 1); or (32, 32): both directions have the same codes
    scale_layout  'compact' or 'swizzled' (the 128 x 4 tiles of cuBLAS)

    Source: OCP Microscaling Formats v1.0; TransformerEngine's MXFP8BlockScaling; torchao's MXFP8 training.
    """

    dtype: Any = float8_e4m3fn
    mode: str = "rceil"
    profile: str = "te"
    block: tuple[int, int] = (1, 32)
    scale_layout: str = "compact"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", lookup(self.dtype, FP8_DTYPES, "dtype").dtype)
        check_mx_options(self.mode, self.profile, self.block, self.scale_layout)

    def quantize(self, x: Array, *, rowwise: bool = True, columnwise: bool = False, scale: None = None,
                 amax: None = None, noop: Array | None = None, out: Quantized | None = None) -> Quantized:
        """`quantize_mx` with this recipe's options. Every block finds its own scale: `scale` and `amax`
        belong to per-tensor recipes."""
        from .ops.quantize.mx import quantize_mx

        if scale is not None or amax is not None:
            raise ValueError("scale, amax: belong to per-tensor recipes; MX takes the scale of every block "
                             "from the block itself")
        return quantize_mx(x, dtype=self.dtype, rowwise=rowwise, columnwise=columnwise, mode=self.mode,
                           profile=self.profile, block=self.block, scale_layout=self.scale_layout, noop=noop,
                           out=out)

    def empty(self, shape: Shape, *, rowwise: bool = True, columnwise: bool = False, like: Any = None,
              buffers: Mapping[str, tuple[Array, Array]] | None = None) -> Quantized:
        """A result to pass as `out=`: allocates and launches nothing else, initialises nothing. Column-wise
        data is not stored transposed.

        buffers: {'rowwise': (data, scale_inv), 'columnwise': (data, scale_inv)} to use instead of new
        arrays (with blocks of (32, 32) both pairs have the same data).
        """
        forms = mx_forms(_as_shape(shape), self.dtype, rowwise, columnwise, False, self.block,
                         self.scale_layout)
        if buffers is None:
            return empty_mx(forms, self.block, lambda shape, dtype: empty(shape, dtype, like=like))
        return Quantized(**_wrapped(buffers, forms))


@dataclass(frozen=True)
class BlockScaling:
    """Blocks of 128 elements (or 64, 32, a whole line, 128 x 128), each with an f32 scale.

    block         the row-wise block; column-wise blocks are its transpose. See `quantize_block`
    dtype         float8_e4m3fn or float8_e5m2
    eps           the amax is at least this; None: the profile's own
    pow2_scale    scales are powers of two; None: the profile's own
    profile       whose arithmetic: 'te', 'deepgemm', 'tilekernels', 'vllm', 'sglang' or 'torchao'
    scale_layout  'gemm_ready', 'compact' or 'deepgemm_sm90' (docs/layouts.md)

    Source: DeepSeek-V3 (arXiv 2412.19437); TransformerEngine's Float8BlockScaling; the libraries that the
        profiles are named after.
    """

    block: tuple[int | None, int | None] = (1, 128)
    dtype: Any = float8_e4m3fn
    eps: float | None = None
    pow2_scale: bool | None = None
    profile: str = "te"
    scale_layout: str = "gemm_ready"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", lookup(self.dtype, FP8_DTYPES, "dtype").dtype)
        check_block_options(self.block, self.profile, self.scale_layout)
        block_eps(self.eps, self.profile)
        block_pow2(self.pow2_scale, self.profile)

    def quantize(self, x: Array, *, rowwise: bool = True, columnwise: bool = False, scale: None = None,
                 amax: None = None, noop: Array | None = None, out: Quantized | None = None) -> Quantized:
        """`quantize_block` with this recipe's options. Every block finds its own scale: `scale` and `amax`
        belong to per-tensor recipes."""
        from .ops.quantize.blocks import quantize_block

        if scale is not None or amax is not None:
            raise ValueError("scale, amax: belong to per-tensor recipes; blocks take their scales from their "
                             "own elements")
        return quantize_block(x, block=self.block, dtype=self.dtype, rowwise=rowwise, columnwise=columnwise,
                              pow2_scale=self.pow2_scale, eps=self.eps, profile=self.profile,
                              scale_layout=self.scale_layout, noop=noop, out=out)

    def empty(self, shape: Shape, *, rowwise: bool = True, columnwise: bool = False, like: Any = None,
              buffers: Mapping[str, tuple[Array, Array]] | None = None) -> Quantized:
        """A result to pass as `out=`: allocates and launches nothing else, initialises nothing. Column-wise
        data is stored transposed.

        buffers: {'rowwise': (data, scale_inv), 'columnwise': (data, scale_inv)} to use instead of new
            arrays.
        """
        forms = block_forms(_as_shape(shape), self.dtype, rowwise, columnwise, True, self.block,
                            self.scale_layout)
        if buffers is None:
            return empty_blocks(forms, lambda shape, dtype: empty(shape, dtype, like=like))
        return Quantized(**_wrapped(buffers, forms))


def block_forms(shape: tuple[int, ...], dtype: np.dtype[Any], rowwise: bool, columnwise: bool,
                transposed: bool, block: tuple[int | None, int | None], scale_layout: str) -> dict[str, Form]:
    """The directions of a result with f32 scales, by name. ValueError for neither, and for an array that is
    not two- or three-dimensional."""
    check_directions(shape, rowwise, columnwise)
    if not 2 <= len(shape) <= 3:
        raise ValueError(f"x: expected an array of two or three dimensions, got shape {shape}")
    return {name: Form(dtype, shape, swapped, along, scale_layout, float32,
                       scale_shape(shape, along, scale_layout, swapped))
            for name, wanted, along, swapped in (("rowwise", rowwise, block, False),
                                                 ("columnwise", columnwise, (block[1], block[0]), transposed))
            if wanted}


def empty_blocks(forms: Mapping[str, Form],
                 allocate: Callable[[tuple[int, ...], np.dtype[Any]], Array]) -> Quantized:
    """Uninitialised result of quantisation in blocks. Where both directions are the same (square blocks,
    stored alike) they are one."""
    parts: dict[str, Scaled] = {}
    for name, form in forms.items():
        same = next((parts[other] for other in parts if forms[other] == form), None)
        parts[name] = form.of(allocate(form.stored, form.dtype),
                              allocate(form.scale_shape, form.scale_dtype)) if same is None else same
    return Quantized(**parts)


def mx_forms(shape: tuple[int, ...], dtype: np.dtype[Any], rowwise: bool, columnwise: bool, transposed: bool,
             block: tuple[int, int], scale_layout: str) -> dict[str, Form]:
    """The directions of an MX result by name. Raises ValueError for neither, and for an array that is not
    two- or three-dimensional."""
    check_directions(shape, rowwise, columnwise)
    if not 2 <= len(shape) <= 3:
        raise ValueError(f"x: expected an array of two or three dimensions, got shape {shape}")
    def form(block: tuple[int, int], transposed: bool) -> Form:
        return Form(dtype, shape, transposed, block, scale_layout, float8_e8m0fnu,
                    scale_shape(shape, block, scale_layout))
    return {name: form(along, swapped)
            for name, wanted, along, swapped in (("rowwise", rowwise, (1, 32), False),
                                                 ("columnwise", columnwise, (32, 1), transposed)) if wanted}


def empty_mx(forms: Mapping[str, Form], block: tuple[int, int],
             allocate: Callable[[tuple[int, ...], np.dtype[Any]], Array]) -> Quantized:
    """Uninitialised result of MX quantisation. With blocks of (32, 32) directions that are stored alike share
    their data."""
    parts: dict[str, Scaled] = {}
    for name, form in forms.items():
        shared = parts.get("rowwise") if block == (32, 32) and not form.transposed else None
        data = allocate(form.stored, form.dtype) if shared is None else shared.data
        parts[name] = form.of(data, allocate(form.scale_shape, form.scale_dtype))
    return Quantized(**parts)


def _wrapped(buffers: Mapping[str, tuple[Array, Array]], forms: Mapping[str, Form]) -> dict[str, Scaled]:
    """The caller's arrays as parts of these forms."""
    if not isinstance(buffers, Mapping):
        raise TypeError(f"buffers: expected a dict of (data, scale_inv) pairs, got {type(buffers).__name__}")
    if sorted(buffers) != sorted(forms):
        raise ValueError(f"buffers: expected a (data, scale_inv) pair for each of {list(forms)}, got "
                         f"{sorted(buffers)}")
    return {name: _wrap(name, buffers[name], form) for name, form in forms.items()}


def _wrap(name: str, pair: tuple[Array, Array], form: Form) -> Scaled:
    try:
        data, scale_inv = pair
    except (TypeError, ValueError):
        raise ValueError(f"buffers[{name!r}]: expected a (data, scale_inv) pair, "
                             f"got {type(pair).__name__}") from None
    xp = backend.module_of(data, f"buffers[{name!r}] data")
    backend.require_module(scale_inv, xp, f"buffers[{name!r}] scale_inv")
    for what, a, shape, dtype in (("data", data, form.stored, form.dtype),
                                  ("scale_inv", scale_inv, form.scale_shape, form.scale_dtype)):
        if a.dtype != dtype:
            raise TypeError(f"buffers[{name!r}] {what}: expected dtype {dtype}, got {a.dtype}")
        if a.shape != shape or not a.flags.c_contiguous:
            raise ValueError(f"buffers[{name!r}] {what}: expected a C-contiguous array of shape {shape}, got "
                             f"shape {a.shape}, "
                             f"strides {a.strides}")
    return form.of(data, scale_inv)


def dbias_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the bias gradient of an array: one sum per column of each matrix."""
    return (*shape[:-2], shape[-1])


def check_directions(shape: tuple[int, ...], rowwise: bool, columnwise: bool, dbias: bool = False) -> None:
    flags(rowwise=rowwise, columnwise=columnwise, dbias=dbias)
    if not (rowwise or columnwise):
        raise ValueError("rowwise, columnwise: expected at least one of them, got neither")
    if columnwise and len(shape) < 2:
        raise ValueError(f"columnwise: expected an array of two or more dimensions, got shape {shape}")
    if dbias and len(shape) < 2:
        raise ValueError(f"dbias: expected an array of two or more dimensions, got shape {shape}")


def empty_per_tensor(scale_inv: Array, shape: tuple[int, ...], dtype: np.dtype[Any], rowwise: bool,
                     columnwise: bool, transposed: bool = True, dbias: bool = False) -> Quantized:
    """Uninitialised result of per-tensor scaling, beside its scale_inv, which both directions share; where
    the column-wise data is not stored transposed they share the data too, since its bytes are the same."""
    row = Scaled._of(empty_beside(scale_inv, shape, dtype), scale_inv,
                     shape) if rowwise or not transposed else None
    column = None
    if columnwise:
        column = Scaled._of(empty_beside(scale_inv, swap_last(shape), dtype), scale_inv, shape,
                            True) if transposed else row
    return Quantized(row if rowwise else None, column,
                     empty_beside(scale_inv, dbias_shape(shape), float32) if dbias else None)
