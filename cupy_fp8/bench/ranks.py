"""Measures the time of a step that several ranks run together.

All ranks make the same calls: their number is computed from times that all ranks share. The hosts synchronise
before each burst, and one untimed step synchronises the GPUs. The time is that of the slowest rank, the
median of bursts. The queue is filled behind a delay on the device, so that the host counts only where a step
waits for the GPU (NCCL's counts); its time is reported separately. Arrays are the same each time, as windows
are.
"""

from __future__ import annotations

import statistics
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..distributed import World
from .measure import Call
from .steps import Clock

_WARM, _FIRST = 3, 3
_FEWEST, _MOST = 3, 50              # steps of a burst
_BURST_US, _PAUSE = 10_000.0, 0.05
_DELAY_US, _MOST_DELAY_US = 200.0, 50_000.0


class RankTime(NamedTuple):
    """Microseconds of a step on the slowest rank, their spread ((max - min) / median of the bursts, in
    percent), and the microseconds of the slowest host to enqueue it."""

    us: float
    spread: float
    host_us: float


@dataclass(frozen=True)
class Ranks:
    """One rank's view of a measurement. stream: the current one; None: there are no graphs. xp: CuPy, or
    NumPy."""

    world: World
    clock: Clock
    stream: Any
    xp: Any
    bursts: int = 8

    def slowest(self, times: Sequence[float]) -> list[float]:
        """Return each time's maximum over the ranks."""
        packed = struct.Struct(f"!{len(times)}d")
        return [max(of_ranks) for of_ranks in zip(*map(packed.unpack, self.world.gather(packed.pack(*times))),
                                                  strict=True)]

    def middle(self, times: Sequence[float]) -> list[float]:
        """Return each time's median over the ranks."""
        packed = struct.Struct(f"!{len(times)}d")
        return [statistics.median(of_ranks) for of_ranks in
                zip(*map(packed.unpack, self.world.gather(packed.pack(*times))), strict=True)]

    def all(self, right: bool) -> bool:
        """Whether this holds on every rank."""
        return all(each == b"\1" for each in self.world.gather(bytes([right])))

    def problem(self, own: str | None) -> str | None:
        """Return the problem of the first rank that has one, or None."""
        said = [text.decode() for text in self.world.gather((own or "").encode())]
        return next((f"rank {rank}: {text}" for rank, text in enumerate(said) if text), None)

    def time(self, step: Call, *, queued: bool = True) -> RankTime:
        """Time a step. queued: behind a delay. Otherwise the host's time counts where it is longer, as for a
        program that does nothing else."""
        self.world.gather()
        for _ in range(_WARM):
            step()
        self.clock.wait()
        us, host_us = self.slowest(self._burst(step, _FIRST, 0.0))
        steps = max(_FEWEST, min(_MOST, int(_BURST_US / max(1.0, us))))
        delay = min(_MOST_DELAY_US, _DELAY_US + (steps + 1) * host_us) if queued else 0.0
        own: list[float] = []
        for _ in range(self.bursts):
            self.clock.pause(_PAUSE)
            own += self._burst(step, steps, delay)
        times = self.slowest(own)
        device, host = times[::2], times[1::2]
        median = statistics.median(device)
        return RankTime(median, (max(device) - min(device)) / median * 100, statistics.median(host))

    def _burst(self, step: Call, steps: int, delay: float) -> tuple[float, float]:
        """Return this rank's microseconds of a step, and its host's."""
        clock = self.clock
        self.world.gather()
        if delay:
            clock.delay(delay)
        step()
        start, began = clock.mark(), clock.host_us()
        for _ in range(steps):
            step()
        ended, stop = clock.host_us(), clock.mark()
        clock.wait()
        return clock.us(start, stop) / steps, (ended - began) / steps
