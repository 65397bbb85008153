"""Cases of the per-tensor ops: casts, conversions, amax and scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import reference
from ...formats import (
    BYTE_DTYPES,
    FORMATS,
    FP8_DTYPES,
    INPUT_DTYPES,
    bfloat16,
    float8_e4m3fn,
    float8_e5m2,
    float8_e8m0fnu,
    float16,
    float32,
)
from ...ops.convert import astype
from ...ops.quantize import bias_gradient, tensor, tensor_current
from ...ops.scales import amax, scale
from ..base import ALIGNED_MATRIX, DIRECTIONS, MATRIX, SHAPES, Case, source, values
from ..registry import Registration, register

_SCALES = (1.0, 0.37, 2.0**-130, 0.0, 3e38, float("inf"), float("nan"), -2.0)


def _quantize_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = dict(case.options)
    scale = options.pop("scale", 0.37)
    amax_start = options.pop("amax", None)
    kwargs = options if amax_start is None else {**options, "amax": np.array([amax_start], np.float32)}
    return (source(case), None if scale is None else np.array([scale], np.float32)), kwargs


def _quantize_cases() -> Iterator[Case]:
    for directions in DIRECTIONS:
        yield from _given_scale_cases(directions)
        yield from _current_cases(directions)
        yield from _dbias_cases(directions)
    # More tiles than a launch sums at once.
    yield Case("quantize_tensor", bfloat16, (33000, 3), "normal", options={"dbias": True})
    for start in (-1.0, float("inf"), float("nan"), 2.0**-149):
        yield Case("quantize_tensor", float32, (9, 11), "normal", options={"amax": start})


def _given_scale_cases(directions: dict[str, Any]) -> Iterator[Case]:
    for dtype in INPUT_DTYPES:
        for to in FP8_DTYPES:
            for kind in ("bits", "edges", "normal"):
                yield Case("quantize_tensor", dtype, MATRIX, kind,
                           options={"dtype": to, "amax": 0.0, **directions})
            yield Case("quantize_tensor", dtype, ALIGNED_MATRIX,
                       options={"dtype": to, "amax": 0.0, **directions})
    for shape in SHAPES:
        if _fits(shape, directions):
            yield Case("quantize_tensor", bfloat16, shape, options={"amax": -1.0, **directions})
            yield Case("quantize_tensor", float32, shape, "normal", options=directions)
    for layout in ("offset", "strided"):
        for dtype in INPUT_DTYPES:
            yield Case("quantize_tensor", dtype, (72, 96), "bits", layout,
                       options={"amax": 0.0, **directions})
    for value in _SCALES:
        yield Case("quantize_tensor", float32, (24, 40), options={"scale": value, "dtype": float8_e5m2,
                                                                  **directions})


def _current_cases(directions: dict[str, Any]) -> Iterator[Case]:
    for dtype in INPUT_DTYPES:
        for kind in ("bits", "edges", "normal"):
            yield Case("quantize_tensor", dtype, MATRIX, kind,
                       options={"scale": None, "amax": 0.0, **directions})
        yield Case("quantize_tensor", dtype, ALIGNED_MATRIX, "normal",
                   options={"scale": None, "dtype": float8_e5m2, "pow2_scale": True, "eps": 1e3,
                            **directions})
    for shape in SHAPES:
        if _fits(shape, directions):
            yield Case("quantize_tensor", bfloat16, shape, "normal",
                       options={"scale": None, "pow2_scale": True, **directions})


def _dbias_cases(directions: dict[str, Any]) -> Iterator[Case]:
    for dtype in INPUT_DTYPES:
        for matrix in (MATRIX, ALIGNED_MATRIX, (130, 264)):
            for to in FP8_DTYPES:
                yield Case("quantize_tensor", dtype, matrix, "bits",
                           options={"dtype": to, "dbias": True, "amax": 0.0, **directions})
            yield Case("quantize_tensor", dtype, matrix, "normal", options={"dbias": True, **directions})
        yield Case("quantize_tensor", dtype, (300, 96), "normal", "offset",
                   {"dbias": True, "scale": None, **directions})
    for shape in SHAPES:
        if len(shape) >= 2:
            yield Case("quantize_tensor", bfloat16, shape, "normal",
                       options={"dbias": True, **directions})


def _fits(shape: tuple[int, ...], directions: dict[str, Any]) -> bool:
    return len(shape) >= 2 or not directions["columnwise"]


def _cast_transpose_cases() -> Iterator[Case]:
    for dtype in INPUT_DTYPES:
        for to in FP8_DTYPES:
            for dbias in (False, True):
                yield Case("cast_transpose", dtype, ALIGNED_MATRIX,
                           options={"dtype": to, "amax": 0.0, "dbias": dbias})


def _array_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = dict(case.options)
    positional = (options.pop("to"),) if "to" in options else ()
    return (source(case), *positional), options


def _astype_cases() -> Iterator[Case]:
    for dtype in FORMATS:
        for to in FORMATS:
            for kind in ("bits", "edges"):
                yield Case("astype", dtype, (33, 67), kind, options={"to": to})
            if to in FP8_DTYPES:
                yield Case("astype", dtype, (33, 67), "edges", options={"to": to, "saturate": False})
    for shape in SHAPES:
        yield Case("astype", float32, shape, options={"to": float8_e4m3fn})
        yield Case("astype", float8_e5m2, shape, options={"to": bfloat16})
    for layout in ("offset", "strided"):
        for dtype, to in ((float32, float8_e4m3fn), (float8_e4m3fn, float16), (float8_e8m0fnu, float32),
                          (float16, float8_e5m2)):
            yield Case("astype", dtype, (40, 72), "bits", layout, options={"to": to})


def _transpose_cases() -> Iterator[Case]:
    for shape in SHAPES:
        if len(shape) >= 2:
            for dtype in BYTE_DTYPES:
                yield Case("transpose", dtype, shape)
    for layout in ("offset", "strided"):
        yield Case("transpose", float8_e4m3fn, (144, 272), "bits", layout)


def _amax_cases() -> Iterator[Case]:
    for dtype in INPUT_DTYPES:
        for nan in ("ignore", "propagate"):
            for kind in ("bits", "normal"):
                yield Case("compute_amax", dtype, MATRIX, kind, options={"nan": nan})
            yield Case("compute_amax", dtype, (5, 100), "bits", "offset", options={"nan": nan})
            yield Case("compute_amax", dtype, (40, 72), "normal", "strided", options={"nan": nan})
    for shape in SHAPES:
        yield Case("compute_amax", bfloat16, shape, "normal")


def _compute_scale_cases() -> Iterator[Case]:
    for to in FP8_DTYPES:
        for pow2 in (False, True):
            for kind in ("bits", "edges", "normal"):
                yield Case("compute_scale", float32, MATRIX, kind, options={"dtype": to, "pow2_scale": pow2})
            # Margins that make large scales overflow, small ones subnormal or 0, and the target itself Inf or
            # 0.
            for margin in (1, -3, -130, 12, 140, 1 << 40):
                yield Case("compute_scale", float32, (9, 64), "edges",
                           options={"dtype": to, "pow2_scale": pow2, "margin": margin})
    for eps in (2.0**-149, 1e-39, 1e-12, 0.1, 3e38):
        for kind in ("bits", "edges"):
            yield Case("compute_scale", float32, (9, 64), kind, options={"eps": eps})
    for shape in SHAPES:
        yield Case("compute_scale", float32, shape, options={"pow2_scale": True})
    for layout in ("offset", "strided"):
        yield Case("compute_scale", float32, (40, 72), "bits", layout)


def _update_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The case's array is the history; a third of the tensors have a zero in its row 0, half in the reduced
    amax."""
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
    e4m3, e5m2 = {"dtype": float8_e4m3fn}, {"dtype": float8_e5m2}
    for algo in ("max", "most_recent"):
        for reduced in (None, "bits", "edges", "normal"):
            for kind in ("bits", "edges", "normal"):
                for length in (1, 2, 3, 19):
                    yield Case("update_delayed_scaling", float32, (length, 131), kind,
                               options={**e4m3, "algo": algo, "amax": reduced})
    # One round of loads and several, row segments of one row and of many, every number of columns in a block,
    # and tails of each.
    for shape in ((1, 1), (2, 1), (16, 512), (1024, 1), (1025, 2), (513, 3), (700, 5), (1030, 17), (6000, 1),
                  (9001, 3), (300, 70),
                  (16, 0)):
        for reduced in (None, "normal"):
            yield Case("update_delayed_scaling", float32, shape, "normal", options={**e5m2, "amax": reduced})
    for margin in (2, -130, 150):
        yield Case("update_delayed_scaling", float32, (4, 70), "edges", options={**e5m2, "margin": margin})
    yield Case("update_delayed_scaling", float32, (40, 70), "normal", "offset", options=e4m3)


register(
    Registration("quantize_tensor", tensor.quantize_tensor, reference.quantize_tensor, _quantize_inputs,
                 _quantize_cases,
                 "FP8 with one scale, a given one or the tensor's own",
                 programs=(tensor.variants, tensor_current.variants, bias_gradient.variants, amax.variants)),
    Registration("cast_transpose", tensor.cast_transpose, reference.cast_transpose, _quantize_inputs,
                 _cast_transpose_cases,
                 "`quantize_tensor` in both directions, from one read of x",
                 programs=(tensor.variants, tensor_current.variants, bias_gradient.variants, amax.variants)),
    Registration("astype", astype.astype, reference.astype, _array_inputs, _astype_cases,
                 "converts between float32, float16, bfloat16, E4M3, E5M2 and E8M0",
                 programs=(astype.variants,)),
    Registration("transpose", astype.transpose, reference.transpose, _array_inputs, _transpose_cases,
                 "swaps the last two axes of FP8 or E8M0 data",
                 programs=(astype.variants,)),
    Registration("compute_amax", amax.compute_amax, reference.compute_amax, _array_inputs, _amax_cases,
                 "the largest magnitude",
                 programs=(amax.variants,)),
    Registration("compute_scale", scale.compute_scale, reference.compute_scale, _array_inputs,
                 _compute_scale_cases,
                 "the scale that an amax calls for",
                 programs=(scale.variants,)),
    Registration("update_delayed_scaling", scale.update_delayed_scaling, reference.update_delayed_scaling,
                 _update_inputs, _update_cases,
                 "rolls amax histories and finds the next scales",
                 programs=(scale.variants,), updates=("history", "scale")),
)
