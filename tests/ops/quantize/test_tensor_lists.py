"""Tensor lists: the bytes of the single ops, whatever else is in the list; errors of lists as such. The table
of cases is in cases/quantize/tensor_list.py."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from list_results import (
    DELAYED,
    KINDS,
    LAUNCHES,
    arrays,
    assert_all_same,
    expected,
    kind,
    matrices,
    multi,
    one_element,
    outputs_for,
    poison,
    scales_of,
)
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, backend, cases, testing
from cupy_fp8.calls import tensor_lists
from cupy_fp8.formats import FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e5m2, float16, float32
from cupy_fp8.kernels import shapes
from cupy_fp8.ops.quantize import single_read

EACH: Any = product
#: every layout, block and mode, and the profiles that divide
BLOCK_RECIPES: tuple[Any, ...] = (
    *(BlockScaling(scale_layout=layout) for layout in ("gemm_ready", "compact", "deepgemm_sm90")),
    *(BlockScaling((128, 128), scale_layout=layout) for layout in ("gemm_ready", "compact")),
    *(BlockScaling(block) for block in ((1, 64), (1, 32), (128, 1), (32, 1), (1, None))),
    *(BlockScaling(dtype=float8_e5m2, profile=profile)
      for profile in ("deepgemm", "tilekernels", "vllm", "sglang", "torchao")),
    *(MXScaling(scale_layout=layout, block=block)
      for layout, block in EACH(("compact", "swizzled"), ((1, 32), (32, 32)))),
    *(MXScaling(float8_e5m2, mode=mode, profile="torchao") for mode in ("floor", "ceil", "even")))
DIRECTIONS = ((True, False), (False, True), (True, True))


# ---- bytes ----
def test_by_hand(run):
    a, b = run.array(np.array([[1, 2], [3, 4]], np.float32)), run.array(np.array([[0.5, 300]], np.float32))
    amaxes = run.array(np.array([9, 0], np.float32))
    first, second = fp8.multi_cast_transpose([a, b], run.array(np.array([1, 2], np.float32)), amaxes=amaxes)
    assert first.columnwise is not None
    assert fp8.asnumpy(first.columnwise.data).astype(np.float32).tolist() == [[1, 3], [2, 4]]
    assert fp8.asnumpy(second.dequantize()).tolist() == [[0.5, 224]]
    assert (fp8.asnumpy(second.scale_inv).tolist(), fp8.asnumpy(amaxes).tolist()) == ([0.5], [9, 300])
    assert first.scale_inv is first.columnwise.scale_inv
    assert type(fp8.multi_cast_transpose([a, b], [1.0, 2.0])) is list


@pytest.mark.parametrize("group", ["mixed", "whole", "eight", "empty"])
def test_every_form_of_scales_and_amaxes(group, run):
    """One array, also every second element of it, or backwards; one-element arrays; numbers."""
    xs = [run.array(x) for x in matrices(group)]
    n = len(xs)
    host = np.linspace(0.1, 9, n).astype(np.float32)
    spread = run.array(np.repeat(host, 2))
    forms = (run.array(host), spread[::2], run.array(host[::-1].copy())[::-1],
             [run.array(one_element(s)) for s in host], tuple(map(float, host)), list(host))
    desired = [fp8.cast_transpose(x, float(s)) for x, s in zip(xs, host, strict=True)]
    for scales in forms:
        amaxes = run.array(np.full(2 * n, 0.25, np.float32))
        assert_all_same(run, fp8.multi_cast_transpose(xs, scales, amaxes=amaxes[::2]), desired)
        found = [max(0.25, float(np.abs(fp8.asnumpy(x).astype(np.float32)).max(initial=0))) for x in xs]
        assert fp8.asnumpy(amaxes).tolist() == [value for a in found for value in (a, 0.25)]


@pytest.mark.full
@pytest.mark.parametrize("directions", DIRECTIONS, ids=str)
@pytest.mark.parametrize("recipe", BLOCK_RECIPES, ids=str)
def test_lists_in_blocks(recipe, directions, run, launched):
    """One launch for matrices and batches of any shapes; with rows that suit wide accesses, or not."""
    options: dict[str, Any] = dict(zip(("rowwise", "columnwise"), directions, strict=True))
    for extents in (((130, 150), (0, 8), (3, 5, 9), (37, 8), (2, 130, 72)),
                    ((2, 144, 136), (16, 264), (3, 7, 4), (0, 8))):
        host = [cases.values("normal", shape, bfloat16, i) for i, shape in enumerate(extents)]
        xs = [run.array(x) for x in host]
        desired = [recipe.quantize(x, **options) for x in host]
        outputs = outputs_for(xs, recipe, **options)
        launched.clear()
        assert multi(xs, recipe, out=outputs, **options) is outputs
        if run.name != "reference" and None not in recipe.block:
            assert launched == LAUNCHES[type(recipe)]
        assert_all_same(run, outputs, desired)
        assert_all_same(run, multi(xs, recipe, **options), desired)


@pytest.mark.full
@pytest.mark.parametrize("recipe", [BlockScaling(), BlockScaling((128, 128)), MXScaling()], ids=str)
def test_dtypes_and_memory_of_lists_in_blocks(recipe, run, launched):
    """A launch for each dtype, and for each array whose last two axes are swapped; other views are copied."""
    host = [cases.values("normal", shape, dtype, i) for i, (shape, dtype) in enumerate(
        (((130, 264), bfloat16), ((40, 36), float32), ((16, 8), float16), ((33, 40), float32)))]
    flat = host[0].reshape(-1)
    views = host[0].T.copy(), np.repeat(host[1], 2, axis=1), np.concatenate([flat[:1], flat])
    xs = [run.array(x) for x in (*host, *views)]
    xs[4:] = [xs[4].T, xs[5][:, ::2], xs[6][1:].reshape(130, 264)]
    desired = [recipe.quantize(x, columnwise=True) for x in (*host, host[0], host[1], host[0])]
    outputs = outputs_for(xs, recipe)
    single = "quantize_mx_tile" if isinstance(recipe, MXScaling) else "quantize_block_tile"
    for listed in (xs, xs, [*xs[:5], xs[6]]):
        wanted = [0, 1, 2, 3, 4, 6] if len(listed) < 7 else range(7)
        for _ in range(2):
            launched.clear()
            multi(listed, recipe, out=[outputs[i] for i in wanted])
            assert launched == ([] if run.name == "reference" else [*LAUNCHES[type(recipe)] * 3, single])
            assert_all_same(run, [outputs[i] for i in wanted], [desired[i] for i in wanted])
            poison(outputs)


@pytest.mark.parametrize("recipe", KINDS, ids=kind)
def test_no_arrays_and_no_elements(recipe, run, launched):
    for xs in ([], (), [run.array(np.zeros(shape, np.float32)) for shape in ((0, 5), (5, 0), (0, 0))]):
        given = scales_of(recipe, list(xs))
        results = multi(xs, recipe, **given)
        assert [q.shape for q in results] == [x.shape for x in xs]
        assert multi(xs, recipe, out=results, noop=run.array(one_element(0)), **given) is results
    assert run.name == "reference" or bool(launched) == (recipe in KINDS[:2])   # there are scales to write


@pytest.mark.full
def test_a_thousand(run, launched):
    host = [cases.values("normal", (i % 7 * 5, i % 11 * 3), float32, i) for i in range(1000)]
    xs = [run.array(x) for x in host]
    for recipe in KINDS:
        launched.clear()
        results = multi(xs, recipe, **scales_of(recipe, xs))
        assert launched == ([] if run.name == "reference" else LAUNCHES[type(recipe)])
        assert_all_same(run, results[::37], expected(recipe, host)[::37])


@pytest.mark.full
@needs_host
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), min_size=1, max_size=6),
       st.sampled_from(INPUT_DTYPES), st.sampled_from(FP8_DTYPES),
       st.lists(testing.scales(), min_size=6, max_size=6), st.sampled_from(DIRECTIONS))
def test_any_list(shapes, source, to, scales, directions):
    xs = [cases.values("bits", shape, source, i) for i, shape in enumerate(shapes)]
    options: dict[str, Any] = dict(zip(("rowwise", "columnwise"), directions, strict=True))
    recipes: tuple[Any, ...] = (
        DelayedScaling(to), CurrentScaling(to), BlockScaling(dtype=to), BlockScaling((128, 128), to),
        MXScaling(to), MXScaling(to, scale_layout="swizzled"))
    for recipe in recipes:
        options["scales"] = scales[:len(xs)] if isinstance(recipe, DelayedScaling) else None
        with testing.executor("host"):
            results = multi(xs, recipe, **options)
        testing.assert_bytes_equal(results, multi(xs, recipe, **options))


@pytest.mark.parametrize("source", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("executor", [pytest.param("host", marks=needs_host),
                                      pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tiles_of_large_lists(executor, wide, source, monkeypatch):
    """The tiles that only lists of many megabytes get; with current scaling, those that are read twice."""
    chosen = []
    monkeypatch.setattr(single_read, "choose", lambda *_: None)

    def choose(x, large, size=None):
        chosen.append(size)
        return large

    monkeypatch.setattr(shapes, "choose_tile", choose)
    monkeypatch.setattr(shapes, "fills_wide", lambda columns: wide)
    xs = [cases.values("bits", shape, source, i)
          for i, shape in enumerate(((272, 520), (256, 256), (0, 8), (16, 264)))]
    with testing.executor(executor) as run:
        for recipe, (rowwise, columnwise) in product(KINDS[:2], DIRECTIONS):
            options: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise, **scales_of(recipe, xs)}
            results = fp8.multi_quantize([run.array(x) for x in xs], recipe, **options)
            with testing.executor("reference"):
                testing.assert_bytes_equal(results, multi(xs, recipe, **options))
    assert chosen == [sum(x.size for x in xs)] * 6


@pytest.mark.parametrize("name", ["scales", "amaxes"])
@pytest.mark.parametrize(("wrong", "error", "message"), [
    (1.0, TypeError, "expected a numpy.ndarray or cupy.ndarray, got float"),
    ({}, TypeError, "expected a numpy.ndarray or cupy.ndarray, got dict"),
    ([1.0], ValueError, "expected none for no arrays, got 1"),
    (np.ones((), np.float32), ValueError, "expected none for no arrays, got 1"),
    (np.ones(2, np.float32), ValueError, "expected none for no arrays, got 2")])
def test_no_arrays_have_no_scales_and_no_amaxes(name, wrong, error, message):
    options: dict[str, Any] = {"scales": [], name: wrong}
    with pytest.raises(error, match=re.escape(f"{name}: {message}")):
        fp8.multi_quantize([], DelayedScaling(), **options)
    with pytest.raises(error, match=re.escape(f"{name}: {message}")):
        fp8.multi_cast_transpose([], **options)


def test_wide_tiles_do_not_hang_over_rows():
    assert shapes.fills_wide([5120] * 3 + [7168])
    assert not shapes.fills_wide([1408])  # 11 narrow tiles, or 6 wide ones
    assert not shapes.fills_wide([5120, 1408, 1408])
    assert shapes.fills_wide([51200, 1408, 0])


@pytest.mark.gpu
def test_lists_of_many_megabytes(launched):
    """The real choice of tiles, and more than 2**31 elements in one list."""
    cp = backend.cupy()
    x = cp.random.default_rng(0).standard_normal((8192, 8192), dtype=cp.float32).astype(cp.float16)
    scales = cp.linspace(0.1, 2, 33, dtype=cp.float32)
    results = fp8.multi_cast_transpose([x] * 33, scales)
    assert launched == ["multi_cast_transpose"]
    for i in (0, 17, 32):
        assert fp8.bytes_equal(results[i], fp8.cast_transpose(x, scales[i:i + 1]))


def test_arrays_may_share_an_amax(run):
    x, y = (run.array(cases.values("normal", (16, 8), float32, seed)) for seed in (0, 1))
    shared = run.array(one_element(0))
    fp8.multi_quantize([x, y], DELAYED, scales=[1.0, 1.0], amaxes=[shared, shared])
    assert float(shared[0]) == max(float(abs(x).max()), float(abs(y).max()))


@needs_host
@pytest.mark.parametrize("recipe", KINDS, ids=kind)
def test_more_blocks_than_a_launch_can_have(recipe, monkeypatch):
    monkeypatch.setattr(tensor_lists, "_MOST_BLOCKS", 2)
    xs = [cases.values("normal", (300, 8), bfloat16, i) for i in range(2)]
    outputs = outputs_for(xs, recipe)
    with (testing.executor("host"),
          pytest.raises(ValueError, match=r"^xs: more than the 2 blocks that a launch can")):
        multi(xs, recipe, out=outputs, **scales_of(recipe, xs))
    assert all((a.view(np.uint8) == 0xAA).all() for a in arrays(*outputs))
