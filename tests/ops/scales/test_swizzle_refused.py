"""What swizzle_scales and unswizzle_scales refuse, before one byte is written."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from scale_arrays import raw, scales
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, reference, testing
from cupy_fp8.formats import float8_e4m3fn, float8_e8m0fnu


def test_refused_scales(refused):
    swizzle, unswizzle = fp8.swizzle_scales, fp8.unswizzle_scales
    out = scales(128, 4)
    cases.poison(out)
    wrong: Any
    for wrong in ([[1]], 3, None):
        refused(TypeError, "s: expected a numpy.ndarray or cupy.ndarray", swizzle, wrong, out=out)
        refused(TypeError, "s: expected a numpy.ndarray or cupy.ndarray", unswizzle, wrong, shape=(1, 1),
                out=out)
    for dtype in (np.dtype(np.uint8), float8_e4m3fn):
        message = rf"s: expected dtype float8_e8m0fnu, got {dtype}; bytes of scales .*\.view\(cupy_fp8\."
        refused(TypeError, message, swizzle, np.zeros((4, 4), dtype), out=out)
    refused(TypeError, "s: expected dtype float8_e8m0fnu, got float32$", swizzle,
            np.zeros((4, 4), np.float32), out=out)
    shape: tuple[int, ...]
    for shape in ((), (4,), (1, 1, 4, 4)):
        refused(ValueError, r"s: expected shape \[R, C\] or \[E, R, C\], got", swizzle, scales(*shape),
                out=out)
        refused(ValueError, r"shape: expected \(R, C\) or \(E, R, C\), got", unswizzle, scales(128, 4),
                shape=shape, out=out)
    refused(ValueError, "shape: expected extents of zero or more", unswizzle, scales(128, 4), shape=(-1, 4),
            out=out)
    for wrong in ((1.0, 4), 4, None, "ab"):
        refused(TypeError, r"shape: expected integers, \(R, C\) or \(E, R, C\), got", unswizzle,
                scales(128, 4), shape=wrong, out=out)
    for shape in ((129, 4), (128, 5), (1, 100, 4)):
        message = rf"s: expected shape .* for compact scales of shape {re.escape(str(shape))}, got \(128, 4\)"
        refused(ValueError, message, unswizzle, scales(128, 4), shape=shape, out=out)
    refused(ValueError, r"s: expected shape \(256, 4\) .* in 2 groups along axis 0, got \(128, 4\)",
            unswizzle, scales(128, 4),
            shape=(9, 4), splits=[4, 5], out=out)


@needs_host
def test_swizzled_scales_are_aligned():
    """Both sides of a matrix product need it; the kernels move 16 bytes at a time."""
    memory = scales(1024)
    lead = -memory.ctypes.data % 16 + 8
    s = memory[lead : lead + 512].reshape(128, 4)
    with testing.executor("host"):
        with pytest.raises(ValueError, match=r"^out: address 0x.*8 is not a multiple of 16"):
            fp8.swizzle_scales(scales(9, 4), out=s)
        with pytest.raises(ValueError, match=r"^s: address 0x.*8 is not a multiple of 16"):
            fp8.unswizzle_scales(s, shape=(9, 4), out=scales(9, 4))
    want = fp8.swizzle_scales(scales(9, 4))
    # the reference does not care
    testing.assert_bytes_equal(fp8.swizzle_scales(scales(9, 4), out=s), want)


def test_refused_groups(refused):
    swizzle, s, out = fp8.swizzle_scales, scales(9, 4), scales(256, 4)
    cases.poison(out)
    refused(ValueError, "axis: means something for groups only, which need splits=; got axis=1 without",
            swizzle, s, axis=1, out=out)
    for axis in (2, -1, None, "rows", 0.0):
        refused(ValueError, r"axis: expected 0 \(groups of lines\) or 1", swizzle, s, splits=[4, 5],
                axis=axis, out=out)
    refused(ValueError, r"splits: groups are of scales \[R, C\], got shape \(1, 9, 4\)", swizzle, s[None],
            splits=[4, 5], out=out)
    refused(ValueError, "splits: expected sizes of 0 or more, got -5 for group 1", swizzle, s,
            splits=[14, -5], out=out)
    refused(ValueError, "splits: expected sizes of 0 or more, got -5 for group 1", swizzle, s,
            splits=np.array([14, -5]), out=out)
    for sizes_of_nine in ([10], [4, 6], [2**62, 2**62, 2**62, 2**62]):
        total = sum(sizes_of_nine)
        message = rf"splits: expected sizes that add up to at most the 9 lines there are, got {total}"
        refused(ValueError, message, swizzle, s, splits=sizes_of_nine, out=out)
        refused(ValueError, message, swizzle, s, splits=np.array(sizes_of_nine, np.int64), out=out)
        refused(ValueError, message, fp8.unswizzle_scales, scales(256, 4), shape=(9, 4), splits=sizes_of_nine,
                out=s.copy())
    message = "splits: expected sizes that add up to at most the 4 blocks of 32 elements there are, got 5"
    refused(ValueError, message, swizzle, s, splits=[64, 65], axis=1, out=out)
    refused(ValueError, r"splits: expected an array of one dimension, got shape \(1, 2\)", swizzle, s,
            splits=np.array([[4, 5]]), out=out)
    for dtype in (np.float32, np.uint32, np.int16, bool):
        refused(TypeError, "splits: expected dtype int32, int64, got", swizzle, s, splits=np.zeros(2, dtype),
                out=out)
    for wrong in (9, "45", {4, 5}):
        refused(TypeError, "splits: expected a numpy.ndarray or cupy.ndarray", swizzle, s, splits=wrong,
                out=out)
    refused(TypeError, "splits: expected integers", swizzle, s, splits=[4.0, 5], out=out)
    refused(ValueError, "splits: expected integers of 64 bits", swizzle, s, splits=[2**63], out=out)
    buffer = np.zeros(1024 + 16, np.uint8)
    memory = buffer[-buffer.ctypes.data % 16 :][:1024]
    inside = memory[64:80].view(np.int64)
    inside[...] = 4, 5
    with pytest.raises(ValueError, match=r"^out: overlaps splits in memory"):
        swizzle(s, splits=inside, out=memory.view(float8_e8m0fnu).reshape(256, 4))
    assert inside.tolist() == [4, 5]


# ---- on a GPU ----
@pytest.mark.gpu
def test_check_looks_at_the_device():
    cp = backend.cupy()
    s, out = fp8.asarray(scales(9, 4), like="cupy"), fp8.asarray(scales(256, 4), like="cupy")
    cases.poison(out)
    for splits, message in (([4, 6], "splits: expected sizes that add up to at most the 9 lines"),
                            ([14, -5], "splits: expected sizes of 0 or more")):
        with pytest.raises(ValueError, match="^" + message):
            fp8.swizzle_scales(s, splits=cp.asarray(splits), check=True, out=out)
        with pytest.raises(ValueError, match="^" + message):
            fp8.swizzle_scales(s, splits=splits, out=out)
    assert (raw(out) == 0xAA).all()
    assert fp8.device_errors() == ()
    fp8.swizzle_scales(s, splits=cp.asarray([4, 5]), check=True, out=out)
    testing.assert_bytes_equal(out, reference.swizzle_scales(fp8.asnumpy(s), splits=[4, 5]))
