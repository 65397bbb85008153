"""Two micro-batches through the layer of experts over ranks: one by one, and with the exchanges of each
beside what the experts compute for the other one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ...arrays import Array
from ...distributed.expert_parallel import TransportName
from ..ranks import Ranks
from .dispatch import beside, group, same_bytes, timed
from .dispatch_given import Destinations, Sizes, Way, uniform
from .dispatch_layer import Fp8, Task, connected, rate
from .layer import problem
from .layer_rows import Row

#: multiprocessors for exchanges
_NUM_SMS = 32
_BATCHES = 2
#: Tokens of two other slots each, four times as many: a rank of two then sends about as many bytes to others
#: as one of eight ranks does.
_AWAY_SLOTS, _AWAY_TOKENS = 2, 4


class Side:
    """A stream beside the current one. Without streams work is done at once."""

    def __init__(self, ranks: Ranks) -> None:
        self._main = ranks.stream
        if self._main is not None:
            self._stream = ranks.xp.cuda.Stream(non_blocking=True, priority=-1)

    def run(self, work: Callable[[], Any]) -> Any:
        """Enqueue work behind what the current stream has so far, and return what `wait` takes."""
        if self._main is None:
            return work()
        self._stream.wait_event(self._main.record())
        with self._stream:
            work()
        return self._stream.record()

    def wait(self, done: Any) -> None:
        """Let the current stream wait for work."""
        if self._main is not None:
            self._main.wait_event(done)


def one_by_one(batches: Sequence[Fp8]) -> None:
    for batch in batches:
        batch.both()


def overlapped(batches: Sequence[Fp8], side: Side) -> None:
    """Run the same steps with all exchanges on the side (docs/several-gpus.md)."""
    came = [side.run(batch.send) for batch in batches]
    for i, batch in enumerate(batches):
        side.wait(came[i])
        batch.compute()
        came[i] = side.run(partial(_turn, batch))
    for batch, grads in zip(batches, came, strict=True):
        batch.on_rows = lambda *of_rows, batch=batch: side.run(partial(batch.collect_back, *of_rows))
        side.wait(grads)
        batch.compute_back()
        batch.on_rows = None
    side.wait(side.run(lambda: None))


def _turn(batch: Fp8) -> None:
    batch.collect()
    batch.send_back()


# ---- rows ----
def overlap_rows(ranks: Ranks, sizes: Sizes, transports: Sequence[TransportName]) -> Iterator[Row]:
    """Yield times of two micro-batches of the first size of steps: to any experts, and to those of other
    ranks."""
    tokens, experts = sizes.steps[0], sizes.weak * ranks.world.size
    yield from _rows(ranks, sizes, transports[:1], Task(tokens, experts, True))
    if ranks.world.size > 1:
        yield from _rows(ranks, sizes._replace(topk=_AWAY_SLOTS), transports[:1],
                         Task(_AWAY_TOKENS * tokens, experts, True), away=_AWAY_SLOTS)


def _rows(ranks: Ranks, sizes: Sizes, transports: Sequence[TransportName], task: Task, **away: int
          ) -> Iterator[Row]:
    to = [uniform(ranks, task.tokens, task.experts, sizes.topk, away=bool(away), seed=batch)
          for batch in range(_BATCHES)]
    for name in transports:
        way, first = Way(name, True), list[Array]()
        yield from group(ranks, "two micro-batches", task.size | away, [
            (f"{name} {kind}", partial(_timed, ranks, sizes, way, task, to, first, num_sms, together))
            for kind, num_sms, together in (("serial", None, False), ("overlap", None, True),
                                            (f"{_NUM_SMS} SMs", _NUM_SMS, True))])


def _timed(ranks: Ranks, sizes: Sizes, way: Way, task: Task, to: Sequence[Destinations], first: list[Array],
           num_sms: int | None, together: bool) -> Row:
    with connected(ranks, sizes, way, task, num_sms=num_sms) as ep:
        batches: list[Fp8] = []
        for i, chosen in enumerate(to):
            given = problem(task.shape(ranks, sizes), ranks.xp, seed=ranks.world.rank + i * ranks.world.size)
            batches.append(Fp8(ep, given, chosen.own, task, batches[0].experts if batches else None))
        del given
        step = partial(overlapped, batches, Side(ranks)) if together else partial(one_by_one, batches)
        step()
        results = tuple(a for batch in batches for a in batch.results)
        row = timed(ranks, step, same_bytes(ranks, lambda: results))
        row["checks"] |= beside(ranks, results, first)
    return row | rate(row, ranks, sizes, task, _BATCHES)
