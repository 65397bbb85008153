"""The biases of the experts: copied from arrays, updated in place, and their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import backend
from ..advice import shown, type_name
from ..arrays import Array, empty, full, is_array
from ..formats import INPUT_DTYPES, float32, names
from ..ops.convert.astype import astype
from ..ops.convert.dequantize import dequantize
from ..ops.matmul.grouped import grouped_matmul_nt
from ..ops.moe.group_sums import group_sums
from ..recipes import BlockScaling, quantize
from .step import Calls

#: The gradient of a row's prob is a product with the bias of `down`, in FP8 like the other products.
_OF_PROBS = BlockScaling((1, 128))


class Biases:
    """Copies of the biases [E, 2 F] of `up` and [E, H] of `down`, either of which may be None."""

    def __init__(self, given: Any, shapes: tuple[tuple[int, int], tuple[int, int]], dtype: np.dtype[Any],
                 xp: Any) -> None:
        self._shapes, self._xp = shapes, xp
        up, down = self._pair(given)
        self.up = None if up is None else astype(up, dtype)             # dtype of h, which it is added to
        self.down = None if down is None else astype(down, down.dtype)
        self._factors = None if down is None else _Factors(down)

    def __bool__(self) -> bool:
        return self.up is not None or self.down is not None

    def __repr__(self) -> str:
        held = [name for name, own in (("up", self.up), ("down", self.down)) if own is not None]
        return f"bias of {' and '.join(held)}" if held else "no bias"

    # ---- taken and updated ----
    def _pair(self, given: Any) -> tuple[Any, Any]:
        if given is None:
            return None, None
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise TypeError(f"bias: expected two arrays, for up and down, or None, got {shown(given)}")
        for name, a, shape in zip(("up", "down"), given, self._shapes, strict=True):
            if a is None:
                continue
            if not is_array(a):
                raise TypeError(f"bias ({name}): expected an array or None, got {type_name(a)}")
            backend.require_module(a, self._xp, f"bias ({name})")
            if a.dtype not in INPUT_DTYPES:
                raise TypeError(f"bias ({name}): expected {names(INPUT_DTYPES)}, got {a.dtype}")
            if a.shape != shape:
                raise ValueError(f"bias ({name}): expected shape {shape}, got {a.shape}")
        up, down = given
        return up, down

    def check(self, given: Any) -> None:
        """Raise TypeError or ValueError unless these can replace the present ones."""
        for name, a, own in zip(("up", "down"), self._pair(given), (self.up, self.down), strict=True):
            if a is not None and own is None:
                raise ValueError(f"bias ({name}): expected None, since the layer has none, got an array")

    def update(self, given: Any) -> None:
        up, down = self._pair(given)
        if up is not None and self.up is not None:
            astype(up, self.up.dtype, out=self.up)
        if down is not None and self.down is not None:
            astype(down, self.down.dtype, out=self.down)
            if self._factors is not None:
                self._factors.update(down)

    # ---- in a step ----
    def of_up(self, splits: Any) -> dict[str, Any]:
        """Return options of the activation and its gradient."""
        return {} if self.up is None else {"bias": self.up, "splits": splits}

    def of_down(self, row_probs: Array | None) -> dict[str, Any]:
        """Return options of the second product, whose rows already include the probs."""
        return {} if self.down is None else {"bias": self.down, "bias_weights": row_probs}

    def add_to_probs(self, dp: Array | None, grads: Any, splits: Any) -> None:
        """Add the part of the gradient of each row's prob that comes through the bias of `down`."""
        if dp is not None and self._factors is not None:
            for term in self._factors.terms:
                grouped_matmul_nt(grads, term, splits, accumulate=dp.reshape(-1, 1))

    def gradients(self, call: Calls, d_hidden: Any, grads: Any, splits: Any,
                  row_probs: Array | None) -> tuple[Any, Any]:
        """Return f32 [E, 2 F] and [E, H], sums of FP8 rows."""
        up = None if self.up is None else call("up bias grad", group_sums, d_hidden, splits)
        down = None if self.down is None else call("down bias grad", group_sums, grads, splits,
                                                   weights=row_probs)
        return up, down


class _Factors:
    """The bias of `down` [E, H] as a sum of two FP8 terms [E, 1, H] for products: the rounded bias, and the
    rounded remainder. One term alone is wrong by up to 1/17 of a value, in the same direction for all
    rows."""

    def __init__(self, bias: Array) -> None:
        experts, hidden = bias.shape
        self._both = empty((2, experts, 1, hidden), float32, like=bias)     # the bias, and its first term
        self._weights = full((2,), 1, float32, like=bias)
        self._weights[1:].fill(-1)
        self._sizes = full((1,), 2, np.int32, like=bias)
        self._rest = empty((1, experts * hidden), float32, like=bias)
        self.terms = [_OF_PROBS.empty((experts, 1, hidden), like=bias) for _ in range(2)]
        self.update(bias)

    def update(self, bias: Array) -> None:
        """Replace the terms; nothing is allocated."""
        exact, first = self._both[0], self._both[1]
        astype(bias[:, None], float32, out=exact)
        quantize(exact, _OF_PROBS, out=self.terms[0])
        dequantize(self.terms[0], dtype=float32, out=first)
        # fl(1 · exact + -1 · first), with the arithmetic of kernels
        group_sums(self._both.reshape(2, -1), self._sizes, weights=self._weights, out=self._rest)
        quantize(self._rest.reshape(exact.shape), _OF_PROBS, out=self.terms[1])
