"""Cases of matmul_nt."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from ...formats import INPUT_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float16, float32
from ...layouts import ScaleLayout, scale_shape
from ...ops.matmul import dense, tiles
from ...ops.scales import convert
from ...reference.matmul import dense as reference
from ...reference.matmul.tolerance import assert_within
from ...results import Quantized, Scaled
from ..base import Case, powers_of_two, values
from ..registry import Arguments, Registration, register

BLOCKS: dict[str, Any] = {"tensor": None, "row": (1, None), "vector": (1, 128), "block": (128, 128)}
_PAIRS = (("tensor", "tensor"), ("row", "row"), ("vector", "block"), ("block", "vector"),
          ("vector", "vector"))
#: pairs that cuBLASLt does not support
_OTHER_PAIRS = (("block", "block"), ("tensor", "row"), ("row", "block"), ("tensor", "vector"))
#: [M, N, K] or [B, M, N, K]. The odd shapes, which cuBLASLt does not support, have tails of blocks and tiles.
_ALIGNED: tuple[tuple[int, ...], ...] = ((16, 8, 16), (128, 128, 128), (68, 72, 272), (4, 264, 400))
_ODD: tuple[tuple[int, ...], ...] = ((1, 1, 1), (7, 5, 3), (33, 17, 129), (130, 9, 130), (5, 64, 256))
_EMPTY: tuple[tuple[int, ...], ...] = ((0, 8, 16), (8, 0, 16), (5, 8, 0))
_BATCHES: tuple[tuple[int, ...], ...] = ((2, 16, 24, 144), (3, 5, 3, 7), (0, 4, 8, 16))


def operand(shape: tuple[int, ...], dtype: np.dtype[Any], scaling: str, layout: ScaleLayout,
            scale: np.dtype[Any], kind: str, seed: int) -> Scaled:
    """Return FP8 data (see `values`) with scales below 1, so that float16 holds the products; E8M0 scales are
    powers of two."""
    block, rng = BLOCKS[scaling], np.random.default_rng(seed + 77)
    data = values(kind, shape, dtype, seed)
    if block is None:
        return Scaled(data, np.array([0.37], np.float32), shape)
    stored = scale_shape(shape, block, layout)
    exponents = rng.integers(-6, 0, stored)
    if scale == float8_e8m0fnu:
        scales = powers_of_two(exponents, scale)
    else:
        scales = (rng.uniform(1, 2, stored) * np.exp2(exponents)).astype(np.float32)
    return Scaled(data, scales, shape, False, block, layout)


def _inputs(case: Case) -> Arguments:
    """The case's shape is ([B,] M, N, K); its dtype is that of a."""
    options = dict(case.options)
    *batch, m, n, k = case.shape
    first, second = options.pop("scaling")
    layouts = options.pop("scale_layout", ("gemm_ready", "gemm_ready"))
    scale, other = options.pop("scale", float32), options.pop("other", float8_e4m3fn)
    a = operand((*batch, m, k), case.dtype, first, layouts[0], scale, case.values, 1)
    b = operand((*batch, n, k), other, second, layouts[1], scale, case.values, 2)
    if options.pop("given", "") == "Quantized":
        return (Quantized(a), Quantized(b)), options
    if (bias := options.pop("bias", None)) is not None:
        options["bias"] = values("normal", (n,), bias, 3)
    if options.pop("accumulate", False):
        options["accumulate"] = values("normal", (*batch, m, n), float32, 4)
    return (a, b), options


def _cases() -> Iterator[Case]:
    def case(shape: tuple[int, ...], pair: tuple[str, str], kind: str = "normal",
             of: np.dtype[Any] = float8_e4m3fn, **options: Any) -> Case:
        return Case("matmul_nt", of, shape, kind, options={"scaling": pair, **options})

    for pair in (*_PAIRS, *_OTHER_PAIRS):
        for shape in (*_ALIGNED, *_ODD):
            yield case(shape, pair)
    for pair in _PAIRS:
        for to in INPUT_DTYPES:
            yield case((68, 72, 272), pair, "normal", float8_e5m2, dtype=to)
            yield case((68, 72, 272), pair, other=float8_e5m2, dtype=to, bias=to)
            yield case((68, 72, 272), pair, dtype=to, bias=bfloat16)
        yield case((68, 72, 272), pair, accumulate=True)
        yield case((68, 72, 272), pair, accumulate=True, bias=bfloat16)
        yield case((68, 72, 272), pair, "bits")
        yield case((68, 72, 272), pair, "bits", float8_e5m2, other=float8_e5m2)
        for shape in (*_EMPTY, *_BATCHES):
            yield case(shape, pair)
        yield case((2, 16, 24, 144), pair, bias=bfloat16, accumulate=True)
        yield case((33, 17, 129), pair, bias=float32)
        yield case((5, 8, 0), pair, bias=float16, accumulate=True)
    # rows that are copied to where tensor copies can read them, for tiles of several parts
    for pair in (("tensor", "tensor"), ("vector", "block")):
        yield case((1, 300, 236, 130), pair, bias=float32)
        yield case((2, 257, 256, 68), pair, dtype=float32)
    for layouts in product(("compact", "deepgemm_sm90"), ("compact", "gemm_ready")):
        yield case((68, 72, 272), ("vector", "block"), scale_layout=layouts)
    yield case((68, 72, 272), ("row", "row"), scale_layout=("compact", "compact"))
    yield case((2, 68, 72, 272), ("vector", "vector"), scale_layout=("compact", "compact"))
    for pair in _PAIRS[1:]:
        yield case((68, 72, 272), pair, scale=float8_e8m0fnu, scale_layout=("compact", "compact"))
    yield case((68, 72, 272), ("vector", "block"), given="Quantized")


def _agrees(actual: dict[str, Any], desired: dict[str, Any], arguments: Arguments) -> None:
    (a, b), options = arguments
    addends = {name: options[name] for name in ("bias", "accumulate") if options.get(name) is not None}
    assert_within(actual["result"], desired["result"], reference.magnitudes(a, b, **addends))


register(Registration(
    "matmul_nt", dense.matmul_nt, reference.matmul_nt, _inputs, _cases,
    "multiplies two FP8 matrices with scales of any recipe",
    programs=(tiles.variants, convert.variants), agrees=_agrees))
