"""Tiles by which large results are compared: whole blocks of every recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...arrays import asnumpy
from ...recipes import CurrentScaling, DelayedScaling, Recipe
from ...results import Quantized
from ...testing import assert_bytes_equal
from ..data import part

EDGE = 128                                     # side of the compared tiles


def corners(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield the first row and column of tiles at two corners, and of one between."""
    rows, columns = shape
    yield 0, 0
    yield rows // 2 // EDGE * EDGE, columns // 4 // EDGE * EDGE
    yield rows - EDGE, columns - EDGE


def of_a_tile(recipe: Recipe, options: dict[str, Any], out: Quantized) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe and options with which the reference makes a tile of a result. The scale is on the
    host: that of current scaling depends on the whole array."""
    if isinstance(recipe, CurrentScaling):
        recipe, options = DelayedScaling(recipe.dtype), options | {"scale": 1 / out._any.scale_inv}
    return recipe, options | ({"scale": asnumpy(options["scale"])} if "scale" in options else {})


def assert_tile(out: Quantized, want: Quantized, r: int, c: int) -> None:
    """Compare codes from row r and column c on with those of a tile."""
    for made, wanted in ((out._row, want._row), (out._column, want._column)):
        if made is not None and wanted is not None:
            i, j = (c, r) if made.transposed else (r, c)
            assert_bytes_equal(part(made.data, slice(i, i + EDGE), slice(j, j + EDGE)), wanted.data)
