"""Cases of the scaling-aware transpose."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, asarray, bits, zeros
from ...formats import FP8_DTYPES, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float32
from ...layouts import cdiv
from ...ops.convert import scaling_aware
from ...ops.quantize import blocks
from ...reference.scales.convert import stored
from ...results import Quantized, Scaled
from ..base import QUANTISED, Case, maker, nbytes, powers_of_two, source
from ..groups import sizes
from ..registry import Arguments, HostCalls, Registration, Timed, register

_SHAPES = ((1, 1), (1, 5), (5, 1), (0, 5), (5, 0), (0, 0), (3, 37), (127, 129), (130, 257), (128, 128),
           (272, 520), (144, 264), (33, 640),
           (500, 272))
#: (rows, experts): empty experts, one expert, more experts than rows, and enough for several rounds of the
#: search. Some columns end in half a sector.
_EXPERTS = ((300, 1), (400, 4), (90, 40), (5, 64), (700, 300), (0, 3), (0, 0), (40, 0), (512, 3), (1281, 1),
            (1296, 1), (2700, 2))
_TIMED_SHAPES = ((16384, 8192), (32768, 7168))
#: Ranges of exponents by row: close; far apart (by one more than f16 has halvings, without and with e4m3's
#: lift); the whole range; and beyond it.
_EXPONENTS = {"near": (-9, -5), "halvings": (-25, 0), "wide": (-32, 0), "all": (-127, 127),
              "tiny": (-149, -120)}


def _inputs(case: Case) -> Arguments:
    """The case's array is the data. scales: a name of _EXPONENTS (with some rows of zeros), or
    'quantised', for a quantiser's. held: their layout. multiple: divides the sizes of all experts."""
    options = dict(case.options)
    block, experts = options.pop("block", 128), options.pop("experts", None)
    scales, narrow = options.pop("scales", "near"), options.pop("narrow", False)
    held = options.pop("held", "compact")
    rows, columns = case.shape
    if experts is not None:
        multiple = options.pop("multiple", 1)
        splits = sizes(rows // multiple, experts) * multiple
        options["splits"] = splits.astype(np.int32 if narrow else np.int64)
    data = source(case)
    if case.layout != "strided" and scales in _EXPONENTS:
        bits(data)[5::11] &= 0x80                   # some rows are zeros, like padding
    rng = np.random.default_rng(rows + columns)
    low, high = _EXPONENTS.get(scales, QUANTISED)
    exponents = rng.integers(low, high, (rows, cdiv(columns, block)), endpoint=True)
    exponents[7::11] = exponents[:1]
    scale_inv = powers_of_two(exponents, float8_e8m0fnu if block == 32 else float32)
    if block == 32 and scales in _EXPONENTS:
        bits(scale_inv)[11::29] = 255                                   # NaN
    if held != "compact":
        scale_inv = stored(scale_inv, held, (1, block))
        scale_inv[:, rows:] = np.nan                                    # padding is not read
    return (Scaled(data, asarray(scale_inv, like=data), case.shape, False, (1, block), held),), options


def _again(q: Scaled, *, out: Quantized | None = None, **options: Any) -> Quantized:
    """Call the op again. A result belongs to the memory of its q, so with `out` the new values are copied
    into that memory."""
    if out is not None and out.rowwise.data is not q.data:
        kept = q.scale_inv if out.rowwise.scale_layout == "gemm_ready" else out.rowwise.scale_inv
        for mine, given in ((out.rowwise.data, q.data), (kept, q.scale_inv)):
            bits(mine)[...] = bits(given)
        q = Scaled._of(out.rowwise.data, kept, q.shape, False, q.block, q.scale_layout)
    return scaling_aware.scaling_aware_transpose(q, out=out, **options)


def _cases() -> Iterator[Case]:
    case = maker("scaling_aware_transpose")
    # few blocks first, for callers that take only a few cases: each kind of kernel
    for block in (128, 32):
        for target in scaling_aware.TARGETS:
            yield case(float8_e4m3fn, (144, 272), "normal", block=block, target=target)
            yield case(float8_e5m2, (150, 131), "normal", block=block, target=target, experts=3)
    for block in (128, 32):
        for target in scaling_aware.TARGETS:
            for dtype in FP8_DTYPES:
                for scales in _EXPONENTS:
                    yield case(dtype, (300, 272), "normal" if scales == "near" else "bits", block=block,
                               target=target, scales=scales,
                               experts=3)
                yield case(dtype, (130, 257), block=block, target=target, scales="all")
                yield case(dtype, (160, 136), "edges", block=block, target=target, scales="wide")
            for shape in _SHAPES:
                yield case(float8_e4m3fn, shape, "normal", block=block, target=target)
            for rows, experts in _EXPERTS:
                yield case(float8_e4m3fn, (rows, 144), "normal", block=block, target=target, experts=experts)
                yield case(float8_e5m2, (rows, 45), block=block, target=target, experts=experts, narrow=True,
                           scale_layout="compact")
            # small: a tile has several strips of them
            for rows, columns, experts in ((500, 400, 24), (600, 272, 14), (31, 648, 1), (64, 528, 1)):
                yield case(float8_e4m3fn, (rows, columns), "normal", block=block, target=target,
                           experts=experts)
        for layout in ("offset", "strided"):
            yield case(float8_e5m2, (136, 144), "bits", layout, block=block, experts=2)
        yield case(float8_e4m3fn, (130, 257), block=block, scale_layout="compact")
    yield from _cases_of_other_layouts()


def _cases_of_other_layouts() -> Iterator[Case]:
    """Yield cases of gemm_ready scales and the like. Rows are not multiples of 4 or of a tile, there are
    several tiles in both directions, and experts begin anywhere."""
    case = maker("scaling_aware_transpose", "normal")
    for shape in ((1, 1), (5, 130), (0, 5), (5, 0), (127, 129), (128, 128), (144, 264), (33, 640),
                  (500, 1300)):
        yield case(float8_e4m3fn, shape, held="gemm_ready")
    for target in scaling_aware.TARGETS:
        for rows, columns, experts in ((300, 144, 1), (401, 272, 4), (90, 45, 40), (1281, 144, 1),
                                       (500, 400, 24), (31, 648, 1), (0, 144, 3), (2700, 272, 2)):
            yield case(float8_e4m3fn, (rows, columns), held="gemm_ready", target=target, experts=experts)
        yield case(float8_e5m2, (150, 131), "bits", held="gemm_ready", target=target, experts=3,
                   scales="all")
    yield case(float8_e4m3fn, (150, 272), held="deepgemm_sm90", experts=3)


def _timed() -> Iterator[Timed]:
    for shape, target in product(_TIMED_SHAPES, scaling_aware.TARGETS):
        yield _timed_row(f"e4m3 {target}", shape, target=target)
        for experts in (None, 8):
            label = "" if experts is None else f", {experts} uneven experts"
            yield _timed_row(f"e4m3 {target}, gemm_ready{label}", shape, target=target, held="gemm_ready",
                             experts=experts)
        for experts in (1, 8, 256):
            yield _timed_row(f"e4m3 {target}, {experts} uneven experts", shape, target=target,
                             experts=experts)
    for shape, experts in product(_TIMED_SHAPES, (8, 256)):
        yield _timed_row(f"e4m3 column, {experts} uneven experts, multiples of 16", shape, target="column",
                         experts=experts, multiple=16)
    for target in scaling_aware.TARGETS:
        yield _timed_row(f"e5m2 {target}, 8 uneven experts", _TIMED_SHAPES[0], float8_e5m2, target=target,
                         experts=8)
        yield _timed_row(f"e4m3fn {target} MX, 8 uneven experts", _TIMED_SHAPES[0], block=32, target=target,
                         experts=8)


def _timed_row(label: str, shape: tuple[int, int], dtype: np.dtype[Any] = float8_e4m3fn,
               **options: Any) -> Timed:
    case = maker("scaling_aware_transpose", "normal")
    return Timed(label, case(dtype, shape, scales="quantised", **options))


def _moves(arguments: Arguments, written: dict[str, np.ndarray]) -> int:
    """Data and scales are read, and written column-wise. float32 scales are also written row-wise. Padding of
    scales is not counted."""
    (q,), _ = arguments
    return 2 * nbytes(q.data) + (3 if q.scale_inv.dtype == float32 else 2) * nbytes(q.scale_inv)


def _host_calls(x: Array) -> Iterator[HostCalls]:
    wide = zeros((x.shape[0], 128), x.dtype, like=x)
    yield HostCalls.both("splits (two launches)", scaling_aware.scaling_aware_transpose,
                         blocks.quantize_block(wide, scale_layout="compact"),
                         splits=asarray([4, 12], np.int64, like=x))


register(Registration("scaling_aware_transpose", _again, reference.scaling_aware_transpose, _inputs, _cases,
                      "column-wise FP8 from row-wise FP8, without quantising again",
                      programs=(scaling_aware.variants,), timed=_timed, moves=_moves,
                      host_calls=_host_calls))
