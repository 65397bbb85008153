"""Results and recipes: frozen, with correct metadata, and cheap: one launch per call, none for `.empty`."""

from __future__ import annotations

import copy
import dataclasses
import html
import pickle
import re

import numpy as np
import pytest
from small_results import SHAPE, direction_parameter, kind_parameter, parts, x_of

import cupy_fp8 as fp8
from cupy_fp8 import DelayedScaling, Quantized, Scaled, backend, cases, testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import INPUT_DTYPES, float8_e4m3fn, float8_e5m2, float32


# ---- Scaled ----
@pytest.mark.parametrize(("make", "fields", "derived"), [
    (lambda: fp8.quantize_tensor(x_of(), 2.0).rowwise,
     ("data", "scale_inv", "shape", "transposed", "block", "scale_layout"), ("dtype", "nbytes", "T")),
    (lambda: fp8.cast_transpose(x_of(), 2.0), ("rowwise", "columnwise", "dbias"),
     ("data", "scale_inv", "shape", "dtype", "nbytes")),
    (DelayedScaling, ("dtype", "margin", "history_len", "algo"), ())], ids=["Scaled", "Quantized", "recipe"])
def test_frozen(make, fields, derived):
    a = make()
    for name in fields:
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            setattr(a, name, getattr(a, name))
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            delattr(a, name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.note = 1
    for name in derived:
        with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
            setattr(a, name, None)


@kind_parameter
def test_scaled_unpacks(kind):
    q = fp8.cast_transpose(x_of(kind), 2.0)
    for part in parts(q):
        data, scale_inv = part
        assert data is part.data
        assert scale_inv is part.scale_inv
    assert ([f.name for f in dataclasses.fields(Scaled)]
            == ["data", "scale_inv", "shape", "transposed", "block", "scale_layout", "splits"])


def test_scaled_defaults():
    data, scale_inv = np.zeros(SHAPE, float8_e4m3fn), np.ones(1, np.float32)
    s = Scaled(data, scale_inv, SHAPE)
    assert (s.transposed, s.block, s.scale_layout, s.splits) == (False, None, None, None)
    assert (s.dtype, s.nbytes) == (float8_e4m3fn, 15 + 4)
    named = Scaled(data=data.reshape(5, 3), scale_inv=np.ones((3, 1), np.float32), shape=list(SHAPE),
                   transposed=True, block=[1, 128], scale_layout="compact")
    assert (named.shape, named.transposed, named.block,
            named.scale_layout) == (SHAPE, True, (1, 128), "compact")


@kind_parameter
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (0, 4), (2, 2, 1, 7)], ids=str)
def test_transposed_view(kind, shape):
    """.T reads the same bytes the other way round."""
    q = fp8.cast_transpose(x_of(kind, shape), 2.0)
    for s in parts(q):
        t = s.T
        assert t.data is s.data
        assert t.scale_inv is s.scale_inv
        assert t.shape == (*shape[:-2], shape[-1], shape[-2])
        assert t.transposed is not s.transposed
        assert (t.T.shape, t.T.transposed) == (s.shape, s.transposed)
        testing.assert_bytes_equal(t.dequantize(), np.swapaxes(fp8.asnumpy(s.dequantize()), -1, -2).copy())
        assert s.shape == shape                             # the original is unchanged


@pytest.mark.parametrize("shape", [(), (7,)])
def test_transposed_view_of_fewer_than_two_dimensions(shape):
    s = fp8.quantize_tensor(x_of(shape=shape), 2.0).rowwise
    assert s is not None
    assert s.T is s


@kind_parameter
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
@direction_parameter
def test_dequantize_delegates(directions, dtype, kind):
    q = fp8.quantize_tensor(x_of(kind), 2.0, **directions)
    want = fp8.dequantize(q, dtype=dtype)
    assert want.shape == q.shape == SHAPE
    testing.assert_bytes_equal(q.dequantize(dtype), want)
    for part in parts(q):
        testing.assert_bytes_equal(part.dequantize(dtype), want)
        testing.assert_bytes_equal(part.dequantize(dtype=dtype.name), want)
    assert q.dequantize().dtype == float32
    assert backend.kind_of(q.dequantize()) == kind


def test_dequantize_takes_the_row_wise_part():
    row = Scaled(np.full(SHAPE, 3, float8_e4m3fn), np.ones(1, np.float32), SHAPE)
    column = Scaled(np.full((5, 3), 7, float8_e4m3fn), np.ones(1, np.float32), SHAPE, True)
    assert Quantized(row, column).dequantize()[0, 0] == 3
    assert Quantized(None, column).dequantize()[0, 0] == 7


# ---- Quantized ----
def test_quantized_is_not_empty():
    for nothing in ((), (None, None), (None, None, np.zeros(3))):
        with pytest.raises(ValueError,
                           match="Quantized: expected a row-wise or a column-wise part, got neither"):
            Quantized(*nothing)


@direction_parameter
def test_quantized_shortcuts(directions):
    q = fp8.quantize_tensor(x_of(), 2.0, **directions)
    assert (q.shape, q.dtype) == (SHAPE, float8_e4m3fn)
    if hasattr(q, "rowwise"):
        assert q.data is q.rowwise.data
        assert q.scale_inv is q.rowwise.scale_inv
        return
    for name in ("data", "scale_inv"):
        with pytest.raises(AttributeError, match=rf"no row-wise part: use \.columnwise\.{name}$"):
            getattr(q, name)
        assert not hasattr(q, name)
    assert q.columnwise.data.shape == (5, 3)


@kind_parameter
def test_nbytes_counts_what_is_shared_once(kind):
    x = x_of(kind)
    assert fp8.quantize_tensor(x, 2.0).nbytes == 15 + 4
    assert fp8.quantize_tensor(x, 2.0, rowwise=False, columnwise=True).nbytes == 15 + 4
    both = fp8.cast_transpose(x, 2.0)
    assert both.nbytes == 15 + 15 + 4                       # one scale_inv only
    assert sum(part.nbytes for part in parts(both)) == 2 * (15 + 4)
    assert fp8.quantize_tensor(x, 2.0, columnwise=True, transposed=False).nbytes == 15 + 4
    apart = Quantized(both.rowwise, Scaled(parts(both)[1].data, both.scale_inv.copy(), SHAPE, True))
    assert apart.nbytes == 15 + 15 + 4 + 4


@kind_parameter
def test_directions_share_scale_inv(kind):
    q = fp8.cast_transpose(x_of(kind), 2.0)
    assert parts(q)[0].scale_inv is parts(q)[1].scale_inv
    same = fp8.quantize_tensor(x_of(kind), 2.0, columnwise=True, transposed=False)
    assert parts(same)[0].data is parts(same)[1].data


@kind_parameter
def test_repr(kind):
    x = x_of(kind)
    both = fp8.cast_transpose(x, 2.0)
    assert (repr(both)
            == "Quantized(float8_e4m3fn[3, 5], per tensor, rowwise + columnwise (stored transposed), "
            f"{kind})")
    e5m2 = fp8.quantize_tensor(x, 2.0, dtype=float8_e5m2)
    assert repr(e5m2) == f"Quantized(float8_e5m2[3, 5], per tensor, rowwise, {kind})"
    assert repr(both.rowwise) == f"Scaled(float8_e4m3fn[3, 5], per tensor, {kind})"
    assert repr(both.columnwise) == f"Scaled(float8_e4m3fn[3, 5], per tensor, stored transposed, {kind})"
    assert repr(fp8.quantize_tensor(x_of(kind, ()),
                                    2.0).rowwise) == f"Scaled(float8_e4m3fn[], per tensor, {kind})"
    blocks = Scaled(fp8.zeros(SHAPE, float8_e4m3fn, like=kind), fp8.zeros((3, 1), float32, like=kind), SHAPE,
                    block=(1, None), scale_layout="compact")
    assert repr(blocks) == f"Scaled(float8_e4m3fn[3, 5], block 1×row, compact scales, {kind})"
    assert str(both) == repr(both)


@kind_parameter
def test_html(kind):
    q = fp8.cast_transpose(x_of(kind), 2.0)
    table = q._repr_html_()
    assert table.startswith("<table>")
    assert table.endswith("</table>")
    cells = [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", table)]
    row = ["float8_e4m3fn", "3, 5", "per tensor"]
    assert cells == ["rowwise", *row, "as is", kind, "19", "columnwise", *row, "transposed 5, 3", kind, "19"]
    heads = re.findall(r"<th>(.*?)</th>", table)
    assert heads[1:4] == ["dtype", "shape", "scaling"]
    assert len(cells) == 2 * len(heads)
    assert table.count("<tr>") == 3
    single = parts(q)[0]._repr_html_()
    assert single.count("<tr>") == 2
    assert "Scaled" in single


def test_copies_are_whole():
    x = x_of()
    q = fp8.cast_transpose(x, 2.0)
    for again in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert isinstance(again, Quantized)
        testing.assert_bytes_equal(again, q)
        assert all(mine.data is not theirs.data for mine, theirs in zip(parts(q), parts(again), strict=True))
        bits(again.data).fill(0)
        assert fp8.cast_transpose(x, 2.0, out=again) is again
        testing.assert_bytes_equal(again.data, q.data)
    assert copy.copy(q).data is q.data


@pytest.mark.gpu
def test_a_copy_of_a_used_result_is_written_where_it_lies():
    """What an op remembers about a result's addresses belongs to that result alone."""
    x = x_of("cupy")
    q = fp8.quantize_tensor(x, 2.0, out=fp8.quantize_tensor(x, 2.0))
    again = copy.deepcopy(q)
    for part in (q, again):
        cases.poison(part.data)
    fp8.quantize_tensor(x, 2.0, out=again)
    testing.assert_bytes_equal(again.data, fp8.quantize_tensor(fp8.asnumpy(x), 2.0).data)
    assert (fp8.asnumpy(q.data).view(np.uint8) == 0xAA).all()


def test_an_op_changes_no_metadata():
    q = fp8.cast_transpose(x_of(), 2.0)
    facts = [(id(p.data), id(p.scale_inv), p.shape, p.transposed) for p in parts(q)]
    fp8.cast_transpose(x_of(), 4.0, out=q)
    fp8.dequantize(q)
    assert [(id(p.data), id(p.scale_inv), p.shape, p.transposed) for p in parts(q)] == facts
