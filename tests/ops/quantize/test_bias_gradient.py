"""Bias gradients (docs/numerics.md, rule 11): the fixed tree, whatever the shape, the tiles and the
directions."""

from __future__ import annotations

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import CurrentScaling, DelayedScaling, cases, reference, testing
from cupy_fp8.formats import bfloat16, float32
from cupy_fp8.kernels import shapes
from cupy_fp8.reference import numerics

DIRECTIONS = [{"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True},
              {"rowwise": True, "columnwise": True}]


def by_hand(terms: list[np.float32]) -> np.float32:
    """Follow the rule literally."""
    if not terms:
        return np.float32(0)
    while len(terms) > 1:
        paired = [np.float32(terms[i] + terms[i + 1]) for i in range(0, len(terms) - 1, 2)]
        terms = paired + ([terms[-1]] if len(terms) % 2 else [])
    return terms[0]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9, 127, 128, 129, 257, 300])
def test_the_tree_is_the_rule(rows):
    x = (np.random.default_rng(rows).standard_normal((rows, 3)) * 1e4).astype(np.float32)
    want = np.array([by_hand(list(column)) for column in x.T], np.float32)
    testing.assert_bytes_equal(numerics.tree_sum(x, 0), want)
    if rows > 8:
        others = x.sum(axis=0, dtype=np.float32), np.cumsum(x, axis=0, dtype=np.float32)[-1]
        assert any((want != other).any() for other in others)


@pytest.mark.parametrize("directions", DIRECTIONS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 8, 129, 272])
def test_negative_zero_survives_absent_rows(directions, rows, run):
    """Absent rows count as -0: as +0 they would turn a column of -0 into +0."""
    x = np.full((rows, 16), -0.0, np.float32)
    q = fp8.quantize_tensor(run.array(x), 1.0, dbias=True, **directions)
    testing.assert_bytes_equal(q.dbias, np.full(16, -0.0, np.float32))


def test_no_rows_give_positive_zero_and_nan_is_one_pattern(run):
    q = fp8.cast_transpose(run.array(np.empty((2, 0, 5), np.float32)), 1.0, dbias=True)
    testing.assert_bytes_equal(q.dbias, np.zeros((2, 5), np.float32))
    x = np.zeros((200, 3), np.float32)
    x.view(np.uint32)[17, 0] = 0xFFC12345
    x[3, 1], x[190, 1] = np.inf, -np.inf
    q = fp8.quantize_tensor(run.array(x), 1.0, dbias=True)
    assert fp8.asnumpy(q.dbias).view(np.uint32).tolist() == [0x7FC00000, 0x7FC00000, 0]


def test_it_is_the_sum_before_scaling_of_each_matrix(run):
    x = cases.values("normal", (3, 40, 24), bfloat16)
    q = fp8.quantize_tensor(run.array(x), 0.01, dbias=True)
    assert q.dbias is not None
    assert q.dbias.shape == (3, 24)
    testing.assert_bytes_equal(q.dbias, np.stack([numerics.tree_sum(m.astype(np.float32), 0) for m in x]))


@pytest.mark.parametrize("directions", DIRECTIONS, ids=str)
def test_every_tile_gives_the_same_bytes(directions, run, monkeypatch):
    x = cases.values("normal", (560, 272), bfloat16)
    a = fp8.quantize_tensor(run.array(x), 1.0, dbias=True, **directions).dbias
    monkeypatch.setattr(shapes, "choose_tile", lambda _, large: large)
    b = fp8.quantize_tensor(run.array(x), 1.0, dbias=True, **directions).dbias
    testing.assert_bytes_equal(a, b)


@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling()], ids=lambda r: type(r).__name__)
def test_recipes_make_room_for_it(recipe, run):
    x = cases.values("normal", (130, 48), float32)
    scale = None if isinstance(recipe, CurrentScaling) else 2.0
    out = recipe.empty(x.shape, columnwise=True, dbias=True, like=run.array(x))
    assert recipe.quantize(run.array(x), columnwise=True, scale=scale, dbias=True, out=out) is out
    want = reference.cast_transpose(x, scale, dbias=True)
    testing.assert_bytes_equal(out.dbias, want.dbias)
    testing.assert_bytes_equal(out.data, want.data)
    assert recipe.quantize(run.array(x), scale=scale).dbias is None
    wrapped = recipe.empty(x.shape, dbias=True, like=run.array(x),
                           buffers={"rowwise": (out.data, out.scale_inv)})
    assert wrapped.dbias is not None
    assert wrapped.dbias.shape == (48,)
    assert wrapped.dbias.dtype == float32


@pytest.mark.gpu
def test_a_graph_keeps_its_memory():
    """Calls with another dtype, between capture and replay, use the memory for the sums of tiles that the
    graph uses."""
    cp = fp8.xp
    values = cases.values("normal", (1000, 264), bfloat16)
    x, other = fp8.asarray(values, like="cupy"), fp8.asarray(values.astype(np.float32) * 3, like="cupy")
    out = fp8.DelayedScaling().empty(x.shape, columnwise=True, dbias=True, like=x)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        fp8.cast_transpose(x, 1.0, dbias=True, out=out)
        fp8.cast_transpose(other, 1.0, dbias=True, out=out)
        stream.begin_capture()
        fp8.cast_transpose(x, 1.0, dbias=True, out=out)
        fp8.cast_transpose(other, 1.0, dbias=True, out=out)
        fp8.cast_transpose(x, 1.0, dbias=True, out=out)
        graph = stream.end_capture()
        fp8.cast_transpose(other, 1.0, dbias=True, out=out)
        cases.poison(out.dbias)
        graph.launch(stream)
        stream.synchronize()
    testing.assert_bytes_equal(out.dbias, reference.cast_transpose(values, 1.0, dbias=True).dbias)
