"""Launches of calls with out=, kept with a routing: arrays in the same places need no second validation."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .. import backend
from ..arrays import Array
from ..kernels import Variant, executor_of
from ..results import Scaled
from ..routing import Routing

#: A call: the op, its arrays' places, shapes and dtypes.
Key = tuple[Any, ...]
_MOST_KEPT = 256


def key(routing: Any, out: Any, op: Any, *arrays: Any) -> Key | None:
    """What all validation of a call with out= depends on, None where that is more than arrays that kernels can take as they are."""
    if out is None or not isinstance(routing, Routing):
        return None
    parts: list[Any] = [op]
    for a in (out, *arrays):
        for one in a if isinstance(a, tuple) else (a,):
            if isinstance(one, Scaled):
                found = _place(one.data), _place(one.scale_inv)
                if None in found or type(one.shape) is not tuple or type(one.block) is not tuple:
                    return None
                parts.append((*found, one.shape, one.transposed, one.block, one.scale_layout))
            elif one is None:
                parts.append(None)
            elif (place := _place(one)) is None:
                return None
            else:
                parts.append(place)
        parts.append(isinstance(a, tuple))
    return tuple(parts)


def _place(a: Any) -> Key | None:
    kind = type(a)
    if kind is np.ndarray:
        at, fit = a.ctypes.data, a.flags.carray and executor_of(np) == "host"
    elif kind is _cupy_ndarray():
        at, fit = a.data.ptr, a._c_contiguous
    else:
        return None
    dtype = a.dtype
    return (kind, at, a.shape, dtype) if fit and at % (dtype.itemsize or 1) == 0 else None


@functools.cache
def _cupy_ndarray() -> Any:
    return backend.cupy().ndarray if backend.gpu_problem() is None else None


def launch(routing: Routing, key: Key | None, x: Array, variant: Variant, grid: int, members: tuple[Any, ...]) -> None:
    """Kept with the routing, whose own arrays are always the same."""
    variant.launch(x, grid, *members)
    if key is not None:
        kept = routing.__dict__.setdefault("_launches", {})
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        kept[key] = variant, grid, members


def launch_again(routing: Routing, key: Key | None) -> bool:
    """Whether a call was an earlier one, which needs no second look, and has been launched."""
    found = None if key is None else routing.__dict__.get("_launches", {}).get(key)
    if found is None:
        return False
    variant, grid, members = found
    variant.launch(routing.row_map, grid, *members)
    return True
