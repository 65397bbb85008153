"""Cases of activations with quantisation. Shapes are x's; options of gated kinds are as in swiglu.py."""

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
from ...ops.quantize import activation, bias_gradient
from ...options import BLOCK_PROFILES, BLOCK_SCALE_LAYOUTS, MX_PROFILES, MX_SCALE_LAYOUTS
from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling
from ..base import DIRECTIONS, TIMED_MATRICES, TIMED_MATRIX, Case, maker, source
from ..registry import Arguments, Registration, Timed, register
from .swiglu import MOVES, inputs, timed_row
from .swiglu import backward_inputs as gated_backward_inputs

_BOTH = DIRECTIONS[2]
_DELAYED: dict[str, Any] = {"recipe": DelayedScaling(), "scale": 0.37, "amax": 0.0}
_RECIPES: tuple[dict[str, Any], ...] = (
    _DELAYED, {"recipe": CurrentScaling(), "amax": 0.0}, {"recipe": BlockScaling()}, {"recipe": MXScaling()})
_GATED_OPTIONS: tuple[dict[str, Any], ...] = (
    {"bias": "normal"}, {"clamp": 0.75}, {"interleaved": True},
    {"bias": "normal", "experts": 3, "narrow": True},
    {"clamp": 7.0, "interleaved": True, "probs": "edges", "bias": "normal", "experts": 5})
#: one tile or several, tails of every kind, rows with and without wide accesses, or no elements
_SHAPES = ((1, 1), (1, 3), (0, 8), (5, 0), (0, 0), (3, 37), (16, 8), (130, 257), (144, 136), (129, 264),
           (300, 16))


def _backward_inputs(case: Case) -> Arguments:
    if case.options["kind"] in activation.GATED:
        return gated_backward_inputs(case)
    (x, recipe), options = inputs(case)
    return (source(case, 3), x, recipe), options


def _alone(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For gated kinds without probs return the gradient of x alone, since the checks compare arrays."""
    def run(*args: Any, **options: Any) -> Any:
        if options["kind"] not in activation.GATED or "probs" in options:
            return backward(*args, **options)
        if options.get("out") is not None:
            options["out"] = options["out"], None
        return backward(*args, **options)[0]

    return run


def _cases(op: str) -> Iterator[Case]:
    yield from _cases_of_silu(partial(maker(op), kind="silu"))
    for kind in activation.UNARY[1:]:
        yield from _cases_of(partial(maker(op), kind=kind))
    for gated in activation.GATED:
        yield from _gated_cases(partial(maker(op), kind=gated))


def _cases_of(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield cases of every program, and of what depends on the activation."""
    for recipe, shape in product(_RECIPES, ((70, 104), (35, 57))):
        yield case(bfloat16, shape, "normal", **recipe, **_BOTH)
    for i, (dtype, to) in enumerate(product(INPUT_DTYPES, FP8_DTYPES)):
        recipes = _of_type(to)
        yield case(dtype, (144, 264), "bits", **recipes[i % 4], **_BOTH)
        yield case(dtype, (67, 101), "edges", **recipes[(i + 1) % 4], **_BOTH)
    for how in (*_of_type(FP8_DTYPES[0]), *_of_type(FP8_DTYPES[1])):
        yield case(bfloat16, (24, 136), "edges", **how)
    # 8-bit codes hide rounding differences that the amax of short rows shows
    for row in range(10):
        yield case(float32, (1, 1 + row), "normal", **_DELAYED)


def _gated_cases(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield cases of every program, and of every option on each path."""
    for recipe in _RECIPES:
        yield case(bfloat16, (50, 512), "normal", **recipe, probs="normal", **_BOTH)
        yield case(bfloat16, (133, 512), "edges", **recipe)
        yield case(bfloat16, (35, 54), "bits", **recipe, probs="edges", **_BOTH)
    for i, (dtype, to) in enumerate(product(INPUT_DTYPES, FP8_DTYPES)):
        recipes = _of_type(to)
        yield case(dtype, (144, 528), "bits", **recipes[i % 4], **_BOTH)
        yield case(dtype, (67, 202), "edges", **recipes[(i + 1) % 4], **_BOTH)
    for i, options in enumerate(_GATED_OPTIONS):
        yield case(bfloat16, (40, 272), "edges", **_RECIPES[i % 4], **options, **_BOTH)
        yield case(float32, (37, 54), "normal", **_RECIPES[(i + 1) % 4], **options, **_BOTH)
    for row in range(6):
        yield case(float32, (1, 2 + 2 * row), "normal", **_DELAYED)


def _of_type(to: np.dtype[Any]) -> tuple[dict[str, Any], ...]:
    return ({"recipe": DelayedScaling(to), "scale": 3.5}, {"recipe": BlockScaling(dtype=to)},
            {"recipe": BlockScaling(dtype=to, profile="vllm")}, {"recipe": MXScaling(to)})


def _cases_of_silu(case: Callable[..., Case]) -> Iterator[Case]:
    # few blocks first (for callers that take only a few cases), for every kernel
    for recipe, shape in product(_RECIPES, ((70, 104), (35, 57))):
        yield case(bfloat16, shape, "normal", **recipe, **_BOTH)
    for dtype, to in product(INPUT_DTYPES, FP8_DTYPES):
        scale = {"scale": 3.5}
        for x, shape in (("bits", (144, 264)), ("edges", (67, 101))):
            yield case(dtype, shape, x, recipe=DelayedScaling(to), **scale, **_BOTH)
            yield case(dtype, shape, x, recipe=CurrentScaling(to, eps=1e-3, pow2_scale=True), **_BOTH)
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
    # 8-bit codes hide rounding differences that the amax of short rows shows
    for row in range(12):
        yield case(float32, (1, 1 + row), "normal", **_DELAYED)
    yield from _scale_cases(case)


def _scale_cases(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield cases of every profile and layout of scales."""
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
    recipes = {"per tensor": delayed, "1×128": {"recipe": BlockScaling()}, "MX": {"recipe": MXScaling()}}

    def timed(kind: str, label: str, shape: tuple[int, int], dtype: Any = bfloat16, **options: Any) -> Timed:
        label = f"{kind} {FORMATS[dtype].tag}→e4m3 {label}"
        if kind in activation.GATED:
            row = timed_row(op)(label, shape, dtype, kind=kind, **options)
            return row._replace(label=label)
        return Timed(label, maker(op, "normal")(dtype, shape, kind=kind, **options))

    for shape, (name, recipe) in product(TIMED_MATRICES, recipes.items()):
        yield timed("silu", f"{name} row", shape, **recipe)
        yield timed("silu", f"{name} both", shape, **recipe, **_BOTH)
    yield timed("silu", "current row", TIMED_MATRIX, recipe=CurrentScaling(pow2_scale=True))
    for dtype in (float32, float16):
        yield timed("silu", "per tensor row", TIMED_MATRIX, dtype, **delayed)
    for kind in ("gelu", "gelu_tanh", "relu2", "geglu"):
        for name, recipe in recipes.items():
            yield timed(kind, f"{name} row", TIMED_MATRIX, **recipe)
            if name != "MX":
                yield timed(kind, f"{name} both", TIMED_MATRIX, **recipe, **_BOTH)


register(
    Registration("activation_quantize", activation.activation_quantize, reference.activation_quantize,
                 inputs, lambda: _cases("activation_quantize"), "an activation or its gated form, quantised",
                 programs=(activation.variants,), timed=lambda: _timed("activation_quantize"), moves=MOVES),
    Registration("activation_backward_quantize", _alone(activation.activation_backward_quantize),
                 _alone(reference.activation_backward_quantize), _backward_inputs,
                 lambda: _cases("activation_backward_quantize"), "the gradient of an activation, quantised",
                 programs=(activation.variants, bias_gradient.variants),
                 timed=lambda: _timed("activation_backward_quantize"), moves=MOVES),
)
