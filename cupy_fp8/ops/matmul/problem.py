"""Input of a product kernel: the struct Product of kernels_cu/include/matmul/problem.cuh."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...formats import bfloat16, float16, float32
from .operands import ScaleView

#: numbers of the enum OutType, for results and biases
TYPES: dict[np.dtype[Any], int] = {bfloat16: 0, float16: 1, float32: 2}


class OperandView(NamedTuple):
    """Places of the rows and scales of each group: members of the struct Operand. Strides default to 0."""

    data: int
    scale: int
    group_bytes: int = 0
    start_bytes: int = 0
    pitch: int = 0
    scale_group: int = 0
    scale_start: int = 0
    scale_padded: int = 0
    scale_blocks: int = 0
    scale_row: int = 0
    scale_block: int = 0
    scale_shift: int = 0
    e5m2: int = 0
    own_sizes: int = 0
    own_wide: int = 0
    copies: int = 0
    own_offsets: int = 0

    def with_scales(self, view: ScaleView) -> OperandView:
        """Return the same data with the scales of `view`, for matrices of equal size.
        """
        return self._replace(scale=view.at, scale_group=view.matrix, scale_row=view.line,
                             scale_block=view.block, scale_shift=view.line_shift)


class Problem(NamedTuple):
    """Products D = A · Bᵀ, one per group.

    sizes_of_k    True: sizes of groups are lengths of K ("k"); False: rows of A ("m")
    groups        their number
    splits        the members of the struct Splits; none: each group has total / groups
    total         room of the arrays, of all sizes together
    m, n, k       extents of a group's product; 0 for the one that is the group's size
    out           the address of D, of dtype `to`. out_group, out_start: elements to a group's first row
    bias          an address, or 0. bias_group: elements between the biases of groups, 0: one for all;
                  bias_weights: the address of a factor per row, or 0
    accumulate    the products are added to D
    whole_blocks  groups begin at multiples of 128 of K
    align         promised common divisor of the sizes of "k"
    sizes         the sizes, if known on the host
    """

    a: OperandView
    b: OperandView
    sizes_of_k: bool
    groups: int
    splits: dict[str, Any]
    total: int
    m: int
    n: int
    k: int
    out: int
    to: np.dtype[Any]
    out_group: int = 0
    out_start: int = 0
    bias: int = 0
    bias_dtype: np.dtype[Any] = float32
    bias_group: int = 0
    bias_weights: int = 0
    accumulate: bool = False
    whole_blocks: bool = False
    align: int = 1
    sizes: np.ndarray | None = None

    def members(self) -> dict[str, Any]:
        """Return the members of the struct Product."""
        splits = self.splits or {"groups": self.groups}
        return {"a": self.a._asdict(), "b": self.b._asdict(), "splits": splits, "out": self.out,
                "bias": self.bias, "bias_group": self.bias_group, "bias_weights": self.bias_weights,
                "out_group": self.out_group, "out_start": self.out_start, "total": self.total,
                "m": self.m, "n": self.n, "k": self.k, "out_type": TYPES[self.to],
                "bias_type": TYPES[self.bias_dtype], "accumulate": int(self.accumulate),
                "whole_blocks": int(self.whole_blocks), "align_mask": self.align - 1}
