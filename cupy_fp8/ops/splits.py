"""Sizes of groups as ops take them: an array, or a list, which is copied to where kernels find it."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np

from .. import backend, runtime
from ..arrays import Array
from . import checks

DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


class Groups(NamedTuple):
    """The sizes of groups, where a kernel and the reference find them. number None: no groups."""

    number: int | None = None
    at: int = 0
    nbytes: int = 0
    wide: int = 0
    array: Any = None               # kept alive
    host: Any = None                # sizes that can be looked at

    def check_separate(self, at: int, nbytes: int) -> None:
        checks.separate(at, nbytes, self.at, self.nbytes, "out", "splits")


NO_GROUPS = Groups()


def read(splits: Any, x: Array | None, xp: Any, check: bool) -> Groups:
    """`splits` among arrays of module xp, where x is one of them: beside it, else where they are (a list: the current device). `host`
    is known of NumPy arrays and lists; with `check` of CuPy arrays too, which waits for the device."""
    if isinstance(splits, (list, tuple)):
        host = _as_sizes(splits)
        array = host if xp is np else _to_device(host, x)
        return Groups(len(host), checks.address(array), array.nbytes, 1, array, host)
    if not isinstance(splits, xp.ndarray):
        backend.require_module(splits, xp, "splits")
    array, _, at = checks.source(splits, DTYPES, "splits")
    if array.ndim != 1:
        raise ValueError(f"splits: expected one dimension, got shape {array.shape}")
    looked_at: np.ndarray | None = array if xp is np else None
    if xp is not np:
        if x is not None:
            checks.same_device(array, x, "splits")
        if check:
            if runtime.capturing(array.data.device_id):
                raise ValueError("check: waits for the device, which cannot be done while a CUDA graph is captured; "
                                 "check before the capture")
            looked_at = array.get()
    return Groups(len(array), at, array.nbytes, int(array.dtype.itemsize == 8), array, looked_at)


def refuse_negative(sizes: list[int]) -> None:
    """ValueError naming the first that is the smallest."""
    if sizes and min(sizes) < 0:
        raise ValueError(f"splits: expected sizes of 0 or more, got {min(sizes)} for group {sizes.index(min(sizes))}")


def _as_sizes(splits: Any) -> np.ndarray:
    try:
        return np.array([operator.index(size) for size in splits], np.int64)
    except TypeError as error:
        raise TypeError(f"splits: expected integers ({error})") from None
    except OverflowError:
        raise ValueError(f"splits: expected integers of 64 bits, got {splits}") from None


def _to_device(host: np.ndarray, x: Array | None) -> Array:
    cp = backend.cupy()
    device = cp.cuda.runtime.getDevice() if x is None else x.data.device_id
    if runtime.capturing(device):
        raise ValueError("splits: a list would have to be copied to the GPU, which cannot be done while a CUDA graph is captured; "
                         "give a CuPy array")
    with cp.cuda.Device(device):
        return cp.asarray(host)
