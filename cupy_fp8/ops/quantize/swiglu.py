"""SwiGLU and quantisation from one read. Kernels: kernels_cu/quantize/swiglu_tensor.cu, swiglu_blocks.cu, swiglu_mx.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ... import backend, reference
from ...arrays import Array, empty_beside
from ...calls import splits as sizes
from ...calls import validate
from ...calls.row_segments import GroupRows, rows_variants
from ...formats import FORMATS, FP8_DTYPES, INPUT_DTYPES, flag, float32
from ...kernels import Kernel, Variant, executor_of, tiles, workspace
from ...recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Form,
    MXScaling,
    check_directions,
    empty_blocks,
    empty_mx,
    empty_per_tensor,
)
from ...reference.quantize.swiglu import ALPHA
from ...results import Quantized
from ..scales.scale import scale_target
from . import block_results, blocks, mx
from .bias_gradient import ColumnSums

FORMS = ("swiglu", "gpt_oss")
_BLOCKS = ((1, 128), (1, 64), (1, 32))
_CAST = Kernel("quantize/swiglu_tensor", "swiglu_cast")
_BLOCK = Kernel("quantize/swiglu_blocks", "swiglu_block")
_MX = Kernel("quantize/swiglu_mx", "swiglu_mx")
_TILE = tiles.SMALL
_STAGES = 4                 # rows of 16-bit elements that a thread has on their way (kStages in swiglu_stream.cuh); of f32 half as many
_TOPS = 4 * (8 * _TILE.columns + 8) * 4         # bytes: the maxima of a tile's columns (ColumnTops)
#: From how many blocks on a block takes twice as many tiles, one below the other: rows of the next are on their way while it stores the
#: first.
_ENOUGH_BLOCKS = 512
_LEAST_SHARED = 16           # where no column-wise data are written: an array of no bytes has no address on the CPU
_ANY, _PLAIN, _OPTIONS, _EXPERTS = range(4)     # programs: for every call; for most; for wide rows and whatever else; and experts' biases
_CLAMPED, _GPT_OSS, _INTERLEAVED, _WIDE = 1, 2, 4, 8
_WORDS, _SCALE_OFFSET = 4, 8        # of workspace: the amax so far, blocks that have finished, and the scale of current scaling

Recipe = DelayedScaling | CurrentScaling | BlockScaling | MXScaling


def swiglu_quantize(x: Array, recipe: Recipe, *, scale: Any = None, amax: Array | None = None, probs: Array | None = None,
                    bias: Array | None = None, splits: Any = None, rowwise: bool = True, columnwise: bool = False,
                    clamp: float | None = None, form: str = "swiglu", interleaved: bool = False, noop: Array | None = None,
                    out: Quantized | None = None) -> Quantized:
    """SwiGLU of both halves of x, quantised by a recipe, from one read of x.

        y = ((a * sigma(a)) * b) * p                                form 'swiglu', sigma(a) = 1 / (1 + exp(-a))
        y = ((a * sigma(1.702 * a)) * (b + 1)) * p                  form 'gpt_oss'

    in f32, each operation rounded; y then goes through the recipe's rule as it is, without a rounding to x's dtype in between. Every
    byte, those of exp included, as docs/numerics.md section 9 says.

    Parameters
    ----------
    x : bfloat16, float16 or float32 array [M, 2 H], a row holds the H elements of a, then those of b
    recipe : DelayedScaling, CurrentScaling, BlockScaling with blocks of (1, 128), (1, 64) or (1, 32), or MXScaling with (1, 32)
    scale : of DelayedScaling: one-element f32 array, or a number
    amax : of a per-tensor recipe: one-element f32 array, raised to the largest |y| (NaN ignored); not zeroed first
    probs : f32 array [M], the weight p of each row
    bias : array [2 H] of x's dtype, in the order of x's columns; added to every row first. Or [E, 2 H], one for each expert, with `splits`
    splits : rows of each of E experts, which follow one another: an int32 or int64 array [E] of x's kind, or a list. Rows that they leave
        over (memory allocated for the worst case) get no bias. Takes a small launch before
    rowwise, columnwise : directions of y, [M, H]. Column-wise data are stored as the recipe stores them: transposed, but for MX
    clamp : a number c above 0: a is at most c, b at most c and at least -c (after the bias; NaN stays)
    form : 'swiglu' or 'gpt_oss'
    interleaved : a row of x is a0, b0, a1, b1, …; so is bias
    noop : one-element f32 array on the device; where it holds 1.0 nothing at all is written. Needs `out`
    out : an earlier result of the same shape and options (or ``recipe.empty((M, H), …)``); written in place and returned. With it the call
        allocates nothing and can be captured into a CUDA graph, with splits once it has been used before

    Returns
    -------
    Quantized of shape [M, H].

    Raises
    ------
    TypeError for wrong dtypes or NumPy and CuPy arrays mixed, ValueError for shapes, options and overlaps, DeviceError; all before
    anything is written. Splits on the device raise nothing: a negative one counts as 0, an expert that goes past the last row ends there;
    `device_errors` tells.

    Source: arXiv 2002.05202 (SwiGLU); gpt-oss; TransformerEngine; FP8-Flow-MoE. Bytes moved per element of y: 2 of x + 1 per direction;
    current scaling reads x twice.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> q = fp8.swiglu_quantize(np.array([[0, 2, 3, 5]], np.float32), fp8.DelayedScaling(), scale=1.0)
    >>> q.data.astype(np.float32).tolist()                          # 0 * 0.5 * 3, 2 * 0.8808 * 5
    [[0.0, 9.0]]
    >>> x, bias = np.zeros((3, 2), np.float32), np.float32([[0, 2], [4, 5]])
    >>> fp8.swiglu_quantize(x + 1, fp8.DelayedScaling(), scale=1.0, bias=bias, splits=[1, 1]).data.astype(np.float32).tolist()
    [[2.25], [30.0], [0.75]]
    """
    options = _Options(scale, amax, probs, bias, splits, rowwise, columnwise, clamp, form, interleaved)
    return _quantize(x, None, recipe, options, noop, out, None)[0]


def swiglu_backward_quantize(grad: Array, x: Array, recipe: Recipe, *, scale: Any = None, amax: Array | None = None,
                             probs: Array | None = None, bias: Array | None = None, splits: Any = None, rowwise: bool = True,
                             columnwise: bool = False, clamp: float | None = None, form: str = "swiglu", interleaved: bool = False,
                             noop: Array | None = None,
                             out: tuple[Quantized, Array | None] | None = None) -> tuple[Quantized, Array | None]:
    """The gradients of SwiGLU, quantised by a recipe, from one read of grad and x.

        da = ((g * p) * b) * (sigma * (1 + a * (1 - sigma)))
        db = (g * p) * (a * sigma)
        dp = sum over H of (g * (a * sigma)) * b

    in f32, each operation rounded, sigma that of `swiglu_quantize`; dp by a fixed tree, so that its bytes depend on nothing but its
    arguments. 'gpt_oss': sigma of 1.702 * a, which also takes the place of the a before (1 - sigma), and b + 1 for b. Where `clamp` has
    changed a (b), da (db) is 0. Every byte as docs/numerics.md section 9 says.

    Parameters
    ----------
    grad : array [M, H] of x's dtype, the gradient of y
    x, probs, bias, splits, clamp, form, interleaved : as `swiglu_quantize` had them
    recipe, scale, amax, rowwise, columnwise, noop : as for `swiglu_quantize`, of the gradient [da | db] of x (interleaved: da0, db0, …)
    out : an earlier result of the same shape and options; written in place and returned. With it the call allocates nothing and can be
        captured into a CUDA graph, once it has been used before

    Returns
    -------
    (Quantized of shape [M, 2 H], f32 [M] the gradient of probs, or None without probs).

    Raises
    ------
    TypeError, ValueError, DeviceError, as `swiglu_quantize`; all before anything is written.

    Source: TransformerEngine; FP8-Flow-MoE. Bytes moved per element of grad: grad + 2 of x + 2 per direction. The gradient of probs for an
    H above 128 (interleaved: 64) takes another launch.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> grad, x = np.array([[1.0]], np.float32), np.array([[0.0, 2.0]], np.float32)
    >>> q, dprobs = fp8.swiglu_backward_quantize(grad, x, fp8.DelayedScaling(), scale=1.0, probs=np.ones(1, np.float32))
    >>> q.data.astype(np.float32).tolist(), dprobs.tolist()         # 2 * 0.5, 0 * 0.5; 0
    ([[1.0, 0.0]], [0.0])
    """
    dprobs = None
    if out is not None:
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(f"out: expected an earlier result, (Quantized, array or None), got {type(out).__name__}")
        if not isinstance(out[0], Quantized):
            raise TypeError(f"out[0]: expected a Quantized (an earlier result, or recipe.empty(…)), got {type(out[0]).__name__}")
        if (out[1] is None) != (probs is None):
            raise ValueError(f"out[1]: expected {'None, since there are no probs' if probs is None else 'an array, since there are probs'}")
        dprobs = out[1]
    if grad is None:
        raise TypeError("grad: expected a numpy.ndarray or cupy.ndarray, got None")
    options = _Options(scale, amax, probs, bias, splits, rowwise, columnwise, clamp, form, interleaved)
    result = _quantize(x, grad, recipe, options, noop, None if out is None else out[0], dprobs)
    return result if out is None else out


class _Options(NamedTuple):
    """As `reference` names them."""

    scale: Any
    amax: Array | None
    probs: Array | None
    bias: Array | None
    splits: Any
    rowwise: bool
    columnwise: bool
    clamp: float | None
    form: str
    interleaved: bool


def _quantize(x: Array, grad: Array | None, recipe: Any, o: _Options, noop: Array | None, out: Quantized | None,
              dprobs: Array | None) -> tuple[Quantized, Array | None]:
    """Of y; with grad, of the gradients."""
    x, xp, at = validate.source(x, INPUT_DTYPES)
    plan = _plan_of(x, recipe, o.rowwise, o.columnwise, grad is not None)
    rows, half = plan.rows, x.shape[1] // 2
    read = [(at, x.nbytes, "the input")]

    def reads(name: str, a_at: int, nbytes: int) -> int:
        read.append((a_at, nbytes, name))
        return a_at

    grad_at = 0
    if grad is not None:
        grad, module, grad_at = validate.source(grad, INPUT_DTYPES, "grad")
        backend.require_module(grad, xp, "grad")
        if grad.dtype != x.dtype:
            raise TypeError(f"grad: expected x's dtype {x.dtype}, got {grad.dtype}")
        if grad.shape != (rows, half):
            raise ValueError(f"grad: expected shape {(rows, half)} for an x of shape {x.shape}, got {grad.shape}")
        if module is not np:
            validate.same_device(grad, x, "grad")
        reads("grad", grad_at, grad.nbytes)
    # Names that keep copies until the launch.
    probs, probs_at = (None, 0) if o.probs is None else _array(o.probs, (rows,), float32, x, xp, "probs")
    groups = _experts(o, x, xp)
    bias_shape = (2 * half,) if groups is None else (len(groups.array), 2 * half)
    bias, bias_at = (None, 0) if o.bias is None else _array(o.bias, bias_shape, x.dtype, x, xp, "bias")
    for name, a, a_at in (("probs", probs, probs_at), ("bias", bias, bias_at)):
        if a is not None:
            reads(name, a_at, a.nbytes)
    if groups is not None:
        reads("splits", groups.at, groups.nbytes)
        bias_at *= len(groups.array) > 0                # its address may be anything
    noop_at = 0 if noop is None else reads("noop", validate.one_f32(noop, x, xp, "noop"), 4)
    limit = _limit(o.clamp)
    flag(o.interleaved, "interleaved")
    if not isinstance(o.form, str) or o.form not in FORMS:
        raise ValueError(f"form: expected one of {FORMS}, got {o.form!r}")
    scale_at, scale_value = plan.scale(o.scale, o.amax, x, xp)
    if scale_at:
        reads("scale", scale_at, 4)
    amax_at = 0 if o.amax is None else validate.one_f32(o.amax, x, xp, "amax")
    if o.amax is not None:
        if isinstance(o.amax, np.ndarray) and not o.amax.flags.writeable:
            raise ValueError("amax: the array is read-only")
        for other_at, nbytes, name in read:
            validate.separate(amax_at, 4, other_at, nbytes, "amax", name)
        reads("amax", amax_at, 4)
    given = out is not None
    if out is not None:
        target = _target(out, plan, x, xp)
        ranges = target.ranges
        if dprobs is not None:
            dprobs_at = validate.destination(dprobs, (rows,), float32, x, xp, at, "out[1]")
            for start, end in ranges:
                validate.separate(dprobs_at, 4 * rows, start, end - start, "out[1]", "out[0]")
            ranges = [*ranges, (dprobs_at, dprobs_at + 4 * rows)]
            if executor_of(xp) != "reference" and _partial_sums(o) not in out.__dict__:
                validate.may_prepare(x)
        for start, end in ranges:
            for other_at, nbytes, name in read:
                validate.separate(start, end - start, other_at, nbytes, "out", name)
    elif noop is not None:
        raise ValueError("noop: needs out=, since nothing may be written")
    if executor_of(xp) == "reference":
        if out is not None and noop is not None and noop.reshape(()) == 1:
            return out, dprobs
        options = o._replace(splits=None if groups is None else groups.host)._asdict()
        if grad is None:
            result, sums = reference.swiglu_quantize(x, recipe, **options), None
        else:
            result, sums = reference.swiglu_backward_quantize(grad, x, recipe, **options)
        if out is None:
            return result, sums
        block_results.store(out, result)
        if dprobs is not None:
            dprobs[...] = sums
        return out, dprobs
    if out is None:
        validate.may_allocate(x)
        out = plan.empty(x)
        target = _Target(out, plan, [])
        if grad is not None and o.probs is not None:
            dprobs = empty_beside(x, (rows,), float32)
    sums_at, column_sums = 0, None
    if dprobs is not None:
        # Down the transposed partial sums, a row of them for each tile across.
        shape = 2 * half if o.interleaved else half, rows
        column_sums = ColumnSums(x, validate.address(dprobs), out.__dict__.get(_partial_sums(o)), shape)
        out.__dict__[_partial_sums(o)], sums_at = column_sums.partial, column_sums.tiles_at(_TILE.columns)
    flags = _CLAMPED * (o.clamp is not None) | _GPT_OSS * (o.form == "gpt_oss") | _INTERLEAVED * bool(o.interleaved)
    if half % 8 == 0 and (at | bias_at | grad_at) % 16 == 0 and target.wide:
        flags |= _WIDE
    alpha = float(ALPHA) if o.form == "gpt_oss" else 1.0
    owner, experts_at = out._any.scale_inv if given else None, 0
    if groups is not None and rows and len(groups.array):
        experts = GroupRows(x, owner, groups, rows, _TILE.rows)
        experts.run(x)
        experts_at = experts.at
    gate = (at, grad_at, bias_at, experts_at, probs_at, noop_at, sums_at, rows, plan.columns, limit, -limit, alpha, flags)
    program = _ANY
    if flags & _WIDE:
        if flags == _WIDE and bias is None and (grad is None or half % _TILE.columns == 0):
            program = _PLAIN
        elif plan.has_options and (grad is None or bool(o.interleaved) or half % plan.run == 0):
            program = _EXPERTS if experts_at else _OPTIONS
    plan.launch(x, program, gate, target, scale_at, scale_value, amax_at, owner)
    if column_sums is not None:
        for launch in column_sums.launches(x, _TILE.columns, noop_at):
            launch.run()
    return out, dprobs


class _Plan:
    """What follows from an array's shape and dtype, a recipe and directions: the forms of the result, and the launches that write it."""

    kind: str
    forms: dict[str, Form]
    kernel: Kernel
    run = 1                     # elements of a row that share a scale, and may not be of both da and db

    def __init__(self, shape: tuple[int, int], source: np.dtype[Any], recipe: Any, rowwise: bool, columnwise: bool, backward: bool) -> None:
        self.rows, self.columns = self.shape = shape
        self.backward = int(backward)
        self.source, self.recipe, self.rowwise, self.columnwise = source, recipe, rowwise, columnwise

    def variant(self, plain: int) -> Variant:
        raise NotImplementedError

    @property
    def has_options(self) -> bool:
        """Whether there are programs for wide calls with options."""
        return True

    @functools.cached_property
    def programs(self) -> tuple[tuple[Variant, int, int], ...]:
        """(variant, blocks, tiles of a block) of `_ANY`, `_PLAIN` and, where there are any, `_OPTIONS` and `_EXPERTS`. Of gradients those
        after `_ANY` write the tiles of da and of db at once."""
        once = self.rows, self.columns // (1 + self.backward)
        found = [(self.variant(0), tiles.grid(self.shape, _TILE), 1)]
        with_options = [_options_variant(self.kernel, self.source, self.recipe.dtype, self.backward, program)
                        for program in (_OPTIONS, _EXPERTS) if self.has_options]
        for variant in (self.variant(1), *with_options):
            each = 1
            if _is_streamed(variant):
                while each < _most_tiles(variant) and tiles.grid(once, _TILE) // (2 * each) >= _ENOUGH_BLOCKS:
                    each *= 2
            found.append((variant, tiles.grid(once, _TILE._replace(rows=each * _TILE.rows)), each))
        return tuple(found)

    def empty(self, x: Array) -> Quantized:
        raise NotImplementedError

    def scale(self, scale: Any, amax: Any, x: Array, xp: Any) -> tuple[int, float]:
        """(address, value) of a given scale."""
        if scale is not None or amax is not None:
            raise ValueError("scale, amax: belong to per-tensor recipes; blocks take their scales from their own elements")
        return 0, 0.0

    def launch(self, x: Array, program: int, gate: tuple[Any, ...], to: _Target, scale_at: int, scale_value: float, amax_at: int,
               owner: Array | None) -> None:
        raise NotImplementedError


class _PerTensor(_Plan):
    kind = "per-tensor"
    kernel = _CAST

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        check_directions(self.shape, self.rowwise, self.columnwise)
        self.forms = {name: Form(self.recipe.dtype, self.shape, name == "columnwise", None, None, float32, (1,))
                      for name, wanted in (("rowwise", self.rowwise), ("columnwise", self.columnwise)) if wanted}
        self.current = isinstance(self.recipe, CurrentScaling)

    def variant(self, plain: int) -> Variant:
        return _variant(_CAST, self.source, self.recipe.dtype, self.backward, plain and (1 if self.backward else 2 - self.columnwise))

    def empty(self, x: Array) -> Quantized:
        return empty_per_tensor(empty_beside(x, (1,), float32), self.shape, self.recipe.dtype, self.rowwise, self.columnwise)

    def scale(self, scale: Any, amax: Any, x: Array, xp: Any) -> tuple[int, float]:
        if self.current:
            if scale is not None:
                raise ValueError("scale: current scaling takes it from the values themselves; DelayedScaling quantises with a given scale")
            return 0, 0.0
        if scale is None:
            raise ValueError("scale: delayed scaling needs the scale that earlier steps determined, got None")
        return validate.scalar_or_one_f32(scale, x, xp, "scale")

    def launch(self, x: Array, program: int, gate: tuple[Any, ...], to: _Target, scale_at: int, scale_value: float, amax_at: int,
               owner: Array | None) -> None:
        variant, grid, each = self.programs[program]
        if self.current:
            words = workspace(owner, x, "swiglu", _WORDS)
            found = validate.address(words)
            scale_at = found + _SCALE_OFFSET
            rule = scale_target(self.recipe.dtype, 0), self.recipe.eps, int(self.recipe.pow2_scale)
            variant.launch(x, grid, *gate, 0, 0, 0, 0, 0, amax_at, found, scale_at, 1.0, *rule, 0, each, shared=_shared(variant, False))
            amax_at = 0
        variant.launch(x, grid, *gate, to.data, to.data_t, scale_at, to.scale_inv, to.scale_inv_t, amax_at, 0, 0, scale_value, 0.0, 0.0, 0,
                       to.vector, each, shared=_shared(variant, self.columnwise))


class _Blocks(_Plan):
    kind = "block-scaled"
    kernel = _BLOCK

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        r = self.recipe
        self.run = r.block[1]
        if r.block not in _BLOCKS:
            raise ValueError(f"recipe: expected blocks of one of {_BLOCKS}, got {r.block}; quantize_block has the others")
        plan = blocks.Plan(self.shape, self.source, False, (
            r.dtype, self.rowwise, self.columnwise, True, r.block, r.pow2_scale, r.eps, r.profile, r.scale_layout))
        self.forms, self.divide = plan.forms, plan.divide
        if any(prod(form.scale_shape) >= 1 << 32 for form in self.forms.values()):
            raise ValueError(f"x: expected fewer than 2^32 scales, which rows of {self.columns} elements have from {self.rows} rows on")
        (fast, slow), _ = plan.tile_launch(list(self.forms))
        self.fast, self.slow, self.members = fast.strides, slow.strides, (*plan.rule, r.block[1] // 32)

    def variant(self, plain: int) -> Variant:
        return _variant(_BLOCK, self.source, self.recipe.dtype, self.backward, plain and 2 - self.columnwise, int(self.divide))

    @property
    def has_options(self) -> bool:
        return not self.divide

    def empty(self, x: Array) -> Quantized:
        return empty_blocks(self.forms, functools.partial(empty_beside, x))

    def launch(self, x: Array, program: int, gate: tuple[Any, ...], to: _Target, scale_at: int, scale_value: float, amax_at: int,
               owner: Array | None) -> None:
        if x.size:
            variant, grid, each = self.programs[program]
            variant.launch(x, grid, *gate, to.data, to.data_t, to.scale_inv, *self.fast, to.scale_inv_t, *self.slow, *self.members,
                           to.vector, each, shared=_shared(variant, self.columnwise))


class _Mx(_Plan):
    kind = "MX"
    kernel = _MX
    run = 32

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        r = self.recipe
        if r.block != (1, 32):
            raise ValueError(f"recipe: expected MX blocks of (1, 32), got {r.block}; quantize_mx has the others")
        plan = mx.Plan(self.shape, self.source, False, (
            r.dtype, self.rowwise, self.columnwise, False, r.mode, r.profile, r.block, r.scale_layout))
        self.forms = plan.forms
        self.fast, self.slow = (side.strides for side in plan.sides)
        self.members = plan.members["rule"]

    def variant(self, plain: int) -> Variant:
        return _variant(_MX, self.source, self.recipe.dtype, self.backward, plain and 2 - self.columnwise)

    def empty(self, x: Array) -> Quantized:
        return empty_mx(self.forms, self.recipe.block, functools.partial(empty_beside, x))

    def launch(self, x: Array, program: int, gate: tuple[Any, ...], to: _Target, scale_at: int, scale_value: float, amax_at: int,
               owner: Array | None) -> None:
        if x.size:
            variant, grid, each = self.programs[program]
            variant.launch(x, grid, *gate, to.data, to.data_t, to.scale_inv, *self.fast, to.scale_inv_t, *self.slow, *self.members,
                           each, shared=_shared(variant, self.columnwise))


_PLANS: dict[type, type[_Plan]] = {DelayedScaling: _PerTensor, CurrentScaling: _PerTensor, BlockScaling: _Blocks, MXScaling: _Mx}


def _plan_of(x: Array, recipe: Any, rowwise: bool, columnwise: bool, backward: bool) -> _Plan:
    if type(recipe) not in _PLANS:
        raise TypeError(f"recipe: expected a DelayedScaling, CurrentScaling, BlockScaling or MXScaling, got {type(recipe).__name__}")
    if x.ndim != 2 or x.shape[1] % 2:
        raise ValueError(f"x: expected shape [M, 2 H], got {x.shape}")
    return _plan(x.shape, x.dtype, recipe, flag(rowwise, "rowwise"), flag(columnwise, "columnwise"), backward)


@functools.lru_cache(maxsize=1024)
def _plan(shape: tuple[int, int], source: np.dtype[Any], recipe: Any, rowwise: bool, columnwise: bool, backward: bool) -> _Plan:
    rows, width = shape
    return _PLANS[type(recipe)]((rows, width if backward else width // 2), source, recipe, rowwise, columnwise, backward)


class _Target:
    """Where launches write. Kept with the Quantized it describes, so that using a result again as `out=` costs one comparison instead of
    its validation."""

    def __init__(self, out: Quantized, plan: _Plan, ranges: block_results.Ranges) -> None:
        (self.data, self.scale_inv), (self.data_t, self.scale_inv_t) = (
            (0, 0) if part is None else tuple(map(validate.address, part)) for part in (out.rowwise, out.columnwise))
        if isinstance(plan, _PerTensor):                        # one scale, which may have two places
            first, second = self.scale_inv, self.scale_inv_t
            self.scale_inv, self.scale_inv_t = first or second, second if first and second != first else 0
        self.ranges = ranges
        transposed = isinstance(plan, (_PerTensor, _Blocks))
        self.wide = self.data % 8 == 0 and (transposed or self.data_t % 8 == 0)
        self.vector = int(plan.rows % 16 == 0 and self.data_t % 16 == 0)


def _target(out: Quantized, plan: _Plan, x: Array, xp: Any) -> _Target:
    """The _Target of a result given as `out=`, once it has been found to fit the call."""
    key = ("swiglu", id(out), plan, 0 if xp is np else x.data.device_id)
    kept = getattr(out, "_target", None)
    if kept is not None and kept[0] == key:
        found: _Target = kept[1]
        return found
    shared: tuple[str, ...] = ()
    if isinstance(plan, _PerTensor) and isinstance(out, Quantized) and out.rowwise is not None and out.columnwise is not None:
        shared = ("scale_inv",) * (out.rowwise.scale_inv is out.columnwise.scale_inv)
    target = _Target(out, plan, block_results.written(out, plan.forms, x, xp, plan.kind, shared))
    if xp is not np:
        object.__setattr__(out, "_target", (key, target))
    return target


def _experts(o: _Options, x: Array, xp: Any) -> sizes.Groups | None:
    """Whose biases rows have, where not all have the same."""
    if o.splits is None:
        if getattr(o.bias, "ndim", 1) > 1:
            raise ValueError("bias: of several experts needs splits=, the rows of each; one bias for all rows has one dimension")
        return None
    if o.bias is None or getattr(o.bias, "ndim", 2) < 2:
        raise ValueError(f"splits: expected a bias [E, 2 H], one for each expert, got {'none' if o.bias is None else 'one for all rows'}")
    groups = sizes.read(o.splits, x, xp, False)
    if groups.host is not None:
        sizes.check_at_most(groups.host, len(x))
    return groups


def _array(a: Any, shape: tuple[int, ...], dtype: np.dtype[Any], x: Array, xp: Any, name: str) -> tuple[Array, int]:
    """(a ready for a kernel, its address): an array of that shape, of x's kind and device."""
    if not isinstance(a, xp.ndarray):
        backend.require_module(a, xp, name)
    a, _, at = validate.source(a, (dtype,), name)
    if a.shape != shape:
        raise ValueError(f"{name}: expected an array of shape {shape}, got shape {a.shape}")
    if xp is not np:
        validate.same_device(a, x, name)
    return a, at


def _partial_sums(o: _Options) -> str:
    """Under which name a result keeps the memory that gradients of probs are summed up in: the form decides how much that is."""
    return "_dprobs_interleaved" if o.interleaved else "_dprobs"


def _limit(clamp: Any) -> float:
    if clamp is None:
        return np.inf
    if not isinstance(clamp, (int, float, np.floating, np.integer)) or isinstance(clamp, bool):
        raise TypeError(f"clamp: expected a number or None, got {clamp!r}")
    try:
        with np.errstate(over="ignore", under="ignore"):
            limit = float(np.float32(clamp))
    except OverflowError:
        raise ValueError(f"clamp: an integer of {int(clamp).bit_length()} bits, beyond every float") from None
    if not limit > 0:
        raise ValueError(f"clamp: expected a number above 0 (in float32), got {clamp!r}")
    return limit


@functools.cache
def _variant(kernel: Kernel, source: np.dtype[Any], to: np.dtype[Any], backward: int, plain: int, divide: int = 0,
             options: int = 0, experts: int = 0) -> Variant:
    types: dict[str, Any] = {
        "IN": FORMATS[source].tag, "OUT": FORMATS[to].tag, "BACKWARD": backward, "PLAIN": plain, "OPTIONS": options}
    if options:
        types["EXPERTS"] = experts
    if kernel is _BLOCK:
        types["DIVIDE"] = divide
    if kernel is _CAST and not options and (backward or plain != 1):
        return kernel.variant(block=_TILE.block, shared=_LEAST_SHARED if plain == 2 else _TILE.shared * (1 + backward * plain), **types)
    if not plain:
        return kernel.variant(block=_TILE.block, shared=_TILE.shared if kernel is _BLOCK else _LEAST_SHARED, **types)
    block = _TILE.block * (3 - plain)
    both = backward and plain == 1                              # whose rows are larger, and values stay in registers
    columns = 0 if plain == 2 else (kernel is not _CAST) * _TOPS + (kernel is not _MX) * _TILE.shared
    columns += (kernel is _CAST and backward) * _TILE.shared    # da's tile and db's at once
    return kernel.variant(block=block, shared=_STAGES * (2 + backward) * 16 * block // (1 + both) + columns, **types)


def _options_variant(kernel: Kernel, source: np.dtype[Any], to: np.dtype[Any], backward: int, program: int) -> Variant:
    """program: _OPTIONS or _EXPERTS."""
    return _variant(kernel, source, to, backward, 1, options=1, experts=int(program == _EXPERTS))


def _is_streamed(v: Variant) -> bool:
    """Whether rows come through shared memory (kernels_cu/include/swiglu/swiglu_stream.cuh)."""
    defines = dict(v.defines)
    if v.kernel is _CAST:
        return defines["PLAIN"] == "1" and (defines["BACKWARD"], defines["OPTIONS"]) != ("1", "0")
    return defines["PLAIN"] != "0"


def _most_tiles(v: Variant) -> int:
    """Of a block: what it has shared memory for the weights of (kMostRows in swiglu_stream.cuh)."""
    defines = dict(v.defines)
    if v.kernel is not _BLOCK or (defines["OPTIONS"], defines["BACKWARD"]) != ("1", "0"):
        return v.block // _TILE.rows
    return v.block // _TILE.rows // (2 if defines["IN"] == "f32" else 1) // (1 + int(defines["EXPERTS"]))


def _shared(v: Variant, columnwise: bool) -> int | None:
    return None if columnwise or _is_streamed(v) else _LEAST_SHARED


def variants() -> Iterator[Variant]:
    """Every variant that these ops may launch."""
    yield from rows_variants()
    for source, to, backward, plain in product(INPUT_DTYPES, FP8_DTYPES, (0, 1), (0, 1, 2)):
        if plain < 2 or not backward:
            yield _variant(_CAST, source, to, backward, plain)
        for divide in (0, 1):
            yield _variant(_BLOCK, source, to, backward, plain, divide)
        yield _variant(_MX, source, to, backward, plain)
        if not plain:
            for kernel, program in product((_CAST, _BLOCK, _MX), (_OPTIONS, _EXPERTS)):
                yield _options_variant(kernel, source, to, backward, program)
