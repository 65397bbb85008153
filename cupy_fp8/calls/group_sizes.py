"""Sizes of groups as ops take them: an array, or a list, which is copied for the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import backend, kernels
from ..advice import shown
from ..arrays import Array, address, check_dimensions, is_array
from ..formats import SIZE_DTYPES, flag, integer, integers
from ..scaled_parts import check_offsets_of_sizes
from . import validate

_MOST_ALIGN = 1 << 16


class Groups(NamedTuple):
    """Sizes of groups, for a kernel and the reference. number None: no groups."""

    number: int | None = None
    at: int = 0
    nbytes: int = 0
    wide: int = 0
    #: keeps the array of the sizes alive
    array: Any = None
    #: None unless the sizes are known on the host
    host: Any = None

    def members(self, errors: int) -> dict[str, Any]:
        """Return the struct Splits of kernels_cu/include/groups/splits.cuh. errors: address of the device's
        error word."""
        return {"sizes": self.at, "groups": self.number, "errors": errors, "wide": self.wide}


NO_GROUPS = Groups()


def read(splits: Any, x: Array | None, xp: Any, check: bool, name: str = "splits") -> Groups:
    """Read `splits` for arrays of module xp. They are beside x; without an x they stay where they are, and a
    list goes to the current device. `host` is known of NumPy arrays and lists; with `check` of CuPy arrays
    too, which waits for the device. name: of the sizes, in messages."""
    check = flag(check, "check")
    if isinstance(splits, (list, tuple)):
        host = _as_sizes(splits, name)
        array = host if xp is np else _to_device(host, x, name)
        return Groups(len(host), address(array), array.nbytes, 1, array, host)
    backend.require_module(splits, xp, name, SIZE_DTYPES[1].name, 1)
    array, _, at = validate.source(splits, SIZE_DTYPES, name)
    check_dimensions(array.shape, name, 1, 1)
    looked_at: np.ndarray | None = array if xp is np else None
    if xp is not np:
        if x is not None:
            backend.same_device(array, x, name)
        if check:
            validate.may_wait(array)
            looked_at = array.get()
    return Groups(len(array), at, array.nbytes, int(array.dtype.itemsize == 8), array, looked_at)


def read_first(splits: Any, beside: Any, check: bool, name: str = "splits") -> Groups:
    """Read `splits` of a call without an array before them. beside: an array whose kind and device a list
    goes to; None: those of `cupy_fp8.xp`."""
    if not isinstance(splits, (list, tuple)):
        return read(splits, None, backend.module_of(splits, name, SIZE_DTYPES[1].name, 1), check, name)
    xp = backend.default_module() if beside is None else backend.module_of(beside, "out[0]")
    return read(splits, beside, xp, check, name)


def on_device_of(splits: Any, x: Any) -> Any:
    """Copy a list of sizes of x's rows to the GPU of x, and return the array. Anything else is returned
    unchanged, for the op to examine."""
    if not isinstance(splits, (list, tuple)) or isinstance(x, np.ndarray) or not is_array(x) or not x.ndim:
        return splits
    host = _as_sizes(splits, "splits")
    check_at_most(host, x.shape[0])
    return _to_device(host, x, "splits")


def check_align(align: Any) -> int:
    """Check the multiple that sizes of groups are rounded up to."""
    align = integer(align, "align")
    if not 1 <= align <= _MOST_ALIGN or align & align - 1:
        raise ValueError(f"align: expected a power of two from 1 to {_MOST_ALIGN}, got {shown(align)}")
    return align


def none_negative(host: np.ndarray) -> list[int]:
    """Return sizes on the host as Python integers, whose sums do not overflow. ValueError naming the first
    group with the smallest size, if that is negative."""
    sizes: list[int] = host.tolist()
    if sizes and min(sizes) < 0:
        raise ValueError(f"splits: expected sizes of 0 or more, got {min(sizes)} for group "
                         f"{sizes.index(min(sizes))}")
    return sizes


def check_at_most(sizes: np.ndarray, rows: int, what: str = "rows", instead: str = "") -> None:
    """Raise ValueError unless sizes on the host fit into `rows` rows. what: the unit of the sizes; instead:
    the end of the message, or ''."""
    given = none_negative(sizes)
    if sum(given) > rows:
        raise ValueError(f"splits: expected sizes that add up to at most the {rows} {what} there are, got "
                         f"{sum(given)}{instead}")


def check_offsets(offsets: Any, groups: Groups, x: Array, xp: Any) -> int:
    """Return the address of offsets [N + 1] of N groups, int64, of x's kind and device."""
    backend.require_module(offsets, xp, "offsets", SIZE_DTYPES[1].name, 1)
    validate.check_shape("offsets", offsets.shape, (len(groups.array) + 1,), "one more than splits")
    return validate.fitting(offsets, offsets.shape, SIZE_DTYPES[1], x, xp, "offsets")


def compare_offsets(offsets: Array, given: np.ndarray, columns: int, name: str = "offsets") -> None:
    """Raise ValueError unless offsets (on host or device) are the prefix sums of sizes on the host, times
    columns. name: of the offsets, in messages."""
    host = offsets if isinstance(offsets, np.ndarray) else offsets.get()
    check_offsets_of_sizes(host, given, columns, name)


def _as_sizes(splits: Any, name: str) -> np.ndarray:
    try:
        return np.array(integers(splits), np.int64)
    except TypeError as error:
        raise TypeError(f"{name}: expected integers ({error})") from None
    except OverflowError:
        raise ValueError(f"{name}: expected integers of 64 bits, got {shown(splits)}") from None


def _to_device(host: np.ndarray, x: Array | None, name: str) -> Array:
    cp = backend.cupy()
    device = cp.cuda.runtime.getDevice() if x is None else x.data.device_id
    if kernels.capturing(device):
        raise ValueError(f"{name}: a list would have to be copied to the GPU, which cannot be done while a "
                         "CUDA graph is captured; give a CuPy array")
    with cp.cuda.Device(device):
        return cp.asarray(host)
