"""Remembered calls: the launches of an earlier call, run again without looking at its arguments twice.

A call that writes into `out=` is known by the addresses of its arrays, and its launches are run unchanged. A
call that allocates is known by the shapes, dtypes and alignments of its arrays: its launches get the new
addresses.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from ..arrays import address, empty_beside
from ..kernels import Launch, owner_of, workspace
from ..kernels.tensor_map import TensorMap
from . import validate
from .arguments import Call
from .keys import Memo, flattened
from .memory import ALIGNMENT, ALLOCATION_ALIGNMENT
from .relocation import CallMemory, RelocatedLaunch, RelocatedRecords
from .tables import DeviceTable, table

_U32 = np.dtype(np.uint32)
#: Metadata and addresses of a call (`keys.key_of`).
_CallKey = tuple[tuple[Any, ...], list[Any]]

_calls: Memo[Any, _Repeated | _Allocating] = Memo(4096)


def find(key: _CallKey, out: Any) -> _Repeated | _Allocating | None:
    """Return an earlier call whose launches serve this one. TypeError if an option is unhashable."""
    metadata, addresses = key
    if out is None and (found := _calls.get(_by_alignments(metadata, addresses))) is not None:
        return found
    return _calls.get((metadata, *addresses))


def _by_alignments(metadata: tuple[Any, ...], addresses: list[Any]) -> tuple[Any, ...]:
    """Return the key of calls that allocate, wherever their arrays are."""
    return (metadata, *[at % ALIGNMENT if type(at) is int else at.alignments for at in addresses])


def remember(key: _CallKey, call: Call, launches: list[Launch], written: list[int], out: Any) -> None:
    """Keep a launched call, if it can be repeated."""
    metadata, addresses = key
    if out is not None:
        _calls.put((metadata, *addresses), _Repeated(call, launches))
        return
    # A call that updates an argument is known by its addresses alone, which are known not to overlap anything
    # else. So is a call with tensor maps, since these are made for the addresses of its arguments.
    at_fixed_addresses = any(each.written for each in call.memory_ranges) or any(
        isinstance(value, TensorMap) for launch in launches for value in launch.values)
    found = _Allocating.of(call, launches, flattened(addresses), written, at_fixed_addresses)
    if found is not None:
        known_by = (metadata, *addresses) if at_fixed_addresses else _by_alignments(metadata, addresses)
        _calls.put(known_by, found)


def forget() -> None:
    """Forget all calls: for tests that change what ops would launch."""
    _calls.clear()


class _Repeated:
    """Launches into the same memory. Workspaces belong to the array that owns this memory: once it is gone,
    another array may have the address, and needs workspaces that live as long as itself, since a CUDA graph
    may keep using them. So do tables, which may also have been replaced by others."""

    def __init__(self, call: Call, launches: list[Launch]) -> None:
        self._launches, self._tables, self._owner = launches, call.tables, None
        if call.workspaces:
            self._owner = weakref.ref(owner_of(call.owner))
        for launch in launches:
            launch.keep()

    def run(self, addresses: list[Any], given: tuple[Any, ...], out: Any) -> Any:
        """Run the launches and return `out`; None if the memory has another owner than before."""
        if self._owner is not None and self._owner() is None:
            return None
        for each in self._tables:
            if not each.use():
                return None
        for launch in self._launches:
            launch.run()
        return out


class _Allocating:
    """Launches into new memory: pointers get the addresses of this call's arrays."""

    def __init__(self, call: Call, written: list[int], tables: list[RelocatedRecords],
                 launches: list[RelocatedLaunch]) -> None:
        #: The call's arrays may be freed, so an empty array stands for their kind and device.
        self._like = empty_beside(call.x, (0,), _U32)
        self._allocation, self._build = call.allocation, call.result.build
        # An allocator may align less than launches assume. NumPy aligns to 16, and kernels assume no more.
        self._alignment = ALIGNMENT if isinstance(call.x, np.ndarray) else ALLOCATION_ALIGNMENT
        self._remainders = [at % self._alignment for at in written]
        self._launches, self._tables = launches, tables
        self._workspaces = [(found.use, found.words) for found in call.workspaces]
        self._scratches = [scratch.shape for scratch in call.scratches]

    @staticmethod
    def of(call: Call, launches: list[Launch], given: list[int], written: list[int],
           at_fixed_addresses: bool) -> _Allocating | None:
        """Return None if it is uncertain which array a pointer points into. at_fixed_addresses: the given
        arrays are at the same addresses in every call."""
        # Pointers may point anywhere into new memory, which overlaps nothing; into most given arrays only at
        # their start.
        sizes = [(at, call.read_inside.get(at, 1)) for at in given]
        sizes += [(at, max(1, a.nbytes)) for at, a in zip(written, call.result.arrays, strict=True)]
        sizes += [(address(found.array), 4 * found.words) for found in call.workspaces]
        sizes += [(address(scratch), scratch.nbytes) for scratch in call.scratches]
        memory = CallMemory(sizes, call.constants, at_fixed_addresses)
        tables = [RelocatedRecords.of(each.records, memory) for each in call.tables]
        with_tables = CallMemory(sizes + [(each.at, each.nbytes) for each in call.tables], call.constants,
                                 at_fixed_addresses)
        relocated = [RelocatedLaunch.of(launch, with_tables, len(given)) for launch in launches]
        if not with_tables.is_distinct or None in tables or None in relocated:
            return None
        return _Allocating(call, written, [each for each in tables if each],
                           [each for each in relocated if each])

    def run(self, addresses: list[Any], given: tuple[Any, ...], out: Any) -> Any:
        """Run the launches and return the result; None if memory came with another alignment."""
        x = self._like
        validate.may_allocate(x)
        arrays, written = self._allocation.make()
        if [at % self._alignment for at in written] != self._remainders:
            return None
        addresses = flattened(addresses) + written
        for use, words in self._workspaces:
            addresses.append(address(workspace(None, x, use, words)))
        scratches = [empty_beside(x, shape, _U32) for shape in self._scratches]
        addresses += map(address, scratches)
        tables: list[DeviceTable] = []
        for each in self._tables:
            tables.append(table(arrays[0], x, each.at(addresses), tables))
        addresses += [each.at for each in tables]
        for launch in self._launches:
            launch.run(addresses)
        return self._build(arrays)
