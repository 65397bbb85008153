"""Samples of quantize_block: tiles of whole blocks."""

from __future__ import annotations

from typing import Any

from ... import reference
from ...results import Quantized, Scaled
from ...testing import assert_bytes_equal
from ..data import part

_EDGE = 128                                 # side of the compared tiles


def _compare(args: tuple[Any, ...], options: dict[str, Any], out: Quantized) -> None:
    """Compare tiles at the corners and at some places between."""
    (x,), (rows, columns) = args, out.shape
    rule = {name: value for name, value in options.items() if name not in ("rowwise", "columnwise")}
    middle = rows // 2 // _EDGE * _EDGE, columns // 4 // _EDGE * _EDGE
    for r, c in ((0, 0), middle, (_EDGE, columns - _EDGE), (rows - _EDGE, columns - _EDGE)):
        tile = part(x, slice(r, r + _EDGE), slice(c, c + _EDGE))
        want = reference.quantize_block(tile, columnwise=True, **rule)
        for made, wanted in ((out._row, want._row), (out._column, want._column)):
            if made is None or wanted is None:
                continue
            i, j = (c, r) if made.transposed else (r, c)
            codes = part(made.data, slice(i, i + _EDGE), slice(j, j + _EDGE))
            assert_bytes_equal(codes, wanted.data)
            assert_bytes_equal(_scales(made, r, c), _scales(wanted, 0, 0))


def _scales(made: Scaled, r: int, c: int) -> Any:
    """Return the scales of a tile, by rows and columns of blocks."""
    assert made.block is not None
    flipped = made.block[0] == 1 and made.scale_layout != "compact" if 1 in made.block else made.transposed
    scales = made.scale_inv.T if flipped else made.scale_inv
    rows, columns = (slice(at // (b or 1), at // (b or 1) + _EDGE // (b or 1))
                     for at, b in zip((r, c), made.block, strict=True))
    return part(scales, rows, columns)


COMPARE = {"quantize_block": _compare}
