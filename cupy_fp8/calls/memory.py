"""Memory of a call's arrays: which calls have the same, and whether what is written overlaps anything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..kernels import executor_of
from ..results import Quantized, Scaled
from ..routing import Routing


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


# ---- what a call depends on ----
#: Appends the facts of an object that has memory (shapes, dtypes, metadata) and its addresses; False where such a call is
#: never remembered.
_Describe = Callable[[Any, list[Any], list[int]], bool]


def describe(op: Hashable, given: tuple[Any, ...], out: Any) -> tuple[tuple[Any, ...], list[int]] | None:
    """Everything a call depends on but for the contents of arrays: the op, its options and the facts of its arrays, which
    can be hashed if the options can; and the addresses of the arrays. None for calls of the reference."""
    facts: list[Any] = [op]
    addresses: list[int] = []
    for a in (out, *given):
        if not _describe(a, facts, addresses):
            return None
    return tuple(facts), addresses


def _describe(a: Any, facts: list[Any], addresses: list[int]) -> bool:
    kind = type(a)
    facts.append(kind)
    found = _KINDS.get(kind)
    if found is None and kind.__name__ == "ndarray" and kind.__module__.partition(".")[0] == "cupy":
        found = _KINDS[kind] = _of_cupy
    if found is not None:
        return found(a, facts, addresses)
    facts.append(a)
    if kind is float and a == 0:                    # -0.0 equals 0.0, and is another scale
        facts.append(math.copysign(1, a))
    return not isinstance(a, np.generic)            # equal numbers of other types can mean something else


def _of_cupy(a: Any, facts: list[Any], addresses: list[int]) -> bool:
    memory = a.data
    addresses.append(memory.ptr)
    facts += (a.shape, a.dtype, memory.device_id)
    if not a._c_contiguous:
        facts.append(a.strides)
    return True


def _of_numpy(a: np.ndarray, facts: list[Any], addresses: list[int]) -> bool:
    """Only for kernels on the CPU: a call of the reference is never repeated."""
    addresses.append(a.ctypes.data)
    facts += (a.shape, a.dtype, a.strides, a.flags.writeable)
    return executor_of(np) == "host"


def _of_tuple(given: tuple[Any, ...], facts: list[Any], addresses: list[int]) -> bool:
    """A result of several arrays, or an option such as a block."""
    if given and type(given[-1]) is int:            # a shape or a block: only numbers, whose types count
        facts += (given, tuple(map(type, given)))
        return True
    return _of_parts(given, facts, addresses)


def _of_list(given: list[Any], facts: list[Any], addresses: list[int]) -> bool:
    """A result of several arrays. A call with a list of numbers is not remembered: most are sizes, which it copies."""
    return bool(given) and type(given[-1]) is not int and _of_parts(given, facts, addresses)


def _of_parts(parts: Sequence[Any], facts: list[Any], addresses: list[int]) -> bool:
    """Arrays, numbers and whatever else, each by itself."""
    facts.append(len(parts))
    return all(_describe(a, facts, addresses) for a in parts)


def _of_result(fields: Callable[[Any], tuple[Any, ...]]) -> _Describe:
    """For results with these fields. On a GPU a result's description is kept with it, so its fields are read
    once: results are frozen, and CuPy's memory stays where it is."""

    def describe(result: Any, facts: list[Any], addresses: list[int]) -> bool:
        kept = result.__dict__.get("_described")
        if kept is None:
            own_facts: list[Any] = []
            own_addresses: list[int] = []
            if not _of_parts(fields(result), own_facts, own_addresses):
                return False
            kept = tuple(own_facts), own_addresses
            nested = (part for part in own_facts if isinstance(part, tuple))
            if np.ndarray not in own_facts and not any(np.ndarray in part for part in nested):
                result.__dict__["_described"] = kept
        facts.append(kept[0])
        addresses += kept[1]
        return True

    return describe


#: How to describe each kind of object that has memory; anything else is an option. CuPy's arrays are added when one is seen,
#: since CuPy may not be there.
_KINDS: dict[type, _Describe] = {
    np.ndarray: _of_numpy, tuple: _of_tuple, list: _of_list,
    Scaled: _of_result(lambda s: (s.data, s.scale_inv, s.shape, s.transposed, s.block, s.scale_layout)),
    Quantized: _of_result(lambda q: (q.rowwise, q.columnwise, q.dbias)),
    Routing: _of_result(lambda r: (*r._arrays().values(), r.rows, r.align))}
