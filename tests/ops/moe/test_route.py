"""Rows of tokens against loops over tokens: indices and masks, bounds that cut off rows, wrong
assignments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from group_arrays import most_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launches import note_launches
from moe_arrays import assert_equal, expect, noted
from tiers import needs_host, quick_if

import cupy_fp8 as fp8
from cupy_fp8 import Routing, backend, reference, testing
from cupy_fp8.cases.moe.route import KINDS, indices, mask
from cupy_fp8.kernels import errors
from cupy_fp8.ops.moe import route

EXPERT, BOUND = (errors.MESSAGES[fact] for fact in (errors.Fact.ROUTE_EXPERT, errors.Fact.ROUTE_BOUND))


def i32(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def by_loops(experts: Any, number: int, align: int, rows: int, of_mask: bool = False) -> Routing:
    """Return a Routing, made route by route."""
    tokens, topk = np.shape(experts)
    row_map, sources = np.full((tokens, topk), -1, np.int32), np.full(rows, -1, np.int32)
    splits, offsets, row = np.zeros(number, np.int32), [0], 0
    for expert in range(number):
        for token in range(tokens):
            for slot in range(topk):
                if experts[token][slot] != expert:
                    continue
                if row < rows:
                    row_map[token, slot] = row
                    sources[row] = token * topk + slot
                    splits[expert] += 1
                row += 1
        row = -(-row // align) * align
        offsets.append(min(row, rows))
    return Routing(row_map, splits, np.diff(offsets).astype(np.int32), np.array(offsets, np.int64), sources,
                   rows, align, experts if of_mask else None)


def slots_by_loops(chosen: np.ndarray, topk: int) -> np.ndarray:
    slots = np.full((len(chosen), topk), -1, np.int32)
    for token, row in enumerate(chosen):
        found = np.flatnonzero(row)
        for slot, expert in enumerate(found[:topk]):
            slots[token, expert if topk == chosen.shape[1] else slot] = expert
    return slots


# ---- values ----
@pytest.mark.parametrize("align", quick_if((1, 16).__contains__, [1, 2, 16, 128]))
@pytest.mark.parametrize(("tokens", "topk", "number"), [
    (0, 2, 3), (1, 1, 1), (3, 2, 2), (40, 8, 64), (64, 8, 8), (65, 8, 8), (129, 3, 40), (33, 40, 6),
    (5, 0, 4), (700, 1, 3), (30, 2, 1024),
])  # fmt: skip
def test_indices(tokens, topk, number, align, run):
    for kind in KINDS:
        if kind == "distinct" and topk > number:
            continue
        for dtype in (np.dtype(np.int32), np.dtype(np.int64)):
            host = indices(tokens, topk, number, kind, dtype)
            want = by_loops(host, number, align, most_rows(tokens * topk, number, align))
            r = expect(run, want, fp8.route, run.array(host), num_experts=number, align=align)
            facts = tokens, topk, number, align, want.rows
            assert (r.tokens, r.topk, r.num_experts, r.align, r.rows) == facts


@pytest.mark.full
@pytest.mark.parametrize(("tokens", "number", "topk"), [
    (0, 3, 2), (1, 1, 1), (40, 12, 5), (70, 64, 8), (33, 33, 33), (6, 300, 40), (9, 4, 0)])
@pytest.mark.parametrize("align", [1, 32])
def test_masks(tokens, number, topk, align, run):
    for kind in ("any", *(("one",) if topk else ()), "none"):
        chosen = mask(tokens, number, topk, kind)
        for given_topk, rows in ((topk, None), (None, tokens * topk + number * align)):
            slots = slots_by_loops(chosen, number if given_topk is None else topk)
            bound = most_rows(tokens * topk, number, align) if rows is None else rows
            want = by_loops(slots, number, align, bound, True)
            options: dict[str, Any] = {"topk": given_topk, "rows": rows, "align": align}
            expect(run, want, fp8.route, run.array(chosen), **options)
            assert_equal(fp8.route(run.array(chosen), num_experts=number, **options), want)


def test_by_hand(run):
    r = fp8.route(run.array(np.array([[2, 0], [2, 2], [-1, 0], [-1, -1]])), num_experts=3, rows=12, align=4)
    assert_equal(r, Routing(
        i32([[4, 0], [5, 6], [-1, 1], [-1, -1]]), i32([2, 0, 3]), i32([4, 0, 4]), np.array([0, 4, 4, 8]),
        i32([1, 5, -1, -1, 0, 2, 3, -1, -1, -1, -1, -1]), 12, 4))
    m = fp8.route(run.array(np.array([[True, False, True], [False, True, False]])), topk=2)
    assert fp8.asnumpy(m.experts).tolist() == [[0, 2], [1, -1]]
    assert fp8.asnumpy(m.row_map).tolist() == [[0, 2], [1, -1]]
    every = fp8.route(run.array(np.array([[True, False, True], [False, True, False]])), rows=3)
    assert fp8.asnumpy(every.experts).tolist() == [[0, -1, 2], [-1, 1, -1]]
    assert fp8.asnumpy(every.row_map).tolist() == [[0, -1, 2], [-1, 1, -1]]


@needs_host
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 300), st.integers(0, 9), st.integers(1, 70), st.sampled_from([1, 2, 8, 64]),
       st.integers(0, 2**32 - 1))
def test_any_call(tokens, topk, number, align, seed):
    host = indices(tokens, topk, number, "any", np.dtype(np.int32), seed)
    with testing.executor("host"):
        r = fp8.route(host, num_experts=number, align=align)
    assert_equal(r, reference.route(host, num_experts=number, align=align))


def test_launches(run, monkeypatch):
    """Few tokens' indices need one, everything else two; at most 128 blocks of threads each."""
    launched = note_launches(monkeypatch)
    calls: list[tuple[np.ndarray, dict[str, Any], list[tuple[str, int]]]] = [
        (indices(64, 8, 64), {"num_experts": 64}, [("route_rank", 1)]),
        (indices(65, 8, 64), {"num_experts": 64}, [("route_count", 2), ("route_rank", 2)]),
        (indices(8192, 8, 64), {"num_experts": 64}, [("route_count", 128), ("route_rank", 128)]),
        (indices(8193, 8, 64), {"num_experts": 64}, [("route_count", 114), ("route_rank", 114)]),
        (mask(3, 4, 2), {"topk": 2}, [("route_count", 1), ("route_rank", 1)])]
    for host, options, want in calls:
        launched.clear()
        fp8.route(run.array(host), **options)
        found = [(one.variant.kernel.entry, one.grid) for one in launched]
        assert found == ([] if run.name == "reference" else want)


# ---- facts on the device that are wrong ----
@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch, run: testing.Executor) -> Iterator[testing.Executor]:
    """Values of NumPy arrays are not checked, like those on a device; the sticky error word is clean."""
    monkeypatch.setattr(route, "_check", lambda *_: None)
    fp8.device_errors(clear=True)
    yield run
    fp8.device_errors(clear=True)


@pytest.mark.parametrize("tokens", [20, 400])
@pytest.mark.parametrize("wrong", [-2, 7, 2**31 - 1, -(2**31), 2**31, 2**32 + 1, 2**63 - 1, -(2**63)])
def test_experts_that_do_not_exist(wrong, tokens, unchecked):
    run = unchecked
    for dtype in (np.dtype(np.int32), np.dtype(np.int64)):
        if not np.iinfo(dtype).min <= wrong <= np.iinfo(dtype).max:
            continue
        host = indices(tokens, 2, 7, dtype=dtype)
        noted(run, [])
        host[tokens // 2, 1] = wrong
        given_host = run.array(host.copy())
        host[tokens // 2, 1] = -1
        want = by_loops(host, 7, 4, most_rows(tokens * 2, 7, 4))
        expect(run, want, fp8.route, given_host, num_experts=7, align=4)
        noted(run, [EXPERT])


@pytest.mark.parametrize(("tokens", "topk"), [(30, 2), (300, 3)])
@pytest.mark.parametrize("align", [1, 16])
def test_rows_that_do_not_suffice(tokens, topk, align, unchecked):
    run, host = unchecked, indices(tokens, topk, 5)
    needed = int(reference.route(host, num_experts=5, align=align).offsets[-1])
    for rows in (0, 1, 7, needed // 2, needed - align, needed - 1, needed, needed + 100):
        want = by_loops(host, 5, align, rows)
        expect(run, want, fp8.route, run.array(host), num_experts=5, align=align, rows=rows)
        lost = int((want.row_map >= 0).sum()) < int((host >= 0).sum())
        assert lost or rows >= needed - align
        noted(run, [BOUND] if lost else [])


@pytest.mark.parametrize("topk", [0, 1, 3, 4])
def test_masks_of_more_experts_than_topk(topk, unchecked):
    run, chosen = unchecked, mask(90, 9, 4)
    want = by_loops(slots_by_loops(chosen, topk), 9, 2, most_rows(90 * topk, 9, 2), True)
    expect(run, want, fp8.route, run.array(chosen), topk=topk, align=2)
    noted(run, [BOUND] if topk < chosen.sum(1).max() else [])


def test_what_other_calls_left_is_not_counted(run):
    """Counts of as many words, from more blocks."""
    for tokens, experts in ((448, 64), (320, 64), (448, 64), (2000, 8), (900, 16), (900, 8)):
        for align in (1, 128):
            assignment = indices(tokens, 8, experts)
            fp8.device_errors(clear=True)
            routing = fp8.route(run.array(assignment), num_experts=experts, align=align)
            want = reference.route(assignment, num_experts=experts, align=align)
            assert_equal(routing, want)
            assert fp8.device_errors(clear=True) == ()


# ---- what is refused ----
def test_the_same_memory_is_looked_at_again():
    """A NumPy assignment that has become wrong since an earlier call with the same memory is refused."""
    x = indices(9, 2, 4)
    out = fp8.route(x, num_experts=4)
    for _ in range(2):
        assert fp8.route(x, num_experts=4, out=out) is out
    x[3, 1] = 4
    before = [a.tobytes() for a in out._arrays().values()]
    for check in (False, True):
        with pytest.raises(ValueError, match=r"^assignment: expected experts 0 to 3, .* got 4 at \[3, 1\]"):
            fp8.route(x, num_experts=4, check=check, out=out)
    assert [a.tobytes() for a in out._arrays().values()] == before


# ---- on a GPU ----
@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "topk", "number"), [(1_000_003, 8, 256), (3_000_000, 1, 1024),
                                                        (20_000, 32, 64)])
def test_many_tokens(tokens, topk, number):
    host = indices(tokens, topk, number)
    r = fp8.route(backend.cupy().asarray(host), num_experts=number, align=16)
    assert_equal(r, reference.route(host, num_experts=number, align=16))
