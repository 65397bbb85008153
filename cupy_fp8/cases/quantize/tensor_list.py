"""Cases of tensor lists. A case's shape is the number of arrays. Its option `group` names their shapes
(GROUPS)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, empty_like, full
from ...cache import WeightCache
from ...formats import FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e5m2, float32
from ...ops.quantize import blocks, grouped_blocks, mx, tensor_list
from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling
from ..base import Case, laid_out, values
from ..registry import Arguments, HostCalls, Registration, Timed, all_but, register

#: Lists with a few blocks of threads, also with chunked access; whole patches only; tails of every tile and
#: every alignment; no arrays; many arrays; arrays of one shape with several blocks each; as many arrays as
#: fit into a launch's arguments; or two.
GROUPS: dict[str, tuple[tuple[int, int], ...]] = {
    "few": ((130, 16), (0, 5), (9, 5)),
    "fits": ((130, 136), (0, 8), (1, 8), (400, 16)),
    "whole": ((144, 264), (128, 128), (16, 8), (0, 8), (272, 136)),
    "mixed": ((130, 257), (144, 264), (0, 5), (37, 8), (5, 0), (1, 1), (64, 72), (1, 300), (300, 1), (16, 9)),
    "empty": ((0, 5), (5, 0), (0, 0)),
    "one": ((127, 129),),
    "none": (),
    "many": tuple((i % 9 + 1, i * 7 % 40) for i in range(150)),
    "alike": ((144, 24),) * 9,
    "eight": (*((9, 24),) * 7, (130, 24)),
    "two": ((24, 16), (9, 24)),
}
#: lists of matrices and batches, for recipes that take both, with and without wide accesses
BATCHES: dict[str, tuple[tuple[int, ...], ...]] = {
    "batches": ((3, 5, 9), (130, 150), (2, 33, 72), (2, 0, 7)),
    "wide": ((2, 144, 136), (16, 264), (3, 7, 4), (0, 8)),
}
#: timed weights of experts. Small ones show the time for finding each block's matrix.
_WEIGHTS = {f"{number} of {rows}×{columns}": ((rows, columns),) * number for number, rows, columns in (
    (8, 2048, 5120), (32, 2048, 5120), (64, 2048, 5120), (8, 4096, 7168), (256, 2048, 1408), (128, 256, 256))}
_SCALES = (0.37, 1.0, 2.0**-130, 0.0, 3e38, float("inf"), float("nan"), -2.0)
_DIRECTIONS = ((True, False), (False, True), (True, True))


def arrays(case: Case) -> list[np.ndarray]:
    """Return the arrays of the case's group. Every second one starts one element into its buffer ('offset')
    or is a transposed view ('strided')."""
    found = []
    for i, shape in enumerate(_shapes(case.options["group"])):
        x = values(case.values, shape, case.dtype, i)
        found.append(laid_out(x, case.layout) if i % 2 == 0 else x)
    return found


def _shapes(group: str) -> tuple[tuple[int, ...], ...]:
    return {**GROUPS, **BATCHES, **_WEIGHTS}[group]


def _inputs(case: Case) -> Arguments:
    options = {name: value for name, value in case.options.items() if name != "group"}
    number = case.shape[0]
    scales = options.pop("values_of_scales", _SCALES)
    if options.pop("scaled", True):
        options["scales"] = np.resize(np.array(scales, np.float32), number)
    start = options.pop("amax", None)
    if start is not None:
        options["amax"] = np.full(number, start, np.float32)
    return tuple(arrays(case)), options


def _cast(*xs: Any, scales: Any, amax: Any = None, out: Any = None, **options: Any) -> Any:
    return tensor_list.multi_cast_transpose(list(xs), scales, amaxes=amax, out=out, **options)


def _cast_reference(*xs: Any, scales: Any, amax: Any = None, **options: Any) -> Any:
    return reference.multi_cast_transpose(xs, scales, amaxes=amax, **options)


def _quantize(*xs: Any, amax: Any = None, out: Any = None, recipe: Any, **options: Any) -> Any:
    return tensor_list.multi_quantize(list(xs), recipe, amaxes=amax, out=out, **options)


def _quantize_reference(*xs: Any, amax: Any = None, recipe: Any, **options: Any) -> Any:
    return reference.multi_quantize(xs, recipe, amaxes=amax, **options)


def _case(op: str, dtype: np.dtype[Any], group: str, values: str = "bits", layout: str = "contiguous", /,
          **options: Any) -> Case:
    return Case(op, dtype, (len(_shapes(group)),), values, layout, {"group": group, **options})


def _cast_cases() -> Iterator[Case]:
    # few blocks of threads first, for callers that take only a few cases
    for dtype in (bfloat16, float32):
        yield _case("multi_cast_transpose", dtype, "few", "normal", amax=0.0)
    for group in ("one", "empty", "none"):
        yield _case("multi_cast_transpose", float32, group)
    for layout in ("offset", "strided"):
        yield _case("multi_cast_transpose", bfloat16, "few", "normal", layout)
    yield _case("multi_cast_transpose", bfloat16, "few", "edges", dtype=float8_e5m2)
    for dtype in INPUT_DTYPES:
        for to in FP8_DTYPES:
            yield _case("multi_cast_transpose", dtype, "mixed", dtype=to, amax=0.0)
            yield _case("multi_cast_transpose", dtype, "whole", "edges", dtype=to, amax=-1.0)
        for layout in ("offset", "strided"):
            yield _case("multi_cast_transpose", dtype, "whole", "normal", layout)
    for group in GROUPS:
        yield _case("multi_cast_transpose", bfloat16, group, "normal", amax=0.0)


def _quantize_cases() -> Iterator[Case]:
    few: dict[str, Any] = {"scaled": False, "amax": 0.0}
    for dtype in (bfloat16, float32):
        for rowwise, columnwise in _DIRECTIONS:
            yield _case("multi_quantize", dtype, "few", "normal", recipe=CurrentScaling(), rowwise=rowwise,
                        columnwise=columnwise, **few)
    for recipe in (MXScaling(), BlockScaling()):
        yield _case("multi_quantize", bfloat16, "few", "normal", recipe=recipe, scaled=False)
    yield _case("multi_quantize", bfloat16, "fits", "normal", recipe=CurrentScaling(), columnwise=True, **few)
    for rowwise, columnwise in _DIRECTIONS:
        directions = {"rowwise": rowwise, "columnwise": columnwise}
        own_scales: dict[str, Any] = {"scaled": False, **directions}
        current, powers = CurrentScaling(), CurrentScaling(float8_e5m2, eps=1e3, pow2_scale=True)
        for dtype in INPUT_DTYPES:
            for group in ("mixed", "whole"):
                yield _case("multi_quantize", dtype, group, recipe=current, amax=0.0, **own_scales)
            yield _case("multi_quantize", dtype, "mixed", "normal", recipe=powers, **own_scales)
            yield _case("multi_quantize", dtype, "whole", "edges", recipe=powers, **own_scales)
        for group in GROUPS:
            yield _case("multi_quantize", bfloat16, group, "normal", recipe=current, **own_scales)
            yield _case("multi_quantize", bfloat16, group, "normal", recipe=DelayedScaling(), amax=0.0,
                        **directions)
        yield _case("multi_quantize", float32, "whole", "normal", "offset", recipe=current, **own_scales)
        for recipe in (BlockScaling(), MXScaling(float8_e5m2), MXScaling(block=(32, 32)),
                       BlockScaling((128, 128))):
            for group in ("two", "mixed", *BATCHES):
                yield _case("multi_quantize", bfloat16, group, "normal", recipe=recipe, **own_scales)
    for recipe in (BlockScaling(scale_layout="compact"), MXScaling(scale_layout="swizzled")):
        for dtype in INPUT_DTYPES:
            yield _case("multi_quantize", dtype, "wide", recipe=recipe, columnwise=True, scaled=False)
        for layout in ("offset", "strided"):
            yield _case("multi_quantize", bfloat16, "whole", "normal", layout, recipe=recipe, columnwise=True,
                        scaled=False)


def _timed_row(op: str, label: str, group: str, **options: Any) -> Timed:
    shapes = _WEIGHTS[group]
    case = _case(op, bfloat16, group, "normal", **options)
    return Timed(f"bf16→e4m3 {label}, group", case, (len(shapes), *shapes[0]))


def _timed_cast() -> Iterator[Timed]:
    for group in _WEIGHTS:
        yield _timed_row("multi_cast_transpose", "+amax", group, amax=0.0, values_of_scales=(0.37,))


def _timed() -> Iterator[Timed]:
    timed = functools.partial(_timed_row, "multi_quantize")
    own_scales: dict[str, Any] = {"scaled": False}
    for group in _WEIGHTS:
        yield timed("current both", group, recipe=CurrentScaling(), columnwise=True, **own_scales)
    yield timed("row +amax", "32 of 2048×5120", recipe=DelayedScaling(), amax=0.0, values_of_scales=(0.37,))
    for label, recipe in (("1×128", BlockScaling()), ("MX", MXScaling(scale_layout="swizzled"))):
        yield timed(f"{label} both", "64 of 2048×5120", recipe=recipe, columnwise=True, **own_scales)
        yield timed(f"{label} row", "64 of 2048×5120", recipe=recipe, **own_scales)
    yield timed("MX row", "128 of 256×256", recipe=MXScaling(), **own_scales)


def _host_calls_of_cast(x: Array) -> Iterator[HostCalls]:
    weights, scales = [empty_like(x) for _ in range(64)], full(64, 1, float32, like=x)
    for n in (8, 64):
        yield HostCalls.both(f"{n} arrays", tensor_list.multi_cast_transpose, weights[:n], scales[:n])


def _host_calls(x: Array) -> Iterator[HostCalls]:
    weights, cache = [empty_like(x) for _ in range(64)], WeightCache(CurrentScaling())
    cache.quantize(weights)
    yield HostCalls("WeightCache hit, 64 arrays", functools.partial(cache.quantize, weights, update=False))


register(
    Registration("multi_cast_transpose", _cast, _cast_reference, _inputs, _cast_cases,
                 "`cast_transpose` of many matrices, in one launch",
                 programs=(tensor_list.variants,), timed=_timed_cast, moves=all_but("scales", "amax"),
                 host_calls=_host_calls_of_cast),
    Registration("multi_quantize", _quantize, _quantize_reference, _inputs, _quantize_cases,
                 "quantises many arrays by any recipe, in one or two launches",
                 programs=(tensor_list.variants, grouped_blocks.variants, blocks.variants, mx.variants),
                 timed=_timed, moves=all_but("scales", "amax"), host_calls=_host_calls),
)
