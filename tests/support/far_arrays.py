"""Calls whose arrays have more than 2**32 elements. On the CPU memory is mapped lazily, and only the blocks
at the grid's ends and in the middle run; on a GPU all of them do.

A far call is compared at both ends, and around element 2**31 and a place before it, with the reference of
these windows alone. A product of indices in 32 bits would point elsewhere.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import cases, hostexec, reference, testing
from cupy_fp8.arrays import bits

END = 512                   # rows or columns compared at either end, and around each other place
FAR = (1 << 25) + END       # with 128 elements each, these are more than 2**32
BLOCKS = 64                 # blocks of a grid per window: no kernel needs more for END * 128 elements; one
                            # with a block per row would need `end=BLOCKS`
#: Kernels whose last block writes what all blocks have found; their grids run whole.
_WHOLE = ("group_amax_scale", "multi_amax_scale")
_LARGEST = 1024             # larger than all other elements
_LARGE = 1 << 24            # bytes from which on an array is mapped rather than allocated
#: Python has a name for it from 3.13 on; the number is Linux's.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def mapped(shape: tuple[int, ...] | int, dtype: Any = np.float64) -> np.ndarray:
    """Return zeros that take memory only where they are touched, a small page at a time."""
    shape, dtype = (shape,) if isinstance(shape, int) else tuple(map(int, shape)), np.dtype(dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=flags)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)


@contextmanager
def lazy_memory() -> Iterator[None]:
    """Within this context np.empty maps large arrays lazily: results, and the ops' own memory."""
    allocate = np.empty

    def empty(shape: Any, dtype: Any = np.float64, *args: Any, **kwargs: Any) -> np.ndarray:
        extents = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        large = prod(map(int, extents)) * np.dtype(dtype).itemsize > _LARGE
        return mapped(extents, dtype) if large else allocate(shape, dtype, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "empty", empty)
        yield


def windows(shape: tuple[int, ...], axis: int, end: int) -> list[slice]:
    """Return what is compared along a long axis: both ends, and as much around two places between them.

    The axis is a little longer than a power of two. Half of that is the place of element 2**31 in rows of
    memory if the axis is the first, and in a transposed result if it is the last. A quarter is the place of
    byte 2**31 of 16-bit elements. The last axis has element 2**31 of rows of memory near its end.
    """
    extent = shape[axis]
    most = 1 << (extent.bit_length() - 1)
    places = (most // 4, most // 2) if axis == 0 else (most // 2, (1 << 31) % extent)
    middles = [slice(place - end // 2, place - end // 2 + end) for place in places]
    apart = extent >= 16 * end                              # otherwise the array is short
    return [slice(0, end), *(middles if apart else ()), slice(extent - end, extent)]


@dataclass(frozen=True)
class Far:
    """A call, `call(module, x)` with the package or its reference as the module, of an x with a long axis
    `axis`.

    end: length of that axis compared in each window; blocks: number that must run for it; alike: all windows
    are equal, for amaxes of the whole axis; one_amax: results depend on the amax of all elements, which is
    then that of the last element, and the last window is compared alone, with the scales.
    """

    call: Callable[[Any, Any], Any]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    axis: int = 0
    end: int = END
    blocks: int = BLOCKS
    alike: bool = False
    one_amax: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def windows(self) -> list[slice]:
        return windows(self.shape, self.axis, self.end)

    @property
    def around(self) -> list[Fraction]:
        """Places of the windows between the ends, as fractions of the axis."""
        return [Fraction(window.start + window.stop, 2 * self.shape[self.axis])
                for window in self.windows[1:-1]]

    def contents(self) -> list[np.ndarray]:
        """Contents of x in each window; everything else is 0."""
        shape = (*self.shape[:self.axis], self.end, *self.shape[self.axis + 1:])
        first = others = last = cases.values("normal", shape, self.dtype, 0)
        if self.one_amax:
            last = first.copy()
            last[..., -1:, -1:] = _LARGEST
        elif not self.alike:
            others = last = cases.values("normal", shape, self.dtype, 1)
        return [first, *[others] * (len(self.windows) - 2), last]

    def fill(self, x: Any) -> None:
        for window, part in zip(self.windows, self.contents(), strict=True):
            bits(x)[(*(slice(None),) * self.axis, window)] = bits(fp8.asarray(part, like=x))


def check(far: Far) -> None:
    """Raise AssertionError unless the windows of every result equal those of the reference."""
    x = mapped(far.shape, far.dtype)
    far.fill(x)
    with testing.executor("host"), lazy_memory(), hostexec.blocks_of_grid(
            first=far.blocks, last=far.blocks, around=far.around, each=far.blocks, whole=_WHOLE):
        found = cases.outputs(far.call(fp8, x), {})
    _compare(far, found)


def check_on_device(far: Far) -> None:
    """The same on a GPU, where every block runs."""
    x = fp8.zeros(far.shape, far.dtype, like="cupy")
    far.fill(x)
    _compare(far, cases.outputs(far.call(fp8, x), {}))


def _compare(far: Far, found: dict[str, Any]) -> None:
    compared = 0
    parts = list(zip(far.windows, far.contents(), strict=True))[-1 if far.one_amax else 0:]
    for window, part in parts:
        for name, want in cases.outputs(far.call(reference, part), {}).items():
            of_all = want.ndim < 2 or found[name].shape == want.shape
            if of_all and not (far.one_amax and want.dtype == np.float32):
                continue                                        # scales of a whole tensor and sizes of groups
            assert found[name].ndim == want.ndim, name
            if window.stop == far.shape[far.axis]:
                at = tuple(slice(-n, None) for n in want.shape)
            else:
                at = tuple(_part(window, n, extent) for n, extent in
                           zip(want.shape, found[name].shape, strict=True))
                want = want[tuple(slice(part.stop - part.start) for part in at)]
            got = np.ascontiguousarray(fp8.asnumpy(bits(found[name])[at])).view(want.dtype)
            try:
                testing.assert_bytes_equal(got, want)
            except AssertionError as error:
                raise AssertionError(f"{name}, {window.start} to {window.stop} (of which the CPU runs "
                                     f"{far.blocks} blocks): {error}") from None
            compared += 1
    assert compared >= len(parts), "nothing was compared"


def _part(window: slice, wanted: int, extent: int) -> slice:
    """Return the window along an axis of a result, whose reference has length `wanted`: everything along a
    short axis; less of scales; more where rows have been added."""
    if wanted == extent:
        return slice(0, extent)
    start, stop = window.start, window.stop
    if wanted < stop - start:
        assert (stop - start) % wanted == 0 == start % ((stop - start) // wanted)
        return slice(start * wanted // (stop - start), stop * wanted // (stop - start))
    times = wanted // (stop - start)
    return slice(times * start, times * stop)
