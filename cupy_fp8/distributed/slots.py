"""The slots of tokens: from experts numbered over all ranks to rows. Kernels:
kernels_cu/distributed/slots.cu; rank r has experts r * local to (r + 1) * local - 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, bits
from ..calls.call import Call, Input, Op, run
from ..calls.descriptions import Description, Pair, one_array
from ..formats import float32
from ..kernels import Kernel, Launch, Variant, grid_size
from ..layouts import cdiv
from ..routing import Routing

_THREADS = 256
_RANK, _ARRIVED, _RETURNED = (Kernel("distributed/slots", entry, block=_THREADS)
                              for entry in ("rank_slots", "arrived_slots", "returned_probs"))
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


class Split(NamedTuple):
    """How experts and windows are divided among ranks: `local` experts per rank, `region` rows of a window
    for the tokens of each rank."""

    ranks: int
    me: int
    local: int
    region: int


def rank_slots(assignment: Array, split: Split, out: Any = None) -> tuple[Array, Array]:
    """Experts [T, topk] -> (the same in int32, the rank of each slot's expert; -1 for no expert, and where an
    earlier slot of the token has the same rank)."""
    made: tuple[Array, Array] = run(_RANK_SLOTS, (assignment, split.ranks, split.local), out)
    return made


def arrived_slots(came: Array, counts: Array, back: Array | None, experts: Array, sent: Routing, split: Split,
                  out: Any = None) -> Any:
    """Return (arrived, the rows [T, topk] in which this rank's own tokens come back). arrived: for the
    counts[r] tokens that came from each rank r, their slots' experts here, -1 for another rank's; with back,
    (that, back with -1 where nothing came). experts, sent: of this rank's own tokens, and their rows by
    rank."""
    return run(_ARRIVED_SLOTS, (came, counts, back, experts, sent.row_map, sent.offsets, split), out)


def returned_probs(came: Array, experts: Array, returned: Array, split: Split, out: Any = None) -> Array:
    """Collect gradients of probs that came back, f32 [ranks * region, topk] -> [T, topk]."""
    made: Array = run(_RETURNED_PROBS, (came, experts, returned, split.local), out)
    return made


def _ranks_of(experts: np.ndarray, local: int) -> np.ndarray:
    return np.where(experts < 0, -1, experts // local).astype(np.int32)


def _first_of_rank(ranks: np.ndarray) -> np.ndarray:
    """For each slot, return the first slot of the token with the same rank."""
    same: np.ndarray = ranks[:, :, None] == ranks[:, None, :]
    return same.argmax(2) if ranks.shape[1] else np.zeros(ranks.shape, np.int64)


# ---- ranks of experts ----
class _RankInputs(NamedTuple):
    assignment: Input
    ranks: int
    local: int


class _RankSlots(Op[_RankInputs]):
    def arguments(self, call: Call, assignment: Any, ranks: int, local: int) -> _RankInputs:
        return _RankInputs(call.read("topk_ids", assignment, (_INT32, _INT64)), ranks, local)

    def result(self, inputs: _RankInputs) -> Description:
        shape = inputs.assignment.shape
        return Pair(one_array(shape, _INT32, "out[0]"), one_array(shape, _INT32, "out[1]"))

    def reference(self, inputs: _RankInputs) -> Any:
        given = inputs.assignment.array
        exists = (given >= 0) & (given < inputs.ranks * inputs.local)
        experts = np.where(exists, given, -1).astype(np.int32)
        ranks = _ranks_of(experts, inputs.local)
        slots = np.arange(ranks.shape[1])
        return experts, np.where(_first_of_rank(ranks) == slots, ranks, np.int32(-1))

    def launches(self, call: Call, inputs: _RankInputs, *written: int) -> Iterator[Launch]:
        given, ranks, local = inputs
        tokens, topk = given.shape
        yield _RANK.variant().bind(
            given.array, _grid(tokens * topk, given.shape), assignment=given.at, experts=written[0],
            ranks=written[1], errors=call.error_word(), tokens=tokens, topk=topk, num_experts=ranks * local,
            local=local, wide=int(given.dtype == _INT64))


# ---- tokens that came ----
class _ArrivedInputs(NamedTuple):
    came: Input
    counts: Input
    back: Input | None
    experts: Input
    row_map: Input
    offsets: Input
    split: Split


class _ArrivedSlots(Op[_ArrivedInputs]):
    def arguments(self, call: Call, came: Any, counts: Any, back: Any, experts: Any, row_map: Any,
                  offsets: Any, split: Split) -> _ArrivedInputs:
        return _ArrivedInputs(
            call.read("came", came, (_INT32,)), call.read("counts", counts, (_INT32,)),
            None if back is None else call.read("back", back, (_INT32,), came.shape),
            call.read("experts", experts, (_INT32,)),
            call.read("row_map", row_map, (_INT32,)), call.read("offsets", offsets, (_INT64,)), split)

    def result(self, inputs: _ArrivedInputs) -> Description:
        came = one_array(inputs.came.shape, _INT32, "own")
        if inputs.back is not None:
            came = Pair(came, one_array(inputs.came.shape, _INT32, "back"))
        return Pair(came, one_array(inputs.experts.shape, _INT32, "returned"))

    def reference(self, inputs: _ArrivedInputs) -> Any:
        split, row_map = inputs.split, inputs.row_map.array
        index = np.arange(split.ranks * split.region)
        came = (index % split.region < inputs.counts.array[index // split.region])[:, None]
        own = inputs.came.array - np.int32(split.me * split.local)
        own = np.where(came & (own >= 0) & (own < split.local), own, np.int32(-1))
        ranks = _ranks_of(inputs.experts.array, split.local)
        rows = ranks * split.region + row_map - inputs.offsets.array[ranks]
        returned = np.where(row_map < 0, -1, rows).astype(np.int32)
        if inputs.back is None:
            return own, returned
        return (own, np.where(came, inputs.back.array, np.int32(-1))), returned

    def launches(self, call: Call, inputs: _ArrivedInputs, *written: int) -> Iterator[Launch]:
        came, counts, back, experts, row_map, offsets, split = inputs
        own, *kept, returned = written
        slots = max(came.array.size, experts.array.size)
        yield _ARRIVED.variant().bind(
            came.array, _grid(slots, came.shape), experts=came.at, counts=counts.at,
            back=0 if back is None else back.at, own=own, back_kept=kept[0] if kept else 0, sent=experts.at,
            row_map=row_map.at, offsets=offsets.at, returned=returned, tokens=experts.shape[0],
            topk=experts.shape[1], ranks=split.ranks, me=split.me, local=split.local, region=split.region)


# ---- gradients of probs that came back ----
class _ReturnedInputs(NamedTuple):
    came: Input
    experts: Input
    returned: Input
    local: int


class _ReturnedProbs(Op[_ReturnedInputs]):
    def arguments(self, call: Call, came: Any, experts: Any, returned: Any, local: int) -> _ReturnedInputs:
        return _ReturnedInputs(call.read("came", came, (float32,)), call.read("experts", experts, (_INT32,)),
                               call.read("returned", returned, (_INT32,)), local)

    def result(self, inputs: _ReturnedInputs) -> Description:
        return one_array(inputs.experts.shape, float32)

    def reference(self, inputs: _ReturnedInputs) -> Any:
        experts, came = inputs.experts.array, inputs.came.array
        rows = np.take_along_axis(inputs.returned.array, _first_of_rank(_ranks_of(experts, inputs.local)), 1)
        probs = np.zeros(experts.shape, np.float32)
        here = (experts >= 0) & (rows >= 0)
        bits(probs)[here] = bits(came)[rows[here], np.nonzero(here)[1]]
        return probs

    def launches(self, call: Call, inputs: _ReturnedInputs, *written: int) -> Iterator[Launch]:
        came, experts, returned, local = inputs
        tokens, topk = experts.shape
        yield _RETURNED.variant().bind(
            came.array, _grid(tokens * topk, experts.shape), experts=experts.at, returned=returned.at,
            came=came.at, probs=written[0], tokens=tokens, rows=came.shape[0], topk=topk, local=local)


def _grid(slots: int, shape: tuple[int, ...]) -> int:
    return grid_size(cdiv(slots, _THREADS), shape, "topk_ids")


_RANK_SLOTS, _ARRIVED_SLOTS, _RETURNED_PROBS = _RankSlots(), _ArrivedSlots(), _ReturnedProbs()


def variants() -> Iterator[Variant]:
    """Yield every variant of these kernels."""
    for kernel in (_RANK, _ARRIVED, _RETURNED):
        yield kernel.variant()
