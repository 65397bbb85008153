"""Descriptions of results: which arrays an op writes, how users get them, and whether a result given as `out=` has them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .. import backend
from ..arrays import Array, bits, empty_beside

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

    def arrays_of(self, out: Any) -> Sequence[Array]:
        """The arrays of a result given as `out=`. TypeError or ValueError if it is another kind of result; the arrays
        themselves are checked after this."""
        return (out,)


    def stored_in(self, out: Any) -> Sequence[Array]:
        """Where the reference's arrays go."""
        return self.arrays_of(out)


class Updated(Description):
    """No arrays of its own: the op updates arguments in place, and these are `out`."""

    def arrays_of(self, out: Any) -> Sequence[Array]:
        return ()

    def stored_in(self, out: Any) -> Sequence[Array]:
        return tuple(out)


def one_array(shape: tuple[int, ...], dtype: np.dtype[Any], name: str = "out") -> Description:
    return Description(Written(name, shape, dtype))


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


def store(arrays: Sequence[Array], made: Sequence[np.ndarray]) -> None:
    """Copy the reference's arrays into given ones, byte for byte."""
    for mine, fresh in zip(arrays, made, strict=True):
        bits(mine)[...] = bits(fresh).reshape(mine.shape)
