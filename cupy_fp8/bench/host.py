"""Host time per call on tiny arrays, and its ratio to a bare launch of a `cupy.RawKernel`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .. import backend
from ..arrays import asarray
from ..cases import OPS, HostCalls
from ..formats import bfloat16
from .generic import smallest_calls
from .measure import Call, host_us

BARE = "bare RawKernel launch, four arguments"


class HostTime(NamedTuple):
    """Microseconds per call, and their ratios to those of a bare launch."""

    name: str
    out: float
    out_ratio: float
    allocating: float | None
    allocating_ratio: float | None


def measured(ops: Sequence[str]) -> Iterator[HostTime]:
    """Yield the host times of ops, after that of a bare launch. The bare launch is timed again beside each of
    them, since the speed of a shared host changes within seconds."""
    launch = bare_launch()
    yield HostTime(BARE, host_us(launch), 1.0, None, None)
    for name, calls in all_calls(ops):
        bare = host_us(launch)
        out, allocating = host_us(calls.with_out), calls.allocating and host_us(calls.allocating)
        yield HostTime(name, out, out / bare, allocating, allocating and allocating / bare)


def bare_launch() -> Call:
    """Return a launch of an empty kernel with CuPy alone: the cost of a launch without this library."""
    cp = backend.cupy()
    code = 'extern "C" __global__ void bare(float* a, float* b, long long n, float s) {}'
    kernel = cp.RawKernel(code, "bare")
    a, b, n, s = cp.zeros(16, cp.float32), cp.zeros(16, cp.float32), cp.int64(16), cp.float32(1)
    return lambda: kernel((1,), (128,), (a, b, n, s))


def all_calls(ops: Sequence[str]) -> Iterator[tuple[str, HostCalls]]:
    """Yield the calls of ops, with the names of their rows."""
    x = asarray(backend.cupy().zeros((16, 16), backend.cupy().float32), bfloat16)
    for op in map(OPS.__getitem__, ops):
        for calls in op.host_calls(x) if op.host_calls else [smallest_calls(op)]:
            yield f"{op.name} {calls.label}".rstrip(), calls
