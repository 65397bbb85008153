"""What each block of a tensor lost, and its scale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Array, asnumpy
from ..results import Quantized, Scaled
from . import pieces
from .inputs import module_of_x, require_shape, values_and_codes
from .losses import count_per_block, finite_magnitude, log2_of_scales, losses
from .text import html_table

__all__ = ["BlockReport", "blocks"]


@dataclass(frozen=True, eq=False)
class BlockReport:
    """What `blocks` counted. Arrays of the kind of x with an entry for each block, by rows and columns of
    blocks of the logical matrix.

    block               the shape of a block
    saturated           finite x that overflowed, as in `ErrorReport`: int32
    underflowed         finite nonzero x with v = 0: int32
    nan                 NaN in v: int32
    exponents           log2 of scale_inv: float32, NaN where scale_inv is NaN
    """

    block: tuple[int | None, int | None]
    saturated: Array
    underflowed: Array
    nan: Array
    exponents: Array

    def _facts(self) -> dict[str, str]:
        exponents = asnumpy(self.exponents)
        known = exponents[np.isfinite(exponents)]
        span = "unknown" if known.size == 0 else f"{known.min():g} … {known.max():g}"
        return {"blocks": "×".join(map(str, exponents.shape)),
                **{f"with {name}": f"{int(asnumpy(a != 0).sum()):,}" for name, a in (
                    ("saturated", self.saturated), ("underflowed", self.underflowed), ("NaN", self.nan))},
                "log2 scale_inv": span}

    def __repr__(self) -> str:
        f = self._facts()
        return (f"BlockReport({f['blocks']} blocks: {f['with saturated']} with saturated elements, "
                f"{f['with underflowed']} with "
                f"underflowed ones, {f['with NaN']} with NaN; log2 scale_inv {f['log2 scale_inv']})")

    def _repr_html_(self) -> str:
        return html_table(self._facts())


def blocks(x: Array, q: Scaled | Quantized) -> BlockReport:
    """Count for each block what `error` counts for the whole tensor, and show each block's scale.

    x : the original: bfloat16, float16, float32 or float64 array [..., M, K].
    q : the quantised x, with a scale per block in any layout (for a `Quantized` its row-wise part, if there
        is one), of the same kind (NumPy or CuPy) as x.
    Returns a `BlockReport` with arrays [..., M, ceil(K / B)] for row-wise blocks (1, B), and [..., ceil(M /
    B), K] for column-wise ones. Values are compared in f64, in pieces of about 2**20 elements, with the
    caveats of `error`. Raises TypeError (dtypes, mixed kinds), ValueError (shapes, data with one scale).

    >>> import numpy as np, cupy_fp8 as fp8
    >>> codes = np.full((1, 64), 0x7E, np.uint8).view(fp8.float8_e4m3fn)
    >>> scale_inv = np.array([[127, 120]], np.uint8).view(fp8.float8_e8m0fnu)
    >>> q = fp8.Scaled(codes, scale_inv, (1, 64), block=(1, 32), scale_layout="compact")
    >>> fp8.diagnostics.blocks(np.full((1, 64), 448, np.float32), q)
    BlockReport(1×2 blocks: 1 with saturated elements, 0 with underflowed ones, 0 with NaN; log2 scale_inv -7
    … 0)
    """
    xp = module_of_x(x)
    if not isinstance(q, (Scaled, Quantized)):
        raise TypeError(f"q: expected a Scaled or Quantized, got {type(q).__name__}")
    s = q if isinstance(q, Scaled) else q._any
    if s.block is None:
        raise ValueError("q: expected data with a scale per block, got one scale for the tensor; use error")
    values, codes = values_and_codes(s, xp)
    require_shape(x, values)
    assert codes is not None
    extents = [min(block or max(extent, 1), max(extent, 1))
               for block, extent in zip(s.block, x.shape[-2:], strict=True)]
    exponents = log2_of_scales(xp, s.to_layout("compact").scale_inv)
    # Scales of 2-D blocks follow the order in which the data are stored.
    if s.transposed and 1 not in s.block:
        exponents = exponents.swapaxes(-1, -2)
    counts = xp.zeros((3, *exponents.shape), np.int32)
    step = max(1, pieces.CHUNK // max(1, x.shape[-1] * extents[0]))            # rows of blocks at a time
    for matrix in np.ndindex(x.shape[:-2]):
        for first in range(0, exponents.shape[-2], step):
            rows = slice(first * extents[0], (first + step) * extents[0])
            piece, v = x[matrix][rows].astype(np.float64), values[matrix][rows].astype(np.float64)
            for kind, found in enumerate(losses(xp, finite_magnitude(xp, piece), v, codes[matrix][rows])):
                there = (kind, *matrix, slice(first, first + step))
                counts[there] = count_per_block(xp, found, *extents)
    return BlockReport(s.block, counts[0], counts[1], counts[2], exponents)
