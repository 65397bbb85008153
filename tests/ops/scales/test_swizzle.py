"""The swizzled layout of scales against its formula written as a loop: matrices, batches, groups, and any
strides."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launches import note_launches
from scale_arrays import VIEWS, by_formula, raw, scales, stored_by_blocks
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import float8_e8m0fnu
from cupy_fp8.layouts import cdiv, grouped_columns, grouped_rows, round_up

# ---- the formula ----
FORMULA_SHAPES = [(1, 1), (1, 4), (2, 5), (31, 3), (32, 4), (33, 9), (64, 1), (127, 2), (128, 4), (129, 5),
                  (160, 33), (257, 12), (300, 36)]


@pytest.mark.parametrize("shape", FORMULA_SHAPES, ids=str)
def test_every_byte_is_where_the_formula_says(shape, run):
    s = scales(*shape)
    want = by_formula(s)
    for given_scales in (run.array(s), stored_by_blocks(s, run)):
        w = fp8.swizzle_scales(given_scales)
        assert w.shape == (round_up(shape[0], 128), round_up(shape[1], 4))
        assert w.dtype == float8_e8m0fnu
        np.testing.assert_array_equal(raw(w).reshape(-1), want)
        testing.assert_bytes_equal(fp8.unswizzle_scales(w, shape=shape), s)


@pytest.mark.parametrize("shape", [(1, 5, 3), (3, 130, 6), (2, 128, 32), (5, 0, 4), (0, 7, 7)], ids=str)
def test_three_dimensions_are_matrices_one_after_the_other(shape, run):
    s = scales(*shape)
    for given_scales in (run.array(s), stored_by_blocks(s, run)):
        w = fp8.swizzle_scales(given_scales)
        assert w.shape == (shape[0], round_up(shape[1], 128), round_up(shape[2], 4))
        for e in range(shape[0]):
            np.testing.assert_array_equal(raw(w)[e].reshape(-1), by_formula(s[e]))
        testing.assert_bytes_equal(fp8.unswizzle_scales(w, shape=shape), s)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_empty(shape, run):
    w = fp8.swizzle_scales(run.array(scales(*shape)))
    assert w.shape == (round_up(shape[0], 128), round_up(shape[1], 4))
    assert w.size == 0
    assert fp8.unswizzle_scales(w, shape=shape).shape == shape


@needs_host
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 3), st.booleans(), st.integers(0, 2**32 - 1))
def test_any_shape(lines, blocks, batch, columnwise, seed):
    s = scales(*((batch,) if batch > 1 else ()), lines, blocks, seed=seed)
    with testing.executor("host") as run:
        w = fp8.swizzle_scales(stored_by_blocks(s, run) if columnwise else s)
        testing.assert_bytes_equal(w, reference.swizzle_scales(s))
        testing.assert_bytes_equal(fp8.unswizzle_scales(w, shape=s.shape), s)


# ---- how the arrays lie ----
@needs_host
@pytest.mark.parametrize("shape", [(200, 6), (2, 200, 6)], ids=str)
def test_column_wise_scales_are_not_copied(shape, monkeypatch):
    launched = note_launches(monkeypatch)
    # as quantisers store them: [..., blocks, lines]
    compact = scales(*shape[:-2], shape[-1], shape[-2])
    s = compact.swapaxes(-1, -2)
    with testing.executor("host"):
        w = fp8.swizzle_scales(s)
        back = np.empty_like(compact)
        cases.poison(back)
        view = back.swapaxes(-1, -2)
        assert fp8.unswizzle_scales(w, shape=shape, out=view) is view
    testing.assert_bytes_equal(back, compact)
    (into, _, (compact_at, swizzled_at, *_)), (out_of, _, (back_at, *_)) = launched
    assert ("ADJACENT", "1") in into.defines
    assert ("ADJACENT", "1") in out_of.defines
    assert (compact_at, back_at) == (compact.ctypes.data, back.ctypes.data)
    assert swizzled_at == w.ctypes.data


@pytest.mark.parametrize("view", VIEWS)
def test_any_view(view, run):
    host = scales(60, 200)
    want = reference.swizzle_scales(np.ascontiguousarray(VIEWS[view](bits(host))).view(float8_e8m0fnu))
    s = VIEWS[view](bits(run.array(host))).view(float8_e8m0fnu)
    testing.assert_bytes_equal(fp8.swizzle_scales(s), want)


@pytest.mark.parametrize("lead", [1, 2, 4, 8])
def test_compact_scales_at_any_address(lead, run):
    """Wide accesses need alignment, on both sides."""
    for shape in ((150, 36), (144, 33)):
        n = shape[0] * shape[1]
        host = scales(n + 16)
        buffer = run.array(host)
        s, want = buffer[lead : lead + n], host[lead : lead + n]
        for columnwise in (False, True):
            flat = buffer[lead:lead + n], host[lead:lead + n]
            s, want = (a.reshape(shape[::-1]).T if columnwise else a.reshape(shape) for a in flat)
            w = fp8.swizzle_scales(s)
            testing.assert_bytes_equal(w, reference.swizzle_scales(want))
            back = run.array(np.full(n + 16, 0xAA, np.uint8))
            out = back[lead : lead + n].view(float8_e8m0fnu)
            out = out.reshape(shape[::-1]).T if columnwise else out.reshape(shape)
            assert fp8.unswizzle_scales(w, shape=shape, out=out) is out
            testing.assert_bytes_equal(out, want)
            assert (np.delete(raw(back), np.s_[lead : lead + n]) == 0xAA).all()


# ---- groups ----
def grouped_by_formula(s: np.ndarray, splits: list[int], axis: int) -> np.ndarray:
    """Return bytes of the groups, one after the other, up to the bound."""
    done, parts = 0, []
    for size in splits:
        count = size if axis == 0 else cdiv(size, 32)
        part = s[done : done + count] if axis == 0 else s[:, done : done + count]
        parts.append(by_formula(part))
        done += count
    assert done == s.shape[axis]
    total = np.concatenate([*parts, np.zeros(0, np.uint8)])
    lines, blocks = s.shape
    most = (grouped_rows(lines, len(splits)) * round_up(blocks, 4) if axis == 0
            else round_up(lines, 128) * grouped_columns(blocks, len(splits)))
    assert len(total) <= most, "the bound is none"
    return np.concatenate([total, np.zeros(most - len(total), np.uint8)])


GROUPS = {
    "one": [130], "empty first": [0, 5, 130], "empty in the middle": [7, 0, 0, 128],
    "empty last": [129, 1, 0], "all empty": [0, 0, 0],
    "none": [], "as many as lines": [1] * 9, "aligned": [128, 256], "just above": [129, 257],
    "uneven": [33, 1, 95, 64, 200, 31, 32],
}  # fmt: skip


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", GROUPS)
def test_groups_by_formula(name, axis, run):
    splits = GROUPS[name]
    total = sum(splits) if axis == 0 else sum(cdiv(size, 32) for size in splits)
    for other in (6, 0):
        s = scales(total, other) if axis == 0 else scales(other * 25, total)
        want = grouped_by_formula(s, splits, axis)
        for given_scales in (run.array(s), stored_by_blocks(s, run)):
            for dtype in (np.int32, np.int64, list):
                sized = splits if dtype is list else run.array(np.array(splits, dtype))
                w = fp8.swizzle_scales(given_scales, splits=sized, axis=axis, check=True)
                np.testing.assert_array_equal(raw(w).reshape(-1), want)
                assert w.shape == ((grouped_rows(total, len(splits)), round_up(other, 4)) if axis == 0
                                   else (len(want),))
                testing.assert_bytes_equal(fp8.unswizzle_scales(w, shape=s.shape, splits=sized, axis=axis,
                                                                check=True), s)


@pytest.mark.parametrize("lines", range(12))
def test_the_bound_is_reached_and_never_passed(lines):
    for groups in range(8):
        most = max((sum(round_up(size, 4) for size in splits) for splits in partitions(lines, groups)),
                   default=0)
        assert most <= grouped_columns(lines, groups)
        if groups:
            assert grouped_columns(lines, groups) - most < 4
        assert grouped_rows(lines, 1) == round_up(lines, 128)
    assert grouped_rows(170, 3) == 512


def partitions(total: int, groups: int) -> Iterator[tuple[int, ...]]:
    if groups == 0:
        if total == 0:
            yield ()
        return
    for first in range(total + 1):
        yield from ((first, *rest) for rest in partitions(total - first, groups - 1))


@needs_host
def test_swizzled_scales_are_aligned():
    """Both sides of a matrix product need it; the kernels move 16 bytes at a time."""
    memory = scales(1024)
    lead = -memory.ctypes.data % 16 + 8
    s = memory[lead : lead + 512].reshape(128, 4)
    with (testing.executor("host"),
          pytest.raises(ValueError, match=r"^out: address 0x.*8 is not a multiple of 16")):
        fp8.swizzle_scales(scales(9, 4), out=s)
    want = fp8.swizzle_scales(scales(9, 4))
    # the reference does not need alignment
    testing.assert_bytes_equal(fp8.swizzle_scales(scales(9, 4), out=s), want)
    # a NumPy input is copied to an aligned place, again whenever its bytes have changed
    out = scales(9, 4)
    for executor in ("reference", "host"):
        with testing.executor(executor):
            for given in (want, fp8.swizzle_scales(scales(9, 4)[::-1])):
                bits(s)[...] = bits(given)
                fp8.unswizzle_scales(s, shape=(9, 4), out=out)
                testing.assert_bytes_equal(fp8.swizzle_scales(out), given)
