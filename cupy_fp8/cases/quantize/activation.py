"""Cases of activations with quantisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ... import reference
from ...formats import (
    FORMATS,
    FP8_DTYPES,
    INPUT_DTYPES,
    bfloat16,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
)
from ...ops.quantize import activation
from ...options import BLOCK_PROFILES, BLOCK_SCALE_LAYOUTS, MX_PROFILES, MX_SCALE_LAYOUTS
from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling
from ..base import DIRECTIONS, TIMED_MATRICES, TIMED_MATRIX, Case, maker, source
from ..registry import Arguments, Registration, Timed, register

_BOTH = DIRECTIONS[2]
_DELAYED: dict[str, Any] = {"recipe": DelayedScaling(), "scale": 0.37, "amax": 0.0}
_RECIPES: tuple[dict[str, Any], ...] = (
    _DELAYED, {"recipe": CurrentScaling(), "amax": 0.0}, {"recipe": BlockScaling()}, {"recipe": MXScaling()})
#: One tile or several, tails of every kind, rows with and without wide accesses, or no elements.
_SHAPES = ((1, 1), (1, 3), (0, 8), (5, 0), (0, 0), (3, 37), (16, 8), (130, 257), (144, 136), (129, 264),
           (300, 16))


def _inputs(case: Case) -> Arguments:
    options = dict(case.options)
    if isinstance(options.get("scale"), tuple):                 # A GPU reads it from an array.
        options["scale"] = np.array(options["scale"], np.float32)
    if "amax" in options:
        options["amax"] = np.full(1, options["amax"], np.float32)
    return (source(case), options.pop("recipe")), options


def _backward_inputs(case: Case) -> Arguments:
    (x, recipe), options = _inputs(case)
    return (source(case, 3), x, recipe), options


def _cases(op: str) -> Iterator[Case]:
    for kind in activation.ACTIVATIONS:
        yield from _cases_of(partial(maker(op), kind=kind))


def _cases_of(case: Callable[..., Case]) -> Iterator[Case]:
    # The first cases launch every kernel on a few blocks, for callers that take only a few cases.
    for recipe, shape in product(_RECIPES, ((70, 104), (35, 57))):
        yield case(bfloat16, shape, "normal", **recipe, **_BOTH)
    for dtype, to in product(INPUT_DTYPES, FP8_DTYPES):
        scale = {"scale": 3.5}
        for x, shape in (("bits", (144, 264)), ("edges", (67, 101))):
            yield case(dtype, shape, x, recipe=DelayedScaling(to), **scale, **_BOTH)
            yield case(dtype, shape, x, recipe=CurrentScaling(to, 1e-3, pow2_scale=True), **_BOTH)
            yield case(dtype, shape, x, recipe=BlockScaling(dtype=to), **_BOTH)
            yield case(dtype, shape, x, recipe=BlockScaling(dtype=to, profile="vllm"), **_BOTH)
            yield case(dtype, shape, x, recipe=MXScaling(to), **_BOTH)
    for recipe in _RECIPES:
        for directions in DIRECTIONS[:3]:
            yield case(bfloat16, (150, 272), "edges", **recipe, **directions)
            yield case(float32, (133, 136), "edges", **recipe, **directions)
            yield case(float16, (48, 64), "normal", "offset", **recipe, **directions)
            yield case(float16, (48, 64), "normal", "strided", **recipe, **directions)
            yield case(bfloat16, (700, 72), "bits", **recipe, **directions)
        for shape in _SHAPES:
            yield case(bfloat16, shape, "normal", **recipe, **_BOTH)
    # Codes of eight bits hide roundings that the amax of short rows shows.
    for row in range(12):
        yield case(float32, (1, 1 + row), "normal", **_DELAYED)
    yield from _scale_cases(case)


def _scale_cases(case: Callable[..., Case]) -> Iterator[Case]:
    """Cases of every profile and layout of scales."""
    profiles: Any = BLOCK_PROFILES
    for profile, layout, block in product(profiles, BLOCK_SCALE_LAYOUTS, ((1, 128), (1, 64), (1, 32))):
        blocks = BlockScaling(block, profile=profile, scale_layout=layout)
        yield case(bfloat16, (133, 136), recipe=blocks, **_BOTH)
        yield case(bfloat16, (133, 145), recipe=blocks, **_BOTH)
    for mx_profile, mx_layout in product(MX_PROFILES, MX_SCALE_LAYOUTS):
        for shape, to in (((133, 136), float8_e4m3fn), ((133, 145), float8_e5m2)):
            yield case(bfloat16, shape, recipe=MXScaling(to, profile=mx_profile, scale_layout=mx_layout),
                       **_BOTH)


def _timed(op: str) -> Iterator[Timed]:
    delayed: dict[str, Any] = {"recipe": DelayedScaling(), "scale": (4.0,)}
    rows = {"per tensor": delayed, "1×128": {"recipe": BlockScaling()}, "MX": {"recipe": MXScaling()}}

    def timed(kind: str, label: str, shape: tuple[int, int], dtype: Any = bfloat16, **options: Any) -> Timed:
        case = maker(op, "normal")(dtype, shape, kind=kind, **options)
        return Timed(f"{kind} {FORMATS[dtype].tag}→e4m3 {label}", case)

    for kind in activation.ACTIVATIONS:
        for shape, (name, recipe) in product(TIMED_MATRICES, rows.items()):
            yield timed(kind, f"{name} row", shape, **recipe)
            yield timed(kind, f"{name} both", shape, **recipe, **_BOTH)
        yield timed(kind, "current row", TIMED_MATRIX, recipe=CurrentScaling(pow2_scale=True))
        for dtype in (float32, float16):
            yield timed(kind, "per tensor row", TIMED_MATRIX, dtype, **delayed)


register(
    Registration("activation_quantize", activation.activation_quantize, reference.activation_quantize,
                 _inputs, lambda: _cases("activation_quantize"), "an activation (silu), quantised",
                 programs=(activation.variants,), timed=lambda: _timed("activation_quantize")),
    Registration("activation_backward_quantize", activation.activation_backward_quantize,
                 reference.activation_backward_quantize, _backward_inputs,
                 lambda: _cases("activation_backward_quantize"), "the gradient of an activation, quantised",
                 programs=(activation.variants,), timed=lambda: _timed("activation_backward_quantize")),
)
