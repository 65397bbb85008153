"""Tokens permuted by a routing against loops over tokens: data, scales and probs; routings that no `route`
made."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_arrays import array, assert_equal, expect, normal
from moe_loops import gathered, moved, moved_probs, routings, summed
from scale_arrays import guarded, guarded_like, raw
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import Routing, Scaled, cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases.moe.route import indices
from cupy_fp8.cases.moe.route import routing as routed
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float16, float32
from cupy_fp8.ops.moe import permute_launches


def expect_permuted(run: testing.Executor, x: Any, host: Routing, probs: np.ndarray | None = None,
                    leads: tuple[int, ...] = (0,), scale_layout: Any = None) -> Any:
    moving, r, there = run.array(x), run.array(host), None if probs is None else run.array(probs)
    return expect(run, moved(x, host, probs, scale_layout), fp8.permute, moving, r, probs=there, leads=leads,
                  scale_layout=scale_layout)


@routings
@pytest.mark.parametrize(("dtype", "columns"), [
    (bfloat16, 64), (float8_e4m3fn, 37), (float8_e5m2, 4), (float16, 9), (np.float64, 3), (np.uint8, 0),
    (bool, 16), (np.int16, 5)])
def test_rows_of_any_length(dtype, columns, options, run):
    expect_permuted(run, array((37, columns), dtype), routed(37, **options), leads=(0, 15))


@routings
def test_probs_move_along(options, run):
    host = routed(70, **options)
    for number in {host.topk, host.topk if host.experts is None else host.num_experts}:
        expect_permuted(run, array((70, 24), bfloat16), host, cases.values("bits", (70, number), float32, 1),
                        (0, 4))


@pytest.mark.parametrize(("block", "dtype"), [((1, 128), float32), ((1, 32), float8_e8m0fnu),
                                              ((1, 32), float32), ((1, None), float32)])
@pytest.mark.parametrize("columns", [512, 130, 31, 0])
def test_scales_move_along(block, dtype, columns, run):
    blocks = -(-columns // (block[1] or max(columns, 1)))
    x = Scaled(array((40, columns), float8_e4m3fn), array((40, blocks), dtype, 1), (40, columns), False,
               block, "compact")
    for host in (routed(40, 3, 8, align=16), routed(40, 2, 5, form="mask")):
        q = expect_permuted(run, x, host)
        layout = "gemm_ready" if dtype == float32 else "compact"
        facts = q.shape, q.block, q.scale_layout, q.transposed
        assert facts == ((host.rows, columns), block, layout, False)
        expect_permuted(run, x, host, normal((40, host.topk)), leads=(0, 4))
        expect_permuted(run, x, host, scale_layout="compact")


@pytest.mark.parametrize("layout", ["gemm_ready", "deepgemm_sm90", "deepgemm_sm100", "swizzled"])
def test_scales_in_any_layout(layout, run):
    """The default of `quantize_block` moves without conversion; the same scales are returned, whatever the
    input layout."""
    x, host = normal((40, 260)), routed(40, 3, 8, align=16)
    made = fp8.quantize_mx(x) if layout == "swizzled" else fp8.quantize_block(x)
    q = run.array(made.to_layout(layout))
    compact = run.numpy(q.to_layout("compact")).rowwise
    r = run.array(host)
    for given_q in (q, q.rowwise):
        for to in (None, None, "compact"):
            expect(run, moved(compact, host, scale_layout=to), fp8.permute, given_q, r, scale_layout=to)


def test_scales_at_any_strides(run):
    """gemm_ready scales are made from non-contiguous rows and columns in place, at any address."""
    host = routed(30, 3, 8, rows=77)
    for columns, step, begin in ((20, 24, 0), (20, 24, 4), (20, 24, 1), (20, 23, 0), (19, 24, 0)):
        wide = array((30, step), float32, 3)
        x = Scaled(array((30, 128 * columns), float8_e4m3fn), wide[:, begin:begin + columns],
                   (30, 128 * columns), False, (1, 128), "compact")
        wanted, given_x = moved(x, host), run.array(x)
        there = run.array(wide)
        narrow = dataclasses.replace(given_x, scale_inv=there[:, begin:begin + columns])
        lines = dataclasses.replace(narrow, scale_inv=narrow.to_layout("gemm_ready").scale_inv,
                                    scale_layout="gemm_ready")
        for q in (narrow, lines):
            expect(run, wanted, fp8.permute, q, run.array(host))


def test_gemm_ready_scales_of_few_rows_and_of_many(run):
    """Each block of threads moves scales of some rows; if there are many, more than once."""
    for tokens, columns, rows in ((3, 16_512, 2000), (1, 128, 20_000), (600, 128, 1801), (40, 2176, 80)):
        host = reference.route(np.arange(2 * tokens).reshape(tokens, 2) % 3, num_experts=3, rows=rows)
        x = Scaled(array((tokens, columns), float8_e4m3fn), array((tokens, columns // 32), float32, 1),
                   (tokens, columns), False, (1, 32), "compact")
        expect_permuted(run, x, host)


@pytest.mark.parametrize("rows", [9, 529, 1057, 17_000])
def test_few_unused_rows(rows, run, monkeypatch):
    """Blocks of threads that clear rows check one each, a few or 32."""
    monkeypatch.setattr(permute_launches, "_LEAST_ON_CPU", 1)
    host = routed(4, 2, 3, rows=rows)
    expect_permuted(run, array((4, 24), bfloat16), host)
    quantised = fp8.quantize_permute(run.array(normal((4, 40))), run.array(host))
    assert_equal(quantised, fp8.quantize_permute(normal((4, 40)), host))


def test_a_source_that_is_no_token_has_scales_of_zero(run):
    """Sources out of bounds are read as none. (The reference reads the map.)"""
    if run.name == "reference":
        pytest.skip("reads no sources")
    host, more = routed(20, 2, 3), run.array(np.ones((21, 2), np.float32))
    x = Scaled(run.array(array((20, 256), float8_e4m3fn)), more[:20], (20, 256), False, (1, 128), "compact")
    for source in (40, 2**31 - 1, -7):
        sources = host.sources.copy()
        sources[3] = source
        got = run.numpy(fp8.permute(x, run.array(dataclasses.replace(host, sources=sources))))
        assert not raw(got.scale_inv)[:, 3].any()
        assert raw(got.scale_inv)[:, 4].all()


@pytest.mark.parametrize("scale_layout", ["gemm_ready", "compact"])
def test_what_permute_returns_goes_on_as_it_is(scale_layout, run):
    """A product and a transpose of permuted rows have the same bytes with scales in either layout."""
    host = routed(40, 2, 3, align=16)
    q, r = fp8.quantize_block(run.array(normal((40, 256)))), run.array(host)
    w = fp8.quantize_block(run.array(normal((3, 128, 256), seed=1)), (128, 128))
    default, rows = fp8.permute(q, r), fp8.permute(q, r, scale_layout=scale_layout)
    for call in (lambda s: fp8.grouped_matmul_nt(s, w, r.aligned_splits),
                 lambda s: fp8.scaling_aware_transpose(s, splits=r.aligned_splits).columnwise,
                 lambda s: s.dequantize()):
        assert_equal(call(rows), call(default))


def test_new_scales_of_the_same_tokens_are_read_anew(run):
    """A call with converted scales is not remembered as one that needs no check."""
    recipe, r = fp8.BlockScaling(), run.array(routed(40, 3, 8))
    for to in ("gemm_ready", "compact"):
        q = recipe.quantize(run.array(normal((40, 260))))
        out = fp8.permute(q, r, scale_layout=to)
        fp8.permute(q, r, scale_layout=to, out=out)
        recipe.quantize(run.array(normal((40, 260), seed=3) * 64), out=q)
        fp8.permute(q, r, scale_layout=to, out=out)
        assert_equal(out, fp8.permute(q.to_layout("compact"), r, scale_layout=to))


@pytest.mark.parametrize(("tokens", "rows"), [(0, 33), (1, 32), (1, 2000), (40, 1281), (40, 5000),
                                              (600, 1200)])
def test_unused_rows_are_everywhere_zeros(tokens, rows, run):
    """Blocks that have tokens clear a share of the rows; with many rows there are blocks that do nothing
    else."""
    host = reference.route(np.arange(tokens)[:, None] * 5 % 3, num_experts=3, align=16, rows=rows)
    probs, ones = normal((tokens, 1), seed=3), np.ones((tokens, 1), np.float32)
    for columns in (8, 13, 3000):
        x = array((tokens, columns), bfloat16)
        expect_permuted(run, x, host, probs)
        y, intact = guarded(run, (rows, columns), bfloat16)
        dprobs = run.array(np.empty_like(ones))
        fp8.unpermute_backward(run.array(x), run.array(moved(x, host)), run.array(host),
                               probs=run.array(ones), out=(y, dprobs))
        assert not raw(y)[host.sources < 0].any()
        assert intact()


@pytest.mark.parametrize(("tokens", "columns"), [(530, 7168), (1100, 128), (3, 16_384), (3, 16_512),
                                                 (2000, 128)])
def test_tokens_and_scales_of_blocks_of_threads(tokens, columns, run):
    """A block of threads takes one token, many, or a part of one, and others take the scales."""
    host = reference.route(np.arange(2 * tokens).reshape(tokens, 2) % 3, num_experts=3)
    scale_inv = cases.values("bits", (tokens, columns // 128), float32, 1)
    x = Scaled(array((tokens, columns), float8_e4m3fn), scale_inv, (tokens, columns), False, (1, 128),
               "compact")
    assert_equal(fp8.permute(run.array(x), run.array(host)), moved(x, host))


def test_three_dimensions(run):
    host = routed(30, 2, 3)
    y = expect_permuted(run, array((30, 3, 7), bfloat16), host)
    assert fp8.unpermute(y, run.array(host)).shape == (30, 3, 7)


@needs_host
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 40), st.integers(0, 5), st.integers(1, 9), st.sampled_from([1, 2, 16]),
       st.integers(0, 70), st.integers(0, 15), st.integers(0, 15),
       st.sampled_from([np.uint8, bfloat16, float32]), st.integers(0, 2**32 - 1))
def test_any_call(tokens, topk, number, align, columns, lead, lead_out, dtype, seed):
    """Any routing, row lengths and addresses."""
    dtype = np.dtype(dtype)
    host = reference.route(indices(tokens, topk, number, seed=seed), num_experts=number, align=align)
    with testing.executor("host") as run:
        x, _ = guarded(run, (tokens, columns), dtype, lead // dtype.itemsize * dtype.itemsize)
        bits(x)[...] = bits(array(x.shape, dtype, seed))
        y = expect_permuted(run, x, host, leads=(lead_out,))
        if dtype != np.uint8:
            expect(run, summed(y, host), fp8.unpermute, y, host, leads=(lead,))
            probs = normal((tokens, topk), seed=seed % 99)
            assert_equal(fp8.unpermute_backward(x, y, host, probs=probs),
                         reference.unpermute_backward(x, y, host, probs=probs))


# ---- routings by hand ----
def routed_by_hand(row: int, options: dict[str, Any]) -> Routing:
    """Return a routing in which a slot of token 3 leads to this row, but no row to that slot."""
    r = routed(20, 2, 3, **options)
    assert r.rows <= 100
    row_map, sources = r.row_map.copy(), r.sources.copy()
    if row_map[3, 1] >= 0:
        sources[row_map[3, 1]] = -1
    row_map[3, 1] = row
    return dataclasses.replace(r, row_map=row_map, sources=sources)


@pytest.mark.parametrize("options", [{}, {"form": "mask"}, {"align": 16}], ids=str)
@pytest.mark.parametrize("row", [-2, -(2**31), 2**31 - 1, 100, "rows"])
def test_a_row_outside_of_the_routing_is_none(row, options, run):
    """A map out of bounds is read as leading nowhere, by all four ops, in the reference and in the kernels.
    "rows": one past the last."""
    nowhere = routed_by_hand(-1, options)
    host = routed_by_hand(nowhere.rows if row == "rows" else row, options)
    x, y, probs, by_row = normal((20, 24)), normal((host.rows, 24),
                                                   seed=1), normal((20, 2)), normal((host.rows,), seed=2)
    r, given_x, given_y, given_probs = map(run.array, (host, x, y, probs))
    wanted = moved(x, nowhere, probs)
    out, intact = guarded_like(run, wanted)
    assert_equal(fp8.permute(given_x, r, probs=given_probs, out=out), wanted)
    assert intact()
    assert_equal(fp8.unpermute(given_y, r, probs=given_probs), summed(y, nowhere, probs))
    assert_equal(fp8.permute_backward(given_y, r, probs_grad=run.array(by_row)),
                 (summed(y, nowhere), gathered(by_row, nowhere)))
    for weights in (None, probs):
        got = fp8.unpermute_backward(given_x, given_y, r, probs=None if weights is None else given_probs)
        assert (got[1] is None) == (weights is None)
        assert_equal(got, reference.unpermute_backward(x, y, nowhere, probs=weights))


@pytest.mark.parametrize("expert", [-7, 3, 2**31 - 1])
def test_an_expert_that_is_none_has_a_prob_of_zero(expert, run):
    """With probs by expert, the expert of a slot with a row may be invalid: reference and kernels agree."""
    host = routed(20, 2, 3, form="mask")
    token = int(np.argmax(host.row_map[:, 0] >= 0))
    assert host.experts is not None
    host.experts[token, 0] = expert
    probs, x, y = normal((20, 3)), normal((20, 24)), normal((host.rows, 24), seed=1)
    by_slot = np.take_along_axis(probs, np.clip(host.experts, 0, 2), 1)
    by_slot[token, 0] = 0
    r, there = run.array(host), run.array(probs)
    assert_equal(fp8.permute(run.array(x), r, probs=there)[1], moved_probs(by_slot, host))
    assert_equal(fp8.unpermute(run.array(y), r, probs=there), summed(y, host, by_slot))
    got = fp8.unpermute_backward(run.array(x), run.array(y), r, probs=there)
    grad_y, by_slot_dprobs = reference.unpermute_backward(x, y, host, probs=by_slot)
    assert by_slot_dprobs is not None
    dprobs = np.zeros_like(probs)
    for t, k in zip(*np.nonzero((host.row_map >= 0) & (host.experts >= 0) & (host.experts < 3)), strict=True):
        dprobs[t, host.experts[t, k]] = by_slot_dprobs[t, k]
    assert_equal(got, (grad_y, dprobs))


def test_scales_that_are_made_compact_first_overlap_nothing():
    """The given scales share one element with those of the result."""
    q, r = fp8.quantize_block(normal((9, 256)))._any, routed(9, 2, 3)
    out, size = fp8.permute(q, r), q.scale_inv.size
    memory: Any = np.full(size + out.scale_inv.size - 1, 3, np.float32)
    given = dataclasses.replace(q, scale_inv=memory[:size].reshape(q.scale_inv.shape))
    over = dataclasses.replace(out, scale_inv=memory[size - 1:].reshape(out.scale_inv.shape))
    with pytest.raises(ValueError, match=r"^out\.scale_inv: overlaps x\.scale_inv in memory"):
        fp8.permute(given, r, out=over)
    assert (memory == 3).all()
