"""Descriptions of results: which arrays an op writes, how users get them, and whether `out=` fits."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .. import backend
from ..arrays import Array, array_at, bits
from . import validate
from .memory import ALLOCATION_ALIGNMENT, Range

#: Bytes from which on a kernel takes longer than an allocation.
_LARGE = 8 << 20


class Written(NamedTuple):
    """An array that a call writes: its name in messages, its shape and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Description:
    """What an op returns: here one array; other kinds of results override `build` and `arrays_of`. Holds no
    array, since later calls of the same kind build their results with it."""

    def __init__(self, *arrays: Written) -> None:
        self.arrays = arrays

    def build(self, arrays: Sequence[Array]) -> Any:
        """Build what the user gets from the arrays, in order."""
        return arrays[0]

    def for_out(self, out: Any) -> Description:
        """Describe a result given as `out=`, which may have other arrays than a new one."""
        return self

    def arrays_of(self, out: Any) -> Sequence[Array]:
        """Return the arrays of a result given as `out=`. TypeError or ValueError for another kind of result;
        the arrays themselves are checked later."""
        return (out,)

    def store(self, out: Any, made: Any) -> None:
        """Copy the reference's result into a given one, byte for byte."""
        for array, computed in zip(self.arrays_of(out), self.arrays_of(made), strict=True):
            bits(array)[...] = bits(computed)


class Updated(Description):
    """No arrays of its own: the op updates arguments in place, and `out` consists of these."""

    def arrays_of(self, out: Any) -> Sequence[Array]:
        return ()

    def store(self, out: Any, made: Any) -> None:
        for array, computed in zip(out, made, strict=True):
            bits(array)[...] = bits(computed)


def one_array(shape: tuple[int, ...], dtype: np.dtype[Any], name: str = "out") -> Description:
    return Description(Written(name, shape, dtype))


class Several(Description):
    """A tuple of results."""

    def __init__(self, *parts: Description) -> None:
        super().__init__(*(a for part in parts for a in part.arrays))
        self._parts = parts

    def build(self, arrays: Sequence[Array]) -> tuple[Any, ...]:
        left = iter(arrays)
        return tuple(part.build([next(left) for _ in part.arrays]) for part in self._parts)

    def arrays_of(self, out: Any) -> Sequence[Array]:
        given = several(out, len(self._parts))
        return [a for part, one in zip(self._parts, given, strict=True) for a in part.arrays_of(one)]


class Pair(Several):
    """A tuple of two results."""

    def __init__(self, first: Description, second: Description) -> None:
        super().__init__(first, second)


def several(out: Any, count: int) -> tuple[Any, ...]:
    """Check that `out=` is a tuple of `count`; TypeError for anything else."""
    if not isinstance(out, tuple) or len(out) != count:
        number = {2: "two", 3: "three", 4: "four"}.get(count, str(count))
        raise TypeError(f"out: expected a tuple of {number} (an earlier result), got {type(out).__name__}")
    return out


def pair(out: Any) -> tuple[Any, Any]:
    """Check that `out=` is a tuple of two; TypeError for anything else."""
    first, second = several(out, 2)
    return first, second


def given_result(described: Description, out: Any, x: Array,
                 xp: Any) -> tuple[Description, Sequence[Array], list[Range]]:
    """Return the description and the arrays of a result given as `out=`, and their memory. Checks that every
    array is of x's kind and device, writable, and of its shape and dtype."""
    described = described.for_out(out)
    arrays = described.arrays_of(out)
    ranges = []
    for a, wanted in zip(arrays, described.arrays, strict=True):
        at = validate.writable(a, wanted.shape, wanted.dtype, x, xp, wanted.name)
        ranges.append(Range(at, at + a.nbytes, True, wanted.name))
    return described, arrays, ranges


class Allocation:
    """Allocation of uninitialised arrays beside another one. On a GPU they are views of one allocation, or of
    several if they are large, since an allocation lives as long as any of its arrays."""

    def __init__(self, like: Array, arrays: Sequence[Written]) -> None:
        found, self._sizes = divide(arrays)
        self._arrays = [(a.shape, a.dtype, *place) for a, place in zip(arrays, found, strict=True)]
        self._device = None if isinstance(like, np.ndarray) else like.data.device_id
        self._cupy = None if self._device is None else backend.cupy()

    def make(self) -> tuple[list[Array], list[int]]:
        """Return the arrays and their addresses."""
        if self._cupy is None:
            arrays = [np.empty(shape, dtype) for shape, dtype, _, _ in self._arrays]
            return arrays, [a.ctypes.data for a in arrays]
        cp = self._cupy
        if self._device != cp.cuda.runtime.getDevice():
            with cp.cuda.Device(self._device):
                memories = [cp.cuda.alloc(nbytes) for nbytes in self._sizes]
        else:
            memories = [cp.cuda.alloc(nbytes) for nbytes in self._sizes]
        made, begins = array_at(cp), [memory.ptr for memory in memories]
        arrays = [made(shape, dtype, memories[which] + start) for shape, dtype, which, start in self._arrays]
        return arrays, [begins[which] + start for _, _, which, start in self._arrays]


def divide(arrays: Sequence[Written]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return which allocation each array is in, and its offset there; and the bytes of each allocation. An
    allocation that is already large gets no further array."""
    found, sizes = [], [0]
    for a in arrays:
        if sizes[-1] >= _LARGE:
            sizes.append(0)
        found.append((len(sizes) - 1, sizes[-1]))
        sizes[-1] += -(-a.nbytes // ALLOCATION_ALIGNMENT) * ALLOCATION_ALIGNMENT
    return found, sizes
