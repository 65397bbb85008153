"""Measures the time of a step of many calls.

A GPU at its power limit slows down, so bursts of steps have pauses between them, and the time of a step is
the median over the bursts. The times of its calls come from events around each of them. A delay on the device
comes before such a step, so that the host's time does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from .. import backend
from ..moe.step import Calls
from .measure import DELAY, Call

_BURSTS, _STEPS, _PAUSE = 8, 3, 0.15
_BURST_US = 10_000.0            # approximate length of a burst of short steps
_REPEATS, _SHORT_PAUSE = 5, 0.1
_DELAY_US = 20_000.0            # most host time to enqueue a step with events


class Clock(Protocol):
    """A source of times. A mark is a point in the order of the device's work."""

    def mark(self) -> Any: ...
    def us(self, start: Any, stop: Any) -> float: ...
    def host_us(self) -> float: ...
    def wait(self) -> None: ...
    def pause(self, seconds: float) -> None: ...
    def delay(self, us: float) -> None: ...


class Events:
    """CUDA events on a stream, which is the current one."""

    def __init__(self, stream: Any) -> None:
        cp = backend.cupy()
        self._cuda, self._stream, self._anchor = cp.cuda, stream, cp.empty(1, cp.uint8)

    def mark(self) -> Any:
        event = self._cuda.Event()
        event.record(self._stream)
        return event

    def us(self, start: Any, stop: Any) -> float:
        return float(self._cuda.get_elapsed_time(start, stop)) * 1e3

    def host_us(self) -> float:
        return time.perf_counter() * 1e6

    def wait(self) -> None:
        self._stream.synchronize()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def delay(self, us: float) -> None:
        DELAY.bind(self._anchor, 1, nanoseconds=int(1000 * us)).run()


class StepTime(NamedTuple):
    """Microseconds of a step on the device, their spread ((max - min) / median of the bursts, in percent),
    and the host's microseconds to enqueue it."""

    us: float
    spread: float
    host_us: float


def step_time(step: Call, clock: Clock) -> StepTime:
    """Return the time of a step in bursts, which have more steps the shorter these are."""
    for _ in range(_STEPS):
        step()
    clock.wait()
    start = clock.mark()
    for _ in range(_STEPS):
        step()
    stop = clock.mark()
    clock.wait()
    steps = max(_STEPS, int(_BURST_US / max(1.0, clock.us(start, stop) / _STEPS)))
    device, host = [], []
    for _ in range(_BURSTS):
        clock.pause(_PAUSE)
        start = clock.mark()
        began = clock.host_us()
        for _ in range(steps):
            step()
        ended = clock.host_us()
        stop = clock.mark()
        clock.wait()
        device.append(clock.us(start, stop) / steps)
        host.append((ended - began) / steps)
    median = statistics.median(device)
    return StepTime(median, (max(device) - min(device)) / median * 100, statistics.median(host))


def call_times(step: Call, clock: Clock) -> dict[str, float]:
    """Return the microseconds of a step's calls on the device, by name and in order: medians over some steps.
    Calls that share a name are summed."""
    found: dict[str, list[float]] = {}
    for _ in range(_REPEATS):
        clock.pause(_SHORT_PAUSE)
        clock.delay(_DELAY_US)
        with marked_calls(clock) as marks:
            step()
        clock.wait()
        of_step: dict[str, float] = {}
        for name, start, stop in marks:
            of_step[name] = of_step.get(name, 0) + clock.us(start, stop)
        for name, us in of_step.items():
            found.setdefault(name, []).append(us)
    return {name: statistics.median(times) for name, times in found.items()}


@contextmanager
def marked_calls(clock: Clock) -> Iterator[list[tuple[str, Any, Any]]]:
    """Record for every call of a step, within this context, its name and the marks before and after it."""
    plain = Calls.__call__
    marks: list[tuple[str, Any, Any]] = []

    def marked(self: Calls, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = clock.mark()
        made = plain(self, name, function, *args, **options)
        marks.append((name, start, clock.mark()))
        return made

    Calls.__call__ = marked             # type: ignore[method-assign]
    try:
        yield marks
    finally:
        Calls.__call__ = plain          # type: ignore[method-assign]
