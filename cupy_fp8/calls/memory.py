"""Memory of a call's arrays, and overlap checks of the written ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

#: Kernels need at most 16.
ALIGNMENT = 32
#: Alignment of allocations on a GPU, also of several arrays in one allocation. cuBLASLt has algorithms for
#: arrays with this alignment.
ALLOCATION_ALIGNMENT = 256


class Range(NamedTuple):
    """A range of addresses, whether the call writes it, and its argument."""

    start: int
    end: int
    written: bool
    name: str


def check_separate(ranges: Iterable[Range]) -> None:
    """Raise ValueError if any written range shares a byte with another. It names the written one (of two, the
    later); of several such pairs the first in the order of the arguments, wherever they lie.
    """
    ranges = [found for found in ranges if found.start < found.end]
    if _overlap(ranges):
        name, met = next(_overlapping(ranges))
        raise ValueError(f"{name}: overlaps {met} in memory; results need memory of their own")


class Occupied:
    """Fixed ranges of addresses, which many other ranges are compared with."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._ranges = sorted(found for found in ranges if found.start < found.end)
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end, *_ in self._ranges:
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def check(self, start: int, end: int, name: str) -> None:
        """Raise ValueError if the range shares a byte with any of these."""
        before = bisect_left(self._starts, end)            # number of ranges that begin before this one's end
        if start < end and before and self._ends[before - 1] > start:
            check_separate([Range(start, end, True, name), *self._ranges])


def _overlap(ranges: list[Range]) -> bool:
    """Whether any two ranges, one of them written, share a byte. None is empty."""
    read_end = written_end = 0                      # ends of the ranges before
    for start, end, written, _ in sorted(ranges):
        if start < written_end or (written and start < read_end):
            return True
        if written:
            written_end = end                       # begins after the end of all written ones
        else:
            read_end = max(read_end, end)
    return False


def _overlapping(ranges: list[Range]) -> Iterator[tuple[str, str]]:
    """Yield the names of each such pair."""
    for number, later in enumerate(ranges):
        for other in ranges[:number]:
            if (later.written or other.written) and max(later.start, other.start) < min(later.end, other.end):
                yield (later.name, other.name) if later.written else (other.name, later.name)
