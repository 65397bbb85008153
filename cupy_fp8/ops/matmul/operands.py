"""Operands of matrix products: FP8 data whose values along K are adjacent in memory (K-major), and scales.

Every product takes its operands through `read`, whose errors say which call makes a right one. `scales_for`
converts the scales to the layout that a kernel needs, by a launch of the same call.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...advice import member
from ...arrays import Array, address, is_contiguous
from ...calls import validate
from ...calls.call import Call, Input
from ...formats import float8_e8m0fnu, float32
from ...kernels import Launch
from ...layouts import block_text, round_up
from ...results import Quantized, Scaled, row_wise
from ...scaled_parts import check_one_piece
from ..scales.convert import conversion, conversion_launches
from ..scales.swizzle import check_aligned

#: Kind of scaling, by the block of a matrix that shares a scale.
SCALINGS: dict[Any, str] = {
    None: "tensor", (1, None): "row", (1, 128): "vector", (128, 128): "block", (1, 32): "mx"}
#: log2 of the elements per scale, along a line and along K. A whole line or matrix counts as any number.
_WHOLE = 63
_SHIFTS = {"tensor": (_WHOLE, _WHOLE), "row": (0, _WHOLE), "vector": (0, 7), "block": (7, 7), "mx": (0, 5)}
#: Layouts that are readable directly where a layout is requested.
_READ_AS = {None: ("compact", "gemm_ready", "deepgemm_sm90"), "gemm_ready": ("gemm_ready", "deepgemm_sm90"),
            "swizzled": ("swizzled",)}
_CONVERT = "%s.to_block((1, 128), scale_layout='gemm_ready') converts scales that are powers of two"


class Operand(NamedTuple):
    """`batch` matrices of `rows` lines with `k` FP8 values each, adjacent in memory, and their scales.

    s        what the caller gave (its row-wise part): the argument of the reference
    data     the FP8 array [rows, k] or [batch, rows, k], C-contiguous
    scaling  'tensor': one f32 scale; 'row': one for each line; 'vector': one for 128 values of a line;
             'block': one for 128 lines × 128 values; 'mx': an E8M0 scale for 32 values of a line
    scales   as stored: float32, float8_e8m0fnu, or int32 (words of four E8M0 scales), C-contiguous
    name     of the argument, in messages
    """

    s: Scaled
    data: Input
    batch: int
    rows: int
    k: int
    scaling: str
    scales: Input
    name: str

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.data.dtype

    @property
    def at(self) -> int:
        return self.data.at


class Product(NamedTuple):
    """A validated call of `matmul_nt`: operands with equal batch and K.

    to          dtype of the result
    accumulate  the result's array, to which the product is added; None: nothing to add to
    """

    a: Operand
    b: Operand
    to: np.dtype[Any]
    bias: Input | None
    fast_accum: bool
    autotune: bool
    accumulate: Array | None

    @property
    def m(self) -> int:
        return self.a.rows

    @property
    def n(self) -> int:
        return self.b.rows

    @property
    def k(self) -> int:
        return self.a.k

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.a.s.shape[:-1], self.n)


class ScaleView(NamedTuple):
    """Scales as a kernel reads them: the scale of row r and column k of matrix i is

        at[i * matrix + (r >> line_shift) * line + (k >> k_shift) * block]

    in elements, float32 (E8M0 of 'mx'). Strides are 0 along what shares one scale."""

    at: int
    matrix: int
    line: int
    block: int
    line_shift: int
    k_shift: int


def read(call: Call, name: str, given: Any) -> Operand:
    """Declare and validate an operand. TypeError or ValueError for anything that is not K-major FP8."""
    s = _row_wise(name, given)
    check_one_piece(s, name)
    if s.transposed:
        raise ValueError(f"{name}: expected data stored as is (values along K adjacent), got data stored "
                         f"transposed; {name}.T of it is an operand of a product over its rows"
                         f"{_for_columns(name)}")
    if len(s.shape) not in (2, 3):
        raise ValueError(f"{name}: expected a matrix [rows, K] or a batch [batch, rows, K], got shape "
                         f"{s.shape}")
    scaling = _scaling(name, s)
    rows, k = s.shape[-2:]
    data, scales = call.read_scaled(name, s, ("compact",))
    _check_scales(name, s, scales)
    return Operand(s, data, prod(s.shape[:-2]), rows, k, scaling, scales, name)


def check_pair(a: Operand, b: Operand) -> None:
    """Raise ValueError unless the two can be multiplied."""
    if len(a.s.shape) != len(b.s.shape) or a.batch != b.batch:
        wanted = "a matrix" if len(a.s.shape) == 2 else f"a batch of {a.batch} matrices"
        raise ValueError(f"b: expected {wanted}, as a has shape {a.s.shape}, got shape {b.s.shape}")
    if a.k != b.k:
        raise ValueError(f"b: expected K = {a.k} as last extent, as a has, got shape {b.s.shape}; the "
                         "product is a [M, K] times b [N, K] transposed")
    if (a.scaling == "mx") != (b.scaling == "mx"):
        mx, other = (a, b) if a.scaling == "mx" else (b, a)
        raise ValueError(f"{other.name}: expected MX blocks 1×32, as {mx.name} has, got {_text(other.s)}; "
                         f"{_CONVERT % mx.name}")


def scales_for(call: Call, operand: Operand, layout: str | None = None,
               alignment: int = 4) -> tuple[list[Launch], ScaleView]:
    """Return the launches, to run before the product, that convert an operand's scales for a kernel, and
    their view. layout: 'gemm_ready', or 'swizzled' of MX, whose strides mean nothing; None: float32 (E8M0 of
    MX) in any layout that has strides. One scale for the tensor stays where it is."""
    s, scales, scaling = operand.s, operand.scales, operand.scaling
    shifts = _SHIFTS[scaling]
    if scaling == "tensor":
        return [], ScaleView(scales.at, 0, 0, 0, *shifts)
    stored, held = str(s.scale_layout), float8_e8m0fnu if scaling == "mx" else float32
    adjacent = is_contiguous(scales.array)
    fits = stored in _READ_AS[layout] and (layout is None or adjacent) and scales.at % alignment == 0
    if scales.dtype == held and fits:
        return [], _view(scales, s, stored, shifts)
    wanted = layout or ("compact" if scaling == "mx" else "gemm_ready")
    assert s.block is not None
    strides = None if adjacent else validate.matrix_strides(scales.array)
    found = conversion(stored, wanted, s.shape, s.block, scales.dtype, None, strides)
    words = round_up(prod(found.shape) * found.dtype.itemsize, 16) // 4
    scratch = call.scratch(f"scales of {operand.name}", words)
    ready = Input(scratch.view(found.dtype)[: prod(found.shape)].reshape(found.shape), address(scratch))
    return list(conversion_launches(call, found, scales, ready.at)), _view(ready, s, wanted, shifts)


# ---- parts of read ----
def _row_wise(name: str, given: Any) -> Scaled:
    if not isinstance(given, (Scaled, Quantized)):
        instead = member(given, name) or "; quantize_tensor, quantize_block and quantize_mx make one"
        raise TypeError(f"{name}: expected a Scaled or Quantized, got {type(given).__name__}{instead}")
    return row_wise(given, name, f"; {name}.T has one, an operand of a product over its rows"
                                 f"{_for_columns(name)}")


def _for_columns(name: str) -> str:
    """Return what .T of a result needs to be an operand: it may be .T of a result that lacks its columns, or
    of a part, which never has them."""
    return (f". If {name} is q.T or q.rowwise.T, give q.T (not a part's), of a q that was quantised with "
            "columnwise=True (quantize_mx also with transposed=True): the columns are the rows of q.T")


def _scaling(name: str, s: Scaled) -> str:
    known = s.block is None or isinstance(s.block, tuple)
    if known and (scaling := SCALINGS.get(s.block)) is not None:
        return scaling
    if known and s.block is not None and s.block[-1:] == (1,):
        raise ValueError(f"{name}: expected blocks along K, got {_text(s)}; quantise with rowwise=True, or "
                         "take .T of column-wise data stored transposed")
    raise ValueError(f"{name}: expected one scale, a scale for each row, or blocks 1×128, 128×128 or MX, got "
                     f"{_text(s)}; {_CONVERT % name}")


def _check_scales(name: str, s: Scaled, scales: Input) -> None:
    """Raise TypeError for MX blocks with f32 scales, ValueError for unaligned scales in tiles or words."""
    part = f"{name}.scale_inv"
    if s.block == (1, 32) and scales.dtype == float32:
        raise TypeError(f"{part}: expected dtype float8_e8m0fnu of blocks 1×32, got float32; "
                        f"{_CONVERT % name}")
    if s.scale_layout in ("swizzled", "deepgemm_sm100"):
        check_aligned(part, scales.at, s.scale_layout)


def _view(scales: Input, s: Scaled, layout: str, shifts: tuple[int, int]) -> ScaleView:
    """Return the strides of the scales of `s`, stored in this layout."""
    strides = validate.matrix_strides(scales.array)
    assert strides is not None
    assert s.block is not None
    matrix, line, block = strides
    if layout != "compact" and 1 in s.block:            # lines are adjacent
        line, block = block, line
    return ScaleView(scales.at, matrix if len(s.shape) == 3 else 0, line, 0 if shifts[1] == _WHOLE else block,
                     *shifts)


def _text(s: Scaled) -> str:
    try:
        what = "one scale" if s.block is None else block_text(s.block)
    except (TypeError, IndexError):                     # a Scaled that was not validated may have no block
        what = f"block {s.block!r}"
    return what if s.scale_layout is None else f"{what} with {s.scale_inv.dtype} {s.scale_layout} scales"
