"""Calls of scaling_aware_transpose: experts, results anywhere in memory, scales in any layout, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from power_of_two_rows import part, parts, scaled, transposed
from scale_arrays import guarded

import cupy_fp8 as fp8
from cupy_fp8 import cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import bfloat16, float8_e4m3fn
from cupy_fp8.ops.convert import scaling_aware
from cupy_fp8.results import Quantized, Scaled


# ---- experts ----
def test_experts_by_hand(run):
    """Every expert equals a call of its own, one after the other; the tail of the scales is 0."""
    rng = np.random.default_rng(1)
    codes, exponents = rng.integers(0, 0x78, (300, 40), np.uint8), rng.integers(-9, -3, (300, 1))
    q, ranges = scaled(codes, exponents, float8_e4m3fn), [(0, 130), (130, 130), (130, 137), (137, 300)]
    got = run.numpy(fp8.scaling_aware_transpose(run.array(q), splits=[130, 0, 7, 163]))
    parts = [transposed(scaled(codes[a:b], exponents[a:b], float8_e4m3fn), testing.Executor("reference"))
             for a, b in ranges]
    assert got.columnwise.data.shape == (300 * 40,)
    assert got.columnwise.scale_inv.shape == ((300 + 127 * 4) // 128, 40)
    np.testing.assert_array_equal(bits(got.columnwise.data), np.concatenate([bits(part.data).reshape(-1)
                                                                             for part in parts]))
    scales = np.concatenate([part.scale_inv for part in parts])
    np.testing.assert_array_equal(got.columnwise.scale_inv[:len(scales)], scales)
    assert not got.columnwise.scale_inv[len(scales):].any()
    assert got.rowwise.scale_inv.shape == ((300 + 3 * 4) // 4 * 4,)
    row_scales = np.concatenate([np.pad(q.scale_inv[a:b, 0], (0, -(b - a) % 4)) for a, b in ranges])
    np.testing.assert_array_equal(got.rowwise.scale_inv[:len(row_scales)], row_scales)
    assert not got.rowwise.scale_inv[len(row_scales):].any()


@pytest.mark.parametrize("recipe", [fp8.BlockScaling(), fp8.BlockScaling(scale_layout="compact"),
                                    fp8.MXScaling()],
                         ids=lambda r: f"{type(r).__name__}-{r.scale_layout}")
def test_after_permuting(recipe, run):
    """Tokens are quantised, permuted and padded in FP8, then transposed by expert, with scales in the layout
    of products. Unused rows, whose scale is 0, and rows of no expert have no effect."""
    rng = np.random.default_rng(2)
    x, chosen = rng.standard_normal((70, 256), np.float32), rng.integers(0, 4, (70, 2))
    r = fp8.route(run.array(chosen), num_experts=4, align=16)
    q = recipe.quantize(run.array(x)).rowwise
    rows = fp8.permute(q, r)
    got = run.numpy(fp8.scaling_aware_transpose(rows, splits=r.aligned_splits))
    if q.block == (1, 128):
        assert rows.to_layout("deepgemm_sm100").scale_layout == "deepgemm_sm100"
    else:
        fp8.swizzle_scales(rows.scale_inv, splits=r.aligned_splits)
    assert fp8.device_errors(clear=True) == ()
    rows, sizes = run.numpy(rows.to_layout("compact")), fp8.asnumpy(r.aligned_splits)
    assert sizes.sum() < len(rows.data)
    assert (bits(rows.scale_inv)[~bits(rows.data).any(axis=1)] == 0).all()
    testing.assert_bytes_equal(got, reference.scaling_aware_transpose(rows, splits=sizes))
    assert not np.isnan(got.columnwise.scale_inv.astype(np.float32)).any()


@pytest.mark.parametrize("splits", [None, [37, 0, 100, 3]])
@pytest.mark.parametrize("lead", [1, 4, 8])
@pytest.mark.parametrize("block", [128, 32])
def test_results_anywhere_in_memory(block, lead, splits, run):
    """Results at any address that a dtype allows: nothing else is written."""
    rng = np.random.default_rng(lead)
    q = scaled(rng.integers(0, 0x78, (140, 256), np.uint8), rng.integers(-9, -3, (140, 256 // block)),
               float8_e4m3fn, block)
    given = run.array(q)
    made, checked = fp8.scaling_aware_transpose(given, splits=splits), []

    def moved(a: Any) -> Any:
        fresh, intact = guarded(run, a.shape, a.dtype, lead // a.dtype.itemsize * a.dtype.itemsize)
        checked.append(intact)
        return fresh

    row, column = parts(made)
    sizes = None if splits is None else moved(column.splits)
    out = Quantized(row if block == 32 else part(row, scale_inv=moved(row.scale_inv), splits=sizes),
                    part(column, data=moved(column.data), scale_inv=moved(column.scale_inv), splits=sizes))
    assert fp8.scaling_aware_transpose(given, splits=splits, out=out) is out
    testing.assert_bytes_equal(run.numpy(out), reference.scaling_aware_transpose(q, splits=splits))
    assert all(intact() for intact in checked)


#: Experts have less than a word, a unit of 16 bytes, a quarter or a half of a tile, a tile, or more with last
#: tiles of any size.
SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 113, 127, 128, 129, 131, 143,
         145, 160, 200, 255, 256, 257,
         272, 389)


@pytest.mark.parametrize("columns", [20, 300, 528])
@pytest.mark.parametrize("target", scaling_aware.TARGETS)
@pytest.mark.parametrize("block", [128, 32])
def test_experts_of_every_size(block, target, columns, run):
    """Their columns begin at every byte of 16; nothing but the results is written."""
    rng = np.random.default_rng(columns)
    splits = rng.permutation(np.repeat(SIZES, 2 if columns == 20 else 1))
    rows = int(splits.sum()) + 70
    q = scaled(rng.integers(0, 0x78, (rows, columns), np.uint8), rng.integers(-9, -3,
                                                                              (rows, -(-columns // block))),
                                                                              float8_e4m3fn, block)
    given, sizes = run.array(q), run.array(splits)
    row, column = parts(fp8.scaling_aware_transpose(given, splits=sizes, target=target))
    data, intact = guarded(run, column.data.shape, column.data.dtype, columns % 16)
    out = Quantized(row, part(column, data=data))
    fp8.scaling_aware_transpose(given, splits=sizes, target=target, out=out)
    want = reference.scaling_aware_transpose(q, splits=splits, target=target)
    testing.assert_bytes_equal(run.numpy(out), want)
    assert intact()


# ---- results ----
@pytest.mark.parametrize("scale_layout", ["compact", "gemm_ready"])
@pytest.mark.parametrize("held", ["compact", "gemm_ready"])
@pytest.mark.parametrize("shape", [(300, 200), (3, 140, 260), (1, 1), (0, 130), (130, 0)], ids=str)
def test_blocks_of_128_x_128_are_transposed_as_they_are(shape, held, scale_layout, run):
    """Whatever the scales and the codes, nothing is computed."""
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    q = fp8.quantize_block(x, block=(128, 128), pow2_scale=False, scale_layout=held).rowwise
    assert q is not None
    bits(q.data)[...] = np.random.default_rng(4).integers(0, 256, shape, np.uint8)
    want = reference.quantize_block(x, block=(128, 128), pow2_scale=False, scale_layout=scale_layout,
                                    rowwise=False, columnwise=True)
    assert want.columnwise is not None
    given = run.array(q)
    result = fp8.scaling_aware_transpose(given, scale_layout=scale_layout)
    assert parts(result)[0] is given
    row, column = parts(run.numpy(result))
    testing.assert_bytes_equal(column.data, np.swapaxes(q.data, -1, -2).copy())
    testing.assert_bytes_equal(column.scale_inv, want.columnwise.scale_inv)
    assert (column.shape, column.transposed, column.block, column.scale_layout) == (shape, True, (128, 128),
                                                                                    scale_layout)
    testing.assert_bytes_equal(column.dequantize(), row.dequantize())
    testing.assert_bytes_equal(reference.scaling_aware_transpose(q, scale_layout=scale_layout),
                               run.numpy(result))
    wanted = column.data.copy(), column.scale_inv.copy()
    for written in parts(result)[1]:
        bits(written)[...] = 0
    assert fp8.scaling_aware_transpose(given, scale_layout=scale_layout, out=result) is result
    for mine, desired in zip(parts(run.numpy(result))[1], wanted, strict=True):
        testing.assert_bytes_equal(mine, desired)
    if q.data.size:
        another = Scaled(run.array(q.data.copy()), given.scale_inv, shape, False, (128, 128), held)
        with pytest.raises(ValueError, match=r"^out\.rowwise: expected q itself"):
            fp8.scaling_aware_transpose(another, scale_layout=scale_layout, out=result)


def test_row_wise_part(run):
    q = scaled(np.zeros((5, 130), np.uint8), np.arange(10).reshape(5, 2), float8_e4m3fn)
    given = run.array(q)
    row, column = parts(fp8.scaling_aware_transpose(Quantized(given)))
    assert row.data is given.data
    assert row.scale_layout == "gemm_ready"
    want = np.zeros((2, 8), np.float32)
    want[:, :5] = q.scale_inv.T
    testing.assert_bytes_equal(row.scale_inv, want)
    assert (column.shape, column.block, column.transposed) == ((5, 130), (128, 1), True)
    assert column.scale_inv.shape == (1, 132)
    mx = run.array(scaled(np.zeros((5, 130), np.uint8), np.zeros((5, 5), np.int64), float8_e4m3fn, 32))
    row, column = parts(fp8.scaling_aware_transpose(mx))
    assert row is mx
    assert column.scale_layout == "compact"


# ---- scales that are not compact ----
@pytest.mark.parametrize("splits", [None, [8, 0, 30]], ids=str)
@pytest.mark.parametrize("layout", ["gemm_ready", "deepgemm_sm90", "deepgemm_sm100", "swizzled"])
def test_scales_in_any_layout(layout, splits, run):
    """The default of `quantize_block` is taken without conversion; all other layouts of row-wise scales are
    accepted too."""
    x = cases.values("normal", (40, 260), bfloat16)
    q = fp8.quantize_mx(x) if layout == "swizzled" else fp8.quantize_block(x, scale_layout="compact")
    compact = q.rowwise
    assert compact is not None
    given, wanted = run.array(compact.to_layout(layout)), fp8.scaling_aware_transpose(compact, splits=splits)
    for q in (given, Quantized(given)):
        got = fp8.scaling_aware_transpose(q, splits=splits)
        testing.assert_bytes_equal(got.columnwise, wanted.columnwise)
        if layout == "swizzled":
            assert got.rowwise is given
        else:
            testing.assert_bytes_equal(got.rowwise, wanted.rowwise)
        for written in (*parts(got)[1], *([] if layout == "swizzled" else [parts(got)[0].scale_inv])):
            cases.poison(written)
        assert fp8.scaling_aware_transpose(q, splits=splits, out=got) is got
        testing.assert_bytes_equal(got.columnwise, wanted.columnwise)
        testing.assert_bytes_equal(given, compact.to_layout(layout))
        if layout != "swizzled":
            testing.assert_bytes_equal(got.rowwise, wanted.rowwise)


def test_the_default_of_quantize_block(run):
    x = cases.values("normal", (40, 260), bfloat16)
    testing.assert_bytes_equal(fp8.scaling_aware_transpose(fp8.quantize_block(run.array(x))),
                               fp8.scaling_aware_transpose(fp8.quantize_block(x, scale_layout="compact")))


def test_new_scales_of_the_same_result_are_read_anew(run):
    """Converted scales are never remembered: the next call sees what has been written since."""
    first, second = (cases.values("normal", (40, 260), bfloat16, seed) for seed in (1, 2))
    recipe = fp8.BlockScaling()
    q = recipe.quantize(run.array(first))
    out = fp8.scaling_aware_transpose(q)
    recipe.quantize(run.array(second * bfloat16.type(64)), out=q)
    fp8.scaling_aware_transpose(q, out=out)
    testing.assert_bytes_equal(out, fp8.scaling_aware_transpose(recipe.quantize(second * bfloat16.type(64))))


def test_a_result_in_the_given_scales_is_refused(run):
    q = fp8.quantize_block(run.array(cases.values("normal", (40, 256), bfloat16)))
    out = fp8.scaling_aware_transpose(q)
    assert q.rowwise is not None
    before = fp8.asnumpy(q.scale_inv).copy()
    with pytest.raises(ValueError, match=r"^out\.rowwise\.scale_inv: overlaps q\.scale_inv in memory"):
        fp8.scaling_aware_transpose(q, out=Quantized(q.rowwise, out.columnwise))
    testing.assert_bytes_equal(q.scale_inv, before)
