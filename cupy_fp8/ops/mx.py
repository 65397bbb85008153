"""MX: blocks of 32 elements with E8M0 scales. Kernels: kernels_cu/mx.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, cast

import numpy as np

from .. import reference
from ..arrays import Array, empty_beside
from ..formats import FORMATS, FP8_DTYPES, INPUT_DTYPES, float8_e4m3fn, float32, lookup
from ..layouts import SWIZZLE_COLUMNS, cdiv, scale_grid
from ..recipes import Form, check_mx_options, empty_mx, mx_forms
from ..results import Quantized, swap_last
from ..runtime import Kernel, Variant, executor_of
from . import checks, flat, forms
from .forms import ABSENT, AS_IS, TRANSPOSED
from .panels import LANE_COLUMNS, Panels

_FIELDS = "4PP3qP3q3qfIiI3I"
_ROWS = Kernel("mx", "quantize_mx_rows", _FIELDS)
_TILE = Kernel("mx", "quantize_mx_tile", _FIELDS)
_BLOCK = 32
_NO_SCALES = (0, 1, 1)

_STORED = ((AS_IS, ABSENT), (TRANSPOSED, ABSENT), (ABSENT, AS_IS), (ABSENT, TRANSPOSED), (AS_IS, AS_IS), (AS_IS, TRANSPOSED),
           (TRANSPOSED, TRANSPOSED))
_SWIZZLED = Panels(4, 1, down_first=False)      # 128 lines: the swizzled scales of a tile of 128 x 128 elements are adjacent
_COMPACT = Panels(1, 8, down_first=False)       # 32 bytes of a row's compact scales (and of a transposed row)
_GATHERED = Panels(8, 1, down_first=False)      # 256 bytes of a transposed row


def quantize_mx(x: Array, *, dtype: Any = float8_e4m3fn, rowwise: bool = True, columnwise: bool = False, transposed: bool = False,
                mode: str = "rceil", profile: str = "te", block: tuple[int, int] = (1, 32), scale_layout: str = "compact",
                noop: Array | None = None, out: Quantized | None = None) -> Quantized:
    """Quantise to MXFP8: every 32 neighbouring elements share a scale, a power of two kept as one E8M0 byte.

        e = scale byte of max |x| over the block      data = cast(x * 2**(127 - e))      scale_inv = 2**(e - 127)

    in f32: round to nearest even, saturating, NaN as 0x7F; every byte as docs/numerics.md section 2 says. One kernel reads x once and
    writes everything, both directions included.

    Parameters
    ----------
    x : bfloat16, float16 or float32 array […, M, K] of two or three dimensions (a batch: each matrix by itself). An array whose last two
        axes are swapped in memory (expert weights with strides (N·K, 1, N), say) is read as it is; any other view is copied first
    dtype : float8_e4m3fn or float8_e5m2
    rowwise, columnwise : blocks of 32 along K, blocks of 32 along M; the last one of a line may be shorter
    transposed : store the column-wise data […, K, M]
    mode : how the block's amax becomes e: 'rceil' (amax / fp8_max rounded up to a power of two), 'floor' (OCP MX v1.0: large elements
        may saturate), 'ceil', 'even'
    profile : 'te' (NaN is ignored by the amax and stays NaN; a block with Inf gets e = 254) or 'torchao' (NaN or Inf makes its whole block
        NaN, e = 255)
    block : (1, 32), or (32, 32): one amax for 32 x 32 elements, whose scale either direction repeats for its lines
    scale_layout : 'compact' (row-wise […, M, ceil(K/32)], column-wise […, ceil(M/32), K]) or 'swizzled' (tiles of 128 lines x 4 blocks, as
        cuBLAS reads them: […, lines rounded up to 128, blocks rounded up to 4], padding 0; see docs/layouts.md)
    noop : one-element f32 array on the device; where it holds 1.0 nothing at all is written. Needs `out`
    out : an earlier result of the same shape and options (or ``recipe.empty(…)``); written in place and returned. With it the call
        allocates nothing and can be captured into a CUDA graph

    Returns
    -------
    Quantized, its scale_inv float8_e8m0fnu. With blocks of (32, 32) and without `transposed` both directions are the same data array.

    Raises
    ------
    TypeError for wrong dtypes or NumPy and CuPy arrays mixed, ValueError for shapes, options and overlaps, DeviceError; all before
    anything is written.

    Source: OCP Microscaling Formats v1.0; TransformerEngine's MXFP8; torchao's to_mx. Bytes moved per element: x + 1 + 1/32 per
    direction.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.zeros((1, 64), np.float32)
    >>> x[0, :2], x[0, 40] = (448, 3), 0.3
    >>> q = fp8.quantize_mx(x)
    >>> q.scale_inv.view(np.uint8).tolist(), q.data.astype(np.float32)[0, [0, 1, 40]].tolist()
    ([[127, 117]], [448.0, 3.0, 320.0])
    """
    options = (lookup(dtype, FP8_DTYPES, "dtype").dtype, rowwise, columnwise, transposed, mode, profile, block, scale_layout)
    x, xp, at, swapped = forms.source(x)
    noop_at = 0 if noop is None else checks.one_f32(noop, x, xp, "noop")
    by_reference = executor_of(xp) == "reference"
    if out is None:
        plan = _plan(x, swapped, options)
        if noop is not None:
            raise ValueError("noop: needs out=, since nothing may be written")
        if by_reference:
            return _by_reference(x, swapped, options)
        checks.may_allocate(x)
        out = empty_mx(plan.forms, block, functools.partial(empty_beside, x))
        _Target(out, plan).launch(x, at, 0)
        return out
    target = _validated(out, x, xp, swapped, options)
    forms.check_separate(target.ranges, at, x.nbytes, noop_at)
    if not by_reference:
        target.launch(x, at, noop_at)
    elif noop is None or noop.reshape(()) != 1:
        forms.store(out, _by_reference(x, swapped, options))
    return out


def _by_reference(x: Array, swapped: bool, options: tuple[Any, ...]) -> Quantized:
    names = ("dtype", "rowwise", "columnwise", "transposed", "mode", "profile", "block", "scale_layout")
    return reference.quantize_mx(x.swapaxes(-1, -2) if swapped else x, **dict(zip(names, options, strict=True)))


@functools.cache
def _rule(dtype: np.dtype[Any], mode: str, profile: str) -> tuple[float, int, int, int]:
    """The ScaleRule of kernels_cu/include/e8m0.cuh."""
    fmt = FORMATS[dtype]
    emax = int(np.log2(fmt.max))
    up, half_a_step = 0x7FFFFF, 1 << 23 - fmt.mantissa_bits - 1
    factor, rounding, bias = {"rceil": (float(np.float32(1) / np.float32(fmt.max)), up, 0), "floor": (2.0**-emax, 0, 0),
                              "ceil": (1.0, up, emax), "even": (1.0, half_a_step, emax)}[mode]
    return factor, rounding, bias, 254 if profile == "te" else 255


class _Plan:
    """What follows from the array and the options, whatever the memory: the forms of the result and the kernel for it."""

    def __init__(self, shape: tuple[int, ...], source: np.dtype[Any], swapped: bool, options: tuple[Any, ...]) -> None:
        dtype, rowwise, columnwise, transposed, mode, profile, block, scale_layout = options
        check_mx_options(mode, profile, block, scale_layout)
        self.forms = mx_forms(swap_last(shape) if swapped else shape, dtype, bool(rowwise), bool(columnwise), bool(transposed), block,
                              scale_layout)
        self.shape, self.size, (self.rows, self.columns) = shape, prod(shape), shape[-2:]
        self.names = ("columnwise", "rowwise") if swapped else ("rowwise", "columnwise")         # of fast blocks, of slow blocks
        fast, slow = (self.forms.get(name) for name in self.names)
        self.stored = _stored(fast, swapped), _stored(slow, swapped)
        self.square = block == (_BLOCK, _BLOCK)
        if self.square:                # the same codes whatever the direction: what counts is how they are stored
            self.sources = dict(zip(self.stored, self.names, strict=True))
            self.stored = AS_IS if AS_IS in self.sources and TRANSPOSED in self.sources else ABSENT, max(self.sources)
        else:
            self.sources = {}
        self.scales = _scale_strides(fast), _scale_strides(slow)
        self.params = (self.size, self.rows, self.columns, *_rule(dtype, mode, profile), int(self.square),
                       self.stored[0] | self.stored[1] << 2)
        self.load_bytes = LANE_COLUMNS * source.itemsize
        self.flat = _rows_variant(source, dtype) if self.stored == (AS_IS, ABSENT) and _is_flat(fast, self.columns) else None
        self.panels = _panels(source, *self.stored, scale_layout == "swizzled" or swapped)
        self.aligned = _tile_variant(source, dtype, *self.stored, self.panels)
        self.any_shape = _any_shape_variant(source, dtype)

    def data(self, addresses: dict[str, int]) -> tuple[int, int]:
        """Where fast and slow blocks' data go, of the addresses of the parts' data."""
        if self.square:
            fast, slow = (addresses.get(self.sources.get(stored, ""), 0) for stored in self.stored)
            return fast, slow
        return addresses.get(self.names[0], 0), addresses.get(self.names[1], 0)


@functools.lru_cache(maxsize=1024)
def _cached_plan(shape: tuple[int, ...], source: np.dtype[Any], swapped: bool, options: tuple[Any, ...]) -> _Plan:
    return _Plan(shape, source, swapped, options)


def _plan(x: Array, swapped: bool, options: tuple[Any, ...]) -> _Plan:
    try:
        return _cached_plan(x.shape, x.dtype, swapped, options)
    except TypeError:                                       # an option that is not even hashable: _Plan says which
        return _Plan(x.shape, x.dtype, swapped, options)


class _Target:
    """Where a launch writes: a result's addresses, and its plan. Kept with the Quantized it describes, so that using a result again as
    `out=` costs one comparison instead of its validation."""

    ranges: forms.Ranges               # of memory that is written; known for a result given as `out=`

    def __init__(self, out: Quantized, plan: _Plan) -> None:
        self.plan = plan
        parts = {"rowwise": out.rowwise, "columnwise": out.columnwise}
        self.data = plan.data({name: checks.address(part.data) for name, part in parts.items() if part is not None})
        fast, slow = (parts[name] for name in plan.names)
        #: Bits of MxParams.vector; the first also needs x to be aligned.
        four_columns = plan.columns % LANE_COLUMNS == 0
        self.vector = int(four_columns) | sum(
            bit for bit, stored, to in zip((2, 4), plan.stored, self.data, strict=True)
            if (plan.rows % 16 == 0 and to % 16 == 0 if stored == TRANSPOSED else four_columns and to % 4 == 0))
        self.params = (*self.data, 0 if fast is None else checks.address(fast.scale_inv), *plan.scales[0],
                       0 if slow is None else checks.address(slow.scale_inv), *plan.scales[1], *plan.params)

    def launch(self, x: Array, at: int, noop_at: int) -> None:
        plan = self.plan
        if not plan.size:
            return
        if plan.flat:
            grid, vector = flat.grid(plan.size, plan.shape, x.dtype.itemsize, 1, at, self.data[0])
            plan.flat.launch(x, grid, at, noop_at, *self.params, vector)
            return
        vector = self.vector if at % plan.load_bytes == 0 else self.vector & ~1
        variant, panels = (plan.aligned, plan.panels) if vector == 7 else (plan.any_shape, _GATHERED)
        variant.launch(x, panels.grid(plan.shape), at, noop_at, *self.params, vector)


def _stored(form: Form | None, swapped: bool) -> int:
    return ABSENT if form is None else AS_IS if form.transposed == swapped else TRANSPOSED


def _is_flat(form: Form | None, columns: int) -> bool:
    """Whether quantize_mx_rows can write this direction: whole blocks, whose scales follow one another."""
    return form is not None and columns % _BLOCK == 0 and form.scale_layout == "compact" and form.block == (1, _BLOCK)


def _scale_strides(form: Form | None) -> tuple[int, int, int]:
    """The ScaleTarget of kernels_cu/include/e8m0.cuh, but for the address."""
    if form is None:
        return _NO_SCALES
    assert form.block is not None
    grid, matrix = scale_grid(form.shape, form.block), form.scale_shape[-2] * form.scale_shape[-1]
    if form.scale_layout == "swizzled":
        return matrix, 0, cdiv(grid.blocks, SWIZZLE_COLUMNS)
    return matrix, *((1, grid.outer) if grid.columnwise else (grid.blocks, 1))


def _panels(source: np.dtype[Any], fast: int, slow: int, tall: bool) -> Panels:
    """The fastest on an H200 of those tried (docs/performance.md). tall: a scale's neighbours along a column of memory are its neighbours
    in the result, so that a tile has to have four of them."""
    if TRANSPOSED not in (fast, slow):
        return _SWIZZLED if tall or not fast else _COMPACT
    if AS_IS not in (fast, slow):
        return _GATHERED._replace(down_first=True)
    return _SWIZZLED if source == float32 else _GATHERED if tall else _COMPACT


@functools.cache
def _rows_variant(source: np.dtype[Any], to: np.dtype[Any]) -> Variant:
    return _ROWS.variant(block=flat.THREADS, IN=FORMATS[source].tag, OUT=FORMATS[to].tag)


@functools.cache
def _tile_variant(source: np.dtype[Any], to: np.dtype[Any], fast: int, slow: int, panels: Panels, aligned: bool = True) -> Variant:
    shared = (fast, slow).count(TRANSPOSED) * panels.tile + 2 * panels.tile // _BLOCK                # and the scales of both directions
    return _TILE.variant(block=panels.block, shared=shared, IN=FORMATS[source].tag, OUT=FORMATS[to].tag, FAST=fast, SLOW=slow,
                         ALIGNED=int(aligned), **panels.defines)


def _any_shape_variant(source: np.dtype[Any], to: np.dtype[Any]) -> Variant:
    """For arrays whose rows do not allow wide accesses: what it stores, and how, is told at run time."""
    return _tile_variant(source, to, TRANSPOSED, TRANSPOSED, _GATHERED, False)


def _validated(out: Quantized, x: Array, xp: Any, swapped: bool, options: tuple[Any, ...]) -> _Target:
    """The _Target of a result given as `out=`, once it has been found to fit the call."""
    key = (id(out), x.shape, x.dtype, swapped, options, 0 if xp is np else x.data.device_id)
    kept = getattr(out, "_target", None)
    if kept is not None and kept[0] == key:
        return cast(_Target, kept[1])
    plan = _plan(x, swapped, options)
    alike = plan.square and "columnwise" in plan.forms and not plan.forms["columnwise"].transposed
    ranges = forms.written(out, plan.forms, x, xp, "MX", ("data",) if alike else ())
    target = _Target(out, plan)
    target.ranges = ranges
    if xp is not np:
        object.__setattr__(out, "_target", (key, target))
    return target


def variants() -> Iterator[Variant]:
    """Every variant that this op may launch."""
    for source, to in product(INPUT_DTYPES, FP8_DTYPES):
        yield _rows_variant(source, to)
        yield _any_shape_variant(source, to)
        for (fast, slow), tall in product(_STORED, (False, True)):
            yield _tile_variant(source, to, fast, slow, _panels(source, fast, slow, tall))
