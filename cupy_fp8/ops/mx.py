"""MX: blocks of 32 elements with E8M0 scales. Kernels: kernels_cu/mx.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any, cast

import numpy as np

from .. import reference
from ..arrays import Array, bits, empty_beside, is_contiguous
from ..formats import FORMATS, FP8_DTYPES, INPUT_DTYPES, float8_e4m3fn, float32, lookup
from ..layouts import SWIZZLE_COLUMNS, cdiv, scale_grid
from ..recipes import Form, check_mx_options, empty_mx, mx_forms
from ..results import Quantized, Scaled
from ..runtime import Kernel, Variant, executor_of
from . import checks, flat
from .panels import LANE_COLUMNS, Panels

_FIELDS = "4PP3qP3q3qfIiI3I"
_ROWS = Kernel("mx", "quantize_mx_rows", _FIELDS)
_TILE = Kernel("mx", "quantize_mx_tile", _FIELDS)
_BLOCK = 32
_NO_SCALES = (0, 0, 1, 1)

#: How the data of blocks along the rows of memory (fast) and down its columns (slow) are stored, where they are wanted.
_ABSENT, _AS_IS, _TRANSPOSED = 0, 1, 2
_STORED = ((_AS_IS, _ABSENT), (_TRANSPOSED, _ABSENT), (_ABSENT, _AS_IS), (_ABSENT, _TRANSPOSED), (_AS_IS, _AS_IS), (_AS_IS, _TRANSPOSED),
           (_TRANSPOSED, _TRANSPOSED))
_SWIZZLED = Panels(4, 1, down_first=False)      # 128 lines: the swizzled scales of a tile of 128 x 128 elements are adjacent
_COMPACT = Panels(1, 8, down_first=False)       # 32 bytes of a row's compact scales
_GATHERED = Panels(8, 1, down_first=False)      # 256 bytes of a transposed row
_WIDE = Panels(4, 2, down_first=False)          # a compromise of both


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
    x, xp, at, swapped = _source(x)
    noop_at = 0 if noop is None else checks.one_f32(noop, x, xp, "noop")
    by_reference = executor_of(xp) == "reference"
    if out is None:
        forms = _forms(x, swapped, options)
        if noop is not None:
            raise ValueError("noop: needs out=, since nothing may be written")
        if by_reference:
            return _by_reference(x, swapped, options)
        checks.may_allocate(x)
        out = empty_mx(forms, block, lambda shape, dtype: empty_beside(x, shape, dtype))
        _Target(out, x, swapped, options).launch(x, at, 0)
        return out
    target = _validated(out, x, xp, swapped, options)
    target.check_separate(at, x.nbytes, noop_at)
    if not by_reference:
        target.launch(x, at, noop_at)
    elif noop is None or noop.reshape(()) != 1:
        _store(out, _by_reference(x, swapped, options))
    return out


def _source(x: Array) -> tuple[Array, Any, int, bool]:
    """(x as it lies in memory, its module, its address, whether its last two axes are swapped there)."""
    swapped = False
    if not (x.flags.c_contiguous if isinstance(x, np.ndarray) else getattr(x, "_c_contiguous", True)):
        swapped = x.ndim >= 2 and is_contiguous(x.swapaxes(-1, -2))
    return (*checks.source(x.swapaxes(-1, -2) if swapped else x, INPUT_DTYPES), swapped)


def _logical(x: Array, swapped: bool) -> tuple[int, ...]:
    return (*x.shape[:-2], x.shape[-1], x.shape[-2]) if swapped else x.shape


def _forms(x: Array, swapped: bool, options: tuple[Any, ...]) -> dict[str, Form]:
    dtype, rowwise, columnwise, transposed, mode, profile, block, scale_layout = options
    check_mx_options(mode, profile, block, scale_layout)
    return mx_forms(_logical(x, swapped), dtype, bool(rowwise), bool(columnwise), bool(transposed), block, scale_layout)


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


class _Target:
    """Where a launch writes: a result's addresses and the kernel variants for it. Kept with the Quantized it describes, so that
    using a result again as `out=` costs one comparison instead of its validation."""

    ranges: list[tuple[int, int]]      # of memory that is written; known for a result given as `out=`

    def __init__(self, out: Quantized, x: Array, swapped: bool, options: tuple[Any, ...]) -> None:
        dtype, _, _, _, mode, profile, block, _ = options
        fast, slow = (out.columnwise, out.rowwise) if swapped else (out.rowwise, out.columnwise)
        self.shape, self.size = x.shape, x.size
        *_, self.rows, self.columns = x.shape
        stored_fast, stored_slow = _stored(fast, swapped), _stored(slow, swapped)
        data = [0 if part is None else checks.address(part.data) for part in (fast, slow)]
        square = block == (_BLOCK, _BLOCK)
        if square:                     # the same codes whatever the direction: what counts is how they are stored
            of = dict(zip((stored_fast, stored_slow), data, strict=True))
            stored_fast, stored_slow = _AS_IS if _AS_IS in of and _TRANSPOSED in of else _ABSENT, max(of)
            data = [of.get(stored_fast, 0), of[stored_slow]]
        self.data = data
        rows_kernel = (stored_fast, stored_slow) == (_AS_IS, _ABSENT) and fast is not None and _is_flat(fast, self.columns)
        self.flat = _rows_variant(x.dtype, dtype) if rows_kernel else None
        self.panels = _panels(x.dtype, stored_fast, stored_slow, "swizzled" in [part.scale_layout for part in (fast, slow) if part])
        self.aligned = _tile_variant(x.dtype, dtype, stored_fast, stored_slow, self.panels)
        self.any_shape = _any_shape_variant(x.dtype, dtype)
        #: Bits of MxParams.vector; the first also needs x to be aligned.
        four_columns = self.columns % LANE_COLUMNS == 0
        self.load_bytes = LANE_COLUMNS * x.dtype.itemsize
        self.vector = int(four_columns) | sum(
            bit for bit, stored, to in zip((2, 4), (stored_fast, stored_slow), data, strict=True)
            if (self.rows % 16 == 0 and to % 16 == 0 if stored == _TRANSPOSED else four_columns and to % 4 == 0))
        self.params = (*data, *_scales(fast), *_scales(slow), self.size, self.rows, self.columns, *_rule(dtype, mode, profile), int(square),
                       stored_fast | stored_slow << 2)

    def check_separate(self, at: int, nbytes: int, noop_at: int) -> None:
        for start, end in self.ranges:
            if at < end and start < at + nbytes:
                raise ValueError("out: overlaps the input in memory; results need memory of their own")
            if start - 3 <= noop_at < end:             # of four bytes the last may be the first that is written
                raise ValueError("out: overlaps noop in memory; results need memory of their own")

    def launch(self, x: Array, at: int, noop_at: int) -> None:
        if not self.size:
            return
        if self.flat:
            grid, vector = flat.grid(self.size, self.shape, x.dtype.itemsize, 1, at, self.data[0])
            self.flat.launch(x, grid, at, noop_at, *self.params, vector)
            return
        vector = self.vector if at % self.load_bytes == 0 else self.vector & ~1
        variant, panels = (self.aligned, self.panels) if vector == 7 else (self.any_shape, _GATHERED)
        variant.launch(x, panels.grid(self.shape), at, noop_at, *self.params, vector)


def _stored(part: Scaled | None, swapped: bool) -> int:
    return _ABSENT if part is None else _AS_IS if part.transposed == swapped else _TRANSPOSED


def _is_flat(part: Scaled, columns: int) -> bool:
    """Whether quantize_mx_rows can write this part: whole blocks, whose scales follow one another."""
    return columns % _BLOCK == 0 and part.scale_layout == "compact" and part.block == (1, _BLOCK)


def _scales(part: Scaled | None) -> tuple[int, int, int, int]:
    """The ScaleTarget of kernels_cu/include/e8m0.cuh."""
    if part is None:
        return _NO_SCALES
    assert part.block is not None
    grid, a = scale_grid(part.shape, part.block), part.scale_inv
    matrix = a.shape[-2] * a.shape[-1]
    if part.scale_layout == "swizzled":
        return checks.address(a), matrix, 0, cdiv(grid.blocks, SWIZZLE_COLUMNS)
    return checks.address(a), matrix, *((1, grid.outer) if grid.columnwise else (grid.blocks, 1))


def _panels(source: np.dtype[Any], fast: int, slow: int, swizzled: bool) -> Panels:
    """The fastest on an H200 of those tried (docs/performance.md)."""
    if _TRANSPOSED not in (fast, slow):
        return _SWIZZLED if swizzled or not fast else _COMPACT
    if _AS_IS not in (fast, slow):
        return _GATHERED._replace(down_first=True)
    return _SWIZZLED if source == float32 else _GATHERED if swizzled else _WIDE


@functools.cache
def _rows_variant(source: np.dtype[Any], to: np.dtype[Any]) -> Variant:
    return _ROWS.variant(block=flat.THREADS, IN=FORMATS[source].tag, OUT=FORMATS[to].tag)


@functools.cache
def _tile_variant(source: np.dtype[Any], to: np.dtype[Any], fast: int, slow: int, panels: Panels, aligned: bool = True) -> Variant:
    shared = (fast, slow).count(_TRANSPOSED) * panels.tile + 2 * panels.tile // _BLOCK                # and the scales of both directions
    return _TILE.variant(block=panels.block, shared=shared, IN=FORMATS[source].tag, OUT=FORMATS[to].tag, FAST=fast, SLOW=slow,
                         ALIGNED=int(aligned), **panels.defines)


def _any_shape_variant(source: np.dtype[Any], to: np.dtype[Any]) -> Variant:
    """For arrays whose rows do not allow wide accesses: what it stores, and how, is told at run time."""
    return _tile_variant(source, to, _TRANSPOSED, _TRANSPOSED, _GATHERED, False)


def _validated(out: Quantized, x: Array, xp: Any, swapped: bool, options: tuple[Any, ...]) -> _Target:
    """The _Target of a result given as `out=`, once it has been found to fit the call."""
    key = (id(out), x.shape, x.dtype, swapped, options, 0 if xp is np else x.data.device_id)
    kept = getattr(out, "_target", None)
    if kept is not None and kept[0] == key:
        return cast(_Target, kept[1])
    if not isinstance(out, Quantized):
        raise TypeError(f"out: expected a Quantized (an earlier result, or recipe.empty(…)), got {type(out).__name__}")
    forms = _forms(x, swapped, options)
    written: dict[int, tuple[str, int, int]] = {}
    for name, part in (("rowwise", out.rowwise), ("columnwise", out.columnwise)):
        form = forms.get(name)
        if (part is None) != (form is None):
            raise ValueError(f"out: {'no' if part is None else 'has a'} {name} part, but {name}={form is not None} was asked for")
        if part is None or form is None:
            continue
        if (part.shape, part.transposed, part.block, part.scale_layout) != form[1:5]:
            raise ValueError(f"out.{name}: expected MX data of shape {form.shape}, {'' if form.transposed else 'not '}stored transposed, "
                             f"block {form.block}, scales {form.scale_layout}; got {part!r}, scales {part.scale_layout}")
        for what, a, shape, dtype in (("data", part.data, form.stored, form.dtype),
                                      ("scale_inv", part.scale_inv, form.scale_shape, form.scale_dtype)):
            at = checks.destination(a, shape, dtype, x, xp, checks.address(x), f"out.{name}.{what}")
            if id(a) not in written:
                for other, other_at, other_nbytes in written.values():
                    checks.separate(at, a.nbytes, other_at, other_nbytes, f"out.{name}.{what}", other)
            written[id(a)] = (f"out.{name}.{what}", at, a.nbytes)
    row, column = out.rowwise, out.columnwise
    if row and column and not column.transposed and (row.data is column.data) != (options[6] == (_BLOCK, _BLOCK)):
        raise ValueError("out: expected both directions to share one data array with blocks of (32, 32), and to have their own otherwise")
    target = _Target(out, x, swapped, options)
    target.ranges = [(at, at + nbytes) for _, at, nbytes in written.values() if nbytes]
    if xp is not np:
        object.__setattr__(out, "_target", (key, target))
    return target


def _store(out: Quantized, result: Quantized) -> None:
    for mine, fresh in ((out.rowwise, result.rowwise), (out.columnwise, result.columnwise)):
        if mine is not None and fresh is not None:
            for a, b in zip(mine, fresh, strict=True):
                bits(a)[...] = bits(b)


def variants() -> Iterator[Variant]:
    """Every variant that this op may launch."""
    for source, to in product(INPUT_DTYPES, FP8_DTYPES):
        yield _rows_variant(source, to)
        yield _any_shape_variant(source, to)
        for (fast, slow), swizzled in product(_STORED, (False, True)):
            yield _tile_variant(source, to, fast, slow, _panels(source, fast, slow, swizzled))
