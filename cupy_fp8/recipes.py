"""How to quantise: frozen descriptions that allocate results and delegate to the ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Any

from .advice import listed, meant, public_only, shown, type_name
from .arrays import Array, Shape, _as_shape, empty_beside
from .directions import (
    block_directions,
    check_directions,
    dbias_shape,
    from_buffers,
    mx_directions,
    new_parts,
    tensor_directions,
)
from .formats import FP8_DTYPES, choice, flag, float8_e4m3fn, float32, integer, lookup
from .layouts import as_block
from .methods import ops
from .options import (
    ALGORITHMS,
    Algorithm,
    BlockProfileName,
    BlockScaleLayout,
    MXMode,
    MXProfile,
    MXScaleLayout,
    block_eps,
    block_pow2,
    check_block_options,
    check_mx_options,
    checked_eps,
)
from .results import Quantized
from .typed_array import FP8DTypeField

__all__ = ["BlockScaling", "CurrentScaling", "DelayedScaling", "MXScaling", "quantize"]


def _as_matrices(shape: Shape) -> tuple[int, ...]:
    """Return the shape of a matrix or of a batch of matrices, which have blocks."""
    shape = _as_shape(shape)
    if not 2 <= len(shape) <= 3:
        raise ValueError(f"shape: expected two or three extents, got {shape}"
                         + (f"; (1, {shape[0]}) is that of a matrix of one row" if len(shape) == 1 else ""))
    return shape


def _keep(recipe: Any, **fields: Any) -> None:
    """Store checked fields as Python's own numbers and names, so that `save` writes what `load` takes."""
    recipe.__dict__.update(fields)


class _Recipe:
    """Refuses positional options, so that new ones can be added between others."""

    if not TYPE_CHECKING:               # the constructor is the dataclass's
        def __new__(cls, *args: Any, **options: Any) -> Any:
            names, first = [f.name for f in fields(cls)], [f.name for f in fields(cls) if not f.kw_only]
            if len(args) > len(first):
                write = ", ".join(f"{name}={shown(value)}" for name, value in zip(names, args, strict=False)
                                  if name not in first)
                raise TypeError(f"{cls.__name__}: expected {' and '.join(first)} alone by position; write "
                                f"{write}")
            return super().__new__(cls)


class _PerTensor(_Recipe):
    """The method of recipes with one scale for a tensor."""

    dtype: FP8DTypeField

    def empty(self, shape: Shape, *, rowwise: bool = True, columnwise: bool = False, dbias: bool = False,
              like: Any = None, buffers: Mapping[str, tuple[Array, Array]] | None = None) -> Quantized:
        """Allocate an uninitialised result to pass as `out=`, without a launch.

        dbias : the result has an array for the bias gradient too.
        buffers : {'rowwise': (data, scale_inv), 'columnwise': (data, scale_inv)} to use instead of new
            arrays. Each pair has both arrays, so that a scale_inv always belongs to its data.
        """
        shape = _as_shape(shape)
        check_directions(shape, rowwise, columnwise, dbias)
        directions = tensor_directions(shape, self.dtype, rowwise, columnwise)
        parts = new_parts(directions, like) if buffers is None else from_buffers(buffers, directions)
        if not dbias:
            return Quantized(**parts)
        beside = next(iter(parts.values())).scale_inv
        return Quantized(**parts, dbias=empty_beside(beside, dbias_shape(shape), float32))


@dataclass(frozen=True)
class DelayedScaling(_PerTensor):
    """Per-tensor scaling with a scale known before the cast, from the amax of earlier steps.

    dtype        float8_e4m3fn (forward) or float8_e5m2 (gradients, in the usual hybrid)
    margin       the scale aims 2**margin below the format's maximum
    history_len  steps of amax history, 1 or more
    algo         'max' of the history or 'most_recent'

    Source: TransformerEngine's DelayedScaling recipe; arXiv 2209.05433.
    """

    dtype: FP8DTypeField = float8_e4m3fn
    _: KW_ONLY
    margin: int = 0
    history_len: int = 1024
    algo: Algorithm = "max"

    def __post_init__(self) -> None:
        _keep(self, dtype=lookup(self.dtype, FP8_DTYPES, "dtype").dtype,
              algo=choice(self.algo, "algo", ALGORITHMS))
        if integer(self.history_len, "history_len") < 1:
            raise ValueError(f"history_len: expected an integer of 1 or more, got {shown(self.history_len)}")
        _keep(self, history_len=integer(self.history_len, "history_len"),
              margin=integer(self.margin, "margin"))

    def quantize(self, x: Array, *, rowwise: bool = True, columnwise: bool = False, scale: Any = None,
                 amax: Array | None = None, noop: Array | None = None, dbias: bool = False,
                 out: Quantized | None = None) -> Quantized:
        """Call `quantize_tensor` with this recipe's dtype. Delayed scaling needs a `scale`: the recipe's
        state holds it."""
        check_scales(self, scale, amax)
        return ops.quantize_tensor(x, scale, dtype=self.dtype, rowwise=rowwise, columnwise=columnwise,
                                   amax=amax, noop=noop, dbias=dbias, out=out)


@dataclass(frozen=True)
class CurrentScaling(_PerTensor):
    """Per-tensor scaling with the scale from the tensor's own amax.

    dtype       float8_e4m3fn or float8_e5m2
    eps         floor of the amax, finite, 0 or more
    pow2_scale  the scale is rounded down to a power of two

    Source: TransformerEngine's Float8CurrentScaling recipe.
    """

    dtype: FP8DTypeField = float8_e4m3fn
    _: KW_ONLY
    eps: float = 0.0
    pow2_scale: bool = False

    def __post_init__(self) -> None:
        _keep(self, dtype=lookup(self.dtype, FP8_DTYPES, "dtype").dtype)
        checked_eps(self.eps)
        _keep(self, eps=float(self.eps), pow2_scale=flag(self.pow2_scale, "pow2_scale"))

    def quantize(self, x: Array, *, rowwise: bool = True, columnwise: bool = False, scale: None = None,
                 amax: Array | None = None, noop: Array | None = None, dbias: bool = False,
                 out: Quantized | None = None) -> Quantized:
        """Call `quantize_tensor` without a scale, with this recipe's dtype, eps and pow2_scale. `amax`
        receives the maximum."""
        check_scales(self, scale, amax)
        return ops.quantize_tensor(x, rowwise=rowwise, columnwise=columnwise, amax=amax, noop=noop,
                                   dbias=dbias, out=out, **vars(self))


@dataclass(frozen=True)
class MXScaling(_Recipe):
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

    dtype: FP8DTypeField = float8_e4m3fn
    _: KW_ONLY
    mode: MXMode = "rceil"
    profile: MXProfile = "te"
    block: tuple[int, int] = (1, 32)
    scale_layout: MXScaleLayout = "compact"

    def __post_init__(self) -> None:
        _keep(self, dtype=lookup(self.dtype, FP8_DTYPES, "dtype").dtype, block=as_block(self.block))
        check_mx_options(self.mode, self.profile, self.block, self.scale_layout)
        _keep(self, mode=str(self.mode), profile=str(self.profile), scale_layout=str(self.scale_layout))

    def quantize(self, x: Array, *, rowwise: bool = True, columnwise: bool = False, scale: None = None,
                 amax: None = None, noop: Array | None = None, out: Quantized | None = None) -> Quantized:
        """Call `quantize_mx` with this recipe's options. Every block finds its own scale: `scale` and `amax`
        belong to per-tensor recipes."""
        check_scales(self, scale, amax)
        return ops.quantize_mx(x, rowwise=rowwise, columnwise=columnwise, noop=noop, out=out, **vars(self))

    def empty(self, shape: Shape, *, rowwise: bool = True, columnwise: bool = False, like: Any = None,
              buffers: Mapping[str, tuple[Array, Array]] | None = None) -> Quantized:
        """Allocate an uninitialised result to pass as `out=`, without a launch. Column-wise data is not
        stored transposed.

        buffers : {'rowwise': (data, scale_inv), 'columnwise': (data, scale_inv)} to use instead of new
            arrays. With blocks of (32, 32) both pairs have the same data.
        """
        directions = mx_directions(_as_matrices(shape), self.dtype, rowwise, columnwise, False, self.block,
                                   self.scale_layout)
        return Quantized(**(new_parts(directions, like) if buffers is None
                            else from_buffers(buffers, directions)))


@dataclass(frozen=True)
class BlockScaling(_Recipe):
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
    dtype: FP8DTypeField = float8_e4m3fn
    _: KW_ONLY
    eps: float | None = None
    pow2_scale: bool | None = None
    profile: BlockProfileName = "te"
    scale_layout: BlockScaleLayout = "gemm_ready"

    def __post_init__(self) -> None:
        _keep(self, block=as_block(self.block))
        check_block_options(self.block, self.profile, self.scale_layout)
        _keep(self, dtype=lookup(self.dtype, FP8_DTYPES, "dtype").dtype, profile=str(self.profile),
              scale_layout=str(self.scale_layout))
        block_eps(self.eps, self.profile)
        if self.eps is not None:
            _keep(self, eps=float(self.eps))
        if self.pow2_scale is not None:
            _keep(self, pow2_scale=block_pow2(self.pow2_scale, self.profile))

    def quantize(self, x: Array, *, rowwise: bool = True, columnwise: bool = False, scale: None = None,
                 amax: None = None, noop: Array | None = None, out: Quantized | None = None) -> Quantized:
        """Call `quantize_block` with this recipe's options. Every block finds its own scale: `scale` and
        `amax` belong to per-tensor recipes."""
        check_scales(self, scale, amax)
        return ops.quantize_block(x, rowwise=rowwise, columnwise=columnwise, noop=noop, out=out, **vars(self))

    def empty(self, shape: Shape, *, rowwise: bool = True, columnwise: bool = False, like: Any = None,
              buffers: Mapping[str, tuple[Array, Array]] | None = None) -> Quantized:
        """Allocate an uninitialised result to pass as `out=`, without a launch. Column-wise data is stored
        transposed.

        buffers : {'rowwise': (data, scale_inv), 'columnwise': (data, scale_inv)} to use instead of new
            arrays.
        """
        directions = block_directions(_as_matrices(shape), self.dtype, rowwise, columnwise, True, self.block,
                                      self.scale_layout)
        return Quantized(**(new_parts(directions, like) if buffers is None
                            else from_buffers(buffers, directions)))


Recipe = DelayedScaling | CurrentScaling | BlockScaling | MXScaling
RECIPES = DelayedScaling, CurrentScaling, BlockScaling, MXScaling


def quantize(x: Array, recipe: Recipe, *, rowwise: bool = True, columnwise: bool = False, scale: Any = None,
             amax: Array | None = None, noop: Array | None = None, dbias: bool = False,
             out: Quantized | None = None) -> Quantized:
    """Quantise to FP8 by any recipe: ``recipe.quantize(x, …)``.

    x : bfloat16, float16 or float32 array of a shape that the recipe takes: any for recipes with one scale, a
        matrix or a batch of matrices for blocks
    recipe : DelayedScaling, CurrentScaling, BlockScaling or MXScaling
    scale, amax, dbias : for recipes with one scale only, as for `quantize_tensor`; DelayedScaling needs a
        scale
    rowwise, columnwise, noop, out : as for `quantize_tensor`, `quantize_block` and `quantize_mx`, which
        define every byte

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.ones((2, 128), np.float32)
    >>> fp8.quantize(x, fp8.BlockScaling()).rowwise.scale_inv.tolist()      # gemm_ready: [blocks, rows to 4]
    [[0.00390625, 0.00390625, 0.0, 0.0]]
    """
    check_recipe(recipe)
    options: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise, "scale": scale, "amax": amax,
                               "noop": noop, "out": out}
    if isinstance(recipe, _PerTensor):
        options["dbias"] = dbias
    elif flag(dbias, "dbias"):
        raise ValueError("dbias: belongs to per-tensor recipes, whose launch adds up columns; "
                         f"{type(recipe).__name__} has none")
    return recipe.quantize(x, **options)


def check_recipe(recipe: Any, kinds: tuple[type, ...] = RECIPES) -> None:
    """Raise TypeError unless this is a recipe of one of these kinds."""
    if isinstance(recipe, kinds):
        return
    names = [kind.__name__ for kind in kinds]
    advice = meant(recipe, names) if isinstance(recipe, str) else ""
    if isinstance(recipe, type) and issubclass(recipe, kinds):
        advice = f"; write {recipe.__name__}()"
    raise TypeError(f"recipe: expected a {listed(names)}, got {type_name(recipe)}{advice}")


def check_scales(recipe: Recipe, scale: Any, amax: Any, several: bool = False) -> None:
    """Raise ValueError for a scale that the recipe lacks, and for a scale or an amax that it does not take.
    several: they are those of several arrays, and named `scales` and `amaxes`."""
    name, other = ("scales", "amaxes") if several else ("scale", "amax")
    them, given = ("them", "given scales") if several else ("it", "a given scale")
    if isinstance(recipe, DelayedScaling):
        if scale is None:
            raise ValueError(f"{name}: delayed scaling needs the {name} that earlier steps determined, got "
                             f"None; DelayedScalingState keeps {them}, CurrentScaling needs none")
    elif isinstance(recipe, CurrentScaling):
        if scale is not None:
            raise ValueError(f"{name}: current scaling takes {them} from the values themselves; "
                             f"DelayedScaling quantises with {given}")
    elif scale is not None or amax is not None:
        raise ValueError(f"{name}, {other}: belong to per-tensor recipes; blocks take their scales from "
                         "their own elements")


if not TYPE_CHECKING:               # otherwise type checkers accept any name
    __getattr__, __dir__ = public_only(globals())
