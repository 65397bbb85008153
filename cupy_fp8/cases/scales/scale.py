"""Cases of compute_scale and of delayed scaling."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, zeros
from ...formats import FP8_DTYPES, float8_e4m3fn, float8_e5m2, float32
from ...ops.scales import scale
from ...recipes import DelayedScaling
from ...state import DelayedScalingState
from ..base import MATRIX, SHAPES, Case, array_alone, maker, nbytes, source, values
from ..registry import Arguments, HostCalls, Registration, Timed, register


def _cases() -> Iterator[Case]:
    case = maker("compute_scale")
    for to in FP8_DTYPES:
        for pow2 in (False, True):
            for kind in ("bits", "edges", "normal"):
                yield case(float32, MATRIX, kind, dtype=to, pow2_scale=pow2)
            # margins that make large scales overflow, small ones subnormal or 0, and the target itself Inf or
            # 0
            for margin in (1, -3, -130, 12, 140, 1 << 40):
                yield case(float32, (9, 64), "edges", dtype=to, pow2_scale=pow2, margin=margin)
    for eps in (2.0**-149, 1e-39, 1e-12, 0.1, 3e38):
        for kind in ("bits", "edges"):
            yield case(float32, (9, 64), kind, eps=eps)
    for shape in SHAPES:
        yield case(float32, shape, pow2_scale=True)
    for layout in ("offset", "strided"):
        yield case(float32, (40, 72), "bits", layout)


def _timed() -> Iterator[Timed]:
    case = maker("compute_scale", "normal")
    for shape in ((1, 512), (4096, 4096)):
        yield Timed("f32", case(float32, shape))


def _update_inputs(case: Case) -> Arguments:
    """The case's array is the history; a third of the tensors have a zero in its row 0, half in the
    reduced amax."""
    options = dict(case.options)
    history, n = source(case), case.shape[1]
    history[:1, ::3] = 0
    previous = values("edges" if case.values == "edges" else "normal", (n,), float32, 1)
    reduced = options.pop("amax", None)
    if reduced is not None:
        options["amax"] = values(reduced, (n,), float32, 2)
        options["amax"][::2] = 0
    return (history, previous), options


def _update_cases() -> Iterator[Case]:
    case = maker("update_delayed_scaling")
    e4m3: dict[str, Any] = {"dtype": float8_e4m3fn}
    e5m2: dict[str, Any] = {"dtype": float8_e5m2}
    for algo in ("max", "most_recent"):
        for reduced in (None, "bits", "edges", "normal"):
            for kind in ("bits", "edges", "normal"):
                for length in (1, 2, 3, 19):
                    yield case(float32, (length, 131), kind, **e4m3, algo=algo, amax=reduced)
    # Columns take one round of loads or several, and row segments have one row or many. Blocks of every
    # number of columns, with tails of each.
    for shape in ((1, 1), (2, 1), (16, 512), (1024, 1), (1025, 2), (513, 3), (700, 5), (1030, 17), (6000, 1),
                  (9001, 3), (300, 70),
                  (16, 0)):
        for reduced in (None, "normal"):
            yield case(float32, shape, "normal", **e5m2, amax=reduced)
    for margin in (2, -130, 150):
        yield case(float32, (4, 70), "edges", **e5m2, margin=margin)
    yield case(float32, (40, 70), "normal", "offset", **e4m3)


def _timed_update() -> Iterator[Timed]:
    case = maker("update_delayed_scaling", "normal")
    for shape in ((16, 512), (1024, 1), (1024, 10_000)):
        yield Timed("history × tensors", case(float32, shape, dtype=float8_e4m3fn))
        yield Timed("history × tensors, reduced amax",
                    case(float32, shape, dtype=float8_e4m3fn, amax="normal"))


def _update_moves(arguments: Arguments, written: dict[str, np.ndarray]) -> int:
    """The history is read and written. The scales of each tensor are not counted."""
    return 2 * nbytes(written["history"])


def _host_calls(x: Array) -> Iterator[HostCalls]:
    yield HostCalls.both("", scale.compute_scale, zeros(1, float32, like=x))


def _host_calls_of_update(x: Array) -> Iterator[HostCalls]:
    """Yield calls that update a state, as training does."""
    amax = zeros(1, float32, like=x)
    state = DelayedScalingState(1, DelayedScaling(history_len=16), like=amax)
    yield HostCalls("", state.update)
    yield HostCalls("+amax", functools.partial(state.update, amax))


register(
    Registration("compute_scale", scale.compute_scale, reference.compute_scale, array_alone, _cases,
                 "the scale that an amax calls for",
                 programs=(scale.variants,), timed=_timed, host_calls=_host_calls),
    Registration("update_delayed_scaling", scale.update_delayed_scaling, reference.update_delayed_scaling,
                 _update_inputs, _update_cases,
                 "rolls amax histories and finds the next scales",
                 programs=(scale.variants,), updates=("history", "scale"),
                 timed=_timed_update, moves=_update_moves, host_calls=_host_calls_of_update),
)
