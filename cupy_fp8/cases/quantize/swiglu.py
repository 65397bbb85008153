"""Cases of SwiGLU with quantisation. A case's shape is x's, [M, 2 H]. Its options `probs` and `bias` name
their values (a number: all equal it), and `experts` is the number of experts with biases of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array
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
from ...ops.quantize import bias_gradient, swiglu
from ...options import BLOCK_PROFILES, BLOCK_SCALE_LAYOUTS, MX_MODES, MX_PROFILES, MX_SCALE_LAYOUTS
from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling
from ..base import DIRECTIONS, TIMED_MATRICES, TIMED_MATRIX, Case, maker, source, values
from ..groups import sizes
from ..registry import Arguments, HostCalls, Registration, Timed, all_but, register

_BOTH = DIRECTIONS[2]
#: Numbers of experts with biases of their own that share 133 rows: one, more than rows, enough for several
#: rounds of the search, or none. Some experts are empty.
_EXPERTS = (1, 3, 9, 200, 0)
_DELAYED: dict[str, Any] = {"recipe": DelayedScaling(), "scale": 0.37, "amax": 0.0}
_RECIPES: tuple[dict[str, Any], ...] = (
    _DELAYED, {"recipe": CurrentScaling(), "amax": 0.0}, {"recipe": BlockScaling()}, {"recipe": MXScaling()})
_OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"probs": "normal"}, {"bias": "normal"}, {"clamp": 0.75}, {"form": "gpt_oss", "clamp": 7.0},
    {"interleaved": True}, {"form": "gpt_oss", "clamp": 7.0, "interleaved": True, "probs": "edges",
                            "bias": "normal"})
#: short rows, one tile or several, tails of every kind, rows with and without wide accesses, or no elements
_SHAPES = ((1, 2), (1, 6), (5, 2), (0, 8), (5, 0), (0, 0), (3, 74), (16, 16), (128, 256), (130, 514),
           (144, 272), (129, 264), (1, 1280), (300, 16))
_ALIGNED = (144, 528)                           # wide accesses, and tails of the tile
_GPT_OSS = _OPTIONS[-1]
#: Gradients of these shapes have wide accesses, and their halves are whole tiles (paths rows and tiles). Rows
#: end with a patch of the tile, or within one.
_HALVES = ((150, 512), (16, 256))
_SCALES: tuple[Any, ...] = (
    *(BlockScaling(block, scale_layout=layout) for block,
      layout in product(((1, 128), (1, 64), (1, 32)), BLOCK_SCALE_LAYOUTS)),
    *(MXScaling(mode=mode, profile=profile, scale_layout=layout)
      for mode, profile, layout in product(MX_MODES[:1], MX_PROFILES, MX_SCALE_LAYOUTS)))
#: option of most cases of gradients
_WEIGHTED = {"probs": "normal"}


def inputs(case: Case) -> Arguments:
    options = dict(case.options)
    rows, width = case.shape
    experts = options.pop("experts", None)
    if isinstance(options.get("scale"), tuple):                 # a GPU reads it from an array
        options["scale"] = np.array(options["scale"], np.float32)
    of_bias = (width,) if experts is None else (experts, width)
    if experts is not None:
        wide = not options.pop("narrow", False)
        rows_of_experts = rows - options.pop("spare", rows // 8)
        options["splits"] = sizes(rows_of_experts, experts).astype(np.int64 if wide else np.int32)
    for name, shape, dtype, seed in (("probs", (rows,), float32, 1), ("bias", of_bias, case.dtype, 2)):
        if name in options:
            kind = options[name]
            options[name] = values(kind, shape, dtype,
                                   seed) if isinstance(kind, str) else np.full(shape, kind, dtype)
    if "amax" in options:
        options["amax"] = np.full(1, options["amax"], np.float32)
    return (source(case), options.pop("recipe")), options


def backward_inputs(case: Case) -> Arguments:
    (x, recipe), options = inputs(case)
    half = Case(case.op, case.dtype, (case.shape[0], case.shape[1] // 2), case.values, case.layout)
    return (source(half, 3), x, recipe), options


def _scale(recipe: Any) -> dict[str, float]:
    """Return the scale that a recipe needs, if any."""
    return {"scale": 3.5} if isinstance(recipe, DelayedScaling) else {}


def _in_blocks(to: np.dtype[Any]) -> tuple[BlockScaling | MXScaling, ...]:
    return BlockScaling(dtype=to), BlockScaling(dtype=to, profile="vllm"), MXScaling(to)


def _of_experts(case: Callable[..., Case], weighted: dict[str, Any]) -> Iterator[Case]:
    """Yield cases of experts with biases of their own, for rows with and without wide accesses."""
    for dtype, to in product(INPUT_DTYPES, FP8_DTYPES):
        for how in (DelayedScaling(to), *_in_blocks(to)):
            yield case(dtype, (133, 2 * 136), "edges", recipe=how, **_scale(how), **_GPT_OSS, **_BOTH,
                       experts=5)
    for i, experts in enumerate(_EXPERTS):
        for interleaved, half in product((False, True), (136, 27)):
            for j, directions in enumerate(DIRECTIONS[:3]):
                yield case(bfloat16, (133, 2 * half), "normal", **_RECIPES[(i + j) % 4], **weighted,
                           **directions, bias="normal", interleaved=interleaved, experts=experts,
                           narrow=bool(i % 2))
    # several blocks of threads find the expert of each row
    yield case(bfloat16, (1100, 2 * 24), "normal", **_RECIPES[0], **_BOTH, bias="normal", experts=5)
    for recipe in _RECIPES:
        yield case(bfloat16, (700, 2 * 72), "bits", **recipe, **_BOTH, bias="bits", experts=40)
        yield case(bfloat16, (0, 2 * 72), "bits", **recipe, **_BOTH, bias="bits", experts=3)


def _backward(*args: Any, out: Any = None, **options: Any) -> Any:
    """Return the pair if there are probs, else the gradient of x alone, since the checks compare arrays."""
    if "probs" in options:
        return swiglu.swiglu_backward_quantize(*args, out=out, **options)
    return swiglu.swiglu_backward_quantize(*args, out=None if out is None else (out, None), **options)[0]


def _backward_reference(*args: Any, **options: Any) -> Any:
    pair = reference.swiglu_backward_quantize(*args, **options)
    return pair if "probs" in options else pair[0]


def _backward_cases() -> Iterator[Case]:
    case = maker("swiglu_backward_quantize")
    # few blocks first (for callers that take only a few cases), for every kernel
    for recipe in _RECIPES:
        yield case(bfloat16, (50, 512), "normal", **recipe, **_WEIGHTED, **_BOTH)
    yield case(bfloat16, (130, 30), "normal", recipe=BlockScaling(profile="vllm"), **_WEIGHTED, **_BOTH)
    yield case(float32, (40, 264), "normal", recipe=MXScaling(scale_layout="swizzled"), **_OPTIONS[-1],
               **_BOTH)
    yield case(bfloat16, (50, 272), "normal", **_DELAYED, **_GPT_OSS, **_BOTH, experts=3)
    for recipe in _RECIPES:
        yield case(bfloat16, (144, 208), "normal", **recipe, **_WEIGHTED, **_BOTH)
    for dtype, to in product(INPUT_DTYPES, FP8_DTYPES):
        for kind, shape, weights in (("bits", _ALIGNED, {}), ("edges", (67, 202), {}),
                                     ("bits", _HALVES[0], _WEIGHTED), ("edges", _HALVES[1], {})):
            for how in (DelayedScaling(to), CurrentScaling(to, eps=1e-3, pow2_scale=True), *_in_blocks(to)):
                yield case(dtype, shape, kind, recipe=how, **_scale(how), **weights, **_BOTH)
        # row-wise results alone have separate programs
        for how in _in_blocks(to):
            yield case(dtype, _HALVES[0], "edges", recipe=how, **_WEIGHTED)
    for i, (dtype, options) in enumerate(product(INPUT_DTYPES, _OPTIONS)):          # recipes take turns
        yield case(dtype, (24, 80), "edges", **_RECIPES[i % 4], **options)
        yield case(dtype, (37, 54), "normal", **_RECIPES[(i + 1) % 4], **options, **_BOTH)
        yield case(dtype, (20, 528), "normal", **_RECIPES[(i + 2) % 4], **{**_WEIGHTED, **options})
    yield from _backward_shape_cases(case)
    yield from _backward_scale_cases(case)


def _backward_shape_cases(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield cases of every direction, shape and combination of options."""
    for recipe in _RECIPES:
        for directions in DIRECTIONS[:3]:
            yield case(bfloat16, _ALIGNED, "normal", **recipe, **_WEIGHTED, **directions)
        yield case(float16, (48, 64), "normal", "offset", **recipe, **_WEIGHTED, **_BOTH)
    for i, shape in enumerate(_SHAPES):
        yield case(bfloat16, shape, "normal", **_RECIPES[i % 4], **_WEIGHTED, **_BOTH)
        yield case(bfloat16, shape, "normal", **_RECIPES[(i + 1) % 4], **_WEIGHTED, interleaved=True, **_BOTH)
    for recipe in _RECIPES:
        for directions in DIRECTIONS[:3]:
            for kind in ("normal", "edges"):
                yield case(bfloat16, _HALVES[0], "normal", **recipe, probs=kind, **directions)
            yield case(bfloat16, _HALVES[0], "normal", **recipe, **directions)
        yield case(float32, (21, 768), "normal", **recipe, **_WEIGHTED)
        for options in _OPTIONS[2:]:
            yield case(bfloat16, _HALVES[1], "normal", **recipe, **options, **_BOTH)
            for directions in DIRECTIONS[:2]:                                     # halves are not whole tiles
                yield case(bfloat16, (133, 2 * 200), "normal", **recipe, **{**_WEIGHTED, **options},
                           **directions)


def _backward_scale_cases(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield cases of tiles that da and db share, wide rows with all options, experts, and sums of many
    tiles."""
    for scaling in _SCALES:
        yield case(bfloat16, (133, 256), "normal", recipe=scaling, **_BOTH)
        yield case(bfloat16, (37, 512), recipe=scaling, **_WEIGHTED)
        # the columns of da end, and those of db start, within a tile
        for half in (160, 192, 224):
            yield case(bfloat16, (133, 2 * half), "normal", recipe=scaling, **_WEIGHTED, **_BOTH)
        yield case(bfloat16, (133, 2 * 200), "normal", recipe=scaling, **_GPT_OSS, **_BOTH)
        # the second tile does not exist
        yield case(bfloat16, (133, 2 * 72), "edges", recipe=scaling, interleaved=True, **_BOTH)
    # wide rows get all options at once
    for dtype, to in product(INPUT_DTYPES, FP8_DTYPES):
        for how in (DelayedScaling(to), *_in_blocks(to)):
            yield case(dtype, (130, 2 * 136), "edges", recipe=how, **_scale(how), **_GPT_OSS, **_BOTH)
    yield from _of_experts(case, _WEIGHTED)
    # rows past the end repeat this row, times 0
    for dtype, how in product(INPUT_DTYPES, _RECIPES[:2]):
        yield case(dtype, (1, 512), "normal", **how, probs=0.25, **_BOTH)
    for interleaved in (False, True):                                               # sums take many tiles
        yield case(bfloat16, (3, 2 * 3000), "normal", **_DELAYED, **_WEIGHTED, interleaved=interleaved)
        yield case(bfloat16, (9, 2 * 3072), "normal", **_DELAYED, **_WEIGHTED, interleaved=interleaved)
        # as many as a block sums, and one more
        for half in (8192, 8200):
            yield case(bfloat16, (9, 2 * half >> interleaved), "normal", **_DELAYED, **_WEIGHTED,
                       interleaved=interleaved)


def _cases() -> Iterator[Case]:
    case = maker("swiglu_quantize")
    # few blocks first (for callers that take only a few cases), for every kernel
    for recipe in _RECIPES:
        yield case(bfloat16, (144, 208), "normal", **recipe, **_BOTH)
    yield case(bfloat16, (130, 30), "normal", recipe=BlockScaling(profile="vllm"), probs="normal", **_BOTH)
    yield case(float32, (40, 264), "normal", recipe=MXScaling(scale_layout="swizzled"), **_OPTIONS[-1],
               **_BOTH)
    yield case(bfloat16, (50, 272), "normal", **_DELAYED, **_GPT_OSS, **_BOTH, experts=3)
    for dtype, to in product(INPUT_DTYPES, FP8_DTYPES):
        for kind, shape in (("bits", _ALIGNED), ("edges", (67, 202))):
            for how in (DelayedScaling(to), CurrentScaling(to, eps=1e-3, pow2_scale=True), *_in_blocks(to)):
                yield case(dtype, shape, kind, recipe=how, **_scale(how), **_BOTH)
        # row-wise results alone have separate programs
        for how in (DelayedScaling(to), *_in_blocks(to)):
            yield case(dtype, (133, 272), "edges", recipe=how, probs="normal", **_scale(how))
    for i, (dtype, options) in enumerate(product(INPUT_DTYPES, _OPTIONS)):          # recipes take turns
        yield case(dtype, (24, 80), "edges", **_RECIPES[i % 4], **options)
        yield case(dtype, (37, 54), "normal", **_RECIPES[(i + 1) % 4], **options, **_BOTH)
    for recipe in _RECIPES:
        for options in _OPTIONS:
            yield case(bfloat16, (40, 48), "normal", **recipe, **options, **_BOTH)
        for directions in DIRECTIONS[:3]:
            yield case(bfloat16, _ALIGNED, "normal", **recipe, **directions)
            yield case(float32, (150, 272), "edges", **recipe, **directions, probs="edges")
            yield case(bfloat16, (133, 272), "edges", **recipe, **directions, probs="edges")
            for layout in ("offset", "strided"):
                yield case(float16, (48, 64), "normal", layout, **recipe, **directions)
        for shape in _SHAPES:
            yield case(bfloat16, shape, "normal", **recipe, **_BOTH)
    yield from _option_cases(case)


def _option_cases(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield cases of every profile, mode and layout, wide rows with all options, and experts."""
    profiles: Any = BLOCK_PROFILES
    for profile, pow2, block in product(profiles, (False, True), ((1, 128), (1, 64), (1, 32))):
        blocks = BlockScaling(block, float8_e5m2 if pow2 else float8_e4m3fn, profile=profile, pow2_scale=pow2)
        yield case(float32, (40, 400), "edges", recipe=blocks, **_BOTH)
        yield case(bfloat16, (70, 264), recipe=blocks, **_BOTH)
    for block, layout in product(((1, 128), (1, 64), (1, 32)), BLOCK_SCALE_LAYOUTS):
        for shape in (_ALIGNED, (133, 290)):
            yield case(bfloat16, shape, "normal", recipe=BlockScaling(block, scale_layout=layout), **_BOTH)
    # wide rows get all options at once
    for dtype, to in product(INPUT_DTYPES, FP8_DTYPES):
        for how in (DelayedScaling(to), *_in_blocks(to)):
            yield case(dtype, (133, 272), "edges", recipe=how, **_scale(how), **_GPT_OSS, **_BOTH)
    for recipe, options in product(_RECIPES, _OPTIONS[2:]):
        for directions in DIRECTIONS[:3]:
            yield case(bfloat16, (133, 272), "normal", **recipe, **options, **directions)
    for scaling in _SCALES:
        yield case(bfloat16, (133, 272), "normal", recipe=scaling, **_GPT_OSS, **_BOTH)
    yield from _of_experts(case, {"probs": "edges"})
    # rows past the end repeat this row, times 0
    for dtype, how in product(INPUT_DTYPES, _RECIPES[:2]):
        yield case(dtype, (1, 272), "normal", **how, probs=0.25)
    # Rows past the end, whose weight is 1, have a larger amax, which comes from biases alone.
    yield case(bfloat16, (133, 272), "normal", **_DELAYED, bias="normal", probs=2.0**-20, **_BOTH)
    # zeros times weights that are Inf or NaN do not reach scales in the padding
    yield case(bfloat16, (133, 272), "edges", recipe=MXScaling(profile="torchao", scale_layout="swizzled"),
               probs="edges", **_BOTH)
    for mode, profile, scale_layout in product(MX_MODES, MX_PROFILES, MX_SCALE_LAYOUTS):
        yield case(bfloat16, (133, 290),
                   recipe=MXScaling(mode=mode, profile=profile, scale_layout=scale_layout), **_BOTH)
        yield case(float32, (64, 144), "edges",
                   recipe=MXScaling(float8_e5m2, mode=mode, profile=profile, scale_layout=scale_layout),
                   **_BOTH)
    for shape in _SHAPES[5:]:
        yield case(float16, shape, "normal", recipe=MXScaling(scale_layout="swizzled"), **_BOTH)


_PER_TENSOR: dict[str, Any] = {"recipe": DelayedScaling(), "scale": (4.0,)}
_BLOCKS: dict[str, Any] = {"recipe": BlockScaling()}
_MX: dict[str, Any] = {"recipe": MXScaling()}
#: the layer of gpt-oss has one bias for all rows, or one for each expert
_OF_GPT_OSS: dict[str, dict[str, Any]] = {
    label: {"form": "gpt_oss", "clamp": 7.0, "interleaved": True, "bias": "normal", **experts}
    for label, experts in (("gpt-oss", {}), ("gpt-oss, biases of 32 experts", {"experts": 32, "spare": 0}))}
_GPT_OSS_SHAPE = (16384, 2880)


def timed_row(op: str) -> Callable[..., Timed]:
    """Return timed(label, shape of y, dtype, **options), for x [M, 2 H]."""
    case = maker(op, "normal")

    def timed(label: str, shape: tuple[int, int], dtype: np.dtype[Any] = bfloat16, **options: Any) -> Timed:
        x = case(dtype, (shape[0], 2 * shape[1]), **options)
        return Timed(f"{FORMATS[dtype].tag}→e4m3 {label}", x, shape)

    return timed


def _timed() -> Iterator[Timed]:
    timed = timed_row("swiglu_quantize")
    for shape in TIMED_MATRICES:
        yield timed("per tensor row", shape, **_PER_TENSOR)
        yield timed("per tensor both", shape, **_PER_TENSOR, **_BOTH)
        yield timed("1×128 row weighted", shape, **_BLOCKS, **_WEIGHTED)
        yield timed("1×128 both weighted", shape, **_BLOCKS, **_WEIGHTED, **_BOTH)
        yield timed("MX row", shape, **_MX)
        yield timed("MX both", shape, **_MX, **_BOTH)
    yield from _timed_gpt_oss(timed)
    yield timed("1×128 row clamped", TIMED_MATRIX, **_BLOCKS, clamp=7.0)
    yield timed("current row", TIMED_MATRIX, recipe=CurrentScaling(pow2_scale=True))
    for dtype in (float32, float16):
        yield timed("per tensor row", TIMED_MATRIX, dtype, **_PER_TENSOR)
        yield timed("1×128 row weighted", TIMED_MATRIX, dtype, **_BLOCKS, **_WEIGHTED)


def _timed_backward() -> Iterator[Timed]:
    timed = timed_row("swiglu_backward_quantize")
    for shape in TIMED_MATRICES[1:3]:
        yield timed("per tensor row", shape, **_PER_TENSOR)
        yield timed("per tensor both", shape, **_PER_TENSOR, **_BOTH)
        yield timed("1×128 row weighted", shape, **_BLOCKS, **_WEIGHTED)
        yield timed("1×128 both weighted", shape, **_BLOCKS, **_WEIGHTED, **_BOTH)
        yield timed("MX both", shape, **_MX, **_BOTH)
    yield from _timed_gpt_oss(timed)


def _timed_gpt_oss(timed: Callable[..., Timed]) -> Iterator[Timed]:
    for label, options in _OF_GPT_OSS.items():
        yield timed(f"per tensor both {label}", _GPT_OSS_SHAPE, **_PER_TENSOR, **_BOTH, **options)
        yield timed(f"MX both {label}", _GPT_OSS_SHAPE, **_MX, **_BOTH, **options)


def _host_calls(x: Array) -> Iterator[HostCalls]:
    yield HostCalls.both("", swiglu.swiglu_quantize, x, MXScaling())


#: arrays too small to count; "[1].result" is the gradient of probs
MOVES = all_but("probs", "bias", "splits", "[1].result")

register(
    Registration("swiglu_quantize", swiglu.swiglu_quantize, reference.swiglu_quantize, inputs, _cases,
                 "SwiGLU, quantised without a rounding in between",
                 programs=(swiglu.variants,), timed=_timed, moves=MOVES, host_calls=_host_calls),
    Registration("swiglu_backward_quantize", _backward, _backward_reference, backward_inputs,
                 _backward_cases,
                 "the gradients of SwiGLU, quantised",
                 programs=(swiglu.variants, bias_gradient.variants), timed=_timed_backward, moves=MOVES),
)
