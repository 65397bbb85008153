"""A Scaled made by hand is checked by its constructor, and one made otherwise by the calls that take it:
every inconsistent part is refused by name."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest
from block_data import result
from messages import check, poisoned

import cupy_fp8 as fp8
from cupy_fp8 import Quantized, Scaled, testing
from cupy_fp8.formats import float8_e4m3fn, float8_e8m0fnu, float32
from cupy_fp8.layouts import SCALE_DTYPES, scale_shape

SHAPE, BLOCK = (20, 300), (1, 128)
GOOD: dict[str, Any] = {"data": np.zeros(SHAPE, float8_e4m3fn), "scale_inv": np.ones((20, 3), float32),
                        "shape": SHAPE, "block": BLOCK, "scale_layout": "compact"}
TENSOR: dict[str, Any] = {"block": None, "scale_layout": None, "scale_inv": np.ones(1, float32)}
LAYOUT_NAMES = tuple(SCALE_DTYPES)


#: one wrong part each, the error, and the start of its message
MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    # the layout of the scales is forgotten, wrong, or given for a single scale
    ({"scale_layout": None}, ValueError,
     f"scale_layout: expected one of {LAYOUT_NAMES} for blocks (1, 128), got None; these scales fit "),
    ({"scale_layout": None, "scale_inv": np.ones((3, 20), float32)}, ValueError,
     f"scale_layout: expected one of {LAYOUT_NAMES} for blocks (1, 128), got None; these scales fit "
     f"gemm_ready or deepgemm_sm90"),
    ({"scale_layout": None, "scale_inv": np.ones((3, 3), float32)}, ValueError,
     f"scale_layout: expected one of {LAYOUT_NAMES} for blocks (1, 128), got None"),
    ({"scale_layout": "gemm"}, ValueError, f"scale_layout: expected one of {LAYOUT_NAMES}, got 'gemm'"),
    ({"scale_layout": ["compact"]}, ValueError,
     f"scale_layout: expected one of {LAYOUT_NAMES}, got ['compact']"),
    ({**TENSOR, "scale_layout": "compact"}, ValueError,
     "scale_layout: expected None for one scale, got 'compact'; scales of blocks"),
    # scales of other blocks
    ({"scale_inv": np.ones((20, 4), float32)}, ValueError,
     "scale_inv: expected shape (20, 3), compact scales of blocks (1, 128) of shape"),
    ({"scale_inv": np.ones((3, 20), float32)}, ValueError,
     "scale_inv: expected shape (20, 3), compact scales of blocks (1, 128) of shape"),
    ({"scale_inv": np.ones((20, 3), np.float64)}, TypeError,
     "scale_inv: expected dtype float8_e8m0fnu, float32 of compact scales, got "),
    ({"scale_layout": "swizzled"}, TypeError,
     "scale_inv: expected dtype float8_e8m0fnu of swizzled scales, got float32"),
    ({"block": None, "scale_layout": None}, ValueError,
     "scale_inv: expected one scale for the tensor, got shape (20, 3)"),
    ({**TENSOR, "scale_inv": np.ones(1, float8_e8m0fnu)}, TypeError,
     "scale_inv: expected dtype float32 of one scale, got float8_e8m0fnu"),
    # no such blocks
    ({"block": (1, 100)}, ValueError,
     "block: expected (1, B), (B, 1) or (B, B'), a power of two of 32 or more each, or None"),
    *(({"block": block}, ValueError, "block: expected (1, B), (B, 1) or (B, B')")
      for block in (128, (1, 16), (1, 1), (None, None), (None, 32), (1, -32), (1, 32.0), (1, 32, 1))),
    ({"block": (128, 128), "scale_layout": "swizzled"}, ValueError,
     "scale_layout: 'swizzled' belongs to blocks along one line, got block"),
    # data of another shape
    ({"shape": (300, 20)}, ValueError,
     "data: expected shape (300, 20) for the logical shape (300, 20), got (20, 300)"),
    ({"transposed": True}, ValueError,
     "data: expected shape (300, 20) for the logical shape (20, 300) stored transposed, got (20, 300)"),
    ({"data": np.zeros(SHAPE, np.uint8)}, TypeError,
     "data: expected dtype float8_e4m3fn, float8_e5m2, got uint8; data.view(cupy_fp8.float8_"),
    ({**TENSOR, "data": np.zeros(5, float8_e4m3fn), "shape": 5, "transposed": True}, ValueError,
     "transposed: needs two or more"),
    ({"data": np.zeros(300, float8_e4m3fn), "shape": (300,)}, ValueError,
     "block: (1, 128) needs two or more dimensions, got shape (300,)"),
    # not arrays
    ({"data": [[0.0]]}, TypeError,
     "data: expected a numpy.ndarray or cupy.ndarray, got list; cupy_fp8.asarray(data"),
    ({"scale_inv": 1.0}, TypeError, "scale_inv: expected a numpy.ndarray or cupy.ndarray, got float"),
    ({**TENSOR, "scale_inv": np.float32(1)}, TypeError,
     "scale_inv: expected a numpy.ndarray or cupy.ndarray, got float32"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), MISTAKES)
def test_parts_that_do_not_fit(change, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        Scaled(**{**GOOD, **change})


@pytest.mark.parametrize(("change", "error", "message"), [
    row for row in MISTAKES if not row[2].startswith(("transposed", "scale_layout: expected None"))])
def test_a_call_refuses_them_too(change, error, message):
    """In a result that no constructor has checked."""
    s, out = Scaled._of(**{**GOOD, **change}), poisoned(np.empty(SHAPE, float32))
    for q in (s, Quantized(None, s)):
        check(error, f"q.{message.partition(' ')[0]} ", fp8.dequantize, (q,), {"out": out})


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("block", [(1, 32), (32, 1), (1, 128), (128, 1), (128, 128), (1, None), (None, 1)],
                         ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_legal_result_can_be_made(layout, block, transposed):
    shape = (130, 260)
    try:
        wanted = scale_shape(shape, block, layout, transposed)
    except ValueError:
        return
    data = np.zeros((260, 130) if transposed else shape, float8_e4m3fn)
    for dtype in SCALE_DTYPES[layout]:
        s = Scaled(data, np.zeros(wanted, dtype), list(shape), transposed, list(block), layout)
        assert (s.shape, s.block, s.scale_layout) == (shape, block, layout)
        turned = s.T
        assert turned == Scaled(turned.data, turned.scale_inv, turned.shape, turned.transposed, turned.block,
                                layout)


def test_copies_are_not_checked_again(monkeypatch):
    """Copies and pickles also take results that only ops make: those of groups, whose arrays are flat."""
    q = fp8.scaling_aware_transpose(fp8.quantize_block(np.ones((40, 256), float32), scale_layout="compact"),
                                    splits=[8, 32])
    s = result((64, 96))
    monkeypatch.setattr("cupy_fp8.results.check_parts", lambda s: pytest.fail("checked again"))
    for given in (q, s, s.T, fp8.quantize_tensor(np.ones((2, 2), np.float32), 1.0)):
        for again in (copy.copy(given), copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
            testing.assert_bytes_equal(again, given)


def test_what_the_library_makes_is_not_checked(monkeypatch):
    checked: list[Scaled] = []
    monkeypatch.setattr("cupy_fp8.results.check_parts", checked.append)
    x = np.ones((64, 256), np.float32)
    run: Any
    for run in ("reference", *(["host"] if testing.executor_problem("host") is None else [])):
        with testing.executor(run):
            for q in (fp8.cast_transpose(x, 1.0), fp8.quantize_block(x, columnwise=True),
                      fp8.quantize_mx(x, columnwise=True)):
                assert q.rowwise is not None
                assert q.rowwise == q.rowwise.T.T
            fp8.scaling_aware_transpose(fp8.quantize_block(x, scale_layout="compact"))
    assert not checked


@pytest.mark.parametrize(("name", "given", "others"), [("scale_inv", "cupy", "numpy"),
                                                       ("data", "numpy", "cupy")])
def test_kinds_are_not_mixed(device, name, given, others):
    """`name` is moved, so that scale_inv is of another kind than the data."""
    there = device.array(GOOD[name])
    message = re.escape(f'scale_inv: a {given} array among {others} arrays; cupy_fp8.asarray(scale_inv, '
                        f'like="{others}") moves it')
    with pytest.raises(TypeError, match=f"^{message}"):
        Scaled(**{**GOOD, name: there})
