"""Measures the losses and the scale of each block of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import Array, asarray, asnumpy, contiguous
from ..layouts import Block
from ..results import Quantized, Scaled, as_scaled, facts_table
from ..typed_array import TypedArray
from . import pieces
from .inputs import module_of_x, require_shape, values_and_codes
from .losses import count_per_block, finite_magnitude, losses, negative_zeros
from .scale_report import ScaleReport, log2_of_scales, report_of, scales_by_block

__all__ = ["BlockReport", "blocks"]

#: what `counts_of` counts in each block, in this order
COUNTED = ("saturated", "underflowed", "nan", "negative_zeros")


@dataclass(frozen=True, eq=False)
class BlockReport:
    """What `blocks` counted. Arrays of the kind of q, with one entry per block, by rows and columns of blocks
    of the logical matrix.

    block               the shape of a block
    shape               the logical shape of the data
    saturated           finite x that overflowed, as in `ErrorReport`: int32; None without x
    underflowed         finite nonzero x with v = 0: int32; None without x
    nan                 NaN in v: int32
    negative_zeros      codes of −0 (0x80), from −0 in x and from negative x that underflowed: int32
    exponents           log2 of scale_inv: float32, −inf for 0, NaN where scale_inv is NaN or negative
    scales              the spread of the scales, a `ScaleReport`
    """

    block: Block
    shape: tuple[int, ...]
    saturated: Array                # as nan, or None: a type checker cannot know whether there was an x
    underflowed: Array
    nan: TypedArray
    negative_zeros: TypedArray
    exponents: TypedArray
    scales: ScaleReport

    @property
    def elements(self) -> np.ndarray:
        """The number of elements of each block: an int64 NumPy array that broadcasts to the others. Blocks at
        the ends are smaller."""
        down, across = (np.minimum(size, extent - size * np.arange(self.exponents.shape[axis]))
                        for axis, extent, size in zip((-2, -1), self.shape[-2:],
                                                      block_extents(self.block, self.shape), strict=True))
        return down[:, None] * across

    def _facts(self) -> dict[str, str]:
        spread = self.scales._facts()
        return {"blocks": "×".join(map(str, self.exponents.shape)),
                **{f"with {name}": "unknown" if a is None else f"{int((a != 0).sum()):,}" for name, a in (
                    ("saturated", self.saturated), ("underflowed", self.underflowed), ("NaN", self.nan),
                    ("−0", self.negative_zeros))},
                **{name: spread[name] for name in ("log2 scale_inv", "mean ± deviation")}}

    def __repr__(self) -> str:
        f = self._facts()
        return (f"BlockReport({f['blocks']} blocks: {f['with saturated']} with saturated elements, "
                f"{f['with underflowed']} with underflowed ones, {f['with NaN']} with NaN, "
                f"{f['with −0']} with −0; log2 scale_inv {f['log2 scale_inv']}, "
                f"mean {f['mean ± deviation']})")

    def _repr_html_(self) -> str:
        return facts_table(self._facts())


def blocks(x: Array | None, q: Scaled | Quantized) -> BlockReport:
    """Count for each block what `error` counts for the whole tensor, and show each block's scale.

    x : the original: bfloat16, float16, float32 or float64 array [..., M, K]. None if there is none, as for
        weights stored in FP8: `saturated` and `underflowed` are then None.
    q : the quantised x, with a scale per block in any layout (for a `Quantized` its row-wise part, if there
        is one), of the same kind (NumPy or CuPy) as x.
    Returns a `BlockReport` with arrays [..., M, ceil(K / B)] for row-wise blocks (1, B), and [..., ceil(M /
    B), K] for column-wise ones. Values are compared in f64, in pieces of 2**20 elements, as in `error`, but
    CuPy flushes f32 subnormals to zero when it widens them, so on a GPU |x| below 2**-126 counts as zero.
    Warns with `ScaleWarning` where a scale is 0, negative, Inf or NaN. Raises TypeError (dtypes,
    mixed kinds), ValueError (shapes, data with one scale).

    >>> import numpy as np, cupy_fp8 as fp8
    >>> codes = np.full((1, 64), 0x7E, np.uint8).view(fp8.float8_e4m3fn)
    >>> scale_inv = np.array([[127, 120]], np.uint8).view(fp8.float8_e8m0fnu)
    >>> q = fp8.Scaled(codes, scale_inv, (1, 64), block=(1, 32), scale_layout="compact")
    >>> fp8.diagnostics.blocks(np.full((1, 64), 448, np.float32), q)
    BlockReport(1×2 blocks: 1 with saturated elements, 0 with underflowed ones, 0 with NaN, 0 with −0; log2
    scale_inv -7 … 0, mean -3.50 ± 3.50)
    """
    xp = None if x is None else module_of_x(x)
    s = as_scaled(q)
    if s.block is None:
        raise ValueError("q: expected data with a scale per block, got one scale for the tensor; use error")
    values, codes = values_and_codes(s, xp)
    if x is not None:
        require_shape(x, values)
    assert codes is not None
    return report_on(x, s, values, codes)


def report_on(x: Array | None, s: Scaled, values: Array, codes: Array) -> BlockReport:
    """Return the report for the results of `values_and_codes`."""
    assert s.block is not None
    scale_inv = contiguous(asnumpy(scales_by_block(s)))
    exponents = np.zeros(scale_inv.shape, np.float32)
    flat = exponents.reshape(-1)
    for piece in pieces.of_line(flat.size):
        flat[piece] = log2_of_scales(scale_inv.reshape(-1)[piece])
    saturated, underflowed, nan, negative = counts_of(x, values, codes, block_extents(s.block, s.shape))
    if x is None:
        saturated = underflowed = None
    return BlockReport(s.block, s.shape, saturated, underflowed, nan, negative,
                       asarray(exponents, like=module_of_x(values)), report_of(scale_inv))


def block_extents(block: Block, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a block, with None replaced by the whole extent."""
    rows, columns = (min(size or max(extent, 1), max(extent, 1))
                     for size, extent in zip(block, shape[-2:], strict=True))
    return rows, columns


def counts_of(x: Array | None, values: Array, codes: Array, extents: tuple[int, int]) -> Array:
    """Return int32 [4, ..., rows of blocks, columns of blocks]: COUNTED in each block of matrices. Without x
    the first two are 0."""
    xp: Any = module_of_x(values)
    grid = [-(-extent // size) for extent, size in zip(values.shape[-2:], extents, strict=True)]
    counts = xp.zeros((len(COUNTED), *values.shape[:-2], *grid), np.int32)
    for matrix in np.ndindex(values.shape[:-2]):
        for piece, blocks_of_piece in pieces.of_matrix(values.shape[-2:], extents):
            v, code = _f64(values[matrix][piece]), codes[matrix][piece]
            part = tuple(map(min, extents, v.shape))            # a piece may be smaller than a block
            magnitude = xp.zeros(1, np.float64) if x is None else finite_magnitude(xp, _f64(x[matrix][piece]))
            for kind, found in enumerate((*losses(xp, magnitude, v, code), negative_zeros(code))):
                if x is not None or COUNTED[kind] in ("nan", "negative_zeros"):
                    counts[(kind, *matrix, *blocks_of_piece)] += count_per_block(found, *part)
    return counts


def _f64(a: Array) -> Array:
    with np.errstate(invalid="ignore"):                         # a signalling NaN is invalid
        return a.astype(np.float64)
