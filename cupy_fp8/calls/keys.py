"""Cache keys of calls: everything that their launches depend on, except the contents of arrays. Calls with
equal keys launch the same, so a key must tell apart everything that an op looks at.

A key costs most of the host time of a repeated call. So what was found about types, lists and results is
remembered too: `_signatures`, `_known_lists`, `_stand_ins` and the attribute `_key_part` of results are
caches, which could be recomputed.
"""

from __future__ import annotations

import functools
import math
import weakref
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..gate import Gate
from ..grouped import Grouped
from ..kernels import executor_of
from ..results import Quantized, Scaled
from ..routing import Routing
from .memory import ALIGNMENT, ALLOCATION_ALIGNMENT

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Memo(dict[_Key, _Value]):
    """A cache of recomputable values, emptied when it has `most` entries."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def put(self, key: _Key, value: _Value) -> None:
        if len(self) >= self._most:
            self.clear()
        self[key] = value

    def keep(self, key: _Key, value: _Value) -> _Value:
        """Return the value of a key: this one, or the one that another thread has put there first."""
        if len(self) >= self._most:
            self.clear()
        return self.setdefault(key, value)


# ---- arguments ----
#: Appends the metadata (shapes, dtypes, attributes) and the addresses of an argument that is no plain option.
#: Returns False if such a call must not be remembered.
_Describe = Callable[[Any, list[Any], list[Any]], bool]


def key_of(op: Hashable, given: tuple[Any, ...], out: Any) -> tuple[tuple[Any, ...], list[Any]] | None:
    """Return (metadata, addresses) of a call. Metadata: the op, its options and whatever else of its
    arguments matters to its launches; hashable if the options are. Addresses: of its arrays; of a list as
    `Addresses`. None for calls of the reference. TypeError if a member of a list is unhashable."""
    given = out, *given
    kinds = tuple(map(type, given))
    signature = _signatures.get(kinds) or _signatures.keep(kinds, _Signature(kinds))
    metadata: list[Any] = [op, signature, signature.options(given)]
    addresses: list[Any] = []
    for position, describe in signature.described:
        if not describe(given[position], metadata, addresses):
            return None
    return tuple(metadata), addresses


class _Signature:
    """The types of a call's arguments. There is one object per sequence of types, which stands for it in the
    metadata. Since types count, 1, 1.0 and True are three options.

    options: selects the arguments that are compared as they are
    described: positions of the others, and how to describe them
    """

    def __init__(self, kinds: tuple[type, ...]) -> None:
        how = [_how_to_describe(kind) for kind in kinds]
        plain = [position for position, describe in enumerate(how) if describe is None]
        # a tuple of options alone is compared as it is
        self.options: Callable[[Any], Any] = tuple
        if len(plain) < len(how):
            self.options = itemgetter(*plain) if plain else lambda _: None
        self.described = [(position, describe) for position, describe in enumerate(how) if describe]


_signatures: Memo[tuple[type, ...], _Signature] = Memo(4096)


#: Immutable types of options; recipes, dtypes and types are the others.
_PLAIN = (int, bool, str, type(None))


def _how_to_describe(kind: type) -> _Describe | None:
    """Return None for plain options, which are immutable: equal ones of one type mean the same. A call with
    anything else that is not described, such as a number of a user's class, is never remembered."""
    described = _of_arrays(kind) if kind.__name__ == "ndarray" else _KINDS.get(kind)
    is_of_package = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    is_plain = is_of_package or kind in _PLAIN or issubclass(kind, (np.dtype, type))
    return described or (None if is_plain else _never)


def _never(a: Any, metadata: list[Any], addresses: list[Any]) -> bool:
    return False


def _of_float(a: float, metadata: list[Any], addresses: list[Any]) -> bool:
    metadata += (a, math.copysign(1, a))               # -0.0 equals 0.0 but is another scale.
    return True


def _of_arrays(kind: type) -> _Describe | None:
    """How to describe arrays of this kind. CuPy's is added on first sight: CuPy may not be installed."""
    if kind not in _KINDS and kind.__name__ == "ndarray" and kind.__module__.partition(".")[0] == "cupy":
        _KINDS[kind] = _of_cupy
    return _KINDS.get(kind)


def _of_cupy(a: Any, metadata: list[Any], addresses: list[Any]) -> bool:
    memory = a.data
    at = memory.ptr
    addresses.append(at)
    metadata += (a.shape, a.dtype, memory.device_id, at % ALLOCATION_ALIGNMENT == 0)
    if not a._c_contiguous:
        metadata.append(a.strides)
    return True


def _of_numpy(a: np.ndarray, metadata: list[Any], addresses: list[Any]) -> bool:
    """Describe arrays for kernels on the CPU only: a call of the reference is never repeated. A 0-d array may
    be an option, which kernels do not read."""
    addresses.append(a.ctypes.data)
    metadata += (a.shape, a.dtype, a.strides, a.flags.writeable)
    return a.ndim > 0 and executor_of(np) == "host"


def _of_parts(parts: Sequence[Any], metadata: list[Any], addresses: list[Any]) -> bool:
    """Describe the members of a tuple, a list or a result one by one."""
    kinds = tuple(map(type, parts))
    signature = _signatures.get(kinds) or _signatures.keep(kinds, _Signature(kinds))
    metadata += (signature, signature.options(parts))
    # `all` of a generator takes twice the time.
    for position, describe in signature.described:  # noqa: SIM110
        if not describe(parts[position], metadata, addresses):
            return False
    return True


# ---- lists ----
class HashedTuple:
    """A tuple that is hashed once, and equals itself without comparing its members."""

    def __init__(self, value: tuple[Any, ...]) -> None:
        self.value, self._hash = value, hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is type(self) and self.value == other.value)


class Addresses(HashedTuple):
    """The addresses of the arrays of a list."""

    @functools.cached_property
    def alignments(self) -> bytes:
        return bytes(at % ALIGNMENT for at in self.value)


def flattened(addresses: Iterable[Any]) -> list[int]:
    """Flatten addresses, including those of lists."""
    found: list[int] = []
    for at in addresses:
        found += (at,) if type(at) is int else at.value
    return found


class _Members(NamedTuple):
    """A list's part of a key, and the shapes of its arrays, which are assignable. `alive` watches its
    members: identities are reused once they are gone."""

    metadata: HashedTuple
    addresses: Addresses
    shapes: tuple[tuple[int, ...], ...] | None
    alive: list[weakref.ref[Any]]


#: Known lists are found by the identities of their members, without describing each of them.
_known_lists: Memo[bytes, _Members] = Memo(1024)
_SHAPE = attrgetter("shape")


def identities(objects: Sequence[Any]) -> bytes:
    """Return the identities as bytes: less than half the time of `id`, and compared at once."""
    return np.fromiter(objects, object, len(objects)).tobytes()


def _of_list(members: list[Any], metadata: list[Any], addresses: list[Any]) -> bool:
    """Describe lists of CuPy arrays, or of results of these, once for as long as their members live. A call
    with a list of integers is not remembered: most are sizes, which it copies."""
    kinds = set(map(type, members))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is int:
        return False
    if kind is float:
        metadata.append(array("d", members).tobytes())                 # bytes tell -0 from 0
        return True
    of_arrays = kind is not None and _of_arrays(kind) is _of_cupy
    key = identities(members) if of_arrays or kind is Quantized else b""
    found = _known_lists.get(key) if key else None
    if found is None or (of_arrays and found.shapes != tuple(map(_SHAPE, members))):
        own_metadata: list[Any] = []
        own_addresses: list[Any] = []
        if not _of_parts(members, own_metadata, own_addresses):
            return False
        shapes = tuple(map(_SHAPE, members)) if of_arrays else None
        found = _Members(HashedTuple(tuple(own_metadata)), Addresses(tuple(flattened(own_addresses))), shapes,
                         alive=[])
        if of_arrays or (kind is Quantized and all("_key_part" in q.__dict__ for q in members)):
            _known_lists.put(key, found)
            forget = functools.partial(_forget_list, key)
            found.alive.extend(weakref.ref(member, forget) for member in members)
    metadata.append(found.metadata)
    addresses.append(found.addresses)
    return True


def _forget_list(key: bytes, _: Any) -> None:
    _known_lists.pop(key, None)


# ---- results ----
#: One object per equal metadata of results stands for them in a key, so that they are compared and hashed at
#: once.
_stand_ins: Memo[tuple[Any, ...], object] = Memo(4096)


def _of_result(fields: Callable[[Any], tuple[Any, ...]]) -> _Describe:
    """Describe results with these fields. On a GPU a result keeps its part of a key, as `_key_part`, so its
    fields are read once: results are frozen, and CuPy's memory stays where it is."""

    def describe(result: Any, metadata: list[Any], addresses: list[Any]) -> bool:
        known = result.__dict__.get("_key_part")
        if known is None:
            parts = fields(result)
            own_metadata: list[Any] = []
            own_addresses: list[Any] = []
            if not _of_parts(parts, own_metadata, own_addresses):
                return False
            known = tuple(own_metadata), own_addresses
            if all(map(_cannot_change, parts)):
                known = _stand_ins.keep(known[0], object()), own_addresses
                result.__dict__["_key_part"] = known
        metadata.append(known[0])
        addresses += known[1]
        return True

    return describe


def _cannot_change(part: Any) -> bool:
    """Whether a result's part of a key is immutable. A NumPy array can become read-only."""
    return "_key_part" in part.__dict__ if isinstance(part, Scaled) else type(part) is not np.ndarray


#: How each kind of object is described.
_KINDS: dict[type, _Describe] = {
    float: _of_float,
    np.ndarray: _of_numpy,
    tuple: _of_parts,
    list: _of_list,
    Scaled: _of_result(attrgetter("data", "scale_inv", "shape", "transposed", "block", "scale_layout",
                                  "splits")),
    Quantized: _of_result(attrgetter("_row", "_column", "dbias")),
    Grouped: _of_result(attrgetter(
        "splits", "offsets", "rowwise", "columnwise", "scale_inv", "columnwise_scale_inv", "shape", "block",
        "scale_layout", "transposed")),
    Gate: _of_result(attrgetter("indices", "weights", "counts", "scores", "score_sums", "score", "normalize",
                                "factor")),
    Routing: _of_result(lambda r: (*r._arrays().values(), r.rows, r.align)),
}
