"""Memory of a call's arrays: which calls have the same, and whether what is written overlaps anything else."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ..kernels import executor_of
from ..results import Quantized, Scaled
from ..routing import Routing

Place = tuple[Hashable, ...]


# ---- overlap ----
class Range(NamedTuple):
    """A range of addresses, whether the call writes it, and the argument it belongs to."""

    start: int
    end: int
    written: bool
    name: str


def check_separate(ranges: Iterable[Range]) -> None:
    """ValueError if any range that is written shares a byte with another. It names the written one, of two the later."""
    furthest: dict[bool, tuple[Range, int]] = {}    # by whether it is written: the one that ends last, and its number
    for number, found in sorted(enumerate(ranges), key=lambda numbered: numbered[1]):
        if found.start == found.end:
            continue
        for other, other_number in furthest.values() if found.written else filter(None, [furthest.get(True)]):
            if found.start < other.end:
                first = (found.written, number) > (other.written, other_number)
                name, met = (found.name, other.name) if first else (other.name, found.name)
                raise ValueError(f"{name}: overlaps {met} in memory; results need memory of their own")
        if found.written not in furthest or found.end > furthest[found.written][0].end:
            furthest[found.written] = found, number


# ---- calls with the same memory ----
def key_of(op: Hashable, given: tuple[Any, ...], out: Any) -> Place | None:
    """What two calls have in common if the second can be launched like the first: the op, its options, and the address,
    shape and dtype of every array. None for calls of the reference."""
    parts: list[Any] = [op]
    for a in (out, *given):
        kind = type(a)
        place = _PLACES.get(kind)
        if place is None and kind.__name__ == "ndarray":
            place = _PLACES[kind] = _of_cupy
        parts.append(kind)
        if place is not None:
            a = place(a)
            if a is None:
                return None
        elif isinstance(a, np.generic):
            return None                             # equal numbers of other types can mean something else
        parts.append(a)
    return tuple(parts)


def _of_cupy(a: Any) -> Place | None:
    memory = a.data
    place = memory.ptr, a.shape, a.dtype, memory.device_id
    return place if a._c_contiguous else (*place, a.strides)


def _of_numpy(a: np.ndarray) -> Place | None:
    """Only for kernels on the CPU: the reference is never launched again."""
    if executor_of(np) != "host":
        return None
    return a.ctypes.data, a.shape, a.dtype, a.strides, a.flags.writeable


def _of_tuple(given: tuple[Any, ...]) -> Place | None:
    """A result of several arrays, or an option such as a block."""
    parts: list[Any] = []
    for a in given:
        place = _PLACES.get(type(a))
        part = a if place is None else place(a)
        if part is None and a is not None:
            return None
        parts += type(a), part
    return tuple(parts)


def _of_scaled(s: Scaled) -> Place | None:
    return _kept(s, lambda: (_of_tuple((s.data, s.scale_inv)), s.shape, s.transposed, s.block, s.scale_layout), s.data)


def _of_quantized(q: Quantized) -> Place | None:
    return _kept(q, lambda: (_of_tuple((q.rowwise, q.columnwise, q.dbias)),), q._any.data)


def _of_routing(r: Routing) -> Place | None:
    return _kept(r, lambda: (_of_tuple(tuple(r._arrays().values())), r.rows, r.align), r.row_map)


def _kept(result: Any, find: Callable[[], Place], a: Any) -> Place | None:
    """The place of a result, remembered with it on a GPU: results are frozen, and CuPy's memory stays where it is."""
    place: Place | None = result.__dict__.get("_place")
    if place is None:
        place = find()
        if place[0] is None:
            return None
        if not isinstance(a, np.ndarray):
            result.__dict__["_place"] = place
    return place


#: How to find the place of each kind of object that has memory; anything else is an option. CuPy's arrays are added when one
#: is seen, since CuPy may not be there.
_PLACES: dict[type, Callable[[Any], Place | None]] = {
    np.ndarray: _of_numpy, Scaled: _of_scaled, Quantized: _of_quantized, Routing: _of_routing, tuple: _of_tuple}
