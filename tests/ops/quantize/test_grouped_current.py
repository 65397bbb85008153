"""group_quantize with current scaling: how the scale of every group is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from group_arrays import CURRENT, PARTS, expect_groups, matrix, parts_of, poison
from test_group_quantize import workspaces_of_one_call

import cupy_fp8 as fp8
from cupy_fp8.formats import bfloat16
from cupy_fp8.kernels import Launch, room
from cupy_fp8.ops.quantize import single_read


@pytest.mark.parametrize("columns", [640, 641])
def test_the_largest_element_is_found_wherever_it_is(columns, run):
    """In the first and last elements of groups, segments of 64 rows, parts of 64 KB, before and after the
    aligned chunks of these."""
    splits = [3, 0, 200, 64, 1]
    x = np.full((280, columns), 0.25, np.float32)
    x[268:] = 1000                                              # no group's
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


@pytest.mark.parametrize("entries", [["group_amax_scale", "group_cast_transpose"], ["group_cast_current"]],
                         ids=len)
def test_the_workspace_is_left_ready(entries, run, monkeypatch):
    """For the next call, of other sizes; both ways to find the scales."""
    launches: list[str] = []
    start, kept = Launch.start, workspaces_of_one_call(monkeypatch)

    def noted(launch: Launch, *values: Any) -> None:
        launches.append(launch.variant.kernel.entry)
        start(launch, *values)

    monkeypatch.setattr(Launch, "start", noted)
    gpu = single_read._gpu
    monkeypatch.setattr(single_read, "_gpu", lambda device: gpu(device)._replace(fewest=0))
    if len(entries) == 2:
        monkeypatch.setattr(single_read, "choose", lambda *_: None)
    splits = run.array(np.array([0] * 70 + [300, 21]))
    out = fp8.group_quantize(run.array(matrix(333, 520)), splits, CURRENT, columnwise=True)
    for seed in range(3):
        x = matrix(333, 520, seed=seed) * np.float32(10.0**-seed).astype(bfloat16)
        poison(parts_of(out, PARTS[1:]).values())
        assert fp8.group_quantize(run.array(x), splits, CURRENT, columnwise=True, out=out) is out
        expect_groups(out, x, fp8.asnumpy(splits), CURRENT, columnwise=True)
    if run.name == "reference":
        assert not launches
        return
    # For so many blocks the CPU has a launch before, as a GPU for large arrays; tiles that are read once
    # always have.
    before = ["group_find_segments"] if run.name == "host" or len(entries) == 1 else []
    assert launches == [*before, *entries] * 4
    words = fp8.asnumpy(kept["group_amax" if len(entries) == 2 else "group_current"])
    if len(entries) == 2:
        assert len(words) == room(1 + 2 * 128)
        assert not words[: 1 + 128].any()
    else:
        launched, finished = words[:2].tolist()
        assert launched >= 4
        assert finished == 0, "blocks that have finished the launch under way"
