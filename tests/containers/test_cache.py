"""WeightCache: what is launched when, at which addresses, and what an error leaves behind."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import numpy as np
import pytest
from cached_weights import RECIPES, SHAPES, addresses, change, expected, weights_of
from list_results import LAUNCHES, assert_same, one_element, raw
from tiers import quick_if

import cupy_fp8 as fp8
from cupy_fp8 import CurrentScaling, DelayedScaling, MXScaling, WeightCache, backend, cases, testing
from cupy_fp8.calls.keys import identities
from cupy_fp8.formats import bfloat16


@pytest.mark.parametrize("recipe", quick_if(lambda r: isinstance(r, fp8.BlockScaling), RECIPES),
                         ids=lambda r: type(r).__name__)
def test_a_step_of_training(recipe, run, launched):
    """A miss, hits that launch nothing, an update at the same addresses, and more directions."""
    cache, weights = WeightCache(recipe), weights_of(run)
    scales = [1.0, 2.0, 3.0, 4.0] if isinstance(recipe, DelayedScaling) else None
    first = cache.quantize(weights, scales=scales)
    assert len(cache) == 4
    assert cache.nbytes == sum(q.nbytes for q in first)
    old, at = raw(first), addresses(first)
    for i, (w, q) in enumerate(zip(weights, first, strict=True)):
        assert_same(q, expected(recipe, w, i + 1.0))
    change(weights)
    launched.clear()
    for _ in range(10):
        again = cache.quantize(weights, update=False)
        assert all(a is b for a, b in zip(again, first, strict=True))
    again.clear()                                           # the list is the caller's
    assert len(cache.quantize(weights, update=False)) == 4
    assert (launched, raw(first)) == ([], old)
    updated = cache.quantize(weights, scales=scales)
    assert all(a is b for a, b in zip(updated, first, strict=True))
    assert addresses(updated) == at
    for i, (w, q) in enumerate(zip(weights, updated, strict=True)):
        assert_same(q, expected(recipe, w, i + 1.0))
    both = cache.quantize(weights, columnwise=True, scales=scales, update=False)
    for i, (w, q) in enumerate(zip(weights, both, strict=True)):
        assert_same(q, expected(recipe, w, i + 1.0, True, True))
    change(weights)
    kept = addresses(both)
    updated = cache.quantize(weights, scales=scales)                    # no direction becomes stale
    for i, (w, q) in enumerate(zip(weights, updated, strict=True)):
        assert_same(q, expected(recipe, w, i + 1.0, True, True))
    assert addresses(both) == kept
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_one_fused_call(recipe, run, launched):
    if run.name == "reference":
        pytest.skip("nothing is launched")
    cache, weights = WeightCache(recipe), weights_of(run)
    scales = [1.0, 2.0, 3.0, 4.0] if isinstance(recipe, DelayedScaling) else None
    for _ in range(3):
        launched.clear()
        cache.quantize(weights, columnwise=True, scales=scales)
        assert launched == LAUNCHES[type(recipe)]


@pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda r: type(r).__name__)
def test_noop_decides(recipe, run, launched):
    """A call with noop always launches; a miss ignores it."""
    cache, weights, flag = WeightCache(recipe), weights_of(run), run.array(one_element(1.0))
    first = cache.quantize(weights, noop=flag)
    for w, q in zip(weights, first, strict=True):
        assert_same(q, recipe.quantize(w))
    old = raw(first)
    change(weights)
    for update in (True, False):
        launched.clear()
        assert raw(cache.quantize(weights, noop=flag, update=update)) == old
        assert bool(launched) == (run.name != "reference")
    flag[...] = 0
    for w, q in zip(weights, cache.quantize(weights, noop=flag, update=False), strict=True):
        assert_same(q, recipe.quantize(w))


def test_some_are_new(run):
    """Only what is missing is quantised, with its own scale and amax."""
    cache, weights = WeightCache(DelayedScaling()), weights_of(run)
    scales, amaxes = run.array(np.array([1, 2, 3, 4], np.float32)), run.array(np.zeros(4, np.float32))
    known = cache.quantize(weights[:2], scales=[8.0, 9.0])
    old = raw(known)
    results = cache.quantize(weights, scales=scales, amaxes=amaxes, update=False)
    assert (results[0], results[1], raw(known)) == (known[0], known[1], old)
    assert_same(results[3], fp8.quantize_tensor(weights[3], 4.0))
    assert fp8.asnumpy(amaxes).tolist() == [0, 0, 0, float(fp8.asnumpy(abs(weights[3])).max())]
    everything = cache.quantize([weights[3], weights[0], weights[3]], scales=[5.0, 6.0, 5.0])
    assert everything[0] is everything[2]
    assert_same(everything[0], fp8.quantize_tensor(weights[3], 5.0))
    assert_same(everything[1], fp8.quantize_tensor(weights[0], 6.0))


def test_members_that_are_quantized(run):
    cache, weights = WeightCache(CurrentScaling()), weights_of(run)
    ready = fp8.quantize_tensor(weights[1], 7.0)
    old = raw([ready])
    for update in (True, False, True):
        results = cache.quantize([weights[0], ready, weights[3]], update=update)
        assert results[1] is ready
    assert raw([ready]) == old
    assert len(cache) == 2
    assert cache.quantize([ready])[0] is ready


def test_a_weight_that_is_gone(run):
    cache, weights = WeightCache(CurrentScaling()), weights_of(run)
    cache.quantize(weights)
    cache.quantize(weights, update=False)
    for seed in range(5):
        del weights[0]
        gc.collect()
        assert len(cache) == 3
        weights.insert(0, run.array(cases.values("normal", SHAPES[0], bfloat16, 50 + seed)))
        assert_same(cache.quantize(weights, update=False)[0], fp8.quantize_tensor(weights[0]))
        assert len(cache) == 4
    held = cache.quantize(weights, update=False)
    weights.clear()
    gc.collect()
    assert (len(cache), cache.nbytes, len(held)) == (0, 0, 4)


def test_other_lists_and_directions(run, launched):
    """A list may change between calls, and several take turns: each call gets its own results."""
    cache, weights, others = WeightCache(CurrentScaling()), weights_of(run), weights_of(run, 7)
    for each in (weights, others):
        cache.quantize(each)
        cache.quantize(each, rowwise=False, columnwise=True)
    both = [*weights, *others]
    known = {id(w): q for w, q in zip(both, cache.quantize(both, update=False), strict=True)}
    launched.clear()
    chosen = list(weights)
    for i in range(4):
        for _ in range(2):
            for asked in (chosen, others, chosen[:2], chosen[::-1], [*chosen, chosen[0]]):
                for options in ({}, {"columnwise": True}, {"rowwise": False, "columnwise": True}):
                    found = cache.quantize(asked, update=False, **options)
                    assert [id(q) for q in found] == [id(known[id(w)]) for w in asked]
        chosen[i] = others[i]  # the list is the same; the previous weight still lives
    assert launched == []


def test_identities_are_those_of_objects(run):
    """Nothing is unpacked or compared: arrays without dimensions, members that are equal, and none at all."""
    array, same = run.array(np.array(3.0, np.float32)), run.array(np.array(3.0, np.float32))
    result = fp8.quantize_tensor(run.array(np.ones((2, 3), np.float32)), 1.0)
    objects = [array, same, result, None, array, [1, 2]]
    assert np.frombuffer(identities(objects), np.uintp).tolist() == [id(each) for each in objects]
    assert identities(tuple(objects)) == identities(objects)
    assert identities([]) == b""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_an_error_leaves_the_cache_as_it_was(recipe, run):
    cache, weights = WeightCache(recipe), weights_of(run)
    scales = [1.0] * 4 if isinstance(recipe, DelayedScaling) else None
    first = cache.quantize(weights, scales=scales)
    old, nbytes = raw(first), cache.nbytes
    change(weights)
    for wrong in (run.array(np.ones(3, np.int32)), run.array(np.ones(3, np.float32)), "weight", None,
                  weights[0].view(np.uint16)):
        with pytest.raises((TypeError, ValueError)):
            cache.quantize([*weights, wrong], scales=None if scales is None else [1.0] * 5)
        assert (raw(first), len(cache), cache.nbytes) == (old, 4, nbytes)
    for options, message in (({"scales": [1.0] * 3}, "scales: "), ({"amaxes": [1.0] * 4}, "amaxes"),
                             ({"rowwise": False}, "rowwise"), ({"noop": 1.0, "scales": scales}, "noop")):
        with pytest.raises((TypeError, ValueError), match=message):
            cache.quantize(weights, **({"scales": scales} | options))
        assert (raw(first), len(cache), cache.nbytes) == (old, 4, nbytes)
    assert all(a is b for a, b in zip(cache.quantize(weights, update=False), first, strict=True))
    wrong_amaxes: Any = "x"
    with pytest.raises(TypeError, match=r"^amaxes: expected .* got str"):
        cache.quantize(weights, update=False, amaxes=wrong_amaxes)
    with pytest.raises(ValueError, match=r"^scales: expected 4, one for each weight, got 3"):
        cache.quantize(weights, update=False, scales=[1.0] * 3)


def test_nothing_is_written_where_a_later_part_of_a_call_is_refused(run):
    """New weights are quantised before known ones; errors in the latter are found before the former are."""
    cache, weights = WeightCache(CurrentScaling()), weights_of(run)
    known = cache.quantize(weights[:2])
    old = raw(known)
    for wrong, error, message in (
            ({"noop": 1.0}, TypeError, "^noop: expected a numpy.ndarray or cupy.ndarray, got float"),
            ({"noop": run.array(np.zeros(2, np.float32))}, ValueError, "^noop: expected one element"),
            ({"amaxes": "others"}, TypeError, r"^amaxes\[1\]: expected dtype float32, got float64"),
            ({"scales": [1.0] * 4}, ValueError, "^scales: current scaling takes them from the values")):
        amaxes = [run.array(np.full(1, 0.5, np.float32)) for _ in weights]
        given = list(amaxes)
        if wrong.pop("amaxes", None):
            given[1] = run.array(np.zeros(1, np.float64))
        change(weights[:2])
        with pytest.raises(error, match=message):
            cache.quantize(weights, amaxes=given, **wrong)
        assert [float(a[0]) for a in amaxes] == [0.5] * 4
        assert (raw(known), len(cache)) == (old, 2)


def test_errors_number_weights_as_they_were_given(run):
    cache, weights = WeightCache(DelayedScaling()), weights_of(run)
    cache.quantize(weights[:2], scales=[1.0, 2.0])
    for options, message in (
            ({"scales": [1.0, 1.0, "x", 1.0]}, r"^scales\[2\]: expected"),
            ({"scales": 3.0}, "^scales: expected a numpy.ndarray or cupy.ndarray, got float"),
            ({"scales": run.array(np.array(3, np.float32))}, r"^scales: expected shape \(2,\)"),
            ({"scales": [1.0] * 4, "amaxes": {}},
             "^amaxes: expected a numpy.ndarray or cupy.ndarray, got dict")):
        with pytest.raises((TypeError, ValueError), match=message):
            cache.quantize(weights, update=False, **options)
    with pytest.raises(ValueError, match=r"^weights\[2\]: expected an array of two dimensions"):
        cache.quantize([*weights[:2], run.array(np.ones(3, np.float32))], scales=[1.0] * 3, update=False)


@pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda r: type(r).__name__)
def test_a_weight_that_was_reshaped_in_place(recipe, run):
    cache = WeightCache(recipe)
    a, b = (run.array(cases.values("normal", (8, 64), bfloat16, seed)) for seed in (1, 2))
    first = cache.quantize([a, b])
    for shape in ((16, 32), (8, 4, 16), (8, 8, 8)):         # the last two keep the number of rows
        reshape(a, shape)
        if len(shape) == 3 and isinstance(recipe, CurrentScaling):
            with pytest.raises(ValueError, match="expected an array of two dimensions"):
                cache.quantize([a, b], update=False)
            continue
        for _ in range(2):
            again = cache.quantize([a, b], update=False)
            assert [q.shape for q in again] == [shape, (8, 64)]
            assert_same(again[0], recipe.quantize(a))
            assert again[1] is first[1]
    reshape(a, (8, 64))
    assert cache.quantize([a, b], update=False)[0].shape == (8, 64)
    known = 3 if isinstance(recipe, CurrentScaling) else 5
    assert len(cache) == (2 if a.base is None else known)       # a view in another shape is another view


@pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda r: type(r).__name__)
def test_a_weight_that_got_another_dtype_in_place(recipe, run):
    """Another dtype of the same width keeps the shape; one of half the width keeps the number of rows."""
    cache = WeightCache(recipe)
    a, b = (run.array(cases.values("normal", (8, 64), bfloat16, seed)) for seed in (1, 2))
    if not isinstance(a, np.ndarray):
        pytest.skip("CuPy's arrays keep their dtype")
    first = cache.quantize([a, b])
    for dtype in (np.float16, np.float32, bfloat16):
        give_dtype(a, dtype)
        for _ in range(2):
            again = cache.quantize([a, b], update=False)
            assert_same(again[0], recipe.quantize(a))
            assert again[1] is first[1]


def reshape(a: Any, shape: tuple[int, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                     # newer versions of NumPy warn
        a.shape = shape


def give_dtype(a: Any, dtype: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a.dtype = dtype


def test_what_is_no_recipe_and_no_list(run):
    with pytest.raises(TypeError, match="recipe: expected"):
        WeightCache("current")                              # type: ignore[arg-type]
    cache = WeightCache(CurrentScaling())
    with pytest.raises(TypeError, match="weights: expected a list"):
        cache.quantize(weights_of(run)[0])
    assert cache.quantize([]) == []
    assert "WeightCache(CurrentScaling" in repr(cache)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda r: type(r).__name__)
def test_one_graph_for_all_micro_batches(recipe):
    cp = backend.cupy()
    with testing.executor("cuda") as run:
        cache, weights, flag = WeightCache(recipe), weights_of(run), cp.zeros(1, cp.float32)
        results = cache.quantize(weights, columnwise=True)
        cache.quantize(weights, columnwise=True, noop=flag)
        cp.cuda.get_current_stream().synchronize()
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            cache.quantize(weights, columnwise=True, noop=flag)
            graph = stream.end_capture()
            for value in (0.0, 1.0):
                flag.fill(value)
                old = [recipe.quantize(w, columnwise=True) for w in weights]
                if value:
                    change(weights)
                graph.launch(stream)
                stream.synchronize()
                for q, want in zip(results, old, strict=True):
                    assert_same(q, want)


@pytest.mark.parametrize("recipe", [CurrentScaling(), MXScaling()], ids=repr)
def test_views_are_known_by_their_memory(recipe):
    """A new view of the same memory is the same weight; a different view of it is another weight."""
    w = np.arange(24, dtype=np.float32).reshape(4, 6).copy()
    cache = WeightCache(recipe)
    first = cache.quantize([w.T, w, w[:2]])
    again = cache.quantize([w.T, w, w[:2]], update=False)
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert len(cache) == 3
    w[:] = -w
    cache.quantize([w.T], update=True)
    testing.assert_bytes_equal(first[0].data, recipe.quantize(w.T).data)
    assert cache.quantize([w[2:]], update=False)[0] is not first[2]
    assert all(q is first[0] for q in cache.quantize([w.T, w.T], update=False))
    del w
    gc.collect()
    assert len(cache) == 0


def test_a_view_at_the_address_of_one_that_is_gone():
    """Neither the identity nor the address of a dead array is taken for a weight."""
    cache = WeightCache(CurrentScaling())
    for i in range(1, 200):
        w = np.full((3, 4), i, np.float32)
        (q,) = cache.quantize([w.T], update=False)
        assert round(float(q.dequantize()[0, 0])) == i
        del w
