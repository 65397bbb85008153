"""Wrong sizes of groups of swizzled scales on the device, and scales that no group covers."""

from __future__ import annotations

import numpy as np
import pytest
from scale_arrays import by_formula, guarded, scales, stored_by_blocks

import cupy_fp8 as fp8
from cupy_fp8 import reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.kernels import errors
from cupy_fp8.ops.scales import swizzle

#: the ways in which sizes of groups can be wrong
WRONG_SIZES = (errors.MESSAGES[errors.Fact.SPLIT_NEGATIVE], errors.MESSAGES[errors.Fact.SPLIT_SUM])


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch, run: testing.Executor) -> testing.Executor:
    """Values of NumPy arrays are not checked, like those on a device."""
    monkeypatch.setattr(swizzle, "_check_sizes", lambda *_: None)
    return run


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("splits", "found"), [
    ([299, 50, 50, 1], WRONG_SIZES[1:]), ([300] + [0] * 500 + [-5], WRONG_SIZES[:1]),
    ([2**63 - 1, 2**62, 2**62 + 5, -(2**63), 1 << 40], WRONG_SIZES)], ids=lambda value: str(value)[:20])
def test_wrong_sizes_of_column_views(splits, found, axis, unchecked):
    """Not in tests/contract/test_device_facts.py."""
    run, s = unchecked, scales(300, 7) if axis == 0 else scales(140, 300)
    host = np.array([max(size, 32 * size - 7) if axis and size < 2**31 else size for size in splits])
    want = reference.swizzle_scales(s, splits=host, axis=axis)
    there = run.array(host)
    out, intact = guarded(run, want.shape)
    fp8.swizzle_scales(stored_by_blocks(s, run), splits=there, axis=axis, out=out)
    testing.assert_bytes_equal(out, want)
    assert intact()
    back, intact = guarded(run, s.shape[::-1])
    fp8.unswizzle_scales(out, shape=s.shape, splits=there, axis=axis, out=back.T)
    again = reference.unswizzle_scales(want, shape=s.shape, splits=host, axis=axis)
    testing.assert_bytes_equal(back.T, again)
    assert intact()
    assert fp8.device_errors(clear=True) == (found if run.name != "reference" else ())


@pytest.mark.parametrize("axis", [0, 1])
def test_what_no_group_covers_may_need_a_tile_of_its_own(axis, unchecked):
    """Eight groups that fill a block of threads with a tile each, and one scale more: past the tiles of the
    swizzled array."""
    run, sized = unchecked, [32] * 8 if axis == 1 else [1] * 8
    s = scales(9, 4) if axis == 0 else scales(4, 9)
    splits = np.array(sized)
    w = reference.swizzle_scales(s, splits=splits, axis=axis)
    want = reference.unswizzle_scales(w, shape=s.shape, splits=splits, axis=axis)
    assert np.count_nonzero(bits(want) == 0) == 4
    back, intact = guarded(run, s.shape)
    fp8.unswizzle_scales(run.array(w), shape=s.shape, splits=run.array(splits), axis=axis, out=back)
    testing.assert_bytes_equal(back, want)
    assert intact()


def test_what_no_group_covers():
    """Scales of no group are omitted from the swizzled scales, and are 0 in the compact ones; a group past
    the end is cut."""
    s = scales(10, 4)
    short = reference.swizzle_scales(s, splits=[3, 4])
    np.testing.assert_array_equal(bits(short[:128]).reshape(-1), by_formula(s[:3]))
    np.testing.assert_array_equal(bits(short[128:256]).reshape(-1), by_formula(s[3:7]))
    back = reference.unswizzle_scales(short, shape=(10, 4), splits=[3, 4])
    testing.assert_bytes_equal(back[:7], s[:7])
    assert not bits(back[7:]).any()
    testing.assert_bytes_equal(reference.swizzle_scales(s, splits=[3, 40]),
                               reference.swizzle_scales(s, splits=[3, 7]))
    testing.assert_bytes_equal(reference.swizzle_scales(s, splits=[-2, 10]),
                               reference.swizzle_scales(s, splits=[0, 10]))


@pytest.mark.parametrize("axis", [0, 1])
def test_empty_scales_with_sizes(axis, unchecked):
    run = unchecked
    s = run.array(scales(0, 4) if axis == 0 else scales(4, 0))
    for splits, found in (([0, 0], 0), ([0, 3], 1)):
        w = fp8.swizzle_scales(s, splits=run.array(np.array(splits)), axis=axis)
        assert w.size == 0
        assert (fp8.unswizzle_scales(w, shape=s.shape, splits=run.array(np.array(splits)),
                                     axis=axis).shape == s.shape)
        assert len(fp8.device_errors(clear=True)) == (found if run.name != "reference" else 0)
