"""Where tokens go over all ranks: to ranks, and on each rank to the rows of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..arrays import Array, Result
from ..routing import Routing
from ..typed_array import TypedArray


class Route(NamedTuple):
    """A rank's routing before anything is exchanged."""

    experts: Array
    sent: Routing
    own: Routing | None


@dataclass(frozen=True, eq=False, repr=False)
class RankRouting(Result):
    """Two hops: this rank's T tokens to ranks, each token once per rank; and the tokens that came to a rank
    to the rows of its experts. Everything is on the device, and nothing waits for it.

    experts   int32 [T, topk]: the expert of each slot, numbered over all ranks; -1: none
    ranks     int32 [T, topk]: the rank of that expert; -1 where an earlier slot of the token has the same
    sent      Routing of this rank's tokens by rank
    counts    int32 [ranks]: tokens that came from each rank
    arrived   int32 [ranks * max_tokens, topk]: this rank's experts for the tokens that came; -1: others
    received  Routing of the tokens that came, a region of max_tokens for each rank, by this rank's experts
    returned  Routing of this rank's tokens to the rows in which sums come back (its `sources` are `sent`'s)
    own       Routing of this rank's tokens by all experts, and
    back      int32 [ranks * max_tokens, topk]: for each slot that came, its row on the sending rank, if rows
              come back one by one (``reduce='exact'``), else None

    splits    int32 [experts of this rank]: rows of each, including padding, for `Experts.forward_rows`
    rows      number of rows
    tokens    T
    align     the rows of an expert begin at multiples of it
    """

    experts: TypedArray
    ranks: TypedArray
    sent: Routing
    counts: TypedArray
    arrived: TypedArray
    received: Routing
    returned: Routing
    own: Routing | None = None
    back: TypedArray | None = None
    #: facts of the ExpertParallel that made it
    _of: ClassVar[Any] = None
    #: what the transport remembers of it
    _known: ClassVar[Any] = None

    @property
    def splits(self) -> TypedArray:
        return self.received.aligned_splits

    @property
    def rows(self) -> int:
        return self.received.rows

    @property
    def tokens(self) -> int:
        return self.sent.tokens

    @property
    def align(self) -> int:
        return self.received.align

    def __repr__(self) -> str:
        return (f"RankRouting({self.tokens} tokens x {self.sent.topk} slots -> {self.sent.num_experts} "
                f"ranks; here {self.rows} rows of {self.received.num_experts} experts, aligned to "
                f"{self.align})")
