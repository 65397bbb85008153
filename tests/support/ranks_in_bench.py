"""Rows of `bench dispatch` on NumPy arrays: tiny sizes, and clocks of the test."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cupy_fp8.bench import ranks as timing
from cupy_fp8.bench import steps
from cupy_fp8.bench.moe import dispatch_given
from cupy_fp8.bench.ranks import Ranks
from cupy_fp8.distributed import World, local

TINY = dispatch_given.Sizes(sent=(5,), tokens=12, forward=(6,), steps=(6,), experts=4, weak=2, topk=2,
                            hidden=128, inner=128)
BOTH = ("p2p", "nccl")              # NumPy arrays have a transport of their own in place of either


class Ticks:
    """A clock on which a step takes `us`, and the host 10 µs between two readings."""

    def __init__(self, us: float = 1.0) -> None:
        self.step, self.now, self.host, self.log = us, 0.0, 0.0, list[str]()

    def mark(self) -> float:
        self.now += self.step
        return self.now

    def us(self, start: float, stop: float) -> float:
        return stop - start

    def host_us(self) -> float:
        self.host += 10
        return self.host

    def wait(self) -> None:
        self.log.append("wait")

    def pause(self, seconds: float) -> None:
        self.log.append("pause")

    def delay(self, us: float) -> None:
        self.log.append(f"delay {us:.0f}")


def between(size: int, rows: Any, sizes: dispatch_given.Sizes = TINY) -> list[dict[str, Any]]:
    """Return rank 0's rows, after checking what must be equal on all ranks."""
    def run(world: World) -> list[dict[str, Any]]:
        return list(rows(Ranks(world, Ticks(), None, np, 2), sizes, BOTH))

    first, *others = local(size).run(run)
    for other in others:
        assert other == first
    json.dumps(first)
    return first


def take_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a measurement take one step."""
    for name, value in (("_WARM", 1), ("_FIRST", 1), ("_FEWEST", 1), ("_MOST", 1)):
        monkeypatch.setattr(timing, name, value)
    monkeypatch.setattr(steps, "_REPEATS", 1)
