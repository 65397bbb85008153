"""The arguments of a call, declared one by one by the op, and what its launches need besides."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import backend
from ..arrays import Array, address, empty_beside
from ..formats import FP8_DTYPES
from ..gate import Gate
from ..kernels import error_word, workspace
from ..results import Scaled
from ..routing import Routing
from ..scaled_parts import check_block_scales, check_data_shape, check_one_piece
from . import group_sizes, validate
from .descriptions import Allocation, Description
from .memory import Range
from .tables import DeviceTable, Records, table

_U32 = np.dtype(np.uint32)


class Input(NamedTuple):
    """An array that a call reads or updates, ready for a kernel, and its address."""

    array: Array
    at: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype


class Workspace(NamedTuple):
    """What a call requested from `kernels.workspace`, and the workspace it got."""

    use: str
    words: int
    array: Array


class Call:
    """The arguments of a call, declared by the op one by one, and validated at their declaration."""

    x: Array                            # the first array: all others are of its kind and on its device
    xp: Any
    result: Description                 # the description of what is written
    allocation: Allocation              # the memory of a result that is not given
    arrays: Sequence[Array]             # the arrays of the result, given or allocated

    def __init__(self) -> None:
        self.memory_ranges: list[Range] = []
        self.names: dict[str, str] = {}             # names of list members in messages
        self.noop_at = 0
        self.owner: Array | None = None             # owner of workspaces: an array of `out=`
        self.workspaces: list[Workspace] = []
        self.scratches: list[Array] = []            # memory for this call alone
        self.tables: list[DeviceTable] = []
        #: Bytes from an address on that launches point into.
        self.read_inside: dict[int, int] = {}
        #: Addresses that are the same for every call on this device.
        self.constants: set[int] = set()
        #: False if the call must not be remembered by its memory: an argument was copied, or its contents
        #: were examined.
        self.repeatable = True
        self._first = True

    def read(self, name: str, a: Any, dtypes: tuple[np.dtype[Any], ...],
             shape: tuple[int, ...] | None = None, what: str = "") -> Input:
        """Declare an array that the op reads: of one of the dtypes; copied if it is not C-contiguous. shape:
        the required one; what: what such an array holds (`validate.check_shape`)."""
        name = self.names.get(name, name)
        if not self._first:
            backend.require_module(a, self.xp, name)
        dense, xp, at = validate.source(a, dtypes, name, 2 if self._first else 0)
        if shape is not None:
            validate.check_shape(name, dense.shape, shape, what)
        self.repeatable &= dense is a
        self._set_or_check_device(name, dense, xp)
        # The given array's memory counts even if a copy is read: a result written there would change the
        # input.
        self.memory_ranges.append(Range(*validate.byte_range(a), False, name))
        return Input(dense, at)

    def read_strided(self, name: str, a: Any) -> Input:
        """Declare an array that the op reads by its strides, none of them negative."""
        if not self._first:
            backend.require_module(a, self.xp, name)
        self._set_or_check_device(name, a, backend.module_of(a, name))
        self.memory_ranges.append(Range(*validate.byte_range(a), False, name))
        return Input(a, address(a))

    def read_scaled(self, name: str, s: Scaled, by_strides: Container[str] = ()) -> tuple[Input, Input]:
        """Declare a Scaled of one piece: its FP8 data and scales, which must fit. by_strides: layouts whose
        scales the op reads by their strides; others are copied if they are not C-contiguous."""
        check_one_piece(s, name)
        data, part = self.read(f"{name}.data", s.data, FP8_DTYPES), f"{name}.scale_inv"
        check_data_shape(s, name)
        if s.block is None:
            return data, Input(s.scale_inv, self.one_f32(part, s.scale_inv))
        backend.require_module(s.scale_inv, self.xp, part)
        check_block_scales(s, name)
        if s.scale_layout in by_strides and validate.matrix_strides(s.scale_inv) is not None:
            return data, self.read_strided(part, s.scale_inv)
        return data, self.read(part, s.scale_inv, (s.scale_inv.dtype,))

    def update(self, name: str, a: Any, dtype: np.dtype[Any], shape: tuple[int, ...] | None = None) -> Input:
        """Declare an array that the op reads and writes in place, of this dtype and (if given) shape."""
        xp = backend.module_of(a, name, dtype.name, 2 if self._first else 1)
        at = validate.writable(a, a.shape if shape is None else shape, dtype, a if self._first else self.x,
                               xp if self._first else self.xp, name)
        self._set_or_check_device(name, a, xp)
        self.memory_ranges.append(Range(at, at + a.nbytes, True, name))
        return Input(a, at)

    def routing(self, name: str, r: Any, *parts: str) -> Routing:
        """Declare a Routing. parts: names of the arrays that the op reads; none: all."""
        if not isinstance(r, Routing):
            raise TypeError(f"{name}: expected a Routing (cupy_fp8.route makes one), got {type(r).__name__}")
        self._read_parts(name, r._arrays(), parts)
        return r

    def gate(self, name: str, g: Any, *parts: str) -> Gate:
        """Declare a Gate. parts: names of the arrays that the op reads."""
        if not isinstance(g, Gate):
            raise TypeError(f"{name}: expected a Gate (cupy_fp8.topk_gate makes one), got {type(g).__name__}")
        self._read_parts(name, g._arrays(), parts)
        return g

    def _read_parts(self, name: str, arrays: dict[str, Array], parts: tuple[str, ...]) -> None:
        """Declare arrays of a result, all on one device. parts: none: all."""
        first = next(iter(arrays.values()))
        if not self._first:
            backend.require_module(first, self.xp, name)
        self._set_or_check_device(name, first, backend.module_of(first, name))
        for part, a in arrays.items():
            if not parts or part in parts:
                at = address(a)
                self.memory_ranges.append(Range(at, at + a.nbytes, False, f"{name}.{part}"))

    def splits(self, name: str, given: Any, check: Any = False, *, beside: Any = None) -> group_sizes.Groups:
        """Declare the sizes of groups: an array that the launches read, or a list, which is copied for them.
        A call that examines the sizes on the host is never remembered. beside: placement of a list if no
        array was declared before (see `group_sizes.read_first`)."""
        if self._first:
            groups = group_sizes.read_first(given, beside, check, name)
            self._set_or_check_device(name, groups.array, backend.module_of(groups.array, name))
        else:
            groups = group_sizes.read(given, self.x, self.xp, check, name)
        self.repeatable &= groups.array is given and groups.host is None
        self.memory_ranges.append(Range(groups.at, groups.at + groups.nbytes, False, name))
        return groups

    def noop(self, flag: Any) -> None:
        """Declare the flag on the device that keeps a call from writing anything."""
        if flag is not None:
            self.noop_at, self._noop = self.one_f32("noop", flag), flag

    def noop_is_set(self) -> bool:
        """Whether the noop flag is set, for calls computed by the reference."""
        return bool(self.noop_at) and self._noop.reshape(()) == 1

    def one_f32(self, name: str, a: Any, *, updated: bool = False) -> int:
        """Return the address of a one-element f32 array that the op reads, or also updates."""
        at = validate.one_f32(a, self.x, self.xp, name)
        if updated:
            validate.check_writeable(a, name)
        self.memory_ranges.append(Range(at, at + 4, updated, name))
        return at

    def scalar(self, name: str, a: Any) -> tuple[int, float]:
        """Return (address, 0) of a one-element f32 array that the op reads, or (0, a number rounded to
        f32)."""
        at, value = validate.scalar_or_one_f32(a, self.x, self.xp, name)
        if isinstance(a, self.xp.ndarray):
            self.memory_ranges.append(Range(at, at + 4, False, name))
        return at, value

    def workspace(self, use: str, words: int) -> int:
        """Return the address of u32 words for this call's launches (see `kernels.workspace`)."""
        return address(self.workspace_array(use, words))

    def workspace_array(self, use: str, words: int) -> Array:
        found = workspace(self.owner, self.x, use, words)
        self.workspaces.append(Workspace(use, words, found))
        return found

    def scratch(self, use: str, words: int) -> Array:
        """Return u32 words for the launches: allocated for a call without `out=`, else a workspace."""
        if self.owner is not None:
            return self.workspace_array(use, words)
        found = empty_beside(self.x, (words,), _U32)
        if words:
            self.scratches.append(found)
        return found

    def table(self, records: Records) -> int:
        """Return the address of records for this call's launches (see `tables`)."""
        found = table(self.arrays[0], self.x, records, self.tables)
        self.tables.append(found)
        return found.at

    def without_arrays(self, noop: Any) -> None:
        """Begin a call with an empty list of arrays. The noop flag, if any, stands for the first array."""
        self.x = np.empty(0, np.float32) if noop is None else noop
        self.xp, self._first = backend.module_of(self.x, "noop"), False

    def error_word(self) -> int:
        """Return the address of the device's error word (see `kernels.errors`)."""
        at = error_word(self.x)
        self.constants.add(at)
        return at

    def _set_or_check_device(self, name: str, a: Array, xp: Any) -> None:
        """Let the first array set the call's module and device; later CuPy arrays must be on that device."""
        if self._first:
            self.x, self.xp, self._first = a, xp, False
        elif xp is not np:
            backend.same_device(a, self.x, name)
