"""Launches of an earlier call, for a call whose arrays lie elsewhere: each address among their values is that
of an array of the call, plus an offset, and is recomputed from the new address of this array."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..kernels import Launch
from ..kernels.tensor_map import TensorMap
from .tables import Records

_U64 = np.dtype(np.uint64)


class Relocation(NamedTuple):
    """The value at a position is an address: of one of the call's arrays, by index, plus an offset."""

    position: int
    array: int
    offset: int


class CallMemory:
    """The memory of a call's arrays, by index: finds the array that a pointer points into."""

    def __init__(self, arrays: Sequence[tuple[int, int]], constants: set[int],
                 at_fixed_addresses: bool) -> None:
        """arrays: the address of each, and the bytes from there on that pointers may point into. constants:
        addresses that are the same in every call. at_fixed_addresses: the given arrays' addresses are the
        same in every call too; then two arguments may be one array, such as the sizes of groups that both
        operands share."""
        self._order = sorted(range(len(arrays)), key=lambda i: arrays[i])
        self._sorted = [arrays[i] for i in self._order]
        self._constants = constants
        ends = pairwise([*self._sorted, (1 << 64, 0)])
        #: True if no byte belongs to two arrays
        self.is_distinct = all(at and (at + size <= next_at or (at_fixed_addresses and at == next_at))
                               for (at, size), (next_at, _) in ends)

    def relocations(self, pointers: Iterable[tuple[int, int]]) -> list[Relocation] | None:
        """Return the relocations of (position, pointer) pairs; None if one points into no array. Null
        pointers and constants stay as they are."""
        found = []
        for position, pointer in pointers:
            i = bisect_right(self._sorted, (pointer, 1 << 64)) - 1
            if i >= 0 and pointer < sum(self._sorted[i]):
                found.append(Relocation(position, self._order[i], pointer - self._sorted[i][0]))
            elif pointer and pointer not in self._constants:
                return None
        return found


class RelocatedRecords:
    """Records of a table, or among the values of a launch, whose pointers are recomputed."""

    def __init__(self, records: Records, relocations: list[Relocation]) -> None:
        self._words, self._records = np.frombuffer(records, _U64), records
        # `at` would convert indices of other types each time
        self._positions, self._arrays, offsets = np.array(relocations, np.intp).reshape(-1, 3).T.copy()
        self._offsets = offsets.view(_U64)

    @staticmethod
    def of(records: Records, memory: CallMemory) -> RelocatedRecords | None:
        """Return None if it is uncertain which array a pointer points into."""
        words = np.frombuffer(records, _U64)
        relocations = memory.relocations((i, int(words[i])) for i in records.pointers)
        return None if relocations is None else RelocatedRecords(records, relocations)

    def at(self, addresses: list[int]) -> Records:
        """Return the records for arrays at these addresses."""
        words = self._words.copy()
        words[self._positions] = np.array(addresses, _U64)[self._arrays] + self._offsets
        return Records.of(words.tobytes(), self._records.pointers, self._records.own)


class RelocatedLaunch(NamedTuple):
    """A launch whose pointers are recomputed: among its values, in records and in tensor maps."""

    launch: Launch
    pointers: list[Relocation]
    records: list[tuple[int, RelocatedRecords]]
    maps: list[Relocation]

    @staticmethod
    def of(launch: Launch, memory: CallMemory, given: int) -> RelocatedLaunch | None:
        """Return None if it is uncertain which array a pointer points into, or if bytes may hide one. given:
        number of the call's arrays that are arguments."""
        pointers = memory.relocations((i, launch.values[i]) for i in launch.pointer_positions)
        maps = memory.relocations((i, value.at) for i, value in enumerate(launch.values)
                                  if isinstance(value, TensorMap))
        records = []
        for i, value in enumerate(launch.values):
            if isinstance(value, bytes) and value and not isinstance(value, TensorMap):
                relocated = RelocatedRecords.of(value, memory) if isinstance(value, Records) else None
                if relocated is None:
                    return None
                records.append((i, relocated))
        if pointers is None or maps is None:
            return None
        # Arguments with tensor maps are at the same addresses in every call (`remember`); results are not.
        return RelocatedLaunch(launch, pointers, records, [each for each in maps if each.array >= given])

    def run(self, addresses: list[int]) -> None:
        """Run it for arrays at these addresses."""
        values = self.launch.values.copy()
        for position, array, offset in self.pointers:
            values[position] = addresses[array] + offset
        for position, records in self.records:
            values[position] = records.at(addresses)
        for position, array, offset in self.maps:
            values[position] = values[position].moved(addresses[array] + offset)
        self.launch.run_with(values)
