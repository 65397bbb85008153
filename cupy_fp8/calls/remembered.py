"""Remembered calls: the launches of an earlier call, run again without looking at its arguments twice.

A call that writes into `out=` is known by the addresses of its arrays, and its launches are run as they are. A call that
allocates is known by the shapes, dtypes and alignments of its arrays: its launches get the new addresses.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays import address, empty_beside
from ..kernels import Launch, owner_of, workspace
from . import validate

if TYPE_CHECKING:
    from .call import Call

_U32 = np.dtype(np.uint32)
_Described = tuple[tuple[Any, ...], list[int]]
_MOST = 4096
_ALIGNMENT = 32                     # kernels ask for 16 at most

_calls: dict[Any, _Repeated | _Allocating] = {}


def find(described: _Described, out: Any) -> _Repeated | _Allocating | None:
    """An earlier call that this one can be launched like. TypeError if an option cannot be hashed."""
    facts, addresses = described
    if out is None:
        return _calls.get((facts, *[at % _ALIGNMENT for at in addresses]))
    return _calls.get((facts, *addresses))


def remember(described: _Described, call: Call, launches: list[Launch], written: list[int], out: Any) -> None:
    """Keep a call that has been launched, if it can be repeated."""
    facts, addresses = described
    if len(_calls) >= _MOST:
        _calls.clear()
    if out is not None:
        _calls[(facts, *addresses)] = _Repeated(call, launches)
    elif (found := _Allocating.of(call, launches, addresses, written)) is not None:
        _calls[(facts, *[at % _ALIGNMENT for at in addresses])] = found


def forget() -> None:
    """Forget all calls: for tests that change what ops would launch."""
    _calls.clear()


class _Repeated:
    """Launches into the same memory. Workspaces belong to the array that owns this memory: once it is gone, another array may
    have the address, and needs workspaces that live as long as itself, since a CUDA graph may keep on using them."""

    def __init__(self, call: Call, launches: list[Launch]) -> None:
        self._launches, self._workspaces, self._owner = launches, call.workspaces, None
        if call.workspaces and not isinstance(call.x, np.ndarray):
            self._owner = weakref.ref(owner_of(call.owner))
        for launch in launches:
            launch.keep()

    def run(self, addresses: list[int], out: Any) -> Any:
        """out; None where the memory has another owner than it had."""
        if self._owner is not None and self._owner() is None:
            return None
        for launch in self._launches:
            launch.run()
        return out


class _Slot(NamedTuple):
    """A value of a launch that is an address: which one of a call's addresses, and how far behind it."""

    position: int
    which: int
    offset: int


class _Allocating:
    """Launches into new memory: members that are pointers get the addresses of this call's arrays."""

    def __init__(self, call: Call, written: list[int], launches: list[tuple[Launch, list[_Slot]]]) -> None:
        #: An array without elements, which stands for the call's arrays where only their device matters: these may be freed.
        self._like = empty_beside(call.x, (0,), _U32)
        self._allocation, self._build = call.allocation, call.result.build
        self._alignments, self._launches = [at % _ALIGNMENT for at in written], launches
        self._workspaces = [(found.use, found.words) for found in call.workspaces]
        self._scratches = [scratch.shape for scratch in call.scratches]

    @staticmethod
    def of(call: Call, launches: list[Launch], given: list[int], written: list[int]) -> _Allocating | None:
        """None where it is not certain which array a pointer belongs to."""
        known = [*given, *written, *(address(found.array) for found in call.workspaces), *map(address, call.scratches)]
        if any(found.written for found in call.ranges) or len({0, *known}) <= len(known):
            return None
        # Pointers may lead into new memory, workspaces and scratch memory, which overlap nothing; but only to the
        # beginning of given arrays.
        sizes = [1] * len(given) + [max(1, found.nbytes) for found in call.result.arrays]
        sizes += [4 * found.words for found in call.workspaces] + [scratch.nbytes for scratch in call.scratches]
        found = []
        for launch in launches:
            slots = _slots(launch, list(zip(known, sizes, strict=True)), call.constants)
            if slots is None:
                return None
            found.append((launch, slots))
        return _Allocating(call, written, found)

    def run(self, addresses: list[int], out: Any) -> Any:
        """The result; None where memory came with another alignment."""
        x = self._like
        validate.may_allocate(x)
        arrays, written = self._allocation.make()
        if [at % _ALIGNMENT for at in written] != self._alignments:
            return None
        addresses = addresses + written
        for use, words in self._workspaces:
            addresses.append(address(workspace(None, x, use, words)))
        scratches = [empty_beside(x, shape, _U32) for shape in self._scratches]
        addresses += map(address, scratches)
        for launch, slots in self._launches:
            values = launch.values.copy()
            for position, which, offset in slots:
                values[position] = addresses[which] + offset
            launch.variant.launch(x, launch.grid, *values, shared=launch.shared)
        return self._build(arrays)


def _slots(launch: Launch, known: list[tuple[int, int]], constants: set[int]) -> list[_Slot] | None:
    """Where a launch has addresses. known: each address, and how many bytes from there on belong to it. None if a pointer
    leads elsewhere, or may be hidden in packed bytes."""
    layout = launch.variant.kernel.layout
    if layout.has_arrays:
        return None
    slots = []
    for position in layout.pointers:
        value = launch.values[position]
        owner = next((i for i, (at, size) in enumerate(known) if at <= value < at + size), None)
        if owner is not None:
            slots.append(_Slot(position, owner, value - known[owner][0]))
        elif value and value not in constants:
            return None
    return slots
