"""Descriptions of results: which arrays an op writes, how users get them, and whether a result given as `out=` has them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .. import backend
from ..arrays import Array, bits, empty_beside
from . import validate
from .memory import Range

#: Arrays of one allocation begin at multiples of so many bytes.
_ALIGNMENT = 256


class Written(NamedTuple):
    """An array that a call writes: its name in messages, its shape and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Description:
    """What an op returns. This one is a single array; other kinds of results replace the two methods."""

    def __init__(self, *arrays: Written) -> None:
        self.arrays = arrays

    def build(self, arrays: Sequence[Array]) -> Any:
        """What the user gets, from the arrays in their order."""
        return arrays[0]

    def for_out(self, out: Any) -> Description:
        """The description of a result given as `out=`, where such a result can have other arrays than a new one."""
        return self

    def arrays_of(self, out: Any) -> Sequence[Array]:
        """The arrays of a result given as `out=`. TypeError or ValueError if it is another kind of result; the arrays
        themselves are checked after this."""
        return (out,)


    def store(self, out: Any, made: Any) -> None:
        """Copy the reference's result into a given one, byte for byte."""
        for mine, fresh in zip(self.arrays_of(out), self.arrays_of(made), strict=True):
            bits(mine)[...] = bits(fresh)


class Updated(Description):
    """No arrays of its own: the op updates arguments in place, and these are `out`."""

    def arrays_of(self, out: Any) -> Sequence[Array]:
        return ()

    def store(self, out: Any, made: Any) -> None:
        for mine, fresh in zip(out, made, strict=True):
            bits(mine)[...] = bits(fresh)


def one_array(shape: tuple[int, ...], dtype: np.dtype[Any], name: str = "out") -> Description:
    return Description(Written(name, shape, dtype))


def given_result(described: Description, out: Any, x: Array, xp: Any) -> tuple[Description, Sequence[Array], list[Range]]:
    """The description and the arrays of a result given as `out=`, and their memory, once every array has been found to be of
    x's kind and device, writable, and of its shape and dtype."""
    described = described.for_out(out)
    arrays = described.arrays_of(out)
    ranges = []
    for a, wanted in zip(arrays, described.arrays, strict=True):
        at = validate.writable(a, wanted.shape, wanted.dtype, x, xp, wanted.name)
        ranges.append(Range(at, at + a.nbytes, True, wanted.name))
    return described, arrays, ranges


def allocate(x: Array, arrays: Sequence[Written]) -> list[Array]:
    """Uninitialised arrays beside x: on a GPU one allocation, viewed as all of them."""
    if isinstance(x, np.ndarray) or len(arrays) == 1:
        return [empty_beside(x, a.shape, a.dtype) for a in arrays]
    starts, end = [], 0
    for a in arrays:
        starts.append(end)
        end += -(-prod(a.shape) * a.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    memory = empty_beside(x, (end,), np.dtype(np.uint8)).data
    cp = backend.cupy()
    return [cp.ndarray(a.shape, a.dtype, memory + start) for a, start in zip(arrays, starts, strict=True)]
