"""The rows for an expert layer's tokens, as found by `route` and read by `permute` and its relatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from . import backend
from .advice import shown
from .arrays import Array, Result, aligned_address, is_contiguous
from .formats import integer
from .results import facts_table
from .typed_array import TypedArray

__all__ = ["Routing"]

#: most experts, and most slots of a token: kernels keep these in shared memory
MOST_EXPERTS = 1024
#: most slots of all tokens, and most rows: indices are int32
MOST_SLOTS = 2**31 - 1

_ALIGNS = tuple(1 << i for i in range(8))

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


def as_align(align: Any) -> int:
    """Return align as an int. ValueError unless it is one of the allowed powers of two."""
    if integer(align, "align") not in _ALIGNS:
        raise ValueError(f"align: expected a power of two from 1 to {_ALIGNS[-1]}, got {shown(align)}")
    return integer(align, "align")


@dataclass(frozen=True, eq=False)
class Routing(Result):
    """The rows for copies of T tokens, sorted by expert. Unused rows follow each expert's, up to a multiple
    of `align`.

    row_map         int32 [T, topk]: the row that a token's slot goes to; -1: nowhere
    splits          int32 [E]: rows of each expert
    aligned_splits  int32 [E]: including the unused rows
    offsets         int64 [E + 1]: the row at which each expert begins, and the last one ends, including
                    unused rows
    sources         int32 [rows]: the inverse of row_map: token * topk + slot; -1: an unused row
    rows            the bound of rows that permuted tokens are allocated for. Rows from offsets[E] on are
                    unused
    align           1, 2, 4, … 128
    experts         int32 [T, topk]: the expert of each slot, -1 for none, if the assignment was a mask. Else
                    None

    All but `rows` and `align` are on the device; nothing waits for it.
    """

    row_map: TypedArray
    splits: TypedArray
    aligned_splits: TypedArray
    offsets: TypedArray
    sources: TypedArray
    rows: int
    align: int
    experts: TypedArray | None = None
    #: number of times that `route` has written it; what a step has saved belongs to one of them
    _written: ClassVar[int] = 0

    if TYPE_CHECKING:               # arrays of any class are accepted
        def __init__(self, row_map: Array, splits: Array, aligned_splits: Array, offsets: Array,
                     sources: Array, rows: int, align: int, experts: Array | None = None) -> None: ...

    def __post_init__(self) -> None:
        xp = backend.module_of(self.row_map, "row_map")
        backend.require_module(self.splits, xp, "splits")
        if integer(self.rows, "rows") < 0:
            raise ValueError(f"rows: expected an integer of 0 or more, got {shown(self.rows)}")
        self.__dict__.update(rows=integer(self.rows, "rows"), align=as_align(self.align))
        if self.row_map.ndim != 2:
            raise ValueError(f"row_map: expected shape [T, topk], got {self.row_map.shape}")
        if self.splits.ndim != 1:
            raise ValueError(f"splits: expected shape [E], got {self.splits.shape}")
        number = self.num_experts
        if max(number, self.topk) > MOST_EXPERTS:
            raise ValueError(f"Routing: expected at most {MOST_EXPERTS} experts, and slots of a token; got "
                             f"{number} and {self.topk}")
        parts: dict[str, tuple[Any, tuple[int, ...], np.dtype[Any]]] = {
            "row_map": (self.row_map, self.row_map.shape, _INT32), "splits": (self.splits, (number,), _INT32),
            "aligned_splits": (self.aligned_splits, (number,), _INT32),
            "offsets": (self.offsets, (number + 1,), _INT64), "sources": (self.sources, (self.rows,), _INT32)}
        if self.experts is not None:
            parts["experts"] = self.experts, self.row_map.shape, _INT32
        for name, (a, shape, dtype) in parts.items():
            backend.require_module(a, xp, name)
            if a.dtype != dtype or a.shape != shape or not is_contiguous(a):
                raise ValueError(f"{name}: expected a C-contiguous {dtype} array of shape {shape}, got "
                                 f"{a.dtype} of shape {a.shape}")
            aligned_address(a, name)
            if xp is not np:
                backend.same_device(a, self.row_map, name, "row_map")

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.row_map.shape[0])

    @property
    def topk(self) -> int:
        """Slots of a token."""
        return int(self.row_map.shape[1])

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return int(self.splits.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(int(a.nbytes) for a in self._arrays().values())

    def _arrays(self) -> dict[str, Array]:
        """Return the arrays by name, without an absent one."""
        names = ("row_map", "splits", "aligned_splits", "offsets", "sources", "experts")
        return {name: a for name in names if (a := getattr(self, name)) is not None}

    def _facts(self) -> dict[str, str]:
        return {"tokens": f"{self.tokens:,}", "slots": str(self.topk), "experts": str(self.num_experts),
                "rows": f"{self.rows:,}", "align": str(self.align),
                "from": "indices" if self.experts is None else "mask", "kind": backend.kind_of(self.row_map)}

    def __repr__(self) -> str:
        f = self._facts()
        return (f"Routing({f['tokens']} tokens x {f['slots']} slots -> {f['rows']} rows of {f['experts']} "
                f"experts, aligned to {f['align']}, {f['kind']})")

    def _repr_html_(self) -> str:
        return facts_table(self._facts())
