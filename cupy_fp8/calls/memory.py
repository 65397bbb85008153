"""Memory of a call's arrays, and whether one that is written overlaps another."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

#: Kernels ask for 16 at most.
ALIGNMENT = 32
#: Allocations on a GPU begin at multiples of this, and so do several arrays of one allocation. cuBLASLt has
#: algorithms for arrays that do.
ALLOCATION_ALIGNMENT = 256


class Range(NamedTuple):
    """A range of addresses, whether the call writes it, and the argument it belongs to."""

    start: int
    end: int
    written: bool
    name: str


def check_separate(ranges: Iterable[Range]) -> None:
    """Raises ValueError if any range that is written shares a byte with another. It names the written one, of
    two the later. Of several such pairs it names the first in the order of the arguments, wherever they lie.
    """
    ranges = [found for found in ranges if found.start < found.end]
    if _overlap(ranges):
        name, met = next(_overlapping(ranges))
        raise ValueError(f"{name}: overlaps {met} in memory; results need memory of their own")


class Occupied:
    """Ranges of addresses that stay what they are, which many other ranges are compared with."""

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
        """Raises ValueError if the range shares a byte with any of these."""
        before = bisect_left(self._starts, end)             # ranges that begin before the end of this one
        if start < end and before and self._ends[before - 1] > start:
            check_separate([Range(start, end, True, name), *self._ranges])


def _overlap(ranges: list[Range]) -> bool:
    """Whether any two share a byte, of which one is written. None is empty."""
    read_end = written_end = 0                      # These are the ends of the ranges before.
    for start, end, written, _ in sorted(ranges):
        if start < written_end or (written and start < read_end):
            return True
        if written:
            written_end = end                       # It begins after the end of all written ones.
        else:
            read_end = max(read_end, end)
    return False


def _overlapping(ranges: list[Range]) -> Iterator[tuple[str, str]]:
    """The names of each such pair."""
    for number, later in enumerate(ranges):
        for other in ranges[:number]:
            if (later.written or other.written) and max(later.start, other.start) < min(later.end, other.end):
                yield (later.name, other.name) if later.written else (other.name, later.name)
