"""The quantised weights of the experts: made from arrays or from a checkpoint, and updated in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..advice import type_name
from ..arrays import Array, is_array
from ..formats import INPUT_DTYPES, names
from ..layouts import swap_last
from ..ops.convert.astype import transpose
from ..ops.convert.scaling_aware import scaling_aware_transpose
from ..ops.quantize.tensor_list import multi_quantize
from ..recipes import BlockScaling, Recipe, quantize
from ..results import Quantized, Scaled

_SQUARE = (128, 128)


def check(given: Any, name: str) -> tuple[int, ...]:
    """Check weights [experts, N, K] and return their shape: an array, or a Scaled or Quantized with blocks of
    128 x 128 or one scale."""
    if isinstance(given, (Scaled, Quantized)):
        row = given._row if isinstance(given, Quantized) else given
        if row is None or row.transposed or row.splits is not None or row.block not in (_SQUARE, None):
            raise ValueError(f"{name}: expected row-wise weights in blocks of {_SQUARE}, or with one scale, "
                             f"got {given!r}; dequantize() gives an array, which the layer quantises")
        shape = row.shape
    elif is_array(given):
        if given.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name}: expected {names(INPUT_DTYPES)}, or a Scaled, got {given.dtype}")
        shape = given.shape
    else:
        raise TypeError(f"{name}: expected an array, a Scaled or a Quantized, got {type_name(given)}")
    if len(shape) != 3 or 0 in shape:
        raise ValueError(f"{name}: expected [experts, N, K], got shape {shape}")
    return shape


def sizes(up: Any, down: Any) -> tuple[int, int, int]:
    """Check the weights of a layer, and return E, F and H."""
    (experts, both, hidden), other = check(up, "up"), check(down, "down")
    inner = other[2]
    if both != 2 * inner or other != (experts, hidden, inner):
        raise ValueError(f"up, down: expected [E, 2 F, H] and [E, H, F], got {(experts, both, hidden)} and "
                         f"{other}")
    return experts, inner, hidden


def recipe_of(recipe: Recipe) -> Recipe:
    """Return how weights are quantised: in square blocks, if tokens have blocks."""
    if isinstance(recipe, BlockScaling):
        return replace(recipe, block=_SQUARE, scale_layout="gemm_ready")
    return recipe


def kind(given: Any) -> Array:
    """Return the array of values, or the row-wise FP8 codes: for weights, and for tokens too."""
    if isinstance(given, Quantized):
        given = given.rowwise
    array: Array = given.data if isinstance(given, Scaled) else given
    return array


def take(given: Any, recipe: Recipe, **scales: Any) -> Quantized:
    """Quantise weights in both directions. A Scaled is not quantised again: its codes and scales are
    transposed."""
    if isinstance(given, Quantized) and given._column is not None and given._column.transposed:
        return given
    if isinstance(given, Quantized):
        given = given.rowwise
    if not isinstance(given, Scaled):
        return quantize(given, recipe, columnwise=True, **scales)
    if given.block is not None:
        return scaling_aware_transpose(given)
    columns = Scaled._of(transpose(given.data), given.scale_inv, given.shape, True)
    assert columns.data.shape == swap_last(given.shape)
    return Quantized(given, columns)


def updated(held: list[Quantized], own: list[bool], given: list[Any], recipe: Recipe,
            scales: list[dict[str, Any]]) -> list[Quantized]:
    """Quantise arrays into the weights that the layer owns: in one launch for blocks. Others are taken as
    new."""
    in_place = [mine and is_array(new) for mine, new in zip(own, given, strict=True)]
    result = [old if stays else take(new, recipe, **of_it)
              for stays, old, new, of_it in zip(in_place, held, given, scales, strict=True)]
    if isinstance(recipe, BlockScaling):
        arrays, into = ([each for stays, each in zip(in_place, all_, strict=True) if stays]
                        for all_ in (given, held))
        if arrays:
            multi_quantize(arrays, recipe, columnwise=True, out=into)
        return result
    for stays, old, new, of_it in zip(in_place, held, given, scales, strict=True):
        if stays:
            quantize(new, recipe, columnwise=True, out=old, **of_it)
    return result
