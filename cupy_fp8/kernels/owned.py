"""Device memory that belongs to a result: workspaces and tables of its launches. A CUDA graph that captured
the launches uses it for as long as the result lives, so it is kept that long."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

_Kept = TypeVar("_Kept")


def owner_of(a: Any) -> Any:
    """Return the CuPy array that owns a's memory and lives as long, unlike its views. NumPy's views may be of
    anything, so a NumPy array stands for itself."""
    return a if isinstance(a, np.ndarray) or a.base is None else a.base


class OwnedMemory(Generic[_Kept]):
    """One object per array that owns memory: `make()`, kept until this array is gone and then passed to
    `drop`."""

    def __init__(self, make: Callable[[], _Kept],
                 drop: Callable[[_Kept], object] = lambda kept: None) -> None:
        self._make, self._drop = make, drop
        self._by_owner: dict[int, tuple[weakref.ref[Any], _Kept]] = {}

    def of(self, a: Any) -> _Kept:
        """Return the object of the array that owns a's memory."""
        owner = owner_of(a)
        found = self._by_owner.get(id(owner))
        if found is None or found[0]() is not owner:
            gone = functools.partial(self._forget, id(owner))
            found = self._by_owner[id(owner)] = weakref.ref(owner, gone), self._make()
        return found[1]

    def _forget(self, place: int, owner: weakref.ref[Any]) -> None:
        found = self._by_owner.get(place)
        if found is not None and found[0] is owner:
            del self._by_owner[place]
            self._drop(found[1])
