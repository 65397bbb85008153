"""Results given as `out=` whose parts are one array where they must not be: refused, and nothing is written.
Square, so that all shapes fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, DelayedScaling, MXScaling, Quantized, Scaled, cases
from cupy_fp8.formats import float8_e4m3fn, float8_e8m0fnu, float32

SHAPE = (128, 128)


def one_data(q: Quantized) -> Quantized:
    assert q.rowwise is not None
    assert q.columnwise is not None
    a, b = q.rowwise, q.columnwise
    return Quantized(a, Scaled(a.data, b.scale_inv, b.shape, b.transposed, b.block, b.scale_layout))


def one_scale_inv(q: Quantized) -> Quantized:
    assert q.rowwise is not None
    assert q.columnwise is not None
    a, b = q.rowwise, q.columnwise
    return Quantized(a, Scaled(b.data, a.scale_inv, b.shape, b.transposed, b.block, b.scale_layout))


@pytest.mark.parametrize("share", [one_data, one_scale_inv])
@pytest.mark.parametrize(("quantize", "options"), [
    (fp8.cast_transpose, {}),
    (fp8.quantize_mx, {"columnwise": True, "scale_layout": "swizzled"}),
    (fp8.quantize_mx, {"columnwise": True, "scale_layout": "swizzled", "transposed": True}),
    (fp8.quantize_block, {"columnwise": True}),
    (fp8.quantize_block, {"columnwise": True, "block": (128, 128)}),
], ids=["cast_transpose", "mx", "mx transposed", "1x128", "128x128"])
def test_directions_of_one_array(share: Callable[[Quantized], Quantized], quantize: Callable[..., Quantized],
                                 options: dict[str, Any], run: Any) -> None:
    x = run.array(cases.values("normal", SHAPE, float32))
    arguments = (x, 2.0) if quantize is fp8.cast_transpose else (x,)
    out = share(quantize(*arguments, **options))
    if quantize is fp8.cast_transpose and share is one_scale_inv:       # of one tensor there is one
        assert quantize(*arguments, **options, out=out) is out
        return
    arrays = cases.outputs(out, {}).values()
    for array in arrays:
        cases.poison(array)
    before = [fp8.asnumpy(array).copy() for array in arrays]
    with pytest.raises(ValueError, match="overlaps out"):
        quantize(*arguments, **options, out=out)
    assert all(fp8.bytes_equal(a, fp8.asnumpy(b)) for a, b in zip(before, arrays, strict=True))


@pytest.mark.parametrize("recipe", [MXScaling(scale_layout="swizzled"), BlockScaling(), DelayedScaling()],
                         ids=lambda r: type(r).__name__)
def test_buffers_of_one_array(recipe: Any, run: Any) -> None:
    x = run.array(cases.values("normal", SHAPE, float32))
    own = recipe.empty(SHAPE, columnwise=True, like=x)
    buffers = {"rowwise": tuple(own.rowwise), "columnwise": (own.data, own.columnwise.scale_inv)}
    shared = recipe.empty(SHAPE, columnwise=True, buffers=buffers)
    with pytest.raises(ValueError, match="overlaps out"):
        recipe.quantize(x, columnwise=True, out=shared,
                        **({"scale": 2.0} if isinstance(recipe, DelayedScaling) else {}))


def test_bias_gradient_in_place_of_a_scale(run):
    x = run.array(np.ones((40, 1), np.float32))
    q = fp8.quantize_tensor(x, 2.0)
    with pytest.raises(ValueError, match=r"out\.dbias: overlaps out\.rowwise\.scale_inv"):
        fp8.quantize_tensor(x, 2.0, dbias=True, out=Quantized(q.rowwise, None, q.scale_inv))


@pytest.mark.parametrize("scales_first", [False, True])
def test_the_first_argument_that_overlaps_is_named_wherever_it_lies(scales_first):
    memory, data_at = np.zeros(512 + 16, np.uint8), 16 * scales_first
    data = memory[data_at:data_at + 512].view(float8_e4m3fn).reshape(4, 128)
    scales = memory[512 * (not scales_first):][:16].view(float8_e8m0fnu).reshape(4, 4)
    q = Scaled(data, scales, (4, 128), False, (1, 32), "compact")
    with pytest.raises(ValueError, match=r"^out\.data: overlaps q\.data in memory"):
        fp8.rebase_scales(q, block=(1, 32), out=q)
