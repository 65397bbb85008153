"""Finds the row that each token of an expert layer goes to. Kernels: kernels_cu/moe/route.cu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import reference
from ...advice import shown
from ...arrays import Array, asnumpy
from ...calls import validate
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, Written
from ...formats import flag, integer
from ...kernels import Kernel, Launch, Variant
from ...layouts import cdiv, padded_rows, round_up
from ...routing import MOST_EXPERTS, MOST_SLOTS, Routing, as_align

_WARPS = 8
_COUNT, _RANK = (Kernel("moe/route", entry, block=32 * _WARPS) for entry in ("route_count", "route_rank"))
_ROUTES = 64                # fewest routes per warp
_INT32, _INT64, _BOOL = np.dtype(np.int32), np.dtype(np.int64), np.dtype(bool)


def route(assignment: Array, *, num_experts: int | None = None, topk: int | None = None,
          rows: int | None = None, align: int = 1, check: bool = False,
          out: Routing | None = None) -> Routing:
    """Find the rows for copies of tokens, so that the rows of each expert are together: the map that
    `permute` and `unpermute` follow. The rows of expert e begin at offsets[e], a multiple of `align`. Its
    tokens come in their order, each with its slots in theirs.

    Parameters
    ----------
    assignment : int32 or int64 array [T, topk], the experts of each token's slots, -1: dropped. Or a mask, a
        bool array [T, E]; a token's slots are then its experts in ascending order (where there are slots for
        all E, slot e is expert e)
    num_experts : E, 1 to 1024. Needed for indices
    topk : slots of a token, 0 to 1024. Of a mask the most experts that a token has (None: E, which needs
        `rows`); else the second extent
    rows : of what `permute` will write, the caller's bound of the sum of all sizes, each rounded up to a
        multiple of `align`. None: what always suffices, T * topk + min(E, T * topk) * (align - 1) rounded
        down to a multiple of `align`
    align : a power of two from 1 to 128: 16, 32 and 128 are what block scales and matrix products of groups
        want
    check : wait for the device and raise ValueError if the assignment there is wrong. (NumPy arrays are
        always examined)
    out : an earlier result for the same T, topk, E, rows and align; written in place and returned. Needed
        while a CUDA graph is captured

    Returns
    -------
    Routing: row_map, splits, aligned_splits, offsets and sources, all on the device.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Wrong assignments on the device raise
    nothing, but `device_errors` reports them: an index without an expert counts as dropped, and so do a
    mask's experts beyond `topk`. A route to a row past `rows` gets -1, and the sizes count only rows that
    exist.

    Two launches, one for the indices of a few tokens. Source: TransformerEngine (moe_permute);
    docs/numerics.md section 8. Bytes moved: the assignment, the map and its inverse.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> r = fp8.route(np.array([[1, 0], [1, -1], [0, 1]]), num_experts=2, align=4)
    >>> r.row_map.tolist(), r.splits.tolist(), r.offsets.tolist()
    ([[4, 0], [5, -1], [1, 6]], [2, 3], [0, 4, 8])
    >>> r
    Routing(3 tokens x 2 slots -> 12 rows of 2 experts, aligned to 4, numpy)
    """
    result: Routing = run(_ROUTE, (assignment, num_experts, topk, rows, align, check), out)
    result.__dict__["_written"] = result._written + 1
    return result


# ---- what follows from shapes and options ----
class _RoutingShape(NamedTuple):
    mask: bool
    tokens: int
    topk: int
    num_experts: int
    rows: int
    align: int

    @property
    def warp_tokens(self) -> int:
        """Tokens per warp."""
        most_warps = _WARPS * _RANK.constant("kMostBlocks")
        return max(cdiv(_ROUTES, max(1, self.topk)), cdiv(self.tokens, most_warps))

    @property
    def blocks(self) -> int:
        return max(1, cdiv(self.tokens, _WARPS * self.warp_tokens))


def _extents(shape: tuple[int, ...], dtype: np.dtype[Any], num_experts: Any, topk: Any, rows: Any,
             align: Any) -> _RoutingShape:
    mask = dtype == _BOOL
    if len(shape) != 2:
        raise ValueError(f"assignment: expected shape {'[T, E]' if mask else '[T, topk]'}, got {shape}")
    tokens, columns = shape
    experts, slots = (_of_mask(columns, num_experts, topk, rows) if mask
                     else _of_indices(columns, num_experts, topk))
    if not 1 <= experts <= MOST_EXPERTS:
        raise ValueError(f"num_experts: expected 1 to {MOST_EXPERTS}, got {shown(experts)}")
    if not 0 <= slots <= MOST_EXPERTS:
        raise ValueError(f"topk: expected 0 to {MOST_EXPERTS}, got {shown(slots)}")
    align = as_align(align)
    bound = padded_rows(tokens * slots, experts, align) if rows is None else integer(rows, "rows")
    if bound < 0:
        raise ValueError(f"rows: expected 0 or more, got {shown(bound)}")
    if max(bound, tokens * slots) > MOST_SLOTS:
        raise ValueError(f"rows: {shown(bound)} rows of {tokens * slots} routes are more than int32 holds "
                         "(2**31 - 1); split the tokens")
    return _RoutingShape(mask, tokens, slots, experts, bound, align)


def _of_mask(columns: int, num_experts: Any, topk: Any, rows: Any) -> tuple[int, int]:
    """Return (experts, slots per token) of a mask."""
    if topk is None and rows is None:
        raise ValueError("topk: a mask needs topk (the most experts of one token) or rows (the bound of the "
                         "result), got neither")
    experts = columns if num_experts is None else integer(num_experts, "num_experts")
    slots = columns if topk is None else integer(topk, "topk")
    if experts != columns:
        raise ValueError(f"num_experts: expected {columns}, the columns of the mask, got {shown(experts)}")
    if slots > columns:
        raise ValueError(f"topk: expected at most {columns}, the experts of the mask, got {shown(slots)}")
    return experts, slots


def _of_indices(columns: int, num_experts: Any, topk: Any) -> tuple[int, int]:
    """Return (experts, slots per token) of indices."""
    if num_experts is None:
        raise ValueError("num_experts: needed where the assignment is indices, got None")
    experts = integer(num_experts, "num_experts")
    slots = columns if topk is None else integer(topk, "topk")
    if slots != columns:
        raise ValueError(f"topk: expected {columns}, the columns of the assignment, got {shown(slots)}")
    return experts, slots


def _check(host: np.ndarray, extents: _RoutingShape) -> None:
    """Raise ValueError unless all experts of an assignment on the host exist, and have slots and rows."""
    if extents.mask:
        most = host.sum(axis=1)
        if extents.tokens and most.max() > extents.topk:
            token = int(np.argmax(most > extents.topk))
            raise ValueError(f"assignment: expected at most topk={extents.topk} experts of a token, got "
                             f"{most[token]} of token {token}")
        sizes = host.sum(axis=0)
    else:
        wrong = (host < -1) | (host >= extents.num_experts)
        if wrong.any():
            token, slot = map(int, np.argwhere(wrong)[0])
            raise ValueError(f"assignment: expected experts 0 to {extents.num_experts - 1}, or -1 for none, "
                             f"got {host[token, slot]} at [{token}, {slot}]")
        sizes = np.bincount(host[host >= 0].astype(np.int64), minlength=extents.num_experts)
    needed = sum(round_up(size, extents.align) for size in sizes.tolist())
    if needed > extents.rows:
        raise ValueError(f"rows: expected at least the {needed} that this assignment needs (sizes rounded up "
                         f"to {extents.align}), got {extents.rows}")


# ---- the call and its launches ----
class _Result(Description):
    """Description of a Routing of these sizes."""

    def __init__(self, extents: _RoutingShape) -> None:
        self._extents = extents
        parts: list[tuple[str, tuple[int, ...], np.dtype[Any]]] = [
            ("row_map", (extents.tokens, extents.topk), _INT32), ("splits", (extents.num_experts,), _INT32),
            ("aligned_splits", (extents.num_experts,), _INT32),
            ("offsets", (extents.num_experts + 1,), _INT64),
            ("sources", (extents.rows,), _INT32)]
        if extents.mask:
            parts.append(("experts", (extents.tokens, extents.topk), _INT32))
        #: names of the arrays, and of the kernels' members
        self.names = tuple(name for name, _, _ in parts)
        super().__init__(*(Written(f"out.{name}", shape, dtype) for name, shape, dtype in parts))

    def build(self, arrays: Sequence[Array]) -> Routing:
        parts = dict(zip(self.names, arrays, strict=True))
        return Routing._of_fields(**{"experts": None, **parts}, rows=self._extents.rows,
                                  align=self._extents.align)

    def arrays_of(self, out: Any) -> list[Array]:
        if not isinstance(out, Routing):
            raise TypeError(f"out: expected a Routing (an earlier result), got {type(out).__name__}")
        if self._extents.mask != (out.experts is not None):
            wanted, given = ("a mask", "indices") if self._extents.mask else ("indices", "a mask")
            raise ValueError(f"out: expected the routing of {wanted}, got that of {given}")
        if out.align != self._extents.align:
            raise ValueError(f"out: expected align {self._extents.align}, got a routing with {out.align}")
        return [getattr(out, name) for name in self.names]


class _Inputs(NamedTuple):
    assignment: Input
    extents: _RoutingShape
    result: _Result


class _Route(Op[_Inputs]):
    def arguments(self, call: Call, assignment: Any, num_experts: Any, topk: Any, rows: Any, align: Any,
                  check: Any) -> _Inputs:
        check = flag(check, "check")
        x = call.read("assignment", assignment, (_INT32, _INT64, _BOOL))
        options = num_experts, topk, rows, align
        extents = _extents(x.shape, x.dtype, *options)
        # a mutable object, such as an array of one element, can change before the next call
        call.repeatable &= all(option is None or type(option) is int for option in options)
        if check or call.xp is np:
            call.repeatable = False
            validate.may_wait(x.array)
            _check(asnumpy(x.array), extents)
        return _Inputs(x, extents, _Result(extents))

    def reference(self, inputs: _Inputs) -> Routing:
        extents = inputs.extents
        return reference.route(inputs.assignment.array, num_experts=extents.num_experts, topk=extents.topk,
                               rows=extents.rows, align=extents.align)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        x, extents, result = inputs
        blocks, pitch = extents.blocks, round_up(extents.blocks, 4)
        counted = extents.mask or blocks > 1
        counts = call.workspace("route", extents.num_experts * pitch) if counted else 0
        slot_for_each = extents.mask and extents.topk == extents.num_experts
        places = dict(zip(result.names, written, strict=True))
        for kernel in (_COUNT, _RANK) if counted else (_RANK,):
            yield kernel.variant().bind(
                x.array, blocks, assignment=x.at, counts=counts, **places, errors=call.error_word(),
                tokens=extents.tokens, topk=extents.topk, num_experts=extents.num_experts, rows=extents.rows,
                align=extents.align, warp_tokens=extents.warp_tokens, pitch=pitch,
                wide=int(x.dtype == _INT64), mask=int(extents.mask) + int(slot_for_each))


_ROUTE = _Route()


def variants() -> Iterator[Variant]:
    """Yields every variant that this op may launch."""
    yield _COUNT.variant()
    yield _RANK.variant()
