"""What `bench dispatch` sends: how much, where to, and by which transport."""

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
_SPARE = 1.25                       # a rank's rows, relative to the mean


class Sizes(NamedTuple):
    """sent: rows that a rank sends; tokens: of a rank, for the whole dispatch and the way back; forward,
    steps: tokens of the layers. experts: of all ranks; weak: of each rank, where their number grows with the
    ranks (weak scaling)."""

    sent: tuple[int, ...] = (64, 4096, 32768)
    tokens: int = 8192
    forward: tuple[int, ...] = (4096, 128, 16, 1)
    steps: tuple[int, ...] = (4096, 128)
    experts: int = 64
    weak: int = 16
    topk: int = 8
    hidden: int = 7168
    inner: int = 2048


FULL = Sizes()
QUICK = FULL._replace(sent=(64, 4096), forward=(4096, 16), steps=(4096,))


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
        """Return the most tokens that any rank sends to others or receives from them. slots: count one for
        each expert there."""
        ranks = range(len(self.chosen))
        counts = np.zeros((len(ranks), len(ranks)), np.int64)
        for rank, chosen in enumerate(self.chosen):
            for to in ranks:
                there = chosen // self.local == to
                counts[rank, to] = there.sum() if slots else there.any(1).sum()
        np.fill_diagonal(counts, 0)
        return int(max(counts.sum(0).max(), counts.sum(1).max()))


def balanced(ranks: Ranks, count: int, topk: int) -> Destinations:
    """Send each token to one rank, and equally many to every rank: all experts of a token are on one rank."""
    size = ranks.world.size
    chosen = []
    for rank in range(size):
        to = np.random.default_rng(rank).permutation(np.arange(count) % size)
        chosen.append((to[:, None] * topk + np.arange(topk)).astype(np.int32))
    return Destinations(chosen, topk, asarray(chosen[ranks.world.rank], like=ranks.xp))


def uniform(ranks: Ranks, tokens: int, experts: int, topk: int, *, away: bool = False, seed: int = 0
            ) -> Destinations:
    """Send each token to uniformly drawn experts. away: of other ranks alone."""
    chosen, local = [], experts // ranks.world.size
    for rank in range(ranks.world.size):
        drawn = np.random.default_rng((rank, tokens, seed)).random((tokens, experts))
        if away:
            drawn[:, rank * local:][:, :local] = 1.0
        chosen.append(np.ascontiguousarray(drawn.argsort(1)[:, :topk], np.int32))
    return Destinations(chosen, experts // ranks.world.size, asarray(chosen[ranks.world.rank], like=ranks.xp))


def drawn(ranks: Ranks, *shape: int) -> Array:
    """Return normal values, different on each rank."""
    if ranks.xp is np:
        return np.random.default_rng(ranks.world.rank).standard_normal(shape, np.float32)
    ranks.xp.random.seed(ranks.world.rank)
    return ranks.xp.random.standard_normal(shape, np.float32)


def tokens_of(ranks: Ranks, count: int, sizes: Sizes, fp8: bool) -> tuple[Any, Array]:
    """Return (tokens in FP8 or bfloat16, probs)."""
    values = astype(drawn(ranks, count, sizes.hidden), bfloat16)
    return RECIPE.quantize(values).rowwise if fp8 else values, abs(drawn(ranks, count, sizes.topk))


def parts_of(x: Any, probs: Array) -> tuple[Part, Part | None, Part]:
    if isinstance(x, Scaled):
        return Part.rows(x.data), Part.scales(x), Part.rows(probs)
    return Part.rows(x), None, Part.rows(probs)


def token_bytes(parts: Sequence[Part | None]) -> int:
    return sum(part.items * part.array.dtype.itemsize for part in parts if part is not None)


def bound(ranks: Ranks, tokens: int, experts: int, topk: int, align: int) -> int:
    """Return the bound of a rank's rows: a quarter more than the mean, in whole groups of 128, or all that
    can come."""
    size = ranks.world.size
    local = experts // size
    most = padded_rows(size * tokens * min(topk, local), local, align)
    return min(most, round_up(int(_SPARE * tokens * topk), 128 * local))


def parallel(ranks: Ranks, sizes: Sizes, way: Way, tokens: int, experts: int, *, rows: int | None = None,
             align: int = 128, reduce: Reduce = "rank", num_sms: int | None = None) -> ExpertParallel:
    return ExpertParallel(
        ranks.world, num_experts=experts, max_tokens=tokens, hidden=sizes.hidden, topk=sizes.topk,
        align=align, rows=rows, recipe=RECIPE if way.fp8 else None, dtype=bfloat16, reduce=reduce,
        transport=way.transport, num_sms=num_sms, timeout=_TIMEOUT, like=ranks.xp)
