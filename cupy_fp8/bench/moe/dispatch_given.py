"""What `bench dispatch` sends: how much, where to, and by what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays import Array, asarray
from ...distributed import ExpertParallel
from ...distributed.exchange import Part
from ...distributed.expert_parallel import Reduce, TransportName
from ...formats import bfloat16
from ...layouts import padded_rows, round_up
from ...ops.convert.astype import astype
from ...recipes import BlockScaling
from ...results import Scaled
from ..ranks import Ranks

RECIPE = BlockScaling()
_TIMEOUT = 60.0                     # seconds: ranks compile kernels before they come
_SPARE = 1.25                       # of a rank's rows, over the mean


class Sizes(NamedTuple):
    """sent: rows that a rank sends; tokens: of a rank, for the whole dispatch and the way back; forward,
    step: those of layers. experts: of all ranks; weak: of each rank, where all are the more the more ranks
    there are."""

    sent: tuple[int, ...] = (64, 4096, 32768)
    tokens: int = 8192
    forward: tuple[int, ...] = (4096, 128, 16, 1)
    step: int = 4096
    experts: int = 64
    weak: int = 16
    topk: int = 8
    hidden: int = 7168
    inner: int = 2048


FULL = Sizes()
QUICK = FULL._replace(sent=(64, 4096), forward=(4096, 16))


class Way(NamedTuple):
    """How tokens are sent."""

    transport: TransportName
    fp8: bool

    def __str__(self) -> str:
        return f"{self.transport} {'FP8' if self.fp8 else 'bf16'}"


class Destinations(NamedTuple):
    """The experts of all ranks' tokens, by rank, and this rank's on its GPU. local: experts of a rank."""

    chosen: list[np.ndarray]
    local: int
    own: Array

    def busiest(self, *, slots: bool = False) -> int:
        """Tokens that a rank sends to others, or that come to it from others: the most of any rank. slots:
        one for each expert there."""
        ranks = range(len(self.chosen))
        counts = np.zeros((len(ranks), len(ranks)), np.int64)
        for rank, chosen in enumerate(self.chosen):
            for to in ranks:
                there = chosen // self.local == to
                counts[rank, to] = there.sum() if slots else there.any(1).sum()
        np.fill_diagonal(counts, 0)
        return int(max(counts.sum(0).max(), counts.sum(1).max()))


def balanced(ranks: Ranks, count: int, topk: int) -> Destinations:
    """Tokens that go to one rank each, to every rank as many: all experts are of one rank."""
    size = ranks.world.size
    chosen = []
    for rank in range(size):
        to = np.random.default_rng(rank).permutation(np.arange(count) % size)
        chosen.append((to[:, None] * topk + np.arange(topk)).astype(np.int32))
    return Destinations(chosen, topk, asarray(chosen[ranks.world.rank], like=ranks.xp))


def uniform(ranks: Ranks, tokens: int, experts: int, topk: int) -> Destinations:
    """Each token goes to experts that are as likely as any others."""
    chosen = []
    for rank in range(ranks.world.size):
        drawn = np.random.default_rng((rank, tokens)).random((tokens, experts)).argsort(1)[:, :topk]
        chosen.append(np.ascontiguousarray(drawn, np.int32))
    return Destinations(chosen, experts // ranks.world.size, asarray(chosen[ranks.world.rank], like=ranks.xp))


def drawn(ranks: Ranks, *shape: int) -> Array:
    """Normal values, others on each rank."""
    if ranks.xp is np:
        return np.random.default_rng(ranks.world.rank).standard_normal(shape, np.float32)
    ranks.xp.random.seed(ranks.world.rank)
    return ranks.xp.random.standard_normal(shape, np.float32)


def tokens_of(ranks: Ranks, count: int, sizes: Sizes, fp8: bool) -> tuple[Any, Array]:
    """(tokens in FP8 or bfloat16, probs)"""
    values = astype(drawn(ranks, count, sizes.hidden), bfloat16)
    return RECIPE.quantize(values).rowwise if fp8 else values, abs(drawn(ranks, count, sizes.topk))


def parts_of(x: Any, probs: Array) -> tuple[Part, Part | None, Part]:
    if isinstance(x, Scaled):
        return Part.rows(x.data), Part.scales(x), Part.rows(probs)
    return Part.rows(x), None, Part.rows(probs)


def token_bytes(parts: Sequence[Part | None]) -> int:
    return sum(part.items * part.array.dtype.itemsize for part in parts if part is not None)


def bound(ranks: Ranks, tokens: int, experts: int, topk: int, align: int) -> int:
    """A rank's rows: a quarter more than there are on average, whole groups of 128, or all that can come."""
    size = ranks.world.size
    local = experts // size
    most = padded_rows(size * tokens * min(topk, local), local, align)
    return min(most, round_up(int(_SPARE * tokens * topk), 128 * local))


def parallel(ranks: Ranks, sizes: Sizes, way: Way, tokens: int, experts: int, *, rows: int | None = None,
             align: int = 128, reduce: Reduce = "rank") -> ExpertParallel:
    return ExpertParallel(
        ranks.world, num_experts=experts, max_tokens=tokens, hidden=sizes.hidden, topk=sizes.topk,
        align=align, rows=rows, recipe=RECIPE if way.fp8 else None, dtype=bfloat16, reduce=reduce,
        transport=way.transport, timeout=_TIMEOUT, like=ranks.xp)
