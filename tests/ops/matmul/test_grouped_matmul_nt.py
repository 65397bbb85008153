"""grouped_matmul_nt: its definition, exact products, wrong sizes, and errors."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import numpy as np
import pytest
from product_operands import integers, scaled
from tiers import where_kernels_run

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, Grouped, MXScaling, Quantized, Scaled, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.calls import group_sizes, remembered
from cupy_fp8.formats import FP8_DTYPES, float8_e4m3fn, float32
from cupy_fp8.kernels import errors
from cupy_fp8.ops.matmul import grouped, grouped_operands, tiles
from cupy_fp8.reference.matmul.grouped import grouped_magnitudes
from cupy_fp8.reference.matmul.tolerance import assert_within

SPLITS = np.array([0, 37, 0, 130, 8, 0], np.int64)
TOTAL = 180                                             # five rows belong to no group
K, N = 200, 24


def values(s: Scaled) -> np.ndarray:
    found: np.ndarray = s.dequantize(np.float32)
    return found.astype(np.float64)


# ---- the definition ----
@pytest.mark.parametrize("scaling", ["tensor", "row", "vector"])
def test_rows_of_each_group(scaling):
    a, b = scaled((TOTAL, K), scaling, 1), scaled((len(SPLITS), N, K), "block", 2)
    got = fp8.grouped_matmul_nt(a, b, SPLITS, dtype=float32)
    want, start = np.zeros((TOTAL, N)), 0
    for e, size in enumerate(SPLITS):
        want[start:start + size] = values(a)[start:start + size] @ values(b)[e].T
        start += size
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)     # dequantize rounds to f32
    assert not bits(got[start:]).any()


@pytest.mark.parametrize("block", [(1, 128), (1, None)], ids=str)
def test_columns_of_each_group(block):
    """The gradients of weights from the results of group_quantize."""
    rng = np.random.default_rng(3)
    x, grad = (rng.standard_normal((TOTAL, n)).astype(np.float32) for n in (K, N))
    recipe = BlockScaling(block)
    a, b = (fp8.group_quantize(v, SPLITS, recipe, rowwise=False, columnwise=True) for v in (grad, x))
    got = fp8.grouped_matmul_nt(a, b, group="k", dtype=float32)
    want = [values(left.columnwise).T @ values(right.columnwise) for left, right in zip(a, b, strict=True)]
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)


def test_what_scaling_aware_transpose_makes():
    """Rows for the forward pass, and columns for the gradient of the weights, from one Quantized."""
    rng = np.random.default_rng(4)
    x, grad = (rng.standard_normal((TOTAL, n)).astype(np.float32) for n in (K, N))
    a, b = (fp8.scaling_aware_transpose(fp8.quantize_block(v, scale_layout="compact"), splits=SPLITS)
            for v in (grad, x))
    weights = scaled((len(SPLITS), 8, K), "block", 5)
    rows = fp8.grouped_matmul_nt(b, weights, SPLITS, dtype=float32)
    plain = fp8.quantize_block(x, scale_layout="compact")
    np.testing.assert_array_equal(rows, fp8.grouped_matmul_nt(plain, weights, SPLITS, dtype=float32))
    got, start = fp8.grouped_matmul_nt(a, b, SPLITS, group="k", dtype=float32), 0
    for e, size in enumerate(SPLITS):
        want = grad[start:start + size].T.astype(np.float64) @ x[start:start + size]
        assert np.abs(got[e] - want).max(initial=0) < 0.3 * max(np.sqrt(size), 1)
        start += size


# ---- every executor ----
@pytest.mark.parametrize("dtypes", itertools.product(FP8_DTYPES, repeat=2), ids=str)
@pytest.mark.parametrize("group", ["m", "k"])
def test_small_integers_are_exact(group, dtypes, run):
    """Bytes equal those of the reference, also when accumulating."""
    if group == "m":
        a, b = integers((TOTAL, K), dtypes[0], 6), integers((len(SPLITS), N, K), dtypes[1], 7)
        shape: tuple[int, ...] = TOTAL, N
    else:
        a, b = integers((N, TOTAL), dtypes[0], 6), integers((13, TOTAL), dtypes[1], 7)
        shape = len(SPLITS), N, 13
    want = reference.grouped_matmul_nt(a, b, SPLITS, group=group, dtype=float32)
    a, b, splits = run.array(a), run.array(b), run.array(SPLITS)
    got = fp8.grouped_matmul_nt(a, b, splits, group=group, dtype=float32)
    testing.assert_bytes_equal(fp8.asnumpy(got) + np.float32(0), want + np.float32(0))
    added = run.array(np.full(shape, 3, np.float32))
    assert fp8.grouped_matmul_nt(a, b, splits, group=group, accumulate=added) is added
    testing.assert_bytes_equal(fp8.asnumpy(added), want + np.float32(3))


@where_kernels_run
@pytest.mark.parametrize("m", [13, 16])
def test_an_empty_group_may_begin_anywhere(m, run):
    """Scales of whole blocks of all columns need groups that begin at multiples of 128, except empty ones."""
    sizes = np.array([128, 100, 0])
    a, b = (run.array(scaled((rows, 240), "vector", rows)) for rows in (m, N))
    fp8.device_errors(clear=True)
    got = fp8.grouped_matmul_nt(a, b, run.array(sizes), group="k", dtype=float32)
    assert fp8.device_errors() == ()
    assert not bits(fp8.asnumpy(got))[2].any()


@where_kernels_run
@pytest.mark.parametrize("blocks", [1, 3])
def test_few_blocks_take_the_tiles_of_all_groups_at_odd_addresses(blocks, run, monkeypatch):
    """Beside a launch for the other groups, one of few blocks computes the remaining tiles."""
    monkeypatch.setattr(tiles, "_BLOCKS_FOR_OTHERS", blocks)
    remembered.forget()
    sizes = np.array([3, 16, 0, 5, 1, 7, 16, 0, 2, 9, 4])
    a, b = (integers((rows, 64), float8_e4m3fn, rows) for rows in (130, N))
    want = reference.grouped_matmul_nt(a, b, sizes, group="k", dtype=float32)
    out = run.array(np.full(want.shape, np.nan, np.float32))
    fp8.grouped_matmul_nt(run.array(a), run.array(b), run.array(sizes), group="k", out=out, dtype=float32)
    testing.assert_bytes_equal(fp8.asnumpy(out) + np.float32(0), want + np.float32(0))


@pytest.mark.full
@pytest.mark.parametrize("group", ["m", "k"])
def test_512_groups(group, run):
    """Most have one row or column or none. A warp searches tiles 32 groups at a time."""
    sizes = np.random.default_rng(3).choice([0, 1, 2, 17], 512, p=[0.4, 0.3, 0.28, 0.02])
    total = int(sizes.sum()) + 3
    shapes = ((total, 48), (512, 8, 48)) if group == "m" else ((9, total), (8, total))
    a, b = (integers(shape, float8_e4m3fn, seed) for seed, shape in enumerate(shapes))
    want = reference.grouped_matmul_nt(a, b, sizes, group=group, dtype=float32)
    got = fp8.grouped_matmul_nt(run.array(a), run.array(b), run.array(sizes), group=group, dtype=float32)
    testing.assert_bytes_equal(fp8.asnumpy(got) + np.float32(0), want + np.float32(0))


@pytest.mark.parametrize("k", [512, 500])                       # tensor copies take 512 but not 500
def test_scales_whose_product_is_no_normal_number(k, run):
    """2^-146 has few bits as f32, and 2^160 exceeds it, but sums times one after the other are in range."""
    rng = np.random.default_rng(9)
    a_data, b_data = rng.uniform(200, 448, (3, k)), rng.uniform(200, 448, (1, 8, k))
    a_data[1] = 0
    a_scales = np.repeat(np.array([[2.0**-100], [2.0**100], [1.0]]), 4, 1) * rng.uniform(1, 2, (3, 4))
    for b_scale, rows in ((2.0**-46, [0, 1, 2]), (2.0**60, [1])):
        a = Scaled(a_data.astype(float8_e4m3fn), a_scales.astype(np.float32), (3, k), False, (1, 128),
                   "compact")
        b = Scaled(b_data.astype(float8_e4m3fn), (b_scale * rng.uniform(1, 2, (1, 1, 4))).astype(np.float32),
                   (1, 8, k), False, (128, 128), "compact")
        got = fp8.asnumpy(fp8.grouped_matmul_nt(run.array(a), run.array(b), [3], dtype=float32))
        want = reference.grouped_matmul_nt(a, b, [3], dtype=float32)
        np.testing.assert_allclose(got[rows], want[rows], rtol=1e-3)


def test_a_row_does_not_depend_on_those_after_its_group(run):
    """Warps multiply 16 rows, some of which do not exist. Memory of their scales may hold anything."""
    a, b = run.array(scaled((48, 384), "vector", 1)), run.array(scaled((1, 72, 384), "block", 2))
    whole = fp8.asnumpy(fp8.grouped_matmul_nt(a, b, run.array(np.array([48])), dtype=float32))
    for rows in (1, 7, 9, 21, 40):
        part = fp8.asnumpy(fp8.grouped_matmul_nt(a, b, run.array(np.array([rows])), dtype=float32))
        testing.assert_bytes_equal(part[:rows], whole[:rows])
        assert not part[rows:].any()


def test_both_tiles_give_the_same_rows(monkeypatch, run):
    a, b = run.array(scaled((TOTAL, K), "vector", 1)), run.array(scaled((6, N, K), "block", 2))
    made = []
    for few in (0, 1 << 20):
        monkeypatch.setattr(tiles, "_FEW", few)
        fp8.calls.remembered.forget()
        made.append(fp8.asnumpy(fp8.grouped_matmul_nt(a, b, run.array(SPLITS))))
    testing.assert_bytes_equal(*made)


@pytest.mark.parametrize("group", ["m", "k"])
def test_allocating_calls_are_remembered_and_write_their_own_result(group, device):
    """Rows of 512 bytes, which are stored by boxes of a tensor map. Both operands of "k" share their
    sizes."""
    rng, blocks = np.random.default_rng(0), fp8.BlockScaling((1, 128))
    x, splits = device.array(rng.standard_normal((256, 128), np.float32)), device.array(np.array([128, 128]))
    if group == "k":
        operands = [fp8.group_quantize(x, splits, blocks, columnwise=True, rowwise=False) for _ in range(2)]
        arguments: tuple[Any, ...] = (*operands, None)
    else:
        w = device.array(rng.standard_normal((2, 256, 128), np.float32))
        arguments = blocks.quantize(x).rowwise, fp8.BlockScaling((128, 128)).quantize(w).rowwise, splits
    first = fp8.grouped_matmul_nt(*arguments, group=group)
    known, want = len(remembered._calls), device.run.numpy(first)
    bits(first).fill(0)
    for _ in range(2):
        again = fp8.grouped_matmul_nt(*arguments, group=group)
        assert device.run.numpy(again).tobytes() == want.tobytes()
    assert not bits(device.run.numpy(first)).any(), "written by a later call"
    assert len(remembered._calls) == known
    assert any(call._launches[-1].launch.variant.kernel.entry in ("wgmma_products", "product_tiles")
               for call in remembered._calls.values() if isinstance(call, remembered._Allocating))


@pytest.mark.parametrize(("version", "entries"), [
    ((12, 3), {"m": {"wgmma_products"}, "k": {"wgmma_products", "product_tiles"}}),
    ((12, 2), {"m": {"product_tiles"}, "k": {"product_tiles"}})], ids=str)
@pytest.mark.parametrize("group", ["m", "k"])
@pytest.mark.parametrize("device", ["stand-in"], indirect=True)
def test_an_nvrtc_that_cannot_compile_hoppers_kernel(device, group, version, entries, launched, monkeypatch):
    monkeypatch.setattr(device.cupy.cuda.nvrtc, "getVersion", lambda: version)
    a, b = (integers(shape, float8_e4m3fn, seed) for seed, shape in enumerate(
        ((48, 64), (2, 8, 64)) if group == "m" else ((24, 48), (8, 48))))
    splits = np.array([16, 32])
    want = reference.grouped_matmul_nt(a, b, splits, group=group, dtype=float32)
    a, b = (Scaled(device.array(s.data), device.array(s.scale_inv), s.shape) for s in (a, b))
    got = fp8.grouped_matmul_nt(a, b, device.array(splits), group=group, dtype=float32)
    assert set(launched) == entries[group]
    testing.assert_bytes_equal(device.run.numpy(got) + np.float32(0), want + np.float32(0))


# ---- sizes that only the device knows ----
NEGATIVE, SUM, START = (errors.MESSAGES[fact] for fact in (
    errors.Fact.SPLIT_NEGATIVE, errors.Fact.SPLIT_SUM, errors.Fact.SPLIT_START))


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch, run: testing.Executor) -> testing.Executor:
    """Values of NumPy arrays are not checked, like those on a device."""
    monkeypatch.setattr(group_sizes, "check_at_most", lambda *_: None)
    monkeypatch.setattr(grouped_operands, "check_whole_blocks", lambda *_: None)
    monkeypatch.setattr(grouped, "check_whole_blocks", lambda *_: None)
    return run


@pytest.mark.parametrize("pair", [("vector", "row"), ("row", "vector")], ids="-".join)
def test_groups_that_begin_within_a_block_of_scales(pair, unchecked):
    run, sizes = unchecked, np.array([128, 100, 0, 52, 0])
    a, b = scaled((N, 280), pair[0], 1), scaled((13, 280), pair[1], 2)
    got = fp8.asnumpy(fp8.grouped_matmul_nt(run.array(a), run.array(b), run.array(sizes), group="k"))
    want = reference.grouped_matmul_nt(a, b, sizes, group="k")
    magnitudes = grouped_magnitudes(a, b, sizes, group="k")
    if run.name != "reference":
        assert not bits(got[3]).any()
        want[3] = 0
        assert fp8.device_errors(clear=True) == (START,)
    assert_within(got, want, magnitudes)


# ---- refused ----
X, W = scaled((TOTAL, K), "vector", 1), scaled((6, N, K), "block", 2)
XT, GT = scaled((13, TOTAL), "vector", 1), scaled((N, TOTAL), "vector", 2)
G = fp8.group_quantize(np.ones((TOTAL, K), np.float32), SPLITS, BlockScaling())
GC = fp8.group_quantize(np.ones((TOTAL, K), np.float32), SPLITS, BlockScaling(), rowwise=False,
                        columnwise=True)
GO = fp8.group_quantize(np.ones((TOTAL, K), np.float32), SPLITS[::-1].copy(), BlockScaling(), rowwise=False,
                        columnwise=True)
GX, GR = (fp8.group_quantize(np.ones((TOTAL, K), np.float32), SPLITS, recipe, columnwise=True)
          for recipe in (MXScaling(), BlockScaling((128, 1))))


@pytest.mark.parametrize(("error", "message", "args", "options"), [
    (TypeError, "splits: expected the sizes of groups, an int32 or int64 array or a list, got None", (X, W),
     {}),
    (ValueError, "group: expected one of ('m', 'k'), got 'n'", (X, W, SPLITS), {"group": "n"}),
    (TypeError, "dtype: expected one of ", (X, W, SPLITS), {"dtype": float8_e4m3fn}),
    (TypeError, "a: expected a Scaled or Quantized, got ndarray", (X.data, W, SPLITS), {}),
    (ValueError, "a: expected [all rows, K], got shape (6, 24, 200)", (W, W, SPLITS), {}),
    (ValueError, "b: expected [experts, N, K], got shape (180, 200)", (X, X, SPLITS), {}),
    (TypeError, "b: expected a Scaled or Quantized [experts, N, K], got a Grouped", (X, G, SPLITS), {}),
    (ValueError, "b: expected K = 200, as a has, got 64", (X, scaled((6, N, 64), "block", 1), SPLITS), {}),
    (ValueError, "b: expected the weights of 5 groups, as many as there are sizes, got 6", (X, W, SPLITS[1:]),
     {}),
    (ValueError, "b: expected the weights of 1 group, as many as there are sizes, got 6", (X, W, [180]), {}),
    (ValueError, "splits: expected sizes that add up to at most the 180 rows", (X, W, SPLITS + 2), {}),
    (ValueError, "splits: expected sizes that add up to at most the 180 columns there are, got 187",
     (GT, XT, SPLITS + 2), {"group": "k"}),
    (ValueError, "splits: expected the sizes that a is laid out by, [0, 37, 0, 130, 8, 0], got [0, 37, 130, "
     "0, 8, 0]", (G, W, SPLITS[[0, 1, 3, 2, 4, 5]]), {}),
    (ValueError, "a: expected one scale, a scale for each row or blocks 1×128, since groups begin at any row",
     (scaled((TOTAL, K), "block", 1), W, SPLITS), {}),
    (ValueError, "a: expected one scale, a scale for each row, or blocks of 128, got MX blocks",
     (fp8.quantize_mx(np.ones((TOTAL, K), np.float32)), W, SPLITS), {}),
    (ValueError, "a: expected a Grouped with quantised rowwise data, got no rowwise data", (GC, W), {}),
    (ValueError, "a: expected a Grouped with quantised rowwise data, got plain values",
     (Grouped.wrap(np.ones((TOTAL, K), np.float32), SPLITS), W), {}),
    (ValueError, "a: expected a Grouped with quantised columnwise data", (G, G), {"group": "k"}),
    (ValueError, "splits: expected groups that begin at multiples of 128", (GT, XT, SPLITS), {"group": "k"}),
    (ValueError, "b: expected 180 columns of all groups, as a has, got 200", (GT, X, SPLITS), {"group": "k"}),
    (ValueError, "a: expected one scale for each group, or block (1, None), (1, 128) or (128, 128) with "
     "compact or gemm_ready scales, got block (1, 32) with compact scales; group_quantize(x, splits, "
     "BlockScaling((1, 128)), rowwise=True) makes an operand", (GX, W), {}),
    (ValueError, "a: expected one scale for each group, or block (1, None) or (1, 128) with compact or "
     "gemm_ready scales, got block (1, 32) with compact scales; group_quantize(x, splits, "
     "BlockScaling((1, 128)), columnwise=True) makes an operand", (GX, GX), {"group": "k"}),
    (ValueError, "b: expected one scale for each group, or block (1, None) or (1, 128) with compact or "
     "gemm_ready scales, got block (128, 1) with ", (GC, GR), {"group": "k"}),
    (ValueError, "a: expected column-wise data stored transposed, got data stored as is; group_quantize(",
     (dataclasses.replace(GC, transposed=False), GC), {"group": "k"}),
    (ValueError, "b.splits: expected the sizes that a is laid out by, ", (GC, GO), {"group": "k"}),
    (ValueError, "out: expected None beside accumulate", (X, W, SPLITS),
     {"accumulate": np.zeros((TOTAL, N), np.float32), "out": np.zeros((TOTAL, N), np.float32)}),
])
def test_refused(error, message, args, options):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        fp8.grouped_matmul_nt(*args, **options)


@pytest.mark.parametrize(("flipped", "message"), [
    ("", r"b: expected 24 columns of all groups, as a has, got 200; a\.T and b\.T have 180 columns"),
    ("a", r"b: expected 180 columns of all groups, as a has, got 200; b\.T has 180 columns"),
    ("b", r"b: expected 24 columns of all groups, as a has, got 180; a\.T has 180 columns"), ("ab", None)])
def test_operands_that_should_be_transposed(flipped, message):
    """Their row-wise parts are used, whose columns are not those of groups."""
    grad, x = (fp8.CurrentScaling().quantize(np.ones((TOTAL, n), np.float32), columnwise=True)
               for n in (N, K))
    a, b = grad.T if "a" in flipped else grad, x.T if "b" in flipped else x
    if message is None:
        assert fp8.grouped_matmul_nt(a, b, SPLITS, group="k").shape == (6, N, K)
        return
    with pytest.raises(ValueError, match=f"^{message}$"):
        fp8.grouped_matmul_nt(a, b, SPLITS, group="k")
    for one_direction in (lambda q: q.rowwise, lambda q: Quantized(q.rowwise)):
        with pytest.raises(ValueError, match=f"^{message.partition(';')[0]}$"):
            fp8.grouped_matmul_nt(one_direction(a), one_direction(b), SPLITS, group="k")


def test_operands_of_equal_extents_that_should_be_transposed():
    q = fp8.CurrentScaling().quantize(np.ones((TOTAL, 64), np.float32), columnwise=True)
    message = "splits: expected sizes that add up to at most the 64 columns there are, got "
    with pytest.raises(ValueError, match=rf"^{message}175; a\.T and b\.T have 180 columns$"):
        fp8.grouped_matmul_nt(q, q, SPLITS, group="k")
    with pytest.raises(ValueError, match=f"^{message}187$"):            # more than there are rows
        fp8.grouped_matmul_nt(q, q, SPLITS + 2, group="k")


def test_scales_of_another_number_of_groups():
    x = fp8.quantize_block(np.ones((TOTAL, K), np.float32), scale_layout="compact")
    q = fp8.scaling_aware_transpose(x, splits=SPLITS)
    with pytest.raises(ValueError, match=r"^splits: expected 6 groups, as a has, got 2$"):
        fp8.grouped_matmul_nt(Quantized(None, q.columnwise), q, [100, 80], group="k")


def test_columns_of_weights_that_were_not_made_are_what_it_asks_for():
    """The gradient of an expert layer's input is a product with w.T."""
    w, g, sizes = np.ones((2, 256, 128), np.float32), np.ones((256, 256), np.float32), [128, 128]
    gq, wq = fp8.quantize_block(g), fp8.quantize_block(w, block=(128, 128), columnwise=True)
    assert fp8.grouped_matmul_nt(gq, wq.T, sizes).shape == (256, 128)
    for wrong in (fp8.Quantized(wq.rowwise).T, wq.rowwise.T):
        with pytest.raises(ValueError, match=r"^b: expected .* If b is q\.T or q\.rowwise\.T, give q\.T"):
            fp8.grouped_matmul_nt(gq, wrong, sizes)
