"""Which ranges of memory overlap, whatever their order and however they lie in one another."""

from __future__ import annotations

from itertools import combinations_with_replacement, permutations, product

import pytest

from cupy_fp8.calls.memory import Range, check_separate


def share_a_byte(ranges: tuple[Range, ...]) -> bool:
    """Whether any two do, of which one is written."""
    return any(
        (a.written or b.written) and set(range(a.start, a.end)) & set(range(b.start, b.end))
        for a, b in permutations(ranges, 2)
    )


def test_three_ranges():
    """All of three ranges of up to three bytes: one inside another, behind it, the same, empty."""
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
