"""One buffer for all arrays of a call, so that stray writes beside them are detected."""

from __future__ import annotations

from typing import Any

import numpy as np
from declared import Example
from perturbed import bytes_of
from places import Place
from trees import leaves, map_arrays

from cupy_fp8.arrays import address, bits

ROOM = 256                  # bytes between arrays


class Arena:
    """A buffer on a place, beginning at a multiple of `ROOM`. Its arrays begin at multiples of their element
    size."""

    def __init__(self, place: Place, nbytes: int) -> None:
        memory = place.array(np.full(nbytes + 4 * ROOM, 0xAA, np.uint8))
        self.memory = memory[-address(memory) % ROOM:]
        self.end = 0
        self._taken = np.zeros(len(self.memory), bool)

    def take(self, a: Any, start: int) -> Any:
        """Copy an array to the offset `start`."""
        found = self.memory[start:start + a.nbytes].view(a.dtype).reshape(a.shape)
        self._taken[start:start + a.nbytes] = True
        if a.size:
            bits(found)[...] = bits(a)
        return found

    def append(self, a: Any) -> Any:
        """Copy an array to the next aligned offset after the last one."""
        start = -(-self.end // a.itemsize) * a.itemsize
        self.end = start + a.nbytes
        return self.take(a, start)

    def append_at(self, lead: int, a: Any) -> Any:
        """Copy an array to a place apart from the others, `lead` bytes past a multiple of `ROOM` (rounded
        down to the element size)."""
        start = -(-self.end // ROOM) * ROOM + ROOM + lead // a.itemsize * a.itemsize
        self.end = start + a.nbytes
        return self.take(a, start)

    def is_intact(self) -> bool:
        """Whether nothing was written outside of the arrays."""
        return bool((bytes_of(self.memory)[~self._taken] == 0xAA).all())


def apart(example: Example, place: Place, lead: int = 0,
          result_lead: int | None = None) -> tuple[Example, Arena]:
    """Return the same call with arrays that begin `lead` bytes past a multiple of `ROOM`, with room between
    them. result_lead: the same for those of the result."""
    written = set() if result_lead is None else {id(a) for a in example.result}
    arrays = {id(a): a for a in leaves(example.tree)}
    arena = Arena(place, sum(a.nbytes + 3 * ROOM for a in arrays.values()))
    moved = {i: arena.append_at(result_lead or 0 if i in written else lead, a) for i, a in arrays.items()}
    return example.with_tree(map_arrays(example.tree, lambda a: moved[id(a)])), arena
