"""group_quantize with current scaling: the scale of every group."""

from __future__ import annotations

import numpy as np
import pytest
from group_arrays import CURRENT

import cupy_fp8 as fp8


@pytest.mark.parametrize("columns", [640, 641])
def test_the_largest_element_is_found_wherever_it_is(columns, run):
    """It is in the first and last elements of groups, segments of 64 rows, shares of 64 KB, before and after
    the aligned chunks of these."""
    splits = [3, 0, 200, 64, 1]
    x = np.full((280, columns), 0.25, np.float32)
    x[268:] = 1000                                              # of no group
    starts = np.cumsum([0, *splits]) * columns
    part = (64 << 10) // 4
    for g, rows in enumerate(splits):
        last = rows * columns - 1
        for at in {0, 1, last, 64 * columns - 1, 64 * columns, part - 1, part, 2 * part, 64 * columns + part,
                   77 * columns + 5}:
            if 0 <= at <= last:
                changed = x.copy()
                changed.reshape(-1)[starts[g] + at] = -3.5
                got = fp8.asnumpy(fp8.group_quantize(run.array(changed), splits, CURRENT).scale_inv)
                usual = np.float32(1) / (np.float32(448) / np.float32(0.25))
                want = np.where(np.array(splits) > 0, usual, np.float32(1))
                want[g] = np.float32(1) / (np.float32(448) / np.float32(3.5))
                np.testing.assert_array_equal(got, want.astype(np.float32),
                                              err_msg=f"element {at} of group {g}")
