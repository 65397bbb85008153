"""Results with a scale per block: .T, .to_layout, copies and repr keep data and scales together."""

from __future__ import annotations

import copy
import html
import pickle
import re
from typing import Any

import numpy as np
import pytest
from block_data import COLUMN, LAYOUTS, ROW, parts, result
from hypothesis import given, settings

import cupy_fp8 as fp8
from cupy_fp8 import Quantized, Scaled, testing
from cupy_fp8.formats import bfloat16, float8_e8m0fnu, float32
from cupy_fp8.layouts import SCALE_DTYPES, scale_shape, swap_last

KINDS = [(block, transposed) for block in (ROW, COLUMN) for transposed in (False, True)]
kinds = pytest.mark.parametrize(("block", "transposed"), KINDS)


# ---- shapes ----
@pytest.mark.parametrize(("shape", "block", "layout", "transposed", "want"), [
    ((100, 64), ROW, "compact", False, (100, 2)), ((100, 65), ROW, "compact", True, (100, 3)),
    ((100, 64), COLUMN, "compact", False, (4, 64)), ((100, 64), COLUMN, "compact", True, (4, 64)),
    ((100, 64), ROW, "swizzled", False, (128, 4)), ((130, 160), ROW, "swizzled", True, (256, 8)),
    ((100, 64), COLUMN, "swizzled", False, (128, 4)), ((130, 160), COLUMN, "swizzled", True, (256, 8)),
    ((5, 100, 64), COLUMN, "compact", False, (5, 4, 64)), ((5, 100, 64), ROW, "swizzled", False, (5, 128, 4)),
    ((0, 64), ROW, "compact", False, (0, 2)), ((0, 64), COLUMN, "compact", False, (0, 64)),
    ((64, 0), ROW, "swizzled", False, (128, 0)), ((100, 640), (128, 128), "compact", False, (1, 5)),
    ((100, 640), (128, 128), "compact", True, (5, 1)), ((100, 640), (1, None), "compact", False, (100, 1)),
    ((100, 640), (None, 1), "compact", True, (1, 640)),
])
def test_scale_shape(shape, block, layout, transposed, want):
    assert scale_shape(shape, block, layout, transposed) == want


# ---- .T ----
@kinds
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(40, 96), (33, 70), (2, 64, 40)], ids=str)
def test_transposed_view(shape, layout, block, transposed, run):
    s = run.array(result(shape, block, layout, transposed))
    t = s.T
    assert (t.shape, t.transposed, t.block,
            t.scale_layout) == (swap_last(shape), not transposed, block[::-1], layout)
    assert t.data is s.data
    assert t.scale_inv.shape == scale_shape(t.shape, t.block, layout, t.transposed)
    if layout == "swizzled":
        assert t.scale_inv is s.scale_inv
    else:
        assert t.scale_inv.shape == swap_last(s.scale_inv.shape)
        if run.name != "cuda":
            assert np.shares_memory(t.scale_inv, s.scale_inv)
    testing.assert_bytes_equal(run.numpy(t.dequantize()),
                               np.ascontiguousarray(run.numpy(s.dequantize()).swapaxes(-1, -2)))
    testing.assert_bytes_equal(run.numpy(t.T.scale_inv), run.numpy(s.scale_inv))
    assert (t.nbytes, t.dtype) == (s.nbytes, s.dtype)


@pytest.mark.parametrize("transposed", [False, True])
def test_transposed_view_of_square_blocks(transposed):
    """Their compact scales follow the storage: nothing moves."""
    s = result((140, 270), (128, 128), transposed=transposed, scale=float32)
    assert s.T.scale_inv is s.scale_inv
    testing.assert_bytes_equal(s.T.dequantize(), np.ascontiguousarray(s.dequantize().T))


# ---- .to_layout ----
@kinds
@pytest.mark.parametrize("shape", [(40, 96), (130, 36), (36, 130), (2, 64, 40), (0, 40), (3, 0, 40)], ids=str)
def test_to_layout(shape, block, transposed, run):
    """The contents of its scales are checked in tests/ops/scales/test_convert_scales_calls.py."""
    compact = run.array(result(shape, block, "compact", transposed))
    swizzled = compact.to_layout("swizzled")
    for s in (swizzled, swizzled.to_layout("compact")):
        assert s.data is compact.data
        assert s.scale_inv.flags.c_contiguous
    testing.assert_bytes_equal(run.numpy(compact.T.to_layout("swizzled").scale_inv),
                               run.numpy(swizzled.scale_inv))


def unchecked(s: Scaled, **changes: Any) -> Scaled:
    return Scaled._of(**{**s.__getstate__(), **changes})


@pytest.mark.parametrize(("s", "name", "error", "message"), [
    (result((64, 64)), "gemm", ValueError, f"to_layout: expected one of {tuple(SCALE_DTYPES)}, got 'gemm'"),
    (result((64, 64)), None, ValueError, f"to_layout: expected one of {tuple(SCALE_DTYPES)}, got None"),
    (result((64, 64), (128, 128), scale=float32), "deepgemm_sm90", ValueError,
     "target: 'deepgemm_sm90' belongs to blocks along one line"),
    (result((140, 270), (128, 128)), "swizzled", ValueError,
     "target: 'swizzled' belongs to blocks along one line, got block"),
    (result((64, 64), scale=float32), "swizzled", ValueError,
     "scale_inv: expected powers of two from 2**-127 to 2**127"),
    (unchecked(result((64, 64)), scale_layout=None), "compact", ValueError,
     "source: expected one of ('compact', "),
    (unchecked(result((64, 64)), block=(1, 64)), "swizzled", ValueError,
     "scale_inv: expected shape (64, 1), compact scales of"),
])
def test_to_layout_errors(s, name, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        s.to_layout(name)


# ---- .to_block ----
@pytest.mark.parametrize("transposed", [False, True])
def test_to_block(transposed, run):
    s = run.array(result((140, 300), COLUMN if transposed else ROW, "compact", transposed))
    block = (128, 1) if transposed else (1, 128)
    count = run.array(np.zeros(1, np.int64))
    for wanted, options in ((block, {}), ((128, 128), {"scale_dtype": float32}),
                            (block, {"scale_layout": "gemm_ready", "changed": count})):
        made = s.to_block(wanted, **options)
        assert run.numpy(made) == run.numpy(fp8.rebase_scales(s, block=wanted, **options))
        assert made.to_block(wanted, scale_layout=made.scale_layout) is made
        assert made.to_block(list(wanted), scale_layout=made.scale_layout) is made
    assert s.to_block(s.block) is s
    assert run.numpy(s.to_block(s.block, scale_layout="swizzled")) == run.numpy(s.to_layout("swizzled"))


def test_to_block_of_both_directions(run):
    x = np.random.default_rng(8).standard_normal((140, 300), np.float32)
    q = run.array(fp8.quantize_block(x, columnwise=True))
    made = q.to_block((128, 128), scale_dtype=float32)
    assert run.numpy(made.rowwise) == run.numpy(q.rowwise.to_block((128, 128)))
    assert run.numpy(made.columnwise) == run.numpy(q.columnwise.to_block((128, 128)))
    assert made.to_block((128, 128)) is made
    row = Quantized(q.rowwise, q.rowwise).to_block((1, 64))
    assert row.rowwise is row.columnwise
    assert Quantized(None, q.columnwise).to_block((1, 64))._any.block == (64, 1)
    mx = run.array(fp8.quantize_mx(x, columnwise=True))
    with pytest.raises(ValueError, match="^" + re.escape("q: expected blocks of (1, B) or (B, B'), along")):
        mx.to_block((1, 128))
    for wrong in (None, 128, "row", (1,), (1, 48)):
        with pytest.raises(ValueError, match=r"^block: expected "):
            q.to_block(wrong)


# ---- copies ----
@kinds
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_are_whole(layout, block, transposed):
    s = result((40, 96), block, layout, transposed)
    for original in (s, s.T):
        again: Any
        for again in (copy.deepcopy(original), pickle.loads(pickle.dumps(original)),
                      copy.deepcopy(Quantized(None, original)).columnwise):
            testing.assert_bytes_equal(again, original)
            assert not any(map(np.shares_memory, again, original))


def test_nbytes():
    row, column = result((64, 96), ROW), result((64, 96), COLUMN)
    assert (row.nbytes, column.nbytes) == (64 * 96 + 64 * 3, 64 * 96 + 2 * 96)
    assert Quantized(row, column).nbytes == row.nbytes + column.nbytes
    shared = Scaled(row.data, column.scale_inv, row.shape, block=COLUMN, scale_layout="compact")
    assert Quantized(row, shared).nbytes == 64 * 96 + 64 * 3 + 2 * 96


# ---- texts ----
def test_repr():
    row, column = result((64, 96), ROW), result((64, 96), COLUMN, "swizzled", True)
    assert repr(row) == "Scaled(float8_e4m3fn[64, 96], block 1×32, compact scales, numpy)"
    assert (repr(column)
            == "Scaled(float8_e4m3fn[64, 96], block 32×1, swizzled scales, stored transposed, numpy)")
    assert repr(Quantized(row, column)) == ("Quantized(float8_e4m3fn[64, 96], block 1×32, compact scales, "
                                            "rowwise + columnwise (stored transposed), numpy)")
    assert "block column×1, compact scales" in repr(result((64, 96), (None, 1)))


def test_html():
    row, column = result((64, 96), ROW), result((64, 96), COLUMN, "swizzled", True)
    table = Quantized(row, column)._repr_html_()
    cells = [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", table)]
    assert cells == ["rowwise", "float8_e4m3fn", "64, 96", "block 1×32, compact scales", "as is", "numpy",
                     "6,336", "columnwise", "float8_e4m3fn", "64, 96", "block 32×1, swizzled scales",
                     "transposed 96, 64", "numpy", "6,656"]


# ---- the strategy ----
def test_the_strategy_makes_valid_results():
    seen = set()

    @settings(max_examples=200, database=None, deadline=None, derandomize=True)
    @given(testing.mx_results(max_side=40))
    def look(s: Scaled) -> None:
        seen.add((s.block, s.scale_layout, s.transposed, len(s.shape), s.dtype))
        assert s.scale_inv.dtype == float8_e8m0fnu
        assert s.dequantize(bfloat16).shape == s.shape

    look()
    assert [len(set(facts)) for facts in zip(*seen, strict=True)] == [2] * 5


# ---- both directions ----
def test_both_directions_to_another_layout(run):
    x = run.array(np.ones((40, 260), np.float32))
    name: Any
    for q, names in ((fp8.quantize_block(x, columnwise=True),
                      ("compact", "deepgemm_sm90", "deepgemm_sm100", "gemm_ready")),
                     (fp8.quantize_mx(x, columnwise=True), ("swizzled", "compact")),
                     (fp8.quantize_block(x, rowwise=False, columnwise=True), ("compact",)),
                     (fp8.quantize_block(x), ("compact",))):
        for name in names:
            there = q.to_layout(name)
            testing.assert_bytes_equal(parts(there), [part.to_layout(name) for part in parts(q)])
            assert [part.scale_layout for part in parts(there)] == [name] * len(parts(q))
            assert there.to_layout(name) is there
            compact = q.to_layout("compact")
            testing.assert_bytes_equal(there.to_layout("compact", dtype=compact._any.scale_inv.dtype),
                                       compact)


def test_parts_that_are_one_stay_one():
    q = fp8.quantize_block(np.ones((140, 270), np.float32), block=(128, 128), rowwise=True, columnwise=False)
    both = Quantized(q.rowwise, q.rowwise, np.ones(270, np.float32))
    there = both.to_layout("compact")
    assert there.rowwise is there.columnwise
    assert there.dbias is both.dbias
    assert Quantized(**q.parts, dbias=both.dbias).dbias is both.dbias
    turned = both.T
    assert turned.rowwise is turned.columnwise


def test_to_layout_of_one_scale():
    q = fp8.quantize_tensor(np.ones((2, 2), np.float32), 1.0)
    one: Any
    for one in (q, *parts(q)):
        with pytest.raises(ValueError,
                           match=r"^to_layout\('compact'\): per-tensor data has a single scale, which has no "
                                 r"layout"):
            one.to_layout("compact")
    blocks: Any = fp8.quantize_block(np.ones((2, 128), np.float32))
    for wrong in ("gemm", None, ["compact"]):
        with pytest.raises(ValueError, match=r"^to_layout: expected one of "):
            blocks.to_layout(wrong)


@pytest.mark.parametrize("make", [
    lambda x: fp8.quantize_block(x, columnwise=True),
    lambda x: fp8.quantize_mx(x, columnwise=True, scale_layout="swizzled"),
    lambda x: fp8.cast_transpose(x, 2.0, dbias=True), lambda x: fp8.quantize_mx(x),
    lambda x: fp8.quantize_mx(x, rowwise=False, columnwise=True),
])  # fmt: skip
def test_the_transposed_tensor(make, run):
    """The rows of .T are the columns: its row-wise part equals the former column-wise one, byte for byte."""
    q = make(run.array(np.arange(40 * 256, dtype=np.float32).reshape(40, 256)))
    t = q.T
    assert t.shape == (256, 40)
    assert t.dbias is None
    turned = {"rowwise": "columnwise", "columnwise": "rowwise"}
    before = {turned[name]: part for name, part in q.parts.items()}
    assert set(t.parts) == set(before)
    for name, part in t.parts.items():
        testing.assert_bytes_equal(part, before[name].T)
        assert part.data is before[name].data
        testing.assert_bytes_equal(part.dequantize(), fp8.asnumpy(before[name].dequantize()).T.copy())
    testing.assert_bytes_equal(t.T, Quantized(**q.parts))
    flat = fp8.quantize_tensor(np.ones(3, np.float32), 1.0)
    assert flat.T is flat
