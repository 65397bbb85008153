"""Current scaling of many matrices from one read: the same bytes as from two, whatever fits, and whatever was
launched before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from list_results import LAUNCHES
from scale_arrays import guarded
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases import values
from cupy_fp8.cli.selftest import check
from cupy_fp8.formats import bfloat16, float8_e5m2, float16, float32
from cupy_fp8.ops.quantize import single_read

searches = settings(max_examples=40, deadline=None,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
directions = st.sampled_from(cases.DIRECTIONS[:3])
seeds = st.integers(0, 2**32 - 1)
CURRENT, ONCE = fp8.CurrentScaling(), ["multi_cast_current"]
#: matrices with so many tiles are never read just once on this machine
HUGE = 1 << 20


@pytest.fixture(autouse=True)
def however_little(monkeypatch):
    """Let small lists be read once too, as large ones on a GPU."""
    gpu = single_read._gpu
    monkeypatch.setattr(single_read, "_gpu", lambda device: gpu(device)._replace(fewest=0))


def expect_list(results: list[Any], xs: list[np.ndarray], amaxes: Any = None, start: float = 0.0) -> None:
    """Check the bytes of each array separately."""
    for i, (q, x) in enumerate(zip(results, xs, strict=True)):
        amax = np.full(1, start, np.float32)
        testing.assert_bytes_equal(q, reference.quantize_tensor(x, rowwise="rowwise" in q.parts, amax=amax,
                                                                columnwise="columnwise" in q.parts))
        if amaxes is not None:
            testing.assert_bytes_equal(amaxes[i:i + 1], amax)


def machine(monkeypatch, blocks, stages, most_stages=None):
    monkeypatch.setattr(single_read, "_CPU", single_read._Capacity(blocks, stages, most_stages or stages, 0))


@needs_host
@searches
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), min_size=1, max_size=6),
       st.integers(1, 4), st.integers(1, 6), st.sampled_from(["bits", "normal"]),
       st.sampled_from([bfloat16, np.float16]), directions, seeds)
def test_any_list(monkeypatch, shapes, blocks, stages, kind, dtype, directions, seed):
    """Any matrices whose rows allow chunked access, on machines of every size: also some that must be loaded
    twice."""
    with monkeypatch.context() as patch, testing.executor("host") as run:
        machine(patch, blocks, stages)
        patch.setattr(single_read._Capacity, "most", lambda self, _: HUGE)
        xs = []
        for i, (rows, units) in enumerate(shapes):
            x, _ = guarded(run, (rows, 8 * units), np.dtype(dtype), 0)
            bits(x)[...] = bits(values(kind, x.shape, np.dtype(dtype), seed + i))
            xs.append(x)
        amaxes = np.full(len(xs), 2.0, np.float32)
        results = fp8.multi_quantize(xs, CURRENT, amaxes=amaxes, **dict[str, Any](directions))
        expect_list(results, xs, amaxes, 2.0)


@needs_host
@searches
@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.integers(0, 40), st.integers(0, 40),
       st.integers(1, 4), st.integers(1, 6), st.sampled_from([1, 16, 128]),
       st.sampled_from(["bits", "normal"]), directions, seeds)
def test_any_groups(monkeypatch, splits, spare, units, blocks, stages, align, kind, directions, seed):
    with monkeypatch.context() as patch, testing.executor("host") as run:
        machine(patch, blocks, stages)
        patch.setattr(single_read._Capacity, "most", lambda self, _: HUGE)
        x, _ = guarded(run, (sum(splits) + spare, 8 * units), bfloat16, 0)
        bits(x)[...] = bits(values(kind, x.shape, bfloat16, seed))
        amaxes, want_amaxes = (np.full(len(splits), 2.0, np.float32) for _ in range(2))
        given_splits, options = np.array(splits, np.int32), {"align": align, **dict[str, Any](directions)}
        g = fp8.group_quantize(x, given_splits, CURRENT, amaxes=amaxes, **options)
        want = reference.group_quantize(x, given_splits, CURRENT, amaxes=want_amaxes, **options)
        testing.assert_bytes_equal([g, amaxes], [want, want_amaxes])


@needs_host
@pytest.mark.parametrize("order", ["asc", "desc", "random"])
def test_any_order_of_threads(order, monkeypatch, launched):
    """Matrices that fit exactly, that miss it by a tile, and small ones, many of which are on their way at
    once."""
    machine(monkeypatch, 3, 2)
    shapes = [(384, 384), (384, 385 + 7), *[(16, 24)] * 30, (130, 136)]
    xs = [values("normal", shape, float16, i) for i, shape in enumerate(shapes)]
    with testing.executor("host"):
        monkeypatch.setenv("CUPY_FP8_HOST_ORDER", order)
        expect_list(fp8.multi_quantize(xs, CURRENT, columnwise=True), xs)
    assert launched == ONCE


def test_one_launch_where_most_fits(run, launched):
    """Two launches for rows without chunked access, for f32, and if most of the data would be read twice."""
    if run.name == "reference":
        pytest.skip("launches nothing")
    small, large = (136, 264), (4096, 4096) if run.name == "cuda" else (512, 512)
    twice = LAUNCHES[type(CURRENT)]
    many = [large, *[small] * (400 if run.name == "cuda" else 6)]
    for shapes, dtype, expected in (([small] * 5, bfloat16, ONCE), ([small] * 5, float32, twice),
                                    ([small, (3, 4)], float16, twice), ([small, large], float16, twice),
                                    (many, float16, ONCE)):
        xs = [values("normal", shape, dtype, i % 7) for i, shape in enumerate(shapes)]
        launched.clear()
        results = fp8.multi_quantize([run.array(x) for x in xs], CURRENT, columnwise=True)
        assert launched == expected, shapes[:2]
        expect_list(results[:5], xs[:5])


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["multi_quantize", "group_quantize"])
def test_every_case_of_the_table(op, launched):
    """Small lists and groups are read once too, which GPUs do with large ones alone (on the CPU they always
    are)."""
    with testing.executor("cuda") as run:
        for case in cases.OPS[op].cases():
            if "current" in case.options or isinstance(case.options.get("recipe"), fp8.CurrentScaling):
                check(cases.OPS[op], case, run)
    assert any("current" in entry for entry in launched)
    assert any("amax" in entry for entry in launched)


def test_the_largest_element_is_found_wherever_it_is(run):
    """It is in corners of tiles, and of matrices that end in the middle of one."""
    shapes = ((300, 264), (128, 128), (1, 8))
    xs = [np.full(shape, 0.25, bfloat16) for shape in shapes]
    moved = [run.array(x.copy()) for x in xs]
    results = fp8.multi_quantize(moved, CURRENT, columnwise=True)
    for i, (rows, columns) in enumerate(shapes):
        for row in {0, 127, 128, 255, 256, 299} & set(range(rows)):
            for column in {0, 7, 8, 127, 128, 255, 256, 263} & set(range(columns)):
                changed = list(xs)
                changed[i] = xs[i].copy()
                changed[i][row, column] = -3.5
                bits(moved[i])[...] = bits(run.array(changed[i]))
                fp8.multi_quantize(moved, CURRENT, columnwise=True, out=results)
                got = [float(fp8.asnumpy(q.scale_inv)[0]) for q in results]
                want = [np.float32(1) / (np.float32(448) / np.float32(3.5 if j == i else 0.25))
                        for j in range(len(shapes))]
                assert got == want, (i, row, column)
        bits(moved[i])[...] = bits(run.array(xs[i]))


def test_a_choice_counts_what_fits(monkeypatch):
    cpu = np.zeros((1, 8), float16)
    machine = single_read._Capacity(blocks=3, stages=3, most_stages=4, fewest=2)
    monkeypatch.setattr(single_read, "_CPU", machine)
    assert (machine.most(3), machine.most(4)) == (12, 15)
    assert single_read.choose(cpu, [6, 1]) == single_read.Staging(3, 3)
    assert single_read.choose(cpu, [7]) == single_read.choose(cpu, [15]) == single_read.Staging(4, 3)
    assert single_read.choose(cpu, [16]) is None, "most would be read twice"
    assert single_read.choose(cpu, [16, 15, 1]) == single_read.Staging(4, 3)
    assert single_read.choose(cpu, [16, 14, 1]) is None
    assert single_read.choose(cpu, [5]) is None, "too little"
    assert single_read.choose(cpu.astype(float32), [6]) is None
    monkeypatch.setattr(single_read, "_CPU", machine._replace(most_stages=0))
    assert single_read.choose(cpu, [6]) is None
    monkeypatch.setattr(single_read, "_CPU", machine._replace(fewest=0))
    assert single_read.choose(cpu, [2]) == single_read.Staging(3, 2)


@pytest.mark.gpu
def test_large_and_larger_matrices():
    """As many matrices as fill the GPU, one that is loaded twice among them, are compared with one after the
    other."""
    cp = backend.cupy()
    rng = cp.random.default_rng(0)
    shapes = [(2048, 5120), (4096, 4096), (2048, 7168), (2048, 1408), (2056, 5128), (16, 8)] * 3
    xs = [(rng.standard_normal(shape, dtype=cp.float32) * 10.0**(i % 5 - 2)).astype(cp.float16)
          for i, shape in enumerate(shapes)]
    recipe = fp8.CurrentScaling(float8_e5m2)
    for rowwise, columnwise in ((True, True), (True, False), (False, True)):
        results: list[Any] = fp8.multi_quantize(xs, recipe, rowwise=rowwise, columnwise=columnwise)
        for _ in range(3):
            fp8.multi_quantize(xs, recipe, rowwise=rowwise, columnwise=columnwise, out=results)
        for x, q in zip(xs, results, strict=True):
            assert fp8.bytes_equal(q, recipe.quantize(x, rowwise=rowwise, columnwise=columnwise))
    rows = [2048] * 3 + [0, 4100, 16, 2048, 777]
    x = rng.standard_normal((sum(rows) + 100, 5120), dtype=cp.float32).astype(cp.float16)
    g = fp8.group_quantize(x, cp.array(rows), recipe, columnwise=True)
    ends = np.cumsum([0, *rows])
    for i, member in enumerate(g):
        assert fp8.bytes_equal(member, recipe.quantize(x[ends[i]:ends[i + 1]], columnwise=True))
