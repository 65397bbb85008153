"""The layout of a rank's window, which the other ranks write."""

from __future__ import annotations

from enum import IntEnum
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..formats import float8_e8m0fnu, float32
from ..layouts import cdiv, round_up
from ..recipes import BlockScaling, MXScaling, Recipe
from .slots import Split

_ALIGNED_TO = 256
INT32 = np.dtype(np.int32)


class Direction(IntEnum):
    """The parts of a window, which exchanges write in turn."""

    ROUTE = 0
    DISPATCH = 1
    RETURN = 2


class Piece(NamedTuple):
    """An array in a window: offset, shape and dtype."""

    at: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Facts(NamedTuple):
    """What all ranks agree on. dtype: of rows that come back, and of tokens without a recipe; exact: each
    slot's row comes back, instead of sums by rank."""

    num_experts: int
    max_tokens: int
    hidden: int
    topk: int
    align: int
    rows: int
    recipe: Recipe | None
    dtype: np.dtype[Any]
    exact: bool

    @property
    def scales(self) -> tuple[int, np.dtype[Any]] | None:
        """Number of scales of a dispatched token, and their dtype; None without scales."""
        if isinstance(self.recipe, MXScaling):
            return cdiv(self.hidden, 32), float8_e8m0fnu
        if isinstance(self.recipe, BlockScaling):
            return cdiv(self.hidden, self.recipe.block[1] or self.hidden), float32
        return None


class Layout:
    """Offsets of the arrays in a window. Those for incoming tokens have a region of max_tokens rows for each
    rank: `experts` and `back` of their slots, `data`, `scales` and `probs`. `returned` holds rows that come
    back, `gradients` those of probs."""

    def __init__(self, facts: Facts, split: Split) -> None:
        self._end = 0
        tokens, topk = split.ranks * split.region, facts.topk
        self.flags = self._place((2, split.ranks), INT32)
        self.sizes = self._place((split.ranks,), INT32)
        self.experts = self._place((tokens, topk), INT32)
        self.back = self._place((tokens, topk), INT32) if facts.exact else None
        dtype = facts.dtype if facts.recipe is None else facts.recipe.dtype
        self.data = self._place((tokens, facts.hidden), dtype)
        self.scales: Piece | None = None
        if facts.scales is not None:
            self.scales = self._place((tokens, facts.scales[0]), facts.scales[1])
        self.probs = self._place((tokens, topk), float32)
        rows = split.region * topk if facts.exact else tokens
        self.returned = self._place((rows, facts.hidden), facts.dtype)
        self.gradients = self._place((rows,) if facts.exact else (rows, topk), float32)

    def _place(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Piece:
        piece = Piece(self._end, shape, dtype)
        self._end += round_up(piece.nbytes, _ALIGNED_TO)
        return piece

    @property
    def nbytes(self) -> int:
        return self._end
