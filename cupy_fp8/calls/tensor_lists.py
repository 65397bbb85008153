"""Shared by ops on lists of arrays: their arguments, the description of their results, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from .. import backend
from ..advice import list_instead
from ..arrays import address
from ..formats import float32
from ..kernels.structs import StructLayout
from . import validate
from .call import Call
from .descriptions import Description
from .memory import Range
from .tables import Records

_T = TypeVar("_T")
_MOST_BLOCKS = 0x7FFFFFFF


# ---- arguments ----
def checked(a: Any, name: str, number: int | None = None) -> Sequence[Any]:
    """Check that `a` is a list or a tuple of `number` members."""
    if not isinstance(a, (list, tuple)):
        raise TypeError(f"{name}: expected a list, got {type(a).__name__}{list_instead(a, name)}")
    if number is not None and len(a) != number:
        raise ValueError(f"{name}: expected {number}, one for each array of xs, got {len(a)}")
    return a


def check_none_given(a: Any, name: str) -> None:
    """Raise TypeError or ValueError unless scales or amaxes for an empty list of arrays are empty too."""
    if a is None:
        return
    if not isinstance(a, (list, tuple)):
        backend.module_of(a, name)
    if number := len(a) if isinstance(a, (list, tuple)) else a.size:
        raise ValueError(f"{name}: expected none for no arrays, got {number}")


def each_scale(call: Call, scales: Any, number: int) -> list[tuple[int, float]]:
    """Return (address, 0) of the scale of each array, or (0, value) of a number. scales: an f32 array [n], or
    a list."""
    if isinstance(scales, (list, tuple)):
        return [call.scalar(f"scales[{i}]", one) for i, one in enumerate(checked(scales, "scales", number))]
    return [(at, 0.0) for at in _elements(call, "scales", scales, number, updated=False)]


def each_amax(call: Call, amaxes: Any, number: int) -> list[int]:
    """Return the address of the amax of each array; several arrays may share one. amaxes: an f32 array [n],
    or a list."""
    if not isinstance(amaxes, (list, tuple)):
        return _elements(call, "amaxes", amaxes, number, updated=True)
    found: list[int] = []
    for i, one in enumerate(checked(amaxes, "amaxes", number)):
        at = call.one_f32(f"amaxes[{i}]", one, updated=True)
        if at in found:
            call.memory_ranges.pop()
        found.append(at)
    return found


def _elements(call: Call, name: str, a: Any, number: int, updated: bool) -> list[int]:
    """Return the address of every element of an f32 array [n] with any stride."""
    backend.require_module(a, call.xp, name)
    validate.check_dtype(a, (float32,), name)
    validate.check_shape(name, a.shape, (number,), "one for each array of xs")
    if call.xp is not np:
        backend.same_device(a, call.x, name)
    if updated:
        validate.check_writeable(a, name)
    at, stride = address(a), a.strides[0]
    if at % 4 or stride % 4:
        raise ValueError(f"{name}: address {at:#x} or stride {stride} is not a multiple of 4")
    found = [at + i * stride for i in range(number)]
    distinct = enumerate(dict.fromkeys(found))
    call.memory_ranges += [Range(one, one + 4, updated, f"{name}[{i}]") for i, one in distinct]
    if stride == 4:
        call.read_inside[at] = 4 * number
    return found


# ---- results ----
class ListResult(Description):
    """A list of results, each with its own description."""

    def __init__(self, members: Sequence[Description]) -> None:
        self.members = members
        self._ends = list(accumulate(len(member.arrays) for member in members))
        super().__init__(*(a._replace(name=f"out[{i}]{a.name[3:]}") for i, member in enumerate(members)
                           for a in member.arrays))

    def divide(self, values: Sequence[_T]) -> Iterator[Sequence[_T]]:
        """Divide values, one per array, into those of each result."""
        start = 0
        for end in self._ends:
            yield values[start:end]
            start = end

    def build(self, arrays: Sequence[Any]) -> list[Any]:
        return [member.build(own) for member, own in zip(self.members, self.divide(arrays), strict=True)]

    def for_out(self, out: Any) -> ListResult:
        checked(out, "out", len(self.members))
        pairs = enumerate(zip(self.members, out, strict=True))
        return ListResult([_numbered(i, member.for_out, one) for i, (member, one) in pairs])

    def arrays_of(self, out: Any) -> list[Any]:
        return [a for i, (member, one) in enumerate(zip(self.members, out, strict=True))
                for a in _numbered(i, member.arrays_of, one)]


def _numbered(i: int, check: Callable[[Any], _T], out: Any) -> _T:
    """Check `out` of one result of the list; messages name its index."""
    try:
        return check(out)
    except (TypeError, ValueError) as error:
        message = str(error)
        message = message[3:] if message.startswith("out") else f": {message}"
        raise type(error)(f"out[{i}]{message}") from None


# ---- tables ----
class TableLayout:
    """Parts of a table: a record per array, then the index of its array for each thread block, then zeros for
    the launches."""

    def __init__(self, record: StructLayout, blocks: Sequence[int], zeros: int = 0) -> None:
        """blocks: thread blocks of each array. zeros: bytes."""
        self.record, self.blocks, self.count = record, blocks, sum(blocks)
        if self.count > _MOST_BLOCKS:
            raise ValueError(f"xs: more than the {_MOST_BLOCKS} blocks that a launch can have; "
                             "split the list")
        #: 0 if arrays have different numbers of thread blocks
        self.each = blocks[0] if len(set(blocks)) == 1 else 0
        self.numbers = record.size * len(blocks)
        self.zeros = -(-(self.numbers + 4 * self.count) // 16) * 16
        self._nbytes = -(-(self.zeros + zeros) // 16) * 16

    def make(self, call: Call, packed: bytes, own: str = "") -> int:
        """Return the address of the table with these records. own: the member of a record that is an offset
        in the table."""
        numbers = np.repeat(np.arange(len(self.blocks), dtype=np.uint32), self.blocks).tobytes()
        own_words = slice(0)
        if own:
            own_words = slice(self.record.offset(own) // 8, self.numbers // 8, self.record.size // 8)
        data = (packed + numbers).ljust(self._nbytes, b"\0")
        return call.table(Records.of(data, self.pointers(own), own_words))

    def pointers(self, own: str = "") -> list[int]:
        """Return the u64 words of all records that are addresses of arrays."""
        offsets = {at for at, code in self.record.scalars() if code == "P"}
        offsets -= {self.record.offset(own)} if own else set()
        starts = range(0, self.numbers, self.record.size)
        return [(start + offset) // 8 for start in starts for offset in sorted(offsets)]
