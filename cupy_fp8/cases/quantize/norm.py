"""Cases of norms with quantisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from ... import reference
from ...formats import FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e5m2, float16, float32
from ...ops.quantize import norm
from ...options import BLOCK_PROFILES, BLOCK_SCALE_LAYOUTS, MX_PROFILES, MX_SCALE_LAYOUTS
from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling
from ..base import DIRECTIONS, Case, maker, source, values
from ..registry import Arguments, Registration, Timed, register

_ROW, _COLUMN, _BOTH = DIRECTIONS[:3]
_DELAYED: dict[str, Any] = {"recipe": DelayedScaling(), "scale": 21.5, "amax": 0.0}
_CURRENT: dict[str, Any] = {"recipe": CurrentScaling(), "amax": 0.0}
_BLOCKS: dict[str, Any] = {"recipe": BlockScaling()}
_MX: dict[str, Any] = {"recipe": MXScaling()}
_RECIPES = (_DELAYED, _CURRENT, _BLOCKS, _MX)
#: Options that are arrays, by name: what their dtype and shape are like.
_ARRAYS = ("residual", "residual_grad")
_RETURNED: dict[str, Any] = {"return_normed": True, "return_rstd": True}
#: One row or several, tails of every kind, rows with and without wide accesses, or no elements.
_SHAPES = ((1, 1), (1, 3), (0, 8), (5, 0), (0, 0), (3, 37), (1, 64), (16, 8), (130, 257), (129, 264),
           (300, 16))
#: bench times these numbers of columns, the first ones with every recipe.
_TIMED_COLUMNS = (4096, 7168, 5120, 8192)
_MORE_COLUMNS = (1024, 1032, 1536, 2048, 2560, 2880, 3072, 6144, 10240, 12288, 16384)


def _inputs(case: Case) -> tuple[Arguments, np.ndarray]:
    """The arguments of the forward call, and a gradient."""
    options, shape, dtype = dict(case.options), case.shape, case.dtype
    if isinstance(options.get("scale"), tuple):                 # A GPU reads it from an array.
        options["scale"] = np.array(options["scale"], np.float32)
    if "amax" in options:
        options["amax"] = np.full(1, options["amax"], np.float32)
    of_weight = options.pop("weight", dtype)
    weight = values("normal", shape[1:], of_weight, 1)
    for name in _ARRAYS:
        if options.get(name):
            options[name] = source(case, 4)
    if options.get("bias"):
        options["bias"] = values("normal", shape[1:], of_weight, 2)
    return ((source(case), weight, options.pop("recipe")), options), source(case, 3)


def _forward_inputs(case: Case) -> Arguments:
    return _inputs(case)[0]


def _backward_inputs(case: Case) -> Arguments:
    ((x, weight, recipe), options), grad = _inputs(case)
    if options.get("rstd"):
        options["rstd"] = values("normal", case.shape[:1], float32, 5)      # Any will do, of either sign.
    return (grad, x, weight, recipe), options


def _small(case: Callable[..., Case], layer: dict[str, Any]) -> Iterator[Case]:
    """Cases that launch every kind of program on a few blocks, for callers that take only a few cases."""
    for recipe, directions in product((_DELAYED, _BLOCKS, _MX), (_ROW, _BOTH)):
        yield case(bfloat16, (37, 272), "normal", **recipe, **directions, **layer)
    yield case(bfloat16, (13, 57), "normal", **_DELAYED, **_BOTH)
    yield case(bfloat16, (35, 72), "normal", **_CURRENT, **_BOTH)


def _cases_of(case: Callable[..., Case], more: tuple[dict[str, Any], ...]) -> Iterator[Case]:
    """more: options of the op, each of which is tried with every recipe."""
    layer: dict[str, Any] = {"kind": "layer"}
    yield from _small(case, {})
    yield from _small(case, layer)
    for dtype, to in product(INPUT_DTYPES, FP8_DTYPES):
        for values_of, shape in (("bits", (19, 264)), ("edges", (37, 101)), ("normal", (133, 136))):
            for directions in (_ROW, _BOTH):
                for kind in ({}, layer):
                    options = {**directions, **kind}
                    current = CurrentScaling(to, eps=1e-3, pow2_scale=True)
                    yield case(dtype, shape, values_of, recipe=DelayedScaling(to), scale=3.5, **options)
                    yield case(dtype, shape, values_of, recipe=current, **options)
                    yield case(dtype, shape, values_of, recipe=BlockScaling(dtype=to), **options)
                    yield case(dtype, shape, values_of, recipe=MXScaling(to), **options)
            yield case(dtype, shape, values_of, recipe=BlockScaling(dtype=to, profile="vllm"), **_BOTH)
    for recipe in _RECIPES:
        for options, directions in product(more, (_ROW, _BOTH)):
            yield case(bfloat16, (150, 272), "normal", **recipe, **directions, **options)
            for values_of in ("normal", "edges"):
                yield case(float32, (35, 136), values_of, **recipe, **directions, **options)
            yield case(float16, (37, 75), "normal", **recipe, **directions, **options)
        for directions in (_ROW, _COLUMN, _BOTH):
            yield case(float16, (48, 64), "normal", "offset", **recipe, **directions)
            yield case(bfloat16, (48, 64), "normal", "strided", **recipe, **directions)
            yield case(bfloat16, (300, 72), "bits", **recipe, **directions)
        for shape in _SHAPES:
            yield case(bfloat16, shape, "normal", **recipe, **_BOTH, **layer)
            yield case(bfloat16, shape, "normal", **recipe, **_ROW)
        # Rows of several warps, of a block's most threads, and of more.
        for columns in (1032, 2880, 8192, 8200, 16384, 16392, 32776):
            for kind in ({}, layer):
                yield case(bfloat16, (3, columns), "normal", **recipe, **_ROW, **kind)
        # Blocks of a GPU have several rows.
        for kind in ({}, layer):
            yield case(bfloat16, (4500, 72), "normal", **recipe, **_ROW, **kind)
        yield case(bfloat16, (5, 4040), "normal", **recipe, **_BOTH)
        yield case(bfloat16, (130, 1928), "normal", **recipe, **_BOTH, **layer)
    yield from _scale_cases(case)


def _scale_cases(case: Callable[..., Case]) -> Iterator[Case]:
    """Cases of every profile and layout of scales."""
    profiles: Any = BLOCK_PROFILES
    for profile, layout, block in product(profiles, BLOCK_SCALE_LAYOUTS, ((1, 128), (1, 64), (1, 32))):
        blocks = BlockScaling(block, profile=profile, scale_layout=layout)
        for shape, directions in product(((133, 136), (7, 145)), (_ROW, _BOTH)):
            yield case(bfloat16, shape, recipe=blocks, **directions)
    for mx_profile, mx_layout in product(MX_PROFILES, MX_SCALE_LAYOUTS):
        for shape, directions in product(((133, 136), (7, 145)), (_ROW, _BOTH)):
            mx = MXScaling(float8_e5m2, profile=mx_profile, scale_layout=mx_layout)
            yield case(bfloat16, shape, recipe=mx, **directions)


def _forward_cases() -> Iterator[Case]:
    case = maker("norm_quantize")
    residual: dict[str, Any] = {"residual": True, "return_residual": True}
    yield from _cases_of(case, (
        {**_RETURNED, "weight": float32, "weight_offset": 1.0}, {**residual, **_RETURNED},
        {"kind": "layer", "bias": True, **residual, "return_rstd": True}, {"residual": True, "eps": 1e-3},
        {"round_through": bfloat16, **residual, "return_normed": True},
        {"round_through": float16, "kind": "layer", "bias": True, "weight": float32}))
    for columns, kind in product((72, 1032, 8192, 16384), ({}, {"kind": "layer"})):
        yield case(bfloat16, (3, columns), "normal", **_DELAYED, **_ROW, **kind, return_rstd=True)
    for shape in ((5, 0), (0, 8), (3, 1)):
        yield case(bfloat16, shape, **_BLOCKS, **residual, **_RETURNED)
        yield case(float32, shape, **_DELAYED, **residual, **_RETURNED)


def _backward_cases() -> Iterator[Case]:
    case = maker("norm_backward_quantize")
    more: tuple[dict[str, Any], ...] = (
        {"weight": float32, "weight_offset": 1.0}, {"residual_grad": True, "rstd": True},
        {"kind": "layer", "residual_grad": True}, {"kind": "layer", "rstd": True, "eps": 1e-3})
    yield from _cases_of(case, more)
    for dtype in INPUT_DTYPES:
        for to in dict.fromkeys((dtype, float32)):
            for shape, values_of in (((37, 264), "normal"), ((67, 101), "edges"), ((200, 136), "bits")):
                for kind in ({}, {"kind": "layer"}):
                    yield case(dtype, shape, values_of, recipe=None, dtype=to, **kind)
        for options in more:
            yield case(dtype, (150, 136), "normal", recipe=None, **options)
    for options, directions in product((_DELAYED, _BLOCKS, _MX), (_ROW, _BOTH)):
        recipe = replace(options["recipe"], dtype=float8_e5m2)
        yield case(bfloat16, (37, 136), "normal", **{**options, "recipe": recipe}, **directions,
                   residual_grad=True)
    for rows in (1, 2, 3, 63, 64, 65, 127, 129, 300):           # sums of columns: every tail of the tree
        for kind in ({}, {"kind": "layer"}):
            yield case(bfloat16, (rows, 72), "normal", recipe=None, **kind)
            yield case(bfloat16, (rows, 72), "normal", **_BLOCKS, **_BOTH, **kind)
    for shape in _SHAPES:
        yield case(float32, shape, "normal", recipe=None, kind="layer")
    for columns in (1032, 8192, 8200):
        yield case(bfloat16, (5, columns), "normal", recipe=None)


def _timed(op: str, recipes: dict[str, dict[str, Any]]) -> Iterator[Timed]:
    case = maker(op, "normal")

    def timed(label: str, columns: int, rows: int = 16384, **options: Any) -> Timed:
        return Timed(f"{label} bf16→e4m3", case(bfloat16, (rows, columns), **options))

    backward = "backward" in op
    for columns, (name, recipe) in product(_TIMED_COLUMNS, recipes.items()):
        yield timed(f"rms {name} row", columns, **recipe)
        if recipe["recipe"] is not None:
            yield timed(f"rms {name} both", columns, **recipe, **_BOTH)
    for columns in _TIMED_COLUMNS if not backward else ():
        yield timed("layer per tensor row", columns, **recipes["per tensor"], kind="layer")
        yield timed("rms + residual 1×128 row", columns, **recipes["1×128"], residual=True,
                    return_residual=True)
    for columns in _MORE_COLUMNS if not backward else ():
        yield timed("rms per tensor row", columns, **recipes["per tensor"])
    for name, recipe in recipes.items() if not backward else ():
        yield timed(f"rms {name} row", 7168, 256, **recipe)
    if not backward:
        yield timed("rms 1×128 both", 16384, **recipes["1×128"], **_BOTH)


_TIMED_RECIPES: dict[str, dict[str, Any]] = {
    "per tensor": {"recipe": DelayedScaling(), "scale": (4.0,)}, "1×128": _BLOCKS, "MX": _MX}
_TIMED_BACKWARD = {name: {**recipe, "rstd": True} for name, recipe in (
    ("dx", {"recipe": None}), *_TIMED_RECIPES.items())}
register(
    Registration("norm_quantize", norm.norm_quantize, reference.norm_quantize, _forward_inputs,
                 _forward_cases, "RMSNorm or LayerNorm, quantised", programs=(norm.variants,),
                 timed=lambda: _timed("norm_quantize", _TIMED_RECIPES)),
    Registration("norm_backward_quantize", norm.norm_backward_quantize, reference.norm_backward_quantize,
                 _backward_inputs, _backward_cases, "the gradients of a norm, quantised or not",
                 programs=(norm.variants,), timed=lambda: _timed("norm_backward_quantize", _TIMED_BACKWARD)),
)
