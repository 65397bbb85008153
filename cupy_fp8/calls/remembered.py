"""Remembered calls: the launches of an earlier call, run again without looking at its arguments twice.

A call that writes into `out=` is known by the addresses of its arrays, and its launches are run as they are.
A call that allocates is known by the shapes, dtypes and alignments of its arrays: its launches get the new
addresses.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..arrays import address, empty_beside
from ..kernels import Launch, owner_of, workspace
from ..kernels.tensor_map import TensorMap
from . import validate
from .arguments import Call
from .memory import ALIGNMENT, ALLOCATION_ALIGNMENT, flat
from .tables import Records, Table, table

_U32, _U64 = np.dtype(np.uint32), np.dtype(np.uint64)
_Described = tuple[tuple[Any, ...], list[Any]]
_MOST = 4096

_calls: dict[Any, _Repeated | _Allocating] = {}


def find(described: _Described, out: Any) -> _Repeated | _Allocating | None:
    """An earlier call that this one can be launched like. TypeError if an option cannot be hashed."""
    facts, addresses = described
    if out is None and (found := _calls.get(_unplaced(facts, addresses))) is not None:
        return found
    return _calls.get((facts, *addresses))


def _unplaced(facts: tuple[Any, ...], addresses: list[Any]) -> tuple[Any, ...]:
    """What calls that allocate have in common, wherever their arrays are."""
    return (facts, *[at % ALIGNMENT if type(at) is int else at.alignments for at in addresses])


def remember(described: _Described, call: Call, launches: list[Launch], written: list[int], out: Any) -> None:
    """Keep a call that has been launched, if it can be repeated."""
    if len(_calls) >= _MOST:
        _calls.clear()
    facts, addresses = described
    if out is not None:
        _calls[(facts, *addresses)] = _Repeated(call, launches)
        return
    # A call that updates an argument is known by the same memory alone, of which that overlaps nothing else;
    # so is one with tensor maps, which are made for the addresses of its arguments.
    placed = any(each.written for each in call.ranges) or any(
        isinstance(value, TensorMap) for launch in launches for value in launch.values)
    if (found := _Allocating.of(call, launches, flat(addresses), written, placed)) is not None:
        _calls[(facts, *addresses) if placed else _unplaced(facts, addresses)] = found


def forget() -> None:
    """Forget all calls: for tests that change what ops would launch."""
    _calls.clear()


class _Repeated:
    """Launches into the same memory. Workspaces belong to the array that owns this memory: once it is gone,
    another array may have the address, and needs workspaces that live as long as itself, since a CUDA graph
    may keep on using them. So do tables, which may also have made room for others."""

    def __init__(self, call: Call, launches: list[Launch]) -> None:
        self._launches, self._tables, self._owner = launches, call.tables, None
        if call.workspaces:
            self._owner = weakref.ref(owner_of(call.owner))
        for launch in launches:
            launch.keep()

    def run(self, addresses: list[Any], given: tuple[Any, ...], out: Any) -> Any:
        """out; None where the memory has another owner than it had."""
        if self._owner is not None and self._owner() is None:
            return None
        for each in self._tables:
            if not each.use():
                return None
        for launch in self._launches:
            launch.run()
        return out


class _Slot(NamedTuple):
    """A value of a launch that is an address: which one of a call's addresses, and how far behind it."""

    position: int
    which: int
    offset: int


class _RecordSlots:
    """Records and the addresses in them."""

    def __init__(self, records: Records, slots: list[_Slot]) -> None:
        self._words, self._records = np.frombuffer(records, _U64), records
        # Indices of other types would be converted by each `fill`.
        self._positions, self._which, offsets = np.array(slots, np.intp).reshape(-1, 3).T.copy()
        self._offsets = offsets.view(_U64)

    @staticmethod
    def of(records: Records, known: _Known) -> _RecordSlots | None:
        """None where it is not certain which array a pointer belongs to."""
        words = np.frombuffer(records, _U64)
        slots = known.slots((i, int(words[i])) for i in records.pointers)
        return None if slots is None else _RecordSlots(records, slots)

    def fill(self, addresses: list[int]) -> Records:
        words = self._words.copy()
        words[self._positions] = np.array(addresses, _U64)[self._which] + self._offsets
        return Records.of(words.tobytes(), self._records.pointers, self._records.own)


class _Known:
    """The addresses of a call, and how many bytes from each on belong to it."""

    def __init__(self, known: list[tuple[int, int]], constants: set[int], placed: bool) -> None:
        self._order = sorted(range(len(known)), key=lambda i: known[i])
        self._places = [known[i] for i in self._order]
        self._constants = constants
        #: Whether every pointer is one address's alone. If all calls have the same addresses (placed), two
        #: arguments may have one, such as the sizes of groups that both operands share.
        ends = pairwise([*self._places, (1 << 64, 0)])
        self.distinct = all(at and (at + size <= next_at or (placed and at == next_at))
                            for (at, size), (next_at, _) in ends)

    def slots(self, values: Iterable[tuple[int, int]]) -> list[_Slot] | None:
        """Which of the values, each with its position, are these addresses; None if one leads elsewhere."""
        found = []
        for position, value in values:
            i = bisect_right(self._places, (value, 1 << 64)) - 1
            if i >= 0 and value < sum(self._places[i]):
                found.append(_Slot(position, self._order[i], value - self._places[i][0]))
            elif value and value not in self._constants:
                return None
        return found


class _Bound(NamedTuple):
    """A launch and the addresses among its values, also in records and in tensor maps."""

    launch: Launch
    slots: list[_Slot]
    records: list[tuple[int, _RecordSlots]]
    maps: list[_Slot]

    @staticmethod
    def of(launch: Launch, known: _Known, given: int) -> _Bound | None:
        """None if a pointer leads elsewhere, or may be hidden in packed bytes. given: how many of the
        addresses are those of arguments."""
        slots = known.slots((i, launch.values[i]) for i in launch.pointer_positions)
        records = []
        for i, value in enumerate(launch.values):
            if isinstance(value, bytes) and value and not isinstance(value, TensorMap):
                inside = _RecordSlots.of(value, known) if isinstance(value, Records) else None
                if inside is None:
                    return None
                records.append((i, inside))
        maps = known.slots((i, value.at) for i, value in enumerate(launch.values)
                           if isinstance(value, TensorMap))
        if slots is None or maps is None:
            return None
        # Arguments that have maps are at the same addresses in every call (`remember`), results are not.
        return _Bound(launch, slots, records, [slot for slot in maps if slot.which >= given])

    def run(self, addresses: list[int]) -> None:
        values = self.launch.values.copy()
        for position, which, offset in self.slots:
            values[position] = addresses[which] + offset
        for position, inside in self.records:
            values[position] = inside.fill(addresses)
        for position, which, offset in self.maps:
            values[position] = values[position].moved(addresses[which] + offset)
        self.launch.run_with(values)


class _Allocating:
    """Launches into new memory: pointers get the addresses of this call's arrays."""

    def __init__(self, call: Call, written: list[int], tables: list[_RecordSlots],
                 launches: list[_Bound]) -> None:
        #: An array without elements stands for the call's arrays, which may be freed: it has their device.
        self._like = empty_beside(call.x, (0,), _U32)
        self._allocation, self._build = call.allocation, call.result.builder(call.argument_names)
        # An allocator may give less than launches rely on. NumPy gives 16, and kernels rely on no more.
        self._alignment = ALIGNMENT if isinstance(call.x, np.ndarray) else ALLOCATION_ALIGNMENT
        self._places = [at % self._alignment for at in written]
        self._launches, self._tables = launches, tables
        self._workspaces = [(found.use, found.words) for found in call.workspaces]
        self._scratches = [scratch.shape for scratch in call.scratches]

    @staticmethod
    def of(call: Call, launches: list[Launch], given: list[int], written: list[int],
           placed: bool) -> _Allocating | None:
        """None where it is not certain which array a pointer belongs to. placed: the given arrays are at the
        same addresses in every call."""
        # Pointers may lead into new memory, which overlaps nothing; of most given arrays, to the start alone.
        sizes = [(at, call.read_inside.get(at, 1)) for at in given]
        sizes += [(at, max(1, a.nbytes)) for at, a in zip(written, call.result.arrays, strict=True)]
        sizes += [(address(found.array), 4 * found.words) for found in call.workspaces]
        sizes += [(address(scratch), scratch.nbytes) for scratch in call.scratches]
        known = _Known(sizes, call.constants, placed)
        tables = [_RecordSlots.of(each.records, known) for each in call.tables]
        known_to_launches = _Known(sizes + [(each.at, each.nbytes) for each in call.tables], call.constants,
                                   placed)
        found = [_Bound.of(launch, known_to_launches, len(given)) for launch in launches]
        if not known_to_launches.distinct or None in tables or None in found:
            return None
        return _Allocating(call, written, [each for each in tables if each], [each for each in found if each])

    def run(self, addresses: list[Any], given: tuple[Any, ...], out: Any) -> Any:
        """The result; None where memory came with another alignment."""
        x = self._like
        validate.may_allocate(x)
        arrays, written = self._allocation.make()
        if [at % self._alignment for at in written] != self._places:
            return None
        addresses = flat(addresses) + written
        for use, words in self._workspaces:
            addresses.append(address(workspace(None, x, use, words)))
        scratches = [empty_beside(x, shape, _U32) for shape in self._scratches]
        addresses += map(address, scratches)
        tables: list[Table] = []
        for each in self._tables:
            tables.append(table(arrays[0], x, each.fill(addresses), tables))
        addresses += [each.at for each in tables]
        for bound in self._launches:
            bound.run(addresses)
        return self._build(arrays, given)
