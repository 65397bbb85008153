"""Measures times.

CUDA events enclose many back-to-back calls. A delay on the device comes before them, so that gaps between
launches on the host do not count. The calls rotate over more buffers than fit into the L2 cache. The time is
the median of repeats, and a device copy of the same bytes is timed in the same way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .. import backend
from ..kernels import Kernel

DELAY = Kernel("bench/delay", "delay", block=1).variant()
_ROTATE_BYTES = 512 << 20       # well past the 60 MB L2 of an H200
_REPEATS = 21
_HOST_CALLS, _HOST_REPEATS = 400, 15
_HOST_US_PER_CALL = 40          # no call takes longer: the delay covers the host time of all calls


Call = Callable[[], Any]
Check = Callable[[], None]


@dataclass(frozen=True)
class Spec:
    """One row of the benchmark. moved: the bytes that a call must move, or a function that returns them.
    make() allocates inputs and outputs and returns (call, check): the call to time, and a function that
    compares what it wrote with the reference. flops: of a product."""

    op: str
    label: str
    shape: tuple[int, ...]
    moved: int | Callable[[], int]
    make: Callable[[], tuple[Call, Check]]
    flops: int = 0

    @cached_property
    def traffic(self) -> int:
        """The bytes that a call must move."""
        return self.moved() if callable(self.moved) else self.moved


@dataclass(frozen=True)
class Measurement:
    """Times in microseconds. spread: (max - min) / median of the repeats' times, in percent.

    share: time of a device copy of the same total bytes / time of the op, both measured in this process.
    """

    us: float
    spread: float
    traffic: int
    copy_us: float

    @property
    def gb_per_s(self) -> float:
        return self.traffic / self.us / 1e3

    @property
    def share(self) -> float:
        return self.copy_us / self.us


def measure(make: Callable[[], tuple[Call, Check]], traffic: int) -> Measurement:
    """Time a call. make() returns a call over new buffers, and a check of what it wrote, which runs after the
    timing. traffic: the bytes that one call must move."""
    made = [make() for _ in range(_sets(traffic))]
    us, spread = _median_us([call for call, _ in made])
    for _, check in (made[0], made[-1]):
        check()
    del made
    return Measurement(us, spread, traffic, copy_us(traffic))


def copy_us(traffic: int) -> float:
    """Return the time of a device-to-device copy that reads traffic / 2 bytes and writes as many."""
    cp = backend.cupy()
    half = max(traffic // 2, 16)

    def make() -> Call:
        source, target = cp.empty(half, cp.uint8), cp.empty(half, cp.uint8)
        source.data.memset_async(1, half)
        return lambda: target.data.copy_from_device_async(source.data, half)

    return _median_us([make() for _ in range(_sets(traffic))])[0]


def host_us(call: Call) -> float:
    """Return the wall time of enqueueing a call, over hundreds of calls, before any synchronisation. The
    minimum of repeats, since other work of the host only adds to it."""
    cp = backend.cupy()
    best = float("inf")
    for _ in range(_HOST_REPEATS):
        for _ in range(20):
            call()
        cp.cuda.get_current_stream().synchronize()
        start = time.perf_counter()
        for _ in range(_HOST_CALLS):
            call()
        best = min(best, time.perf_counter() - start)
        cp.cuda.get_current_stream().synchronize()
    return best / _HOST_CALLS * 1e6


def graph_us(make: Callable[[], tuple[Call, Check]], traffic: int) -> float:
    """Return the time per call when a graph of calls over rotating buffers is replayed."""
    cp = backend.cupy()
    calls = [make()[0] for _ in range(_sets(traffic))]
    for call in calls:
        call()
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        return _median_us([lambda: graph.launch(stream)] * 3)[0] / len(calls)


def _sets(traffic: int) -> int:
    return min(200, max(2, -(-_ROTATE_BYTES // max(traffic, 1))))


def _median_us(calls: list[Call]) -> tuple[float, float]:
    cp = backend.cupy()
    anchor = cp.empty(1, cp.uint8)
    for call in calls * (1 if len(calls) > 5 else 3):
        call()
    stream = cp.cuda.get_current_stream()
    stream.synchronize()
    rounds = max(1, -(-10 // len(calls)))
    start, stop = cp.cuda.Event(), cp.cuda.Event()
    times = []
    for _ in range(_REPEATS):
        delay_us = 200 + _HOST_US_PER_CALL * rounds * len(calls)
        DELAY.bind(anchor, 1, nanoseconds=1000 * delay_us).run()
        start.record()
        for _ in range(rounds):
            for call in calls:
                call()
        stop.record()
        stop.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, stop) * 1e3 / (rounds * len(calls)))
    median = statistics.median(times)
    return median, (max(times) - min(times)) / median * 100
