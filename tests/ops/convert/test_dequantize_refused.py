"""Dequantising blocks: what is refused, before anything is written."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from block_data import COLUMN, ROW

import cupy_fp8 as fp8
from cupy_fp8 import Quantized, Scaled, cases, testing
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e8m0fnu

GOOD: dict[str, Any] = {"data": np.zeros((64, 96), float8_e4m3fn),
                        "scale_inv": np.zeros((64, 3), float8_e8m0fnu),
                        "shape": (64, 96), "block": ROW, "scale_layout": "compact"}


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"scale_inv": np.zeros((64, 4), float8_e8m0fnu)}, ValueError,
     r"q.scale_inv: expected shape (64, 3) (compact scales of blocks (1, 32) of shape (64, 96)), got (64, "
     r"4)"),
    ({"scale_inv": np.zeros((3, 64), float8_e8m0fnu)}, ValueError, r"q.scale_inv: expected shape (64, 3) "),
    ({"scale_inv": np.zeros(192, float8_e8m0fnu)}, ValueError, r"q.scale_inv: expected shape (64, 3) "),
    ({"scale_layout": "swizzled"}, ValueError, r"q.scale_inv: expected shape (128, 4) (swizzled scales of "
     r"blocks (1, 32) of shape"),
    ({"block": COLUMN}, ValueError, r"q.scale_inv: expected shape (2, 96) "),
    ({"block": COLUMN, "scale_layout": "swizzled"}, ValueError, r"q.scale_inv: expected shape (128, 4) "),
    ({"scale_inv": np.zeros((64, 3), np.uint8)}, TypeError,
     "q.scale_inv: expected dtype float8_e8m0fnu, float32 of compact scales, got uint8"),
    ({"scale_inv": np.zeros((64, 3), bfloat16)}, TypeError, "q.scale_inv: expected dtype float8_e8m0fnu, "
     "float32 of compact scales"),
    ({"scale_inv": np.zeros((128, 4), np.float32), "scale_layout": "swizzled"}, TypeError,
     "q.scale_inv: expected dtype float8_e8m0fnu of swizzled scales, got float32"),
    ({"scale_inv": [1.0]}, TypeError, "q.scale_inv: expected a numpy.ndarray or cupy.ndarray, got list"),
    ({"scale_inv": None}, TypeError, "q.scale_inv: expected a numpy.ndarray or cupy.ndarray, got NoneType"),
    ({"scale_layout": None}, ValueError,
     "q.scale_layout: expected one of ('compact', 'swizzled', 'gemm_ready', 'deepgemm_sm90', "
     "'deepgemm_sm100'), got None"),
    ({"scale_layout": "gemm"}, ValueError,
     "q.scale_layout: expected one of ('compact', 'swizzled', 'gemm_ready', 'deepgemm_sm90', "
     "'deepgemm_sm100'), got 'gemm'"),
    ({"block": (1, 48)}, ValueError, "q.block: expected (1, B), (B, 1) or (B, B'), a power of two of 32 or "
     "more each"),
    ({"block": (1, 16)}, ValueError, "q.block: expected (1, B)"),
    ({"block": (1, 1)}, ValueError, "q.block: expected (1, B)"),
    ({"block": (None, None)}, ValueError, "q.block: expected (1, B)"),
    ({"block": (None, 32)}, ValueError, "q.block: expected (1, B)"),
    ({"block": (1, -32)}, ValueError, "q.block: expected (1, B)"),
    ({"block": (1, 32.0)}, ValueError, "q.block: expected (1, B)"),
    ({"block": (1, 32, 1)}, ValueError, "q.block: expected (1, B)"),
    ({"block": 32}, ValueError, "q.block: expected (1, B)"),
    ({"block": (128, 128), "scale_layout": "swizzled"}, ValueError, "q.scale_layout: 'swizzled' belongs to "
     "blocks along one line"),
    ({"data": np.zeros(96, float8_e4m3fn), "shape": (96,)}, ValueError, "q.block: (1, 32) needs two or more "
     "dimensions, got shape (96,)"),
    ({"data": np.zeros((96, 64), float8_e4m3fn)}, ValueError, "q.data: expected shape (64, 96) for the "
     "logical shape (64, 96), got"),
    ({"data": np.zeros((64, 96), np.float32)}, TypeError, "q.data: expected dtype float8_e4m3fn, "
     "float8_e5m2, got float32"),
], ids=lambda v: None)  # fmt: skip
def test_a_malformed_result(refused, change, error, message):
    out = np.empty((64, 96), np.float32)
    cases.poison(out)
    for q in (Scaled._of(**{**GOOD, **change}), Quantized(None, Scaled._of(**{**GOOD, **change}))):
        refused(error, re.escape(message), fp8.dequantize, q, out=out)
        refused(error, re.escape(message), fp8.dequantize, q)


def test_overlap_with_a_strided_view_of_the_scales():
    """What lies between the first and the last scale of a view, not as many bytes as it has scales."""
    memory = np.zeros(1 << 16, np.uint8)
    scale_inv = memory[:64 * 400].view(float8_e8m0fnu).reshape(64, 400)[:, :3]
    s = Scaled(**{**GOOD, "scale_inv": scale_inv})
    start = (-memory.ctypes.data % 4) + 63 * 400 - 100
    assert memory.ctypes.data + start > scale_inv.ctypes.data + scale_inv.nbytes
    with testing.executor("host"), pytest.raises(ValueError, match=r"^out: overlaps q.scale_inv in memory"):
        fp8.dequantize(s, out=memory[start:start + 64 * 96 * 4].view(np.float32).reshape(64, 96))
