"""Groups of arrays: bytes of the single ops, whatever else is in the group; calls that come again; what is refused. The table of cases
is in cases/quantize/tensor_list.py."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from list_results import LAUNCHES, arrays, assert_same, one, raw

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, Quantized, backend, cases, reference, testing
from cupy_fp8.calls import tensor_lists
from cupy_fp8.cases.quantize.tensor_list import GROUPS
from cupy_fp8.formats import FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float16, float32
from cupy_fp8.kernels import tiles
from cupy_fp8.ops.quantize import single_read, tensor_list_blocks

needs_host = pytest.mark.skipif(testing.executor_problem("host") is not None, reason=str(testing.executor_problem("host")))
DELAYED = DelayedScaling()
RECIPES = (DELAYED, CurrentScaling(float8_e5m2), CurrentScaling(pow2_scale=True, eps=0.5), BlockScaling(), MXScaling())
#: Every layout, block and mode, and what divides.
BLOCK_RECIPES: tuple[Any, ...] = (
    *(BlockScaling(scale_layout=layout) for layout in ("gemm_ready", "compact", "deepgemm_sm90")),
    *(BlockScaling((128, 128), scale_layout=layout) for layout in ("gemm_ready", "compact")),
    *(BlockScaling(block) for block in ((1, 64), (1, 32), (128, 1), (32, 1), (1, None))),
    *(BlockScaling(dtype=float8_e5m2, profile=profile) for profile in ("deepgemm", "tilekernels", "vllm", "sglang", "torchao")),
    *(MXScaling(scale_layout=layout, block=block) for layout, block in product(("compact", "swizzled"), ((1, 32), (32, 32)))),
    *(MXScaling(float8_e5m2, mode=mode, profile="torchao") for mode in ("floor", "ceil", "even")))
DIRECTIONS = ((True, False), (False, True), (True, True))


def matrices(group: str, dtype: Any = bfloat16, seed: int = 0) -> list[np.ndarray]:
    return [cases.values("normal", shape, dtype, seed + i) for i, shape in enumerate(GROUPS[group])]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A weak reference to every plan that is made: each is an upload."""
    made: list[Any] = []
    init = tensor_lists.Plan.__init__

    def noted(self: Any, *args: Any) -> None:
        made.append(weakref.ref(self))
        init(self, *args)

    monkeypatch.setattr(tensor_lists.Plan, "__init__", noted)
    return made


# ---- bytes ----
def test_by_hand(run):
    a, b = run.array(np.array([[1, 2], [3, 4]], np.float32)), run.array(np.array([[0.5, 300]], np.float32))
    amaxes = run.array(np.array([9, 0], np.float32))
    first, second = fp8.multi_cast_transpose([a, b], run.array(np.array([1, 2], np.float32)), amaxes=amaxes)
    assert first.columnwise is not None
    assert fp8.asnumpy(first.columnwise.data).astype(np.float32).tolist() == [[1, 3], [2, 4]]
    assert fp8.asnumpy(second.dequantize()).tolist() == [[0.5, 224]]
    assert (fp8.asnumpy(second.scale_inv).tolist(), fp8.asnumpy(amaxes).tolist()) == ([0.5], [9, 300])
    assert type(fp8.multi_cast_transpose([a, b], [1.0, 2.0])) is list


@pytest.mark.parametrize("group", ["mixed", "whole", "empty"])
def test_equals_the_single_op(group, run):
    xs = [run.array(x) for x in matrices(group)]
    scales = run.array(np.linspace(0.1, 9, len(xs)).astype(np.float32))
    amaxes, amax = run.array(np.full(len(xs), 0.25, np.float32)), run.array(np.full(len(xs), 0.25, np.float32))
    for i, q in enumerate(fp8.multi_cast_transpose(xs, scales, amaxes=amaxes, dtype=float8_e5m2)):
        assert_same(q, fp8.cast_transpose(xs[i], scales[i:i + 1], amax=amax[i:i + 1], dtype=float8_e5m2))
        assert q.columnwise is not None
        assert q.scale_inv is q.columnwise.scale_inv
    testing.assert_bytes_equal(amaxes, amax)


@pytest.mark.full
@pytest.mark.parametrize("directions", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_multi_quantize_equals_the_recipe(recipe, directions, run):
    rowwise, columnwise = directions
    xs = [run.array(x) for x in matrices("mixed", float16)]
    scales = [run.array(one(0.5 + i)) for i in range(len(xs))] if isinstance(recipe, DelayedScaling) else None
    results = fp8.multi_quantize(xs, recipe, rowwise=rowwise, columnwise=columnwise, scales=scales)
    for i, (x, q) in enumerate(zip(xs, results, strict=True)):
        assert_same(q, recipe.quantize(x, rowwise=rowwise, columnwise=columnwise, **({"scale": scales[i]} if scales else {})))


@pytest.mark.full
@pytest.mark.parametrize("directions", DIRECTIONS, ids=str)
@pytest.mark.parametrize("recipe", BLOCK_RECIPES, ids=str)
def test_lists_in_blocks(recipe, directions, run, launched):
    """One launch for matrices and batches of any shapes, the bytes of each by itself; with rows that suit wide accesses, or not."""
    rowwise, columnwise = directions
    options: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise}
    for shapes in (((130, 150), (0, 8), (3, 5, 9), (37, 8), (2, 130, 72)), ((2, 144, 136), (16, 264), (3, 7, 4), (0, 8))):
        host = [cases.values("normal", shape, bfloat16, i) for i, shape in enumerate(shapes)]
        xs = [run.array(x) for x in host]
        desired = [recipe.quantize(x, **options) for x in host]
        outputs = [recipe.empty(x.shape, like=x, **options) for x in xs]
        for a in arrays(*outputs):
            cases.poison(a)
        launched.clear()
        assert fp8.multi_quantize(xs, recipe, outputs=outputs, **options) is outputs
        if run.name != "reference" and None not in recipe.block:
            assert launched == LAUNCHES[type(recipe)]
        for q, fresh, want in zip(outputs, fp8.multi_quantize(xs, recipe, **options), desired, strict=True):
            assert_same(run.numpy(q), want)
            assert_same(run.numpy(fresh), want)


@pytest.mark.full
@pytest.mark.parametrize("recipe", [BlockScaling(), BlockScaling((128, 128)), MXScaling()], ids=str)
def test_dtypes_and_memory_of_lists_in_blocks(recipe, run, launched):
    """A launch for each dtype, and for each array whose last two axes are swapped; other views are copied."""
    host = [cases.values("normal", shape, dtype, i) for i, (shape, dtype) in enumerate(
        (((130, 264), bfloat16), ((40, 36), float32), ((16, 8), float16), ((33, 40), float32)))]
    flat = host[0].reshape(-1)
    xs = [run.array(x) for x in (*host, host[0].T.copy(), np.repeat(host[1], 2, axis=1), np.concatenate([flat[:1], flat]))]
    xs[4:] = [xs[4].T, xs[5][:, ::2], xs[6][1:].reshape(130, 264)]
    desired = [recipe.quantize(x, columnwise=True) for x in (*host, host[0], host[1], host[0])]
    outputs = outputs_for(run, xs, recipe)
    single = "quantize_mx_tile" if isinstance(recipe, MXScaling) else "quantize_block_tile"
    for _ in range(2):
        launched.clear()
        fp8.multi_quantize(xs, recipe, columnwise=True, outputs=outputs)
        assert launched == ([] if run.name == "reference" else [*LAUNCHES[type(recipe)] * 3, single])
        for q, want in zip(outputs, desired, strict=True):
            assert_same(run.numpy(q), want)
        for a in arrays(*outputs):
            cases.poison(a)


@pytest.mark.parametrize("recipe", [BlockScaling(), MXScaling()], ids=str)
def test_nothing_to_launch(recipe, run, launched):
    for xs in ([], [run.array(np.zeros(shape, np.float32)) for shape in ((0, 5), (5, 0), (2, 0, 3))]):
        results = fp8.multi_quantize(xs, recipe, columnwise=True)
        assert [q.shape for q in results] == [x.shape for x in xs]
        assert fp8.multi_quantize(xs, recipe, columnwise=True, outputs=results, noop=run.array(one(0))) is results
    assert launched == []


def test_order_and_company_do_not_matter(run):
    """Each array's bytes are its own, wherever it stands."""
    xs, scales = [run.array(x) for x in matrices("mixed")], [0.5 + i for i in range(len(GROUPS["mixed"]))]
    together = fp8.multi_cast_transpose(xs, scales)
    backwards = fp8.multi_cast_transpose(xs[::-1], scales[::-1])[::-1]
    for i, (q, other) in enumerate(zip(together, backwards, strict=True)):
        assert_same(other, q)
        assert_same(fp8.multi_cast_transpose([xs[i]], [scales[i]])[0], q)
    current = fp8.multi_quantize(xs, CurrentScaling())
    for q, other in zip(current, fp8.multi_quantize(xs[::-1], CurrentScaling())[::-1], strict=True):
        assert_same(other, q)


@pytest.mark.full
def test_a_thousand(run, launched):
    host = [cases.values("normal", (i % 7 * 5, i % 11 * 3), float32, i) for i in range(1000)]
    xs = [run.array(x) for x in host]
    scales = run.array(np.linspace(0.01, 3, 1000).astype(np.float32))
    results = fp8.multi_cast_transpose(xs, scales)
    assert launched == ([] if run.name == "reference" else ["multi_cast_transpose"])
    for i in range(0, 1000, 37):
        assert_same(run.numpy(results[i]), reference.cast_transpose(host[i], fp8.asnumpy(scales)[i:i + 1]))
    for recipe in (CurrentScaling(), BlockScaling(), MXScaling()):
        launched.clear()
        results = fp8.multi_quantize(xs, recipe, columnwise=True)
        assert launched == ([] if run.name == "reference" else LAUNCHES[type(recipe)])
        for i in range(0, 1000, 37):
            assert_same(run.numpy(results[i]), recipe.quantize(host[i], columnwise=True))


@pytest.mark.full
@needs_host
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), min_size=1, max_size=6), st.sampled_from(INPUT_DTYPES),
       st.sampled_from(FP8_DTYPES), st.lists(testing.scales(), min_size=6, max_size=6), st.sampled_from([(True, False), (False, True),
                                                                                                      (True, True)]))
def test_any_group(shapes, source, to, scales, directions):
    xs = [cases.values("bits", shape, source, i) for i, shape in enumerate(shapes)]
    options: dict[str, Any] = dict(zip(("rowwise", "columnwise"), directions, strict=True))
    recipes: tuple[Any, ...] = (DelayedScaling(to), CurrentScaling(to), BlockScaling(dtype=to), BlockScaling((128, 128), to), MXScaling(to),
                                MXScaling(to, scale_layout="swizzled"))
    for recipe in recipes:
        given_scales = scales[:len(xs)] if isinstance(recipe, DelayedScaling) else None
        with testing.executor("host"):
            results = fp8.multi_quantize(xs, recipe, scales=given_scales, **options)
        for q, desired in zip(results, fp8.multi_quantize(xs, recipe, scales=given_scales, **options), strict=True):
            assert_same(q, desired)


@pytest.mark.parametrize("source", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("executor", [pytest.param("host", marks=needs_host), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tiles_of_large_groups(executor, wide, source, monkeypatch):
    """Groups in whole patches with the tiles that only many megabytes get, of current scaling those that are read twice."""
    chosen = []
    monkeypatch.setattr(single_read, "choose", lambda *_: None)

    def choose(x, large, size=None):
        chosen.append(size)
        return large

    monkeypatch.setattr(tiles, "choose", choose)
    monkeypatch.setattr(tiles, "fills_wide", lambda columns: wide)
    shapes = ((272, 520), (256, 256), (0, 8), (16, 264))
    xs = [cases.values("bits", shape, source, i) for i, shape in enumerate(shapes)]
    with testing.executor(executor) as run:
        for recipe, scales in ((DelayedScaling(), [0.3, 1.0, 2.0, 7.0]), (CurrentScaling(), None)):
            for rowwise, columnwise in ((True, True), (True, False), (False, True)):
                options: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise, "scales": scales}
                results = fp8.multi_quantize([run.array(x) for x in xs], recipe, **options)
                with testing.executor("reference"):
                    desired = fp8.multi_quantize(xs, recipe, **options)
                for q, want in zip(results, desired, strict=True):
                    assert_same(run.numpy(q), want)
    assert chosen == [sum(x.size for x in xs)] * 6


def test_wide_tiles_do_not_hang_over_rows():
    assert tiles.fills_wide([5120] * 3 + [7168])
    assert not tiles.fills_wide([1408])                             # 11 narrow tiles, or 6 wide ones
    assert not tiles.fills_wide([5120, 1408, 1408])
    assert tiles.fills_wide([51200, 1408, 0])


@pytest.mark.gpu
def test_groups_of_many_megabytes(launched):
    """The real choice of tiles, and more than 2**31 elements in one group."""
    cp = backend.cupy()
    x = cp.random.default_rng(0).standard_normal((8192, 8192), dtype=cp.float32).astype(cp.float16)
    scales = cp.linspace(0.1, 2, 33, dtype=cp.float32)
    results = fp8.multi_cast_transpose([x] * 33, scales)
    assert launched == ["multi_cast_transpose"]
    for i in (0, 17, 32):
        assert_same(results[i], fp8.cast_transpose(x, scales[i:i + 1]))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [BlockScaling(), MXScaling()], ids=str)
def test_a_large_batch_in_a_list(recipe, launched):
    """More than 2**31 elements: the last matrices are found, and their scales."""
    cp = backend.cupy()
    x = cp.random.default_rng(0).standard_normal((8192, 8192), dtype=cp.float32).astype(cp.float16)
    batch = cp.empty((33, 8192, 8192), cp.float16)
    batch[:] = x
    batch[32] *= cp.float16(0.5)
    small, large = fp8.multi_quantize([x, batch], recipe)
    assert launched == LAUNCHES[type(recipe)]
    assert_same(small, recipe.quantize(x))
    for i in (0, 31, 32):
        want = recipe.quantize(batch[i])
        testing.assert_bytes_equal(large.data[i], want.data)
        testing.assert_bytes_equal(large.scale_inv[i], want.scale_inv)


# ---- results given ----
def outputs_for(run: testing.Executor, xs: list[Any], recipe: Any = DELAYED, columnwise: bool = True) -> list[Quantized]:
    outputs = [recipe.empty(x.shape, columnwise=columnwise, like=x) for x in xs]
    for a in arrays(*outputs):
        cases.poison(a)
    return outputs


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_outputs_are_written_in_place(recipe, run):
    xs = [run.array(x) for x in matrices("mixed")]
    scales = [1.5] * len(xs) if isinstance(recipe, DelayedScaling) else None
    desired = fp8.multi_quantize(xs, recipe, columnwise=True, scales=scales)
    outputs = outputs_for(run, xs, recipe)
    for _ in range(3):
        assert fp8.multi_quantize(xs, recipe, columnwise=True, scales=scales, outputs=outputs) is outputs
        for q, want in zip(outputs, desired, strict=True):
            assert_same(q, want)
        for a in arrays(*outputs):
            cases.poison(a)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_noop(recipe, run):
    xs = [run.array(x) for x in matrices("mixed")]
    delayed = isinstance(recipe, DelayedScaling)
    options: dict[str, Any] = {"columnwise": True, "scales": [1.5] * len(xs) if delayed else None}
    amaxes = run.array(np.full(len(xs), -7, np.float32))
    if delayed or isinstance(recipe, CurrentScaling):
        options["amaxes"] = amaxes
    outputs, flag = outputs_for(run, xs, recipe), run.array(one(1.0))
    before = raw(outputs)
    for _ in range(2):
        assert fp8.multi_quantize(xs, recipe, noop=flag, outputs=outputs, **options) is outputs
        assert raw(outputs) == before
        assert fp8.asnumpy(amaxes).tolist() == [-7] * len(xs)
    flag[...] = 0
    fp8.multi_quantize(xs, recipe, noop=flag, outputs=outputs, **options)
    for q, want in zip(outputs, fp8.multi_quantize(xs, recipe, **{**options, "amaxes": None}), strict=True):
        assert_same(q, want)


def test_the_workspace_is_left_as_it_was(run):
    """Scales follow the values of each call, with the same plan."""
    xs = [run.array(x) for x in matrices("whole")]
    outputs = fp8.multi_quantize(xs, CurrentScaling())
    for factor in (2, 0.125):
        for x in xs:
            x *= x.dtype.type(factor)
        fp8.multi_quantize(xs, CurrentScaling(), outputs=outputs)
        for x, q in zip(xs, outputs, strict=True):
            assert_same(q, fp8.quantize_tensor(x))


@needs_host
def test_calls_that_come_again_make_no_table(plans):
    """The same arrays, and views of the same memory; others are noticed, also where an identity comes again."""
    with testing.executor("host") as run:
        xs = matrices("mixed")
        history = np.zeros((2, len(xs)), np.float32)
        state = np.ones(len(xs), np.float32)
        outputs = outputs_for(run, xs)
        for _ in range(3):
            fp8.multi_cast_transpose(xs, state, amaxes=history[0], outputs=outputs)
        assert len(plans) == 1
        for _ in range(2):
            fp8.multi_cast_transpose([x[:] for x in xs], [state[i:i + 1] for i in range(len(xs))], amaxes=history[0], outputs=outputs)
        assert len(plans) == 1                              # found by their addresses
        fp8.multi_cast_transpose(xs, state, amaxes=history[1], outputs=outputs)
        assert len(plans) == 2
        fp8.multi_cast_transpose(xs, [2.0] * len(xs), outputs=outputs)
        assert len(plans) == 3
        for i in range(8):
            xs[0] = cases.values("normal", xs[0].shape, bfloat16, 100 + i)         # the array before is gone
            fp8.multi_cast_transpose(xs, state, outputs=outputs)
            assert_same(outputs[0], fp8.cast_transpose(xs[0], 1.0))
        gc.collect()
        assert sum(plan() is not None for plan in plans) <= tensor_lists.KEPT
        del outputs
        gc.collect()
        assert not any(plan() for plan in plans)


@needs_host
@pytest.mark.parametrize("recipe", [BlockScaling(), MXScaling()], ids=str)
def test_lists_in_blocks_that_come_again_make_no_table(recipe, plans, launched):
    with testing.executor("host") as run:
        xs = matrices("mixed")
        outputs = outputs_for(run, xs, recipe)
        for i in range(3):
            fp8.multi_quantize(xs if i != 1 else [x[:] for x in xs], recipe, columnwise=True, outputs=outputs)
        assert (len(plans), launched) == (1, LAUNCHES[type(recipe)] * 3)
        other = outputs_for(run, xs, recipe)
        fp8.multi_quantize(xs, recipe, columnwise=True, outputs=[outputs[0], *other[1:]])         # another result, of the same plan's owner
        for q, want in zip(other[1:], outputs[1:], strict=True):
            assert_same(q, want)
        xs[3] *= bfloat16.type(0.5)
        fp8.multi_quantize(xs, recipe, columnwise=True, outputs=outputs)
        assert len(plans) == 2
        assert_same(outputs[3], recipe.quantize(xs[3], columnwise=True))
        for i in range(8):
            xs[0] = cases.values("normal", xs[0].shape, bfloat16, 100 + i)         # the array before is gone
            fp8.multi_quantize(xs, recipe, columnwise=True, outputs=outputs)
            assert_same(outputs[0], recipe.quantize(xs[0], columnwise=True))
        gc.collect()
        assert sum(plan() is not None for plan in plans) <= tensor_lists.KEPT
        x = cases.values("normal", (16, 24), bfloat16)
        single = outputs_for(run, [x], recipe)
        fp8.multi_quantize([x], recipe, columnwise=True, outputs=single)
        x.shape = (24, 16)
        with pytest.raises(ValueError, match=r"outputs\[0\]\.rowwise: "):
            fp8.multi_quantize([x], recipe, columnwise=True, outputs=single)
        del outputs, other, single
        gc.collect()
        assert not any(plan() for plan in plans)


@needs_host
def test_a_shape_that_is_assigned_is_noticed():
    with testing.executor("host") as run:
        x = cases.values("normal", (16, 24), bfloat16)
        outputs = outputs_for(run, [x])
        fp8.multi_cast_transpose([x], [1.0], outputs=outputs)
        x.shape = (24, 16)
        with pytest.raises(ValueError, match=r"outputs\[0\]\.rowwise: "):
            fp8.multi_cast_transpose([x], [1.0], outputs=outputs)


@pytest.mark.gpu
def test_captured_graphs(launched):
    cp = backend.cupy()
    with testing.executor("cuda") as run:
        xs = [run.array(x) for x in matrices("mixed")]
        outputs, scales, amaxes = outputs_for(run, xs), cp.ones(len(xs), cp.float32), cp.zeros((2, len(xs)), cp.float32)
        stream = cp.cuda.Stream(non_blocking=True)

        def call(row: int) -> None:
            fp8.multi_cast_transpose(xs, scales, amaxes=amaxes[row], outputs=outputs)

        call(0)
        cp.cuda.get_current_stream().synchronize()
        with stream:
            stream.begin_capture()
            try:
                call(0)
                with pytest.raises(ValueError, match="call once before the capture"):
                    call(1)
                with pytest.raises(ValueError, match="out: needed"):
                    fp8.multi_cast_transpose(xs, scales)
            finally:
                graph = stream.end_capture()
            for i in range(6):                              # more tables than are kept: not at the captured one's cost
                fp8.multi_cast_transpose(xs, [float(i)] * len(xs), outputs=outputs)
            scales.fill(3)
            for _ in range(2):
                for a in arrays(*outputs):
                    cases.poison(a)
                amaxes.fill(0)
                graph.launch(stream)
            stream.synchronize()
        for i, (x, q) in enumerate(zip(xs, outputs, strict=True)):
            amax = cp.zeros(1, cp.float32)
            assert_same(q, fp8.cast_transpose(x, 3.0, amax=amax))
            testing.assert_bytes_equal(amaxes[0, i:i + 1], amax)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [BlockScaling(), MXScaling()], ids=str)
def test_captured_graphs_in_blocks(recipe, launched):
    cp = backend.cupy()
    with testing.executor("cuda") as run:
        xs = [run.array(x) for x in matrices("mixed")]
        outputs, others, flag = outputs_for(run, xs, recipe), outputs_for(run, xs, recipe), cp.zeros(1, cp.float32)
        fp8.multi_quantize(xs, recipe, columnwise=True, outputs=outputs)
        cp.cuda.get_current_stream().synchronize()
        stream = cp.cuda.Stream(non_blocking=True)
        launched.clear()
        with stream:
            stream.begin_capture()
            try:
                fp8.multi_quantize(xs, recipe, columnwise=True, outputs=outputs, noop=flag)
                with pytest.raises(ValueError, match="call once before the capture"):
                    fp8.multi_quantize(xs, recipe, columnwise=True, outputs=others)
                with pytest.raises(ValueError, match="out: needed"):
                    fp8.multi_quantize(xs, recipe)
            finally:
                graph = stream.end_capture()
            assert launched == LAUNCHES[type(recipe)]
            for x in xs:
                x *= x.dtype.type(0.5)
            for value in (0.0, 1.0):
                flag.fill(value)
                for a in arrays(*outputs):
                    cases.poison(a)
                before = raw(outputs)
                graph.launch(stream)
                stream.synchronize()
                assert (raw(outputs) == before) == bool(value)
                if not value:
                    for x, q in zip(xs, outputs, strict=True):
                        assert_same(q, recipe.quantize(x, columnwise=True))


# ---- what is refused ----
def refused(run: testing.Executor, error: type[Exception], message: str, call: Callable[..., Any], outputs: list[Quantized]) -> None:
    before = raw(outputs)
    with pytest.raises(error, match=message):
        call()
    assert raw(outputs) == before, "something was written"


def test_lists_that_do_not_fit(run):
    xs = [run.array(x) for x in matrices("whole")]
    n, outputs = len(xs), outputs_for(run, xs)

    def case(error: type[Exception], message: str, xs: Any = xs, scales: Any = (1.0,) * n, outputs: Any = outputs, **options: Any) -> None:
        refused(run, error, message, lambda: fp8.multi_cast_transpose(xs, scales, outputs=outputs, **options), given_outputs)

    given_outputs = outputs
    case(TypeError, "xs: expected a list, got ndarray", xs=xs[0])
    case(ValueError, rf"scales: expected {n}, one for each array of xs, got {n - 1}", scales=[1.0] * (n - 1))
    case(ValueError, rf"scales: expected shape \({n},\)", scales=run.array(np.ones(n + 1, np.float32)))
    case(ValueError, "scales: expected one for each array, got None", scales=None)
    case(TypeError, "scales: expected dtype float32, got float64", scales=run.array(np.ones(n)))
    case(TypeError, r"scales\[1\]: expected", scales=[1.0, "two", *[1.0] * (n - 2)])
    case(ValueError, r"amaxes: expected", amaxes=[])
    case(TypeError, r"amaxes\[0\]: expected", amaxes=[1.0] * n)
    case(ValueError, r"outputs: expected", outputs=outputs[1:])
    case(TypeError, "outputs: expected a list", outputs=outputs[0])
    case(TypeError, r"outputs\[1\]: .*expected a Quantized", outputs=[outputs[0], None, *outputs[2:]])
    case(ValueError, r"outputs\[0\]\.rowwise: expected per-tensor data of shape", outputs=[outputs[1], outputs[0], *outputs[2:]])
    case(ValueError, r"outputs\[1\]: no columnwise part", outputs=[outputs[0], DELAYED.empty(xs[1].shape, like=xs[1]), *outputs[2:]])
    case(TypeError, r"xs\[1\]: expected dtype bfloat16, that of xs\[0\], got float32", xs=[xs[0], xs[1].astype(np.float32), *xs[2:]])
    case(ValueError, r"xs\[2\]: expected a matrix", xs=[*xs[:2], xs[2].reshape(-1), *xs[3:]])
    case(TypeError, r"xs\[0\]: expected dtype", xs=[outputs[0].data, *xs[1:]])
    case(TypeError, r"xs\[1\]: expected a numpy", xs=[xs[0], [1.0], *xs[2:]])
    case(TypeError, "dtype", dtype=float16)
    case(ValueError, "noop: needs outputs=", outputs=None, noop=run.array(one(0)))
    empty: Any
    for empty in ([], ()):
        assert list(fp8.multi_cast_transpose(empty, empty)) == []
    case(ValueError, "scales: expected none", xs=[], outputs=[])


def test_memory_that_overlaps(run):
    x = run.array(cases.values("normal", (16, 8), float32))
    y = run.array(cases.values("normal", (16, 8), float32, 1))
    outputs = outputs_for(run, [x, y])
    inside = x.view(np.uint8).reshape(-1)[:128].view(float8_e4m3fn)

    def empty(data: Any) -> Quantized:
        return DelayedScaling().empty((16, 8), like=x, buffers={"rowwise": (data.reshape(16, 8), outputs[0].scale_inv)})

    scales = run.array(np.ones(2, np.float32))

    def call(outputs: Any, **options: Any) -> Any:
        return lambda: fp8.multi_quantize([x, y], DelayedScaling(), **{"scales": scales, "outputs": outputs, **options})

    before = fp8.asnumpy(x).tobytes()
    rowwise = outputs_for(run, [x, y], columnwise=False)
    refused(run, ValueError, "overlaps", call([rowwise[0], rowwise[0]]), rowwise)
    refused(run, ValueError, "overlaps xs|overlaps the input", call([rowwise[0], empty(inside)]), rowwise)
    refused(run, ValueError, r"amaxes\[0\]: overlaps scales\[0\]", call(rowwise, amaxes=scales), rowwise)
    refused(run, ValueError, "overlaps", call(rowwise, amaxes=[rowwise[0].scale_inv, run.array(one(0))]), rowwise)
    refused(run, ValueError, "overlaps", call(rowwise, noop=rowwise[1].scale_inv), rowwise)
    assert fp8.asnumpy(x).tobytes() == before
    call(rowwise)()
    refused(run, ValueError, "overlaps", call(rowwise, noop=rowwise[1].scale_inv), rowwise)        # also of a call that is known
    shared = run.array(one(0))
    fp8.multi_quantize([x, y], DelayedScaling(), scales=scales, amaxes=[shared, shared])           # of both
    assert float(shared[0]) == max(float(abs(x).max()), float(abs(y).max()))


@needs_host
def test_more_blocks_than_a_launch_can_have(monkeypatch):
    monkeypatch.setattr(tensor_list_blocks, "_MOST_BLOCKS", 2)
    with testing.executor("host") as run:
        xs = [run.array(cases.values("normal", (300, 8), bfloat16, i)) for i in range(2)]
        outputs = outputs_for(run, xs, MXScaling())
        refused(run, ValueError, "xs: more than the 2 blocks that a launch can have; split the list",
                lambda: fp8.multi_quantize(xs, MXScaling(), columnwise=True, outputs=outputs), outputs)


def test_recipes_that_do_not_fit(run):
    xs = [run.array(x) for x in matrices("whole")]
    n = len(xs)
    for error, message, recipe, options in (
            (TypeError, "recipe: expected", "current", {}),
            (ValueError, "scales: delayed scaling needs", DelayedScaling(), {}),
            (ValueError, "scales: current scaling", CurrentScaling(), {"scales": [1.0] * n}),
            (ValueError, "scales, amaxes: belong", MXScaling(), {"amaxes": [1.0] * n}),
            (ValueError, "rowwise, columnwise: expected at least one", CurrentScaling(), {"rowwise": False}),
            (ValueError, "rowwise, columnwise: expected at least one", BlockScaling(), {"rowwise": False}),
            (ValueError, "noop: needs outputs=", MXScaling(), {"noop": run.array(one(0))})):
        with pytest.raises(error, match=message):
            fp8.multi_quantize(xs, recipe, **options)           # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", [BlockScaling(), MXScaling(), MXScaling(block=(32, 32)), CurrentScaling()], ids=str)
def test_nothing_is_written_where_the_last_is_wrong(recipe, run):
    xs = [run.array(x) for x in matrices("whole")]
    outputs = outputs_for(run, xs, recipe)
    wrong: Iterator[tuple[Any, Any]] = iter((
        (xs, [*outputs[:-1], recipe.empty((3, 5), columnwise=True, like=xs[0])]), (xs, [*outputs[:-1], outputs[0]]),
        ([*xs[:-1], xs[-1].view(np.uint16)], outputs), ([*xs[:-1], xs[-1].reshape(-1)], outputs), (xs, [*outputs[:-1], None])))
    for bad_xs, bad_outputs in wrong:
        refused(run, (TypeError, ValueError), r"xs|outputs|array", lambda: fp8.multi_quantize(                       # type: ignore[arg-type]
            bad_xs, recipe, columnwise=True, outputs=bad_outputs), outputs)  # noqa: B023


@pytest.mark.gpu
def test_kinds_are_not_mixed():
    cp = backend.cupy()
    x, y = np.ones((2, 2), np.float32), cp.ones((2, 2), cp.float32)
    for recipe in (CurrentScaling(), MXScaling()):
        with pytest.raises(TypeError, match=r"xs\[1\]: a numpy array among cupy arrays"):
            fp8.multi_quantize([y, x], recipe)
