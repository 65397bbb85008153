"""group_quantize with current scaling: every group by a scale of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from group_arrays import CURRENT, RECIPE, expect_members, matrix, needs_host, scales_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scale_arrays import guarded, raw

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, kernels, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.calls import call
from cupy_fp8.cases.moe.pad import sizes
from cupy_fp8.formats import bfloat16
from cupy_fp8.kernels import Variant
from cupy_fp8.ops.quantize import single_read


@pytest.mark.parametrize("options", [{}, {"eps": 0.5, "pow2_scale": True}], ids=str)
@pytest.mark.parametrize("splits", [[50], [16, 0, 32], [0, 0, 0], [], [7, 13, 0, 1, 20], [0, 50, 0], [0] * 300 + [50]],
                         ids=lambda s: f"{len(s)}of{sum(s)}")
def test_current_scales_are_each_groups_own(splits, options, run):
    x = matrix(50, 48) * np.geomspace(1e-3, 1e3, 50)[:, None].astype(bfloat16)
    for given_splits in (splits, run.array(np.array(splits, np.int32)), run.array(np.array(splits, np.int64))):
        for directions in cases.DIRECTIONS[:3]:
            g = fp8.group_quantize(run.array(x), given_splits, fp8.CurrentScaling(**options), **dict[str, Any](directions))
            assert (g.rowwise is not None, g.columnwise is not None) == (directions["rowwise"], directions["columnwise"])
            expect_members(g, x, splits, None, **options)
            empty = fp8.asnumpy(g.scale_inv)[np.array(splits, int) == 0]
            assert (empty == (0.5 / 256 if options else 1)).all(), "of an amax of 0: eps, or no scale at all"


@needs_host
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 150), max_size=12), st.integers(0, 40), st.integers(1, 600), st.sampled_from(["bits", "normal"]),
       st.sampled_from([bfloat16, np.float16, np.float32]), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_any_current_call(splits, spare, columns, kind, dtype, lead, seed):
    """Runs of every length, at every address."""
    dtype = np.dtype(dtype)
    with testing.executor("host") as run:
        x, _ = guarded(run, (sum(splits) + spare, columns), dtype, lead * dtype.itemsize)
        bits(x)[...] = bits(cases.values(kind, x.shape, dtype, seed))
        expect_members(fp8.group_quantize(x, splits, CURRENT), x, splits, None)


@pytest.mark.parametrize("columns", [640, 641])
def test_the_largest_element_is_found_wherever_it_is(columns, run):
    """In the first and last elements of groups, runs of 64 rows, parts of 64 KB, before and after the aligned chunks of these."""
    splits = [3, 0, 200, 64, 1]
    x = np.full((280, columns), 0.25, np.float32)
    x[268:] = 1000                                                   # no group's
    starts = np.cumsum([0, *splits]) * columns
    part = (64 << 10) // 4
    for g, rows in enumerate(splits):
        last = rows * columns - 1
        for at in {0, 1, last, 64 * columns - 1, 64 * columns, part - 1, part, 2 * part, 64 * columns + part, 77 * columns + 5}:
            if 0 <= at <= last:
                changed = x.copy()
                changed.reshape(-1)[starts[g] + at] = -3.5
                got = fp8.asnumpy(fp8.group_quantize(run.array(changed), splits, CURRENT).scale_inv)
                want = np.where(np.array(splits) > 0, np.float32(1) / (np.float32(448) / np.float32(0.25)), np.float32(1))
                want[g] = np.float32(1) / (np.float32(448) / np.float32(3.5))
                np.testing.assert_array_equal(got, want.astype(np.float32), err_msg=f"element {at} of group {g}")


def test_current_amaxes_are_raised(run):
    x, start = matrix(60, 33), np.array([1e30, 5, -2, 0], np.float32)
    amaxes, splits = run.array(start), [20, 0, 30, 10]
    g = fp8.group_quantize(run.array(x), splits, CURRENT, amaxes=amaxes)
    expect_members(g, x, splits, None)
    ends, want = np.cumsum([0, *splits]), start.copy()
    for i in range(4):
        reference.quantize_tensor(x[ends[i] : ends[i + 1]], None, amax=want[i : i + 1])
    testing.assert_bytes_equal(amaxes, want)


@pytest.mark.parametrize("entries", [["group_amax_scale", "group_cast_transpose"], ["group_cast_current"]], ids=len)
def test_current_scaling_leaves_its_workspace_ready(entries, run, monkeypatch):
    """The same words for every call, as on a GPU, and for other sizes."""
    launches: list[str] = []
    launch, made = Variant.launch, kernels.workspace
    kept: dict[str, Any] = {}

    def noted(self: Variant, x: Any, grid: int, *values: Any) -> None:
        launches.append(self.kernel.entry)
        launch(self, x, grid, *values)

    def same_words(owner: Any, x: Any, use: str, words: int) -> Any:
        return kept.setdefault(use, made(owner, x, use, words))

    monkeypatch.setattr(Variant, "launch", noted)
    monkeypatch.setattr(call, "workspace", same_words)
    gpu = single_read._gpu
    monkeypatch.setattr(single_read, "_gpu", lambda device: gpu(device)._replace(fewest=0))
    if len(entries) == 2:
        monkeypatch.setattr(single_read, "choose", lambda *_: None)
    splits = run.array(np.array([0] * 70 + [300, 21]))
    out = fp8.group_quantize(run.array(matrix(333, 520)), splits, CURRENT, columnwise=True)
    for seed in range(3):
        x = matrix(333, 520, seed=seed) * np.float32(10.0**-seed).astype(bfloat16)
        for a in (out.rowwise, out.columnwise, out.scale_inv, out.offsets):
            cases.poison(a)
        assert fp8.group_quantize(run.array(x), splits, CURRENT, columnwise=True, out=out) is out
        expect_members(out, x, fp8.asnumpy(splits), None)
    if run.name == "reference":
        assert not launches
        return
    # Of so many blocks the CPU has a launch before, as a GPU of large arrays; tiles that are read once always have.
    before = ["group_find_segments"] if run.name == "host" or len(entries) == 1 else []
    assert launches == [*before, *entries] * 4
    words = kept["group_amax" if len(entries) == 2 else "group_current"]
    if len(entries) == 2:
        assert len(words) == 1 + 2 * 128
        assert not fp8.asnumpy(words)[: 1 + 128].any()
    else:
        launched, finished = fp8.asnumpy(words)[:2].tolist()
        assert (launched >= 4, finished) == (True, 0), "launches, and blocks that have finished one that is under way"


def test_noop_of_current_scaling(run):
    host = matrix(20, 16)
    x, splits, recipe = run.array(host), run.array(np.array([8, 12])), fp8.CurrentScaling(pow2_scale=True)
    out, amaxes = fp8.group_quantize(x, splits, recipe, columnwise=True), run.array(np.full(2, -1, np.float32))
    parts = (out.rowwise, out.columnwise, out.scale_inv, out.offsets)
    for value in (1.0, 0.0, 1.0):
        for a in parts:
            cases.poison(a)
        before = fp8.asnumpy(amaxes).copy()
        fp8.group_quantize(x, splits, recipe, columnwise=True, amaxes=amaxes, noop=run.array(np.array([value], np.float32)), out=out)
        if value == 1.0:
            assert all((raw(a).view(np.uint8) == 0xAA).all() for a in parts)
            testing.assert_bytes_equal(amaxes, before)
        else:
            expect_members(out, host, [8, 12], None, pow2_scale=True)
            assert (fp8.asnumpy(amaxes) > 0).all()


def test_one_result_for_both_recipes(run):
    """What is remembered of one is not taken for the other."""
    host, splits, scales = matrix(30, 16), run.array(np.array([10, 20])), run.array(scales_of(2))
    x = run.array(host)
    out = fp8.group_quantize(x, splits, RECIPE, scales=scales)
    for _ in range(2):
        fp8.group_quantize(x, splits, CURRENT, out=out)
        expect_members(out, host, [10, 20], None)
        fp8.group_quantize(x, splits, fp8.CurrentScaling(eps=50.0), out=out)
        expect_members(out, host, [10, 20], None, eps=50.0)
        fp8.group_quantize(x, splits, RECIPE, scales=scales, out=out)
        expect_members(out, host, [10, 20], scales_of(2))


def test_scales_of_any_strides(run):
    x, splits, scales = matrix(30, 16), np.array([10, 20]), scales_of(4)
    on_device = run.array(splits)
    out = fp8.group_quantize(run.array(x), on_device, RECIPE, scales=run.array(scales)[::2])
    for _ in range(2):
        cases.poison(out.rowwise)
        fp8.group_quantize(run.array(x), on_device, RECIPE, scales=run.array(scales)[::2], out=out)
        expect_members(out, x, splits, scales[::2])


@pytest.mark.gpu
def test_graph_replay_of_current_scaling():
    """Two results captured into one graph, each with words of its own."""
    cp = backend.cupy()
    x, splits = fp8.asarray(matrix(500, 48), like="cupy"), cp.asarray(sizes(490, 20))
    fresh = fp8.group_quantize(x, splits, CURRENT)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match=r"^out: used for the first time while a CUDA graph is captured"):
            fp8.group_quantize(x, splits, CURRENT, out=fresh)
        stream.end_capture()
    outs = [fp8.group_quantize(x, splits, CURRENT, columnwise=True) for _ in range(2)]
    amaxes = cp.zeros(20, cp.float32)
    for out in outs:
        fp8.group_quantize(x, splits, CURRENT, columnwise=True, amaxes=amaxes, out=out)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        for out in outs:
            fp8.group_quantize(x, splits, CURRENT, columnwise=True, amaxes=amaxes, out=out)
        graph = stream.end_capture()
        for seed in range(3):
            host, data = sizes(490, 20, seed=seed), matrix(500, 48, seed=seed)
            splits.set(host)
            bits(x).set(bits(data))
            amaxes.fill(0)
            for out in outs:
                for a in (out.rowwise, out.columnwise, out.scale_inv, out.offsets):
                    cases.poison(a)
            graph.launch(stream)
            stream.synchronize()
            for out in outs:
                expect_members(out, data, host, None)
            starts = np.cumsum(host) - host
            want = [float(reference.compute_amax(data[a : a + n])[0]) for a, n in zip(starts, host, strict=True)]
            assert amaxes.tolist() == want
    assert fp8.device_errors() == ()
