"""Arguments and results as trees of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import cupy_fp8 as fp8
from cupy_fp8.arrays import Result, is_array

#: Types that contain no arrays; arguments can be lists of thousands of numbers.
_SCALARS = (bool, int, float, str, type(None))


def leaves(tree: Any) -> Iterator[Any]:
    """Yield every array in arguments or results."""
    waiting = [tree]
    while waiting:
        tree = waiting.pop()
        if isinstance(tree, _SCALARS):
            continue
        if is_array(tree):
            yield tree
        elif isinstance(tree, Result):
            waiting.extend(reversed(tree.__getstate__().values()))
        elif isinstance(tree, dict):
            waiting.extend(reversed(tree.values()))
        elif isinstance(tree, (list, tuple)):
            waiting.extend(reversed(tree))


def map_arrays(tree: Any, change: Callable[[Any], Any], made: dict[int, Any] | None = None) -> Any:
    """Return the same tree with other arrays. What was one array, or one result, stays one. Results are not
    validated."""
    made = {} if made is None else made
    if id(tree) in made:
        return made[id(tree)]
    if is_array(tree):
        found = change(tree)
    elif isinstance(tree, Result):
        found = object.__new__(type(tree))
        found.__dict__.update({name: map_arrays(part, change, made)
                               for name, part in tree.__getstate__().items()})
    elif isinstance(tree, dict):
        found = {name: map_arrays(part, change, made) for name, part in tree.items()}
    elif isinstance(tree, (list, tuple)):
        found = type(tree)([part if isinstance(part, _SCALARS) else map_arrays(part, change, made)
                            for part in tree])
    else:
        return tree
    made[id(tree)] = found
    return found


def swapped(tree: Any, old: Any, new: Any) -> Any:
    """Return the tree with an array replaced by another object."""
    return map_arrays(tree, lambda a: new if a is old else a)


def snapshot(*trees: Any) -> list[bytes]:
    """Return the bytes of all memory of the arguments."""
    return [_owner(a).tobytes() for a in leaves(trees)]


def _owner(a: Any) -> np.ndarray:
    on_host = getattr(a, "on_host", a)
    if not isinstance(on_host, np.ndarray):
        on_host = fp8.asnumpy(a)
    while isinstance(on_host.base, np.ndarray):
        on_host = on_host.base
    return on_host
