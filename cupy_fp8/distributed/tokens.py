"""Checks of a rank's inputs: its tokens, their experts, and rows of its experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import backend
from ..advice import type_name
from ..arrays import Array, is_contiguous
from ..formats import INPUT_DTYPES, float32, names
from ..recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, check_recipe, quantize
from ..results import Quantized, Scaled
from .exchange import Part
from .layout import Facts

#: scale layouts that are sent without conversion
_SENT_LAYOUTS = ("compact", "gemm_ready")
_IDS = np.dtype(np.int32), np.dtype(np.int64)


class Tokens(NamedTuple):
    """Tokens to send. given: a Scaled, or an array."""

    data: Part
    scales: Part | None
    given: Any

    def came(self, data: Array, scales: Array | None) -> Any:
        """Return received tokens in the form that `permute` takes."""
        if scales is None:
            return data
        return Scaled._of(data, scales, data.shape, False, self.given.block, "compact")

    def rows(self, moved: Any) -> Any:
        """Return permuted tokens, with the scale that all ranks share if there is one."""
        if self.scales is None and isinstance(self.given, Scaled):
            return Scaled._of(moved, self.given.scale_inv, moved.shape)
        return moved


def check_options(facts: Facts) -> None:
    """Raise TypeError or ValueError for a recipe by which tokens cannot be sent."""
    recipe = facts.recipe
    if recipe is None:
        return
    check_recipe(recipe, (BlockScaling, MXScaling, DelayedScaling, CurrentScaling))
    if isinstance(recipe, CurrentScaling):
        raise ValueError("recipe: each rank would find a scale of its own, and rows have one; take "
                         "DelayedScaling with one scale for all ranks, or BlockScaling")
    if isinstance(recipe, (BlockScaling, MXScaling)) and recipe.block[0] != 1:
        raise ValueError(f"recipe: expected blocks (1, n), whose scales move with their tokens, got {recipe}")


def check_ids(ids: Any, facts: Facts, xp: Any) -> None:
    backend.require_module(ids, xp, "topk_ids", "int32", 2)
    if ids.dtype not in _IDS:
        raise TypeError(f"topk_ids: expected int32 or int64, got {ids.dtype}")
    if ids.ndim != 2 or ids.shape[1] != facts.topk or len(ids) > facts.max_tokens:
        raise ValueError(f"topk_ids: expected shape (T, {facts.topk}) with T up to max_tokens="
                         f"{facts.max_tokens}, got {ids.shape}")
    if xp is np and (wrong := (ids < -1) | (ids >= facts.num_experts)).any():
        token, slot = map(int, np.argwhere(wrong)[0])
        raise ValueError(f"topk_ids: expected experts 0 to {facts.num_experts - 1}, or -1 for none, got "
                         f"{ids[token, slot]} at [{token}, {slot}]")


def read(x: Any, count: int, facts: Facts, xp: Any, name: str) -> Tokens:
    """Return checked tokens, quantised by the recipe unless they are already."""
    recipe, quantised = facts.recipe, isinstance(x, (Scaled, Quantized))
    if not quantised:
        backend.require_module(x, xp, name)
        allowed = (facts.dtype,) if recipe is None else INPUT_DTYPES
        if x.dtype not in allowed:
            raise TypeError(f"{name}: expected {names(allowed)}, got {x.dtype}")
    elif recipe is None:
        raise TypeError(f"{name}: expected an array of {facts.dtype}, since recipe=None, got {type_name(x)}")
    if tuple(x.shape) != (count, facts.hidden):
        raise ValueError(f"{name}: expected shape {(count, facts.hidden)}, got {tuple(x.shape)}")
    if recipe is not None and not quantised:
        if isinstance(recipe, DelayedScaling):
            raise TypeError(f"{name}: expected a Scaled, quantised with the scale that all ranks have, got "
                            "an array")
        x = quantize(x, recipe)
    if isinstance(x, (Scaled, Quantized)):
        return _of_scaled(x.rowwise if isinstance(x, Quantized) else x, facts, xp, name)
    if not is_contiguous(x):
        raise ValueError(f"{name}: expected a C-contiguous array, got strides {x.strides}")
    return Tokens(Part.rows(x), None, x)


def _of_scaled(x: Scaled, facts: Facts, xp: Any, name: str) -> Tokens:
    block = facts.recipe.block if isinstance(facts.recipe, (BlockScaling, MXScaling)) else None
    if x.transposed or x.splits is not None or x.block != block:
        raise ValueError(f"{name}: expected row-wise data of {facts.recipe}, got {x!r}")
    backend.require_module(x.data, xp, f"{name}.data")
    if block is None:
        return Tokens(Part.rows(x.data), None, x)
    if x.scale_layout not in _SENT_LAYOUTS:
        x = x.to_layout("compact")
    assert facts.scales is not None
    if x.scale_inv.dtype != facts.scales[1]:
        raise TypeError(f"{name}.scale_inv: expected {facts.scales[1]}, as {facts.recipe} has, got "
                        f"{x.scale_inv.dtype}")
    return Tokens(Part.rows(x.data), Part.scales(x), x)


def check_probs(probs: Any, count: int, facts: Facts, xp: Any) -> None:
    if probs is None:
        return
    _check(probs, (count, facts.topk), float32, xp, "probs")


def check_rows(rows: Any, row_probs: Any, count: int, facts: Facts, xp: Any, name: str) -> None:
    """Check the outputs of experts: rows, and gradients of their probs."""
    _check(rows, (count, facts.hidden), facts.dtype, xp, name)
    if row_probs is not None:
        _check(row_probs, (count,), float32, xp, "row_dprobs")


def _check(a: Any, shape: tuple[int, ...], dtype: np.dtype[Any], xp: Any, name: str) -> None:
    backend.require_module(a, xp, name)
    if a.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {a.dtype}")
    if a.shape != shape or not is_contiguous(a):
        raise ValueError(f"{name}: expected a C-contiguous array of shape {shape}, got {a.shape}")
