"""Places of arrays in memory: overlapping ranges, the bytes of any view, the strides of its matrices, and
several arrays in one allocation."""

from __future__ import annotations

from itertools import combinations_with_replacement, permutations, product

import numpy as np
import pytest

from cupy_fp8.calls.descriptions import Written, divide
from cupy_fp8.calls.memory import ALLOCATION_ALIGNMENT, Range, check_separate
from cupy_fp8.calls.relocation import CallMemory
from cupy_fp8.calls.validate import byte_range, matrix_strides


def share_a_byte(ranges: tuple[Range, ...]) -> bool:
    """Whether any two overlap, of which one is written."""
    return any(
        (a.written or b.written) and set(range(a.start, a.end)) & set(range(b.start, b.end))
        for a, b in permutations(ranges, 2)
    )


def test_three_ranges():
    """Every arrangement of three ranges of up to three bytes: one inside another, behind it, the same,
    empty."""
    spans = [(start, end) for start, end in combinations_with_replacement(range(4), 2)]
    for chosen in product(spans, repeat=3):
        for written in product((False, True), repeat=3):
            ranges = tuple(
                Range(start, end, is_written, name)
                for (start, end), is_written, name in zip(chosen, written, "abc", strict=True)
            )
            if share_a_byte(ranges):
                with pytest.raises(ValueError, match=r"^[abc]: overlaps [abc] in memory"):
                    check_separate(ranges)
            else:
                check_separate(ranges)


# ---- views ----
_A = np.arange(2 * 3 * 4 * 6, dtype=np.int16).reshape(2, 3, 4, 6)
VIEWS = {
    "whole": _A, "matrix": _A[1, 2], "columns": _A[..., 1:5], "every second row": _A[:, :, ::2],
    "every second matrix": _A[:, ::2], "fewer matrices": _A[:, :2], "one batch": _A[1:, ::2],
    "turned": _A.swapaxes(-1, -2), "batches turned": _A.swapaxes(0, 1), "backwards": _A[:, ::-1, :, ::-1],
    "no element": _A[:, :0], "one column": _A[..., 2:3], "rows over batches": _A.transpose(0, 2, 1, 3)}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_the_bytes_of_a_view(view):
    begin = _A.ctypes.data
    own = view.astype(np.int64).reshape(-1) * 2
    want = (view.ctypes.data,) * 2 if not view.size else (begin + own.min(), begin + own.max() + 2)
    assert byte_range(view) == want


@pytest.mark.parametrize("view", [view for view in VIEWS.values() if view.size])
def test_three_strides_lead_to_every_element(view):
    """None if there are no such three, or one is negative."""
    place = view.reshape(-1, *view.shape[-2:]).astype(np.int64) - int(view.min())
    steps = set(np.diff(place[:, 0, 0]))
    found = matrix_strides(view)
    assert (found is not None) == (len(steps) <= 1 and min(view.strides) >= 0)
    if found is not None:
        i, r, c = np.ogrid[tuple(slice(extent) for extent in place.shape)]
        np.testing.assert_array_equal(i * found[0] + r * found[1] + c * found[2], place)


# ---- allocations ----
def test_arrays_of_one_allocation():
    """Each begins at a multiple of the alignment of allocations, and none overlaps another. A large one is
    followed by a new allocation."""
    sizes = [1, 255, 256, 257, 0, 9 << 20, 3, 5]
    places, allocations = divide([Written("out", (size,), np.dtype(np.uint8)) for size in sizes])
    for which in range(len(allocations)):
        ends = 0
        for (own, start), size in zip(places, sizes, strict=True):
            if own == which:
                assert start % ALLOCATION_ALIGNMENT == 0
                assert start >= ends
                ends = start + size
        assert ends <= allocations[which]
    assert [own for own, _ in places] == [0] * 6 + [1] * 2


def test_a_pointer_that_leads_elsewhere():
    memory = CallMemory([(8192, 1), (4096, 16)], {64}, at_fixed_addresses=False)
    assert memory.relocations([(0, 4100), (1, 0), (2, 64), (5, 8192)]) == [(0, 1, 4), (5, 0, 0)]
    for pointer in (4095, 4112, 8193, 63):
        assert memory.relocations([(0, 4096), (1, pointer)]) is None
