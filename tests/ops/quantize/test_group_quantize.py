"""group_quantize with given scales, against quantize_tensor of each group."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from group_arrays import RECIPE, expect_members, matrix, needs_host, scales_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from large_tiles import check_those_that_ask
from scale_arrays import guarded, raw

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases import OPS
from cupy_fp8.cases.moe.pad import sizes
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float32
from cupy_fp8.grouped import Grouped
from cupy_fp8.kernels import Variant, tiles
from cupy_fp8.ops.quantize import grouped_tensor as op


@pytest.mark.parametrize("splits", [[50], [16, 0, 32], [0, 0, 0], [], [7, 13, 0, 1, 20], [0, 50, 0]], ids=str)
@pytest.mark.parametrize("columns", [48, 37])
def test_each_group_by_itself(splits, columns, run):
    x, scales = matrix(50, columns), scales_of(len(splits))
    for given_splits in (splits, run.array(np.array(splits, np.int32)), run.array(np.array(splits, np.int64))):
        for directions in cases.DIRECTIONS[:3]:
            g = fp8.group_quantize(run.array(x), given_splits, RECIPE, scales=run.array(scales), **dict[str, Any](directions))
            assert (g.rowwise is not None, g.columnwise is not None) == (directions["rowwise"], directions["columnwise"])
            expect_members(g, x, splits, scales)


@needs_host
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 150), max_size=12), st.integers(0, 40), st.integers(1, 40), st.sampled_from([1, 8, 16]),
       st.integers(0, 2**32 - 1))
def test_any_call(splits, spare, columns, multiple, seed):
    splits, columns = [n // multiple * multiple for n in splits], columns * multiple
    x, scales = matrix(sum(splits) + spare, columns, seed=seed), scales_of(len(splits))
    with testing.executor("host"):
        g = fp8.group_quantize(x, splits, RECIPE, columnwise=True, scales=scales)
    expect_members(g, x, splits, scales)


def test_nothing_else_is_written(run):
    x, splits = matrix(70, 40), run.array(np.array([30, 0, 33]))
    parts = {name: guarded(run, shape, np.dtype(dtype)) for name, shape, dtype in (
        ("offsets", (4,), np.int64), ("rowwise", (2800,), float8_e4m3fn), ("columnwise", (2800,), float8_e4m3fn),
        ("scale_inv", (3,), float32))}
    out = Grouped(splits, parts["offsets"][0], (70, 40), *(parts[name][0] for name in ("rowwise", "columnwise", "scale_inv")))
    scales = scales_of(3)
    assert fp8.group_quantize(run.array(x), splits, RECIPE, columnwise=True, scales=run.array(scales), out=out) is out
    expect_members(out, x, [30, 0, 33], scales)
    assert all(intact() for _, intact in parts.values())


def test_amaxes_are_raised(run):
    x, amaxes = matrix(60, 33), run.array(np.array([1e30, 5, 0, 0], np.float32))
    fp8.group_quantize(run.array(x), [20, 0, 30, 10], RECIPE, scales=run.array(scales_of(4)), amaxes=amaxes)
    top = [float(np.abs(x[a:b].astype(np.float32)).max()) for a, b in ((20, 50), (50, 60))]
    assert fp8.asnumpy(amaxes).tolist() == [float(np.float32(1e30)), 5, *top]


def test_given_offsets_are_used(run, monkeypatch):
    x, splits, scales = matrix(60, 16), [20, 0, 40], scales_of(3)
    offsets = run.array(np.array([0, 320, 320, 960]))
    seen: list[int] = []
    launch = Variant.launch

    def noted(self: Variant, x: Any, grid: int, *values: Any) -> None:
        seen.append(grid)
        launch(self, x, grid, *values)

    monkeypatch.setattr(Variant, "launch", noted)
    g = fp8.group_quantize(run.array(x), splits, RECIPE, columnwise=True, scales=run.array(scales), offsets=offsets)
    assert g.offsets is offsets
    expect_members(g, x, splits, scales)
    fp8.group_quantize(run.array(x), splits, RECIPE, columnwise=True, scales=run.array(scales))
    assert len(seen) == (0 if run.name == "reference" else 2), "one launch each, offsets or not"


def test_noop(run):
    x, splits, scales = run.array(matrix(20, 16)), run.array(np.array([8, 12])), run.array(scales_of(2))
    out, amaxes = fp8.group_quantize(x, splits, RECIPE, columnwise=True, scales=scales), run.array(np.zeros(2, np.float32))
    parts = (out.rowwise, out.columnwise, out.scale_inv, out.offsets)
    for value in (1.0, 0.0):
        for a in parts:
            cases.poison(a)
        noop = run.array(np.array([value], np.float32))
        fp8.group_quantize(x, splits, RECIPE, columnwise=True, scales=scales, amaxes=amaxes, noop=noop, out=out)
        untouched = all((raw(a).view(np.uint8) == 0xAA).all() for a in parts) and not fp8.asnumpy(amaxes).any()
        assert untouched == (value == 1.0)


@pytest.mark.full
@needs_host
@pytest.mark.parametrize(("rows", "step"), [(0, 3), (1 << 40, 1)], ids=["wide", "narrow"])
def test_tiles_of_large_arrays(monkeypatch, rows, step):
    """What only arrays of many megabytes get, of groups of at least so many rows. Calls that ask for no tile are those of test_cases.py."""
    monkeypatch.setattr(tiles, "fills_wide", lambda columns: True)
    monkeypatch.setattr(op, "_TALL", rows)
    with testing.executor("host") as run:                           # not of all: blocks of 1024 threads are slow here
        chosen = check_those_that_ask(run, islice(OPS["group_quantize"].cases(), 0, None, step), monkeypatch)
    assert chosen == {tiles.BOTH, tiles.BOTH_NARROW}                # no groups at all have wide ones always


@pytest.mark.gpu
def test_graph_replay_follows_the_sizes():
    cp = backend.cupy()
    x, splits, scales = fp8.asarray(matrix(500, 48), like="cupy"), cp.asarray(sizes(500, 20)), cp.asarray(scales_of(20))
    out = fp8.group_quantize(x, splits, RECIPE, columnwise=True, scales=scales)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        fp8.group_quantize(x, splits, RECIPE, columnwise=True, scales=scales, out=out)
        with pytest.raises(ValueError, match=r"^Grouped: members are found"):
            _ = out[0]
        graph = stream.end_capture()
        for seed in range(3):
            host = sizes(490, 20, seed=seed)
            splits.set(host)
            for a in (out.rowwise, out.columnwise, out.scale_inv, out.offsets):
                cases.poison(a)
            graph.launch(stream)
            stream.synchronize()
            expect_members(out, fp8.asnumpy(x), host, scales_of(20))
    other = fp8.asarray(matrix(500, 48, seed=9), like="cupy")
    for _ in range(2):                                              # what is remembered of the first x is not taken for the second's
        for a in (other, x):
            assert fp8.group_quantize(a, splits, RECIPE, columnwise=True, scales=scales, out=out) is out
            expect_members(out, fp8.asnumpy(a), host, scales_of(20))
    assert fp8.device_errors() == ()


@pytest.mark.gpu
@pytest.mark.full
def test_more_than_two_to_the_31_elements():
    cp = backend.cupy()
    rows, columns, splits = 33_000, 65_536, [5, 32_768, 0, 200]
    x = fp8.full((rows, columns), 1.0, bfloat16, like="cupy")
    x_bits = bits(x)
    x_bits[-30, 7] = int(np.array(3.0, bfloat16).view(np.uint16))
    out = fp8.group_quantize(x, splits, RECIPE, columnwise=True, scales=cp.ones(4, cp.float32))
    one, three = (int(fp8.asarray([v], float8_e4m3fn, like=np).view(np.uint8)[0]) for v in (1.0, 3.0))
    end = sum(splits) * columns
    for flat in (bits(out.rowwise), bits(out.columnwise)):
        assert bool((flat[end:] == 0).all())
        assert int((flat[:end] == one).sum()) == end - 1
    assert int(bits(out[3].rowwise.data)[rows - 30 - 32_773, 7]) == three
    assert int(bits(out[3].columnwise.data)[7, rows - 30 - 32_773]) == three
    out = fp8.group_quantize(x, splits, fp8.CurrentScaling(pow2_scale=True))
    assert fp8.asnumpy(out.scale_inv).tolist() == [1 / 256, 1 / 256, 1.0, 1 / 128]
