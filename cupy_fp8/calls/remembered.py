"""Remembered calls: the launches of an earlier call, run again without looking at its arguments twice.

A call that writes into `out=` is known by the addresses of its arrays, and its launches are run as they are. A call that
allocates is known by the shapes, dtypes and alignments of its arrays: its launches get the new addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..arrays import Array
from ..kernels import Launch, Variant
from . import validate

if TYPE_CHECKING:
    from .call import Call

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
        _calls[(facts, *addresses)] = _Repeated(launches, call.workspaces)
    elif (found := _Allocating.of(call, launches, addresses, written)) is not None:
        _calls[(facts, *[at % _ALIGNMENT for at in addresses])] = found


def forget() -> None:
    """Forget all calls: for tests that change what ops would launch."""
    _calls.clear()


class _Repeated:
    """Launches into the same memory; the workspaces that they need live as long as they do."""

    def __init__(self, launches: list[Launch], workspaces: list[Any]) -> None:
        self._launches, self._workspaces = launches, workspaces
        for launch in launches:
            launch.keep()

    def run(self, addresses: list[int], out: Any) -> Any:
        for launch in self._launches:
            launch.run()
        return out


class _Allocating:
    """Launches into new memory: members that are pointers get the addresses of this call's arrays."""

    def __init__(self, call: Call, alignments: list[int],
                 launches: list[tuple[Variant, int, int, list[Any], list[tuple[int, int]]]]) -> None:
        """alignments: of the arrays that are written; launches: each with its values, and which of these are which address."""
        self._like, self._allocation, self._build = _on_device_of(call.x), call.allocation, call.result.build
        self._alignments, self._launches = alignments, launches

    @staticmethod
    def of(call: Call, launches: list[Launch], given: list[int], written: list[int]) -> _Allocating | None:
        """None where launches use memory beside the arrays, or where it is not certain which array a pointer belongs to."""
        known = [*given, *written]
        if call.workspaces or any(found.written for found in call.ranges) or len({0, *known}) <= len(known):
            return None
        found = []
        for launch in launches:
            layout = launch.variant.kernel.layout
            if layout.has_arrays:
                return None
            slots = []
            for position in layout.pointers:
                value = launch.values[position]
                if value in known:
                    slots.append((position, known.index(value)))
                elif value and value not in call.constants:
                    return None
            found.append((launch.variant, launch.grid, launch.shared, launch.values, slots))
        return _Allocating(call, [at % _ALIGNMENT for at in written], found)

    def run(self, addresses: list[int], out: Any) -> Any:
        """The result; None where memory came with another alignment."""
        x = self._like
        validate.may_allocate(x)
        arrays, written = self._allocation.make()
        if [at % _ALIGNMENT for at in written] != self._alignments:
            return None
        addresses = addresses + written
        for variant, grid, shared, values, slots in self._launches:
            values = values.copy()
            for position, index in slots:
                values[position] = addresses[index]
            variant.launch(x, grid, *values, shared=shared)
        return self._build(arrays)


def _on_device_of(like: Array) -> Array:
    """An array without elements on the device of another, which stands for it in launches and allocations."""
    return like[:0] if like.ndim else like.reshape(1)[:0]
