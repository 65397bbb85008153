"""group_quantize(align=): the same as pad_groups, then group_quantize."""

from __future__ import annotations

import numpy as np
import pytest
from group_arrays import ALL, DIRECTIONS, RECIPE, expect_groups, matrix, padded, scales_for, scales_of
from scale_arrays import raw

import cupy_fp8 as fp8
from cupy_fp8 import reference, testing
from cupy_fp8.arrays import bits


@pytest.mark.full
@pytest.mark.parametrize("splits", [[50], [16, 0, 32], [0, 0, 0], [], [7, 13, 0, 1, 20], [0, 49, 0], [1] * 50,
                                    [0] * 300 + [50]], ids=lambda s: f"{len(s)}of{sum(s)}")
@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
def test_aligned_is_padded_then_quantised(splits, recipe, run):
    for align, columns, spare in ((16, 48, 0), (128, 37, 9)):
        x = matrix(sum(splits) + spare, columns)
        bits(x)[sum(splits) :] = 0x4242                         # no group's: it may not be seen
        rows, aligned = padded(x, splits, align)
        for given in (splits, np.array(splits, np.int32), np.array(splits, np.int64)):
            on_device = given if isinstance(given, list) else run.array(given)
            for directions in DIRECTIONS:
                g = fp8.group_quantize(run.array(x), on_device, recipe, align=align, **directions,
                                       scales=scales_for(recipe, len(splits), run))
                assert g.shape == (len(x) + (align - 1) * min(len(splits), len(x)), columns)
                expect_groups(g, rows, aligned, recipe, scales_for(recipe, len(splits)), **directions)
                assert fp8.asnumpy(g.splits).tolist() == aligned.tolist()
                assert g.splits.dtype == (np.int64 if isinstance(given, list) else given.dtype)


def test_members_of_padded_groups(run):
    x = matrix(9, 16)
    g = fp8.group_quantize(run.array(x), [4, 0, 5], RECIPE, columnwise=True, align=8,
                           scales=run.array(scales_of(3)))
    assert [member.rowwise.shape for member in g] == [(8, 16), (0, 16), (8, 16)]
    want = reference.quantize_tensor(x[4:], scales_of(3)[2:]).rowwise
    assert want is not None
    testing.assert_bytes_equal(g[2].rowwise.data[:5], want.data)
    assert not raw(g[2].rowwise.data[5:]).any()
    values = g.dequantize()
    assert values.shape == g.shape == (9 + 7 * 3, 16)
