"""grouped_matmul_nt writes its result and nothing else, with boxes, row by row and with other stores
(kernels_cu/include/matmul/wgmma_copies.cuh)."""

from __future__ import annotations

import numpy as np
import pytest
from product_operands import integers, scaled

import cupy_fp8 as fp8
from cupy_fp8 import Scaled, reference, testing
from cupy_fp8.cases import poison
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float32
from cupy_fp8.ops.matmul import wgmma
from cupy_fp8.reference.matmul.grouped import grouped_magnitudes
from cupy_fp8.reference.matmul.tolerance import assert_within


# ---- every number of rows ----
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("n", [8, 72, 200])
def test_last_rows_of_groups(n, accumulate, run):
    """1 to 15 rows, which do not fill a box; 16 to 63; all 64 of a warpgroup; several tiles."""
    splits = np.array([15, 1, 63, 17, 64, 79, 14, 207, 271])
    total = int(splits.sum()) + 5
    a, b = integers((total, 256), float8_e4m3fn, 1), integers((len(splits), n, 256), float8_e4m3fn, 2)
    check_exact(a, b, splits, "m", accumulate, run)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("added", [None, "by copies", "in blocks"])
@pytest.mark.parametrize("n", [8, 264])
@pytest.mark.parametrize("m", [9, 73, 201, 272])
def test_last_rows_of_gradients(m, n, added, turns, run, monkeypatch):
    """turns: clusters take turns with tiles, instead of taking them as needed."""
    accumulate, all_groups = added is not None, 1 << 20
    monkeypatch.setattr(wgmma, "_ADDED_IN_BLOCKS", all_groups if added == "in blocks" else 0)
    for name in ("_IN_TURNS", "_IN_TURNS_ADDING"):
        monkeypatch.setattr(wgmma, name, all_groups if turns else 0)
    splits = np.array([16, 0, 144, 48, 0, 96])
    total = int(splits.sum()) + 16
    a, b = integers((m, total), float8_e4m3fn, 1), integers((n, total), float8_e4m3fn, 2)
    check_exact(a, b, splits, "k", accumulate, run)


def check_exact(a, b, splits, group, accumulate, run):
    want = reference.grouped_matmul_nt(a, b, splits, group=group, dtype=float32)
    before = np.random.default_rng(3).integers(-9, 10, want.shape).astype(np.float32)
    if accumulate:
        want = want + before
        written = {"accumulate": run.array(before.copy())}
    else:
        poison(before)
        written = {"out": run.array(before.copy()), "dtype": float32}
    got = fp8.grouped_matmul_nt(run.array(a), run.array(b), run.array(splits), group=group, **written)
    testing.assert_bytes_equal(fp8.asnumpy(got) + np.float32(0), want + np.float32(0))


# ---- nothing else is written ----
SPLITS = np.array([0, 37, 0, 130, 8, 0])
TOTAL = 180                                             # five rows belong to no group
K, N = 200, 24


@pytest.mark.parametrize("n", [8, 64, 72, 136, 200, 264])    # the last tile has few columns, many, or most
@pytest.mark.parametrize("dtype", [bfloat16, float32], ids=str)
@pytest.mark.parametrize("group", ["m", "k"])
@pytest.mark.parametrize("start", [64, 65])     # the result begins at a multiple of 16 bytes, or not
def test_nothing_else_is_written_by_copies_of_boxes(start, group, dtype, n, run):
    splits = np.array([16, 0, 144, 48] if start == 64 else [16, 0, 141, 51])
    if group == "m":
        a, b = scaled((208, 256), "vector", 1), scaled((4, n, 256), "block", 2)
    else:
        a, b = (scaled((rows, 208), "row", seed) for rows, seed in ((40, 1), (n, 2)))
    want = reference.grouped_matmul_nt(a, b, splits, group=group, dtype=dtype)
    host = np.empty(want.size + 128, dtype)
    poison(host)
    buffer = run.array(host)
    out = buffer[start:start + want.size].reshape(want.shape)
    fp8.grouped_matmul_nt(run.array(a), run.array(b), run.array(splits), group=group, dtype=dtype, out=out)
    found = fp8.asnumpy(buffer)
    got = found[start:start + want.size].reshape(want.shape)
    assert_within(got, want, grouped_magnitudes(a, b, splits, group=group))
    for part in (slice(start), slice(start + want.size, None)):
        testing.assert_bytes_equal(found[part], host[part])


@pytest.mark.parametrize("n", [8, 23, 72, 200, 264])  # neighbours of 23 do not begin at multiples of 16
@pytest.mark.parametrize("group", ["m", "k"])
def test_what_no_product_is_added_to_keeps_its_bytes(group, n, run):
    """Rows after the last group, and gradients of groups without columns; each warp has fewer rows than 16
    once, and others follow."""
    splits = np.array([16, 0, 149, 50, 2, 0, 96])
    total = int(splits.sum()) + 7                       # rows of gradients begin at multiples of 16 bytes
    if group == "m":
        a, b = integers((total, 256), float8_e4m3fn, 1), integers((len(splits), n, 256), float8_e4m3fn, 2)
        shape: tuple[int, ...] = total, n
    else:
        a, b = integers((43, total), float8_e4m3fn, 1), integers((n, total), float8_e4m3fn, 2)
        shape = len(splits), 43, n
    before = np.empty(shape, np.float32)
    poison(before)
    before[..., 0] = -0.0                               # even 0 is not added to it
    added_to = np.arange(total) < splits.sum() if group == "m" else splits > 0
    before[added_to] = np.random.default_rng(3).integers(-9, 10, shape)[added_to]
    want = before.copy()
    want[added_to] += reference.grouped_matmul_nt(a, b, splits, group=group, dtype=float32)[added_to]
    into = run.array(before.copy())
    fp8.grouped_matmul_nt(run.array(a), run.array(b), run.array(splits), group=group, accumulate=into)
    found = fp8.asnumpy(into)
    testing.assert_bytes_equal(found[added_to] + np.float32(0), want[added_to] + np.float32(0))
    testing.assert_bytes_equal(found[~added_to], before[~added_to])


@pytest.mark.parametrize("rows", [256, 23])             # all rows of 256 are stored in boxes; not those of 23
@pytest.mark.parametrize("scale", [0, 2.0**-70, 2.0**-64])
def test_subnormal_sums_are_kept(scale, rows, run):
    codes, factor = np.full((rows, 128), 1.5).astype(float8_e4m3fn), np.array([scale], np.float32)
    a, b = Scaled(codes, factor, codes.shape), Scaled(codes[None, :20], factor, (1, 20, 128))
    before = np.random.default_rng(0).integers(0, 1 << 22, (rows, 20)).astype(np.uint32).view(np.float32)
    into = run.array(before.copy())
    fp8.grouped_matmul_nt(run.array(a), run.array(b), run.array(np.array([rows])), accumulate=into)
    want = (before + 128 * 2.25 * float(scale) ** 2).astype(np.float32)
    testing.assert_bytes_equal(fp8.asnumpy(into), want)
