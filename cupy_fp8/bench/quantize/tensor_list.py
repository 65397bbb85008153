"""Samples of the ops on tensor lists: some matrices."""

from __future__ import annotations

from typing import Any

from ...arrays import asnumpy
from ...formats import float8_e4m3fn
from ...ops.scales.amax import compute_amax
from ...ops.scales.scale import compute_scale
from ...recipes import BlockScaling, MXScaling
from ...testing import assert_bytes_equal
from .tensor import compare_rows


def _compare(xs: tuple[Any, ...], options: dict[str, Any], outputs: list[Any]) -> None:
    recipe, scales = options.get("recipe"), options.get("scales")
    for i in (0, len(xs) // 2, len(xs) - 1):
        if isinstance(recipe, (BlockScaling, MXScaling)):
            directions = {name: options[name] for name in ("rowwise", "columnwise") if name in options}
            assert_bytes_equal(outputs[i], recipe.quantize(xs[i], **directions))
            continue
        scale = compute_scale(compute_amax(xs[i])) if scales is None else scales[i : i + 1]
        compare_rows(xs[i], outputs[i], asnumpy(scale), float8_e4m3fn)
        if "amax" in options:
            assert_bytes_equal(options["amax"][i : i + 1], compute_amax(xs[i]))


COMPARE = {"multi_cast_transpose": _compare, "multi_quantize": _compare}
