"""f32 scales of blocks from one layout to another: plain copies, which NumPy and CuPy do themselves."""

from __future__ import annotations

from ..arrays import Array, empty_beside
from ..formats import float32
from ..layouts import scale_shape
from ..results import Scaled, check_block_scales


def to_f32_layout(s: Scaled, name: str) -> Array:
    """The scales of `s`, f32 in a layout without tiles, in another such layout. Padding is 0.

    TypeError for E8M0 scales, which these layouts do not hold but compact.
    """
    check_block_scales(s, "to_layout")
    assert s.block is not None
    shape = scale_shape(s.shape, s.block, name, s.transposed)
    if s.scale_inv.dtype != float32:
        raise TypeError(f"to_layout({name!r}): holds float32 scales, got {s.scale_inv.dtype}")
    lines_first = s.block[0] == 1                       # compact scales are then lines by blocks
    *_, length = scale_shape(s.shape, s.block, "compact", s.transposed) if not lines_first else (s.shape[-2],)
    scales = s.scale_inv.swapaxes(-1, -2) if lines_first and s.scale_layout == "compact" else s.scale_inv
    out = empty_beside(s.scale_inv, shape, float32)
    to = out.swapaxes(-1, -2) if lines_first and name == "compact" else out
    to[..., :length] = scales[..., :length]
    to[..., length:] = 0
    return out
