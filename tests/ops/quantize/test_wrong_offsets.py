"""group_quantize with offsets whose errors only the device can see."""

from __future__ import annotations

import numpy as np
import pytest
from group_arrays import ALL, BLOCKS, PARTS, matrix, scales_for
from scale_arrays import guarded_like
from tiers import where_kernels_run

import cupy_fp8 as fp8
from cupy_fp8 import testing
from cupy_fp8.calls import group_sizes
from cupy_fp8.kernels import errors, shapes

SUM = errors.MESSAGES[errors.Fact.SPLIT_SUM]


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch, run: testing.Executor) -> testing.Executor:
    monkeypatch.setattr(group_sizes, "check_at_most", lambda *_: None)
    monkeypatch.setattr("cupy_fp8.calls.group_sizes.compare_offsets", lambda *_: None)
    return run


@pytest.mark.parametrize(("columns", "large"), [(16, False), (5, False), (16, True)])
@pytest.mark.parametrize("offsets", [[0, 160, 480], [-16, 160, 320], [0, 320, 480], [2**63 - 1, -(2**63), 0],
                                     [0, 159, 480]], ids=str)
@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
@where_kernels_run                                              # the reference does not use the offsets
def test_wrong_offsets_stay_within_the_arrays(recipe, offsets, columns, large, unchecked, monkeypatch):
    if large:
        monkeypatch.setattr(shapes, "choose_tile", lambda x, large: large)
    run, x, splits = unchecked, matrix(30, columns), np.array([10, 20])
    scales, given_offsets = scales_for(recipe, 2, run), run.array(np.array(offsets))
    for rowwise in (True, False) if recipe in BLOCKS.values() else (True,):
        right = fp8.group_quantize(run.array(x), run.array(splits), recipe, rowwise=rowwise, columnwise=True,
                                   scales=scales)
        out, intact = guarded_like(run, right)
        fp8.group_quantize(run.array(x), run.array(splits), recipe, rowwise=rowwise, columnwise=True,
                           scales=scales, offsets=given_offsets, out=out)
        assert intact()
        assert fp8.asnumpy(out.offsets).tolist() == offsets
        assert fp8.asnumpy(out.splits).tolist() == splits.tolist()
        is_right = offsets == [0, 160, 480] and columns == 16
        assert list(fp8.device_errors(clear=True)) == ([] if is_right else [SUM])
        if is_right:
            for name in PARTS[2:]:
                if getattr(right, name) is not None:
                    testing.assert_bytes_equal(getattr(out, name), getattr(right, name))
