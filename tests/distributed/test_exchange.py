"""Single exchanges on the CPU executor: which ranks wait for which, and what happens if one does not come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from rank_loops import NAMED, check_on_cpu, of_ranks
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import testing
from cupy_fp8.arrays import bits
from cupy_fp8.distributed import ExpertParallel, RankError, exchange
from cupy_fp8.distributed.exchange import Part
from cupy_fp8.distributed.layout import Direction

pytestmark = needs_host

RANKS, TOKENS, HIDDEN = 3, 4, 64
#: polls of a flag, which stand for nanoseconds on the CPU: if a rank does not come, and if all do
FEW, MANY = 400, 1 << 40
LATE = ("distributed: a rank that did not come in time; nothing of that exchange is to be used, and later "
        "ones send nothing",)


class Exchanges:
    """Ranks whose kernels this thread launches. Token t of each rank goes to rank t % RANKS."""

    def __init__(self, parts: list[tuple[ExpertParallel, Any]]) -> None:
        self.parallel, self.routings = map(list, zip(*parts, strict=True))
        self.transports: list[Any] = [ep._transport for ep in self.parallel]
        self.x = [np.full((TOKENS, HIDDEN), 1 + rank, np.float32) for rank in range(RANKS)]
        self.rows = [np.full((routing.rows, HIDDEN), 1 + rank, np.float32)
                     for rank, routing in enumerate(self.routings)]
        for transport in self.transports:
            for piece in (transport.layout.data, transport.layout.returned):
                bits(transport.array(piece)).fill(0)

    def launch(self, rank: int, direction: Direction, polls: int) -> Any:
        transport, routing = self.transports[rank], self.routings[rank]
        windows = {**transport.members(direction), "timeout": polls}
        if direction == Direction.RETURN:
            return exchange.send_sums(windows, routing.received, routing.counts, transport.split,
                                      self.rows[rank], transport.layout.returned, None,
                                      transport.layout.gradients)
        return exchange.send_tokens(windows, routing.sent, transport.split,
                                    transport.parts_of_tokens(Part.rows(self.x[rank]), None, None))

    def run(self, direction: Direction, *ranks: int) -> None:
        """Run the kernels of these ranks, at the same time."""
        launches = [self.launch(rank, direction, FEW if ranks else MANY) for rank in ranks or range(RANKS)]
        launches[0].variant.run_ranks_on_cpu(launches[0].grid, launches[0].block,
                                              [each.values for each in launches])

    def came(self, rank: int, of: int, direction: Direction = Direction.DISPATCH) -> bool:
        """Whether the window of a rank has a row of another one."""
        layout = self.transports[rank].layout
        piece = layout.returned if direction == Direction.RETURN else layout.data
        rows = self.transports[rank].array(piece)[of * TOKENS:][:TOKENS]
        return bool((rows == 1 + of).all(1).any())


@contextmanager
def exchanges() -> Iterator[Exchanges]:
    def made(world: Any) -> tuple[ExpertParallel, Any]:
        ep = ExpertParallel(world, num_experts=RANKS, max_tokens=TOKENS, hidden=HIDDEN, topk=1, align=1,
                            recipe=None, dtype=np.float32, like=np)
        return ep, ep.route((np.arange(TOKENS) % RANKS)[:, None])

    with testing.executor("host"):
        found = Exchanges(of_ranks(RANKS, made))
        yield found
        for ep in found.parallel:
            ep._transport = None
        fp8.device_errors(clear=True)


def test_a_rank_that_does_not_come_is_named_by_all_others():
    with exchanges() as e:
        e.run(Direction.DISPATCH, 0, 2)
        assert [e.transports[rank].late.ranks() for rank in range(RANKS)] == [[1], [], [1]]
        assert fp8.device_errors() == LATE
        for rank in (0, 2):
            with pytest.raises(RankError, match="rank 1 did not come to an exchange in time") as caught:
                e.parallel[rank].route(np.zeros((1, 1), np.int32))
            assert caught.value.ranks == (1,)
            with pytest.raises(RankError, match="unusable since a rank did not come: rank 1 did not come"):
                e.parallel[rank].check()


def test_after_a_failure_nothing_is_sent():
    with exchanges() as e:
        e.run(Direction.DISPATCH, 0, 2)
        e.run(Direction.RETURN, 0)
        assert not e.came(2, of=0, direction=Direction.RETURN)
        e.run(Direction.RETURN, 0, 1, 2)
        assert not e.came(0, of=0, direction=Direction.RETURN)
        assert e.came(0, of=1, direction=Direction.RETURN), "rank 1 knows of nothing"


def test_a_window_in_use_is_not_written():
    """Two exchanges of one direction in a row: a rank that has not begun the second one may still read."""
    with exchanges() as e:
        e.run(Direction.DISPATCH)
        assert e.came(1, of=0)
        e.x[0][:] = 7
        e.run(Direction.DISPATCH, 0)
        assert e.came(1, of=0), "what rank 1 may still read has changed"
        assert e.transports[0].late.ranks() == [1, 2]


def test_ranks_that_begin_together_may_repeat_a_direction():
    with exchanges() as e:
        for _ in range(3):
            e.run(Direction.DISPATCH)
        assert all(e.came(rank, of=other) for rank in range(RANKS) for other in range(RANKS))
        assert not fp8.device_errors()


def test_an_exchange_between_frees_a_window():
    """So no rank waits for the others to begin."""
    with exchanges() as e:
        e.run(Direction.DISPATCH)
        e.run(Direction.RETURN)
        bits(e.transports[1].array(e.transports[1].layout.data)).fill(0)
        e.run(Direction.DISPATCH, 0)
        assert e.came(1, of=0)


@pytest.mark.parametrize("name", ["float32, exact", "blocks"])
def test_exchanges_alone(name):
    """What runs under ThreadSanitizer: other kernels have more blocks than it has threads."""
    check_on_cpu(NAMED[name], 4, "reference", repeats=1)
