"""Grouped: groups of rows, and their members."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
from group_arrays import COLUMNS, CURRENT, RECIPE, ROWS, matrix, scales_of

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, MXScaling, reference, testing
from cupy_fp8.formats import bfloat16, float8_e4m3fn
from cupy_fp8.grouped import Grouped
from cupy_fp8.io import archive


def test_wrap(run):
    data = run.array(np.arange(21, dtype=np.int32).reshape(7, 3))
    index: Any = np.int64(2)
    for splits in ([2, 0, 4], run.array(np.array([2, 0, 4], np.int32))):
        g = fp8.Grouped.wrap(data, splits)
        assert (len(g), g.shape, g.dtype, g.nbytes) == (3, (7, 3), np.dtype(np.int32), 84)
        assert fp8.asnumpy(g.offsets).tolist() == [0, 6, 6, 18]
        assert g.offsets.dtype == np.int64
        assert g.data.shape == (21,)
        assert [fp8.asnumpy(a).reshape(-1).tolist() for a in g] == [[*range(6)], [], [*range(6, 18)]]
        assert [a.shape for a in g] == [(2, 3), (0, 3), (4, 3)]
        assert g[-1].shape == g[index].shape == (4, 3)
        g[2][0, 0] = 99
        assert int(data[2, 0]) == 99, "a member is a view"
        data[2, 0] = 6
    offsets = run.array(np.array([0, 6, 6, 18]))
    assert fp8.asnumpy(fp8.Grouped.wrap(data, splits, offsets=offsets).offsets).tolist() == [0, 6, 6, 18]
    kind = "cupy" if run.name == "cuda" else "numpy"
    assert repr(g) == f"Grouped(int32[7, 3] in 3 groups, plain values, {kind})"
    codes = np.arange(8, dtype=np.uint8).view(float8_e4m3fn).reshape(4, 2)
    typed = fp8.Grouped.wrap(run.array(codes), [1, 3])
    assert (typed[1].dtype, typed[1].shape) == (float8_e4m3fn, (3, 2))


DATA, EVERYTHING = np.zeros((4, 2), np.float32), cast(Any, slice(None))


@pytest.mark.parametrize(("wrong", "error", "message"), [
    (lambda: Grouped.wrap(np.zeros(4), [4]), ValueError, "data: expected an array of two dimensions"),
    (lambda: Grouped.wrap(DATA.T, [2]), ValueError, "data: expected a C-contiguous array"),
    (lambda: Grouped.wrap([[1]], [1]), TypeError, "data: expected a numpy.ndarray or cupy.ndarray"),
    (lambda: Grouped.wrap(DATA, [2, 3]), ValueError,
     "splits: expected sizes that add up to at most the 4 rows there are, got 5"),
    (lambda: Grouped.wrap(DATA, [2, -1]), ValueError,
     "splits: expected sizes of 0 or more, got -1 for group 1"),
    (lambda: Grouped.wrap(DATA, [2.0]), TypeError, "splits: expected integers"),
    (lambda: Grouped.wrap(DATA, [4], offsets=np.zeros(2, np.int32)), TypeError,
     "offsets: expected dtype int64, got int32"),
    (lambda: Grouped.wrap(DATA, [4], offsets=np.zeros(3, np.int64)), ValueError,
     r"offsets: expected shape \(2,\), one more than splits"),
    (lambda: Grouped.wrap(DATA, [4], offsets=[0, 8]), TypeError, "offsets: expected a numpy.ndarray"),
    (lambda: Grouped.wrap(DATA, [4])[1], IndexError, "Grouped: index 1 is out of range for 1 groups"),
    (lambda: Grouped.wrap(DATA, [4])[EVERYTHING], TypeError, "Grouped: expected an integer index"),
    (lambda: Grouped.wrap(DATA, [4]).dequantize(), TypeError,
     "dequantize: plain float32 values are not quantised"),
    (lambda: Grouped(DATA, DATA, (4, 2)), ValueError,
     "Grouped: expected row-wise data, or quantised column-wise data"),
    (lambda: Grouped.wrap(DATA, [2, 2], offsets=np.array([0, 6, 8])), ValueError,
     r"offsets: expected 4 at 1 \(rows before it, times 2 columns\), got 6"),
])  # fmt: skip
def test_refused(wrong, error, message):
    with pytest.raises(error, match="^" + message):
        wrong()


TENSORS = fp8.group_quantize(matrix(9, 4), [4, 5], RECIPE, columnwise=True, scales=scales_of(2))
BLOCKS = fp8.group_quantize(matrix(9, 4), [4, 5], BlockScaling(scale_layout="compact"), columnwise=True)


@pytest.mark.parametrize(("g", "change", "error", "message"), [
    (TENSORS, {"splits": [4, 5]}, TypeError, "splits: expected a numpy.ndarray or cupy.ndarray, got list"),
    (TENSORS, {"splits": np.ones((2, 1), np.int64)}, ValueError, "splits: expected one dimension, got sh"),
    (TENSORS, {"splits": np.ones(2)}, TypeError, "splits: expected dtype int32, int64, got float64"),
    (TENSORS, {"offsets": np.ones(3, np.int32)}, TypeError, "offsets: expected dtype int64, got int32"),
    (TENSORS, {"offsets": np.ones(2, np.int64)}, ValueError, r"offsets: expected shape \(3,\), got \(2,\)"),
    (TENSORS, {"offsets": np.array([0, 20, 36])}, ValueError,
     r"offsets: expected 16 at 1 \(rows before it, times 4 columns\), got 20"),
    (BLOCKS, {"splits": np.array([5, 4])}, ValueError,
     r"offsets: expected 20 at 1 \(rows before it, times 4 columns\), got 16"),
    (TENSORS, {"shape": (36,)}, ValueError, r"shape: expected \(M, K\), got \(36,\)"),
    (TENSORS, {"shape": (9, -4)}, ValueError, "shape: expected extents of zero or more"),
    (TENSORS, {"shape": (9, 5)}, ValueError, r"rowwise: expected shape \(45,\), got \(36,\)"),
    (TENSORS, {"rowwise": 5}, TypeError, "rowwise: expected a numpy.ndarray or cupy.ndarray, got int"),
    (TENSORS, {"rowwise": np.zeros(36, np.uint8)}, TypeError, "rowwise: expected dtype float8_e4m3fn, flo"),
    (TENSORS, {"columnwise": np.zeros(36, np.uint8)}, TypeError, "columnwise: expected dtype float8_e4m3"),
    (TENSORS, {"scale_inv": np.ones(3, np.float32)}, ValueError, r"scale_inv: expected shape \(2,\)"),
    (TENSORS, {"scale_inv": np.ones(2)}, TypeError, "scale_inv: expected dtype float32, got float64"),
    (TENSORS, {"scale_inv": None}, ValueError, "columnwise: expected None for plain values"),
    (TENSORS, {"scale_inv": None, "columnwise": None}, ValueError,
     r"scale_inv: expected one scale for each of 2 groups, got None; Grouped\.wrap groups plain values"),
    (TENSORS, {"columnwise_scale_inv": np.ones(2, np.float32)}, ValueError,
     "columnwise_scale_inv: expected None for one scale for each group"),
    (TENSORS, {"scale_layout": "compact"}, ValueError, "scale_layout: expected None for one scale for ea"),
    (TENSORS, {"transposed": "yes"}, TypeError, "transposed: expected True or False"),
    (BLOCKS, {"scale_layout": None}, ValueError, r"scale_layout: expected one of .* blocks \(1, 128\), got"),
    (BLOCKS, {"scale_layout": "gemm"}, ValueError, "scale_layout: expected one of"),
    (BLOCKS, {"scale_layout": "swizzled"}, TypeError, "scale_inv: expected dtype float8_e8m0fnu, got float"),
    (BLOCKS, {"block": None}, ValueError, "scale_layout: expected None for one scale for each group"),
    (BLOCKS, {"block": (1, 7)}, ValueError, "block: expected"),
    (BLOCKS, {"block": 128}, ValueError, "block: expected"),
    (BLOCKS, {"scale_inv": None}, ValueError, "scale_inv: expected an array beside rowwise, got None"),
    (BLOCKS, {"columnwise": None}, ValueError, "columnwise: expected an array beside columnwise_scale_inv"),
    (BLOCKS, {"scale_inv": None, "columnwise_scale_inv": None}, ValueError,
     "scale_inv: expected an array beside rowwise, got None"),
    (BLOCKS, {"scale_inv": np.ones((8, 1), np.float32)}, ValueError, r"scale_inv: expected shape \(9, 1\)"),
    (BLOCKS, {"columnwise_scale_inv": np.ones((3, 4))}, TypeError, "columnwise_scale_inv: expected dtype"),
])  # fmt: skip
def test_fields_that_do_not_fit_are_refused_by_name(g, change, error, message):
    with pytest.raises(error, match="^" + message):
        Grouped(**{**g.__getstate__(), **change})
    with pytest.raises(error, match="^" + message):
        dataclasses.replace(g, **change)


def test_fields_that_fit():
    for g in (TENSORS, BLOCKS, Grouped.wrap(DATA, [1, 3])):
        assert dataclasses.replace(g) == g
    given: Any = {"shape": [np.int64(9), 4], "block": [1, np.int64(128)], "transposed": 1}
    g = Grouped(**{**BLOCKS.__getstate__(), **given})
    assert g == BLOCKS
    assert (g.shape, g.block, g.transposed) == ((9, 4), (1, 128), True)
    assert Grouped.wrap(np.zeros((4, 2), float8_e4m3fn), [1, 3])._plain


def test_columnwise_alone():
    g = fp8.group_quantize(matrix(9, 4), [4, 5], RECIPE, rowwise=False, columnwise=True, scales=scales_of(2))
    assert g.rowwise is None
    with pytest.raises(AttributeError, match=r"no row-wise data: use \.columnwise"):
        _ = g.data
    assert list(g[1].parts) == ["columnwise"]
    assert g[1].columnwise.data.shape == (4, 5)


@pytest.mark.parametrize("rowwise", [True, False])
def test_dequantize(rowwise, run):
    x, splits, scales = matrix(50, 24), [20, 0, 23], scales_of(3)
    g = fp8.group_quantize(run.array(x), splits, RECIPE, rowwise=rowwise, columnwise=True,
                           scales=run.array(scales))
    want = np.zeros((50, 24), np.float32)
    want[:20] = reference.quantize_tensor(x[:20], scales[:1]).dequantize()
    want[20:43] = reference.quantize_tensor(x[20:43], scales[2:]).dequantize()
    testing.assert_bytes_equal(g.dequantize(), want)
    testing.assert_bytes_equal(fp8.dequantize(g), want)
    testing.assert_bytes_equal(g.dequantize(bfloat16), reference.astype(want, bfloat16))


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"scale_inv": lambda s: s.astype(np.float64)}, TypeError,
     "q.scale_inv: expected dtype float8_e8m0fnu, float32 of compact"),
    ({"scale_inv": lambda s: s[:40]}, ValueError, "scale_inv: group 1 has scales 16 to 64, got 40"),
    ({"scale_inv": lambda s: s[::2]}, ValueError, "scale_inv: group 1 has scales 16 to 64, got 40"),
    ({"offsets": lambda a: a[:-1]}, ValueError, r"offsets: expected shape \(4,\), got \(3,\)"),
    ({"rowwise": lambda a: a[:-1]}, ValueError, r"rowwise: expected shape \(10240,\), got \(10239,\)"),
    ({"rowwise": lambda a: a.view(np.uint8)}, TypeError,
     "q.data: expected dtype float8_e4m3fn, float8_e5m2, got uint8"),
    ({"scale_layout": lambda _: "swizzled"}, ValueError, "scale_inv: group 0 has scales 0 to 512, got 80"),
])  # fmt: skip
def test_dequantize_into_out_writes_nothing_where_a_member_is_refused(change, error, message, run):
    g = fp8.group_quantize(run.array(matrix(40, 256)), [8, 24, 3], fp8.BlockScaling(scale_layout="compact"))
    assert g.scale_inv is not None
    parts = {**g.__getstate__(), "scale_inv": g.scale_inv.reshape(-1)[:80]}
    assert Grouped._of_fields(**parts).dequantize().shape == (40, 256)
    name, changed = next(iter(change.items()))
    wrong = Grouped._of_fields(**{**parts, name: changed(parts[name])})
    out = run.array(np.full((40, 256), 7, np.float32))
    with pytest.raises(error, match="^" + message):
        wrong.dequantize(out=out)
    assert (fp8.asnumpy(out) == 7).all()


def test_dequantize_into_its_own_scales(run):
    g = fp8.group_quantize(run.array(matrix(40, 256)), [8, 24, 8], fp8.BlockScaling(scale_layout="compact"))
    memory = run.array(np.full(40 * 256, 7, np.float32))
    scales = memory[-80:]
    scales[...] = 1
    wrong = Grouped._of_fields(**{**g.__getstate__(), "scale_inv": scales})
    with pytest.raises(ValueError, match=r"^out: overlaps q\.scale_inv in memory"):
        wrong.dequantize(out=memory.reshape(40, 256))
    assert (fp8.asnumpy(memory)[:-80] == 7).all()


def test_wrapped_sizes_and_offsets_may_change(run):
    data = run.array(np.arange(21, dtype=np.int32).reshape(7, 3))
    for dtype in (np.int32, np.int64):
        splits = run.array(np.array([2, 0, 4], dtype))
        offsets = run.array(np.array([0, 6, 6, 18]))
        for g in (Grouped.wrap(data, splits), Grouped.wrap(data, splits, offsets=offsets)):
            splits[...], offsets[...] = 1, 0
            assert [fp8.asnumpy(a).reshape(-1).tolist() for a in g] == [[*range(6)], [], [*range(6, 18)]]
            splits[...], offsets[...] = run.array(np.array([2, 0, 4])), run.array(np.array([0, 6, 6, 18]))


@pytest.mark.parametrize("change", ["splits", "offsets"])
def test_members_of_other_sizes_are_refused(change, run):
    """Whether a field was exchanged or changed in place, on host or device."""
    g = fp8.group_quantize(run.array(matrix(9, 4)), run.array(np.array([4, 5])), BlockScaling())
    getattr(g, change)[1] = 3
    for use in (lambda: g[0], lambda: list(g), g.dequantize):
        with pytest.raises(ValueError, match=r"^offsets: expected \d+ at \d \(rows before it, times 4 col"):
            use()


# ---- in files and on pages ----
EACH: Any = product
RECIPES = [CURRENT, BlockScaling(profile="deepgemm", scale_layout="deepgemm_sm90"),
           BlockScaling(profile="vllm"),
           BlockScaling(ROWS), BlockScaling(COLUMNS, scale_layout="compact"),
           *(MXScaling(block=block, scale_layout=layout)
             for block, layout in EACH(((1, 32), (32, 32)), ("compact", "swizzled")))]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_saved_and_loaded(recipe, tmp_path):
    x, sizes = matrix(90, 71), np.array([40, 0, 33])
    g, plain = fp8.group_quantize(x, sizes, recipe, columnwise=True), Grouped.wrap(x, sizes)
    codes = Grouped.wrap(fp8.astype(x, float8_e4m3fn), sizes)
    fp8.save(tmp_path / "groups.npz", g=g, plain=plain, codes=codes)
    loaded = fp8.load(tmp_path / "groups.npz")
    assert (loaded["g"], loaded["plain"], loaded["codes"]) == (g, plain, codes)
    assert (loaded["g"].columnwise is loaded["g"].rowwise) == (g.columnwise is g.rowwise)


@pytest.mark.parametrize(("recipe", "field", "message"), [
    (BlockScaling(scale_layout="compact"), {"shape": (91, 72)},
     r"g\.rowwise: expected shape \(6552,\), got \(6480,\)"),
    (BlockScaling(scale_layout="compact"), {"splits": np.zeros(4, np.int64)},
     r"g\.offsets: expected shape \(5,\)"),
    (BlockScaling(scale_layout="compact"), {"offsets": np.zeros(4, np.int32)},
     r"g\.offsets: expected dtype int64"),
    (BlockScaling(scale_layout="compact"), {"scale_layout": "gemm_ready"},
     r"g\.scale_inv: expected shape \(96,\)"),
    (BlockScaling(scale_layout="compact"), {"columnwise_scale_inv": None},
     r"g\.columnwise_scale_inv: expected an array beside columnwise, got None"),
    (BlockScaling(scale_layout="compact"), {"block": None},
     r"g\.scale_layout: expected None for one scale for each group, got 'compact'"),
    *((BlockScaling(block), {"scale_inv": np.zeros((2, 7), np.float32)}, r"g\.scale_inv: expected shape")
      for block in (ROWS, COLUMNS)),
], ids=str)  # fmt: skip
def test_damaged_files_are_refused(recipe, field, message, tmp_path, monkeypatch):
    """Such files are not written either, except by hand."""
    g = fp8.group_quantize(matrix(90, 72), np.array([40, 0, 33]), recipe, columnwise=True)
    damaged = Grouped._of_fields(**{**g.__getstate__(), **field})
    with pytest.raises((TypeError, ValueError), match=message):
        fp8.save(tmp_path / "groups.npz", g=damaged)
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(archive, "_build", lambda kind, fields: kind._of_fields(**fields))
        fp8.save(tmp_path / "groups.npz", g=damaged)
    with pytest.raises(ValueError, match=message):
        fp8.load(tmp_path / "groups.npz")


def test_what_is_shown():
    x, sizes = matrix(90, 72), np.array([40, 0, 33])
    g = fp8.group_quantize(x, sizes, BlockScaling(), columnwise=True)
    assert repr(g) == ("Grouped(float8_e4m3fn[90, 72] in 3 groups, block 1×128, gemm_ready scales, "
                       "rowwise + columnwise (stored transposed), numpy)")
    html = g._repr_html_()
    assert html.count("<td>") == html.count("<th>") == 7
    assert f"<td>{g.nbytes:,}</td>" in html
    assert "rowwise" not in repr(Grouped.wrap(x, sizes))
