"""Cases of rebase_scales: power-of-two scales for other blocks, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from ...arrays import asarray, bits
from ...formats import FORMATS, FP8_DTYPES, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float32, int32
from ...layouts import scale_shape, swap_last
from ...ops.convert import rebase
from ...ops.scales import convert, swizzle
from ...reference.convert.rebase import rebase_scales as by_reference
from ...reference.scales.convert import convert_scales
from ...results import Scaled
from ..base import QUANTISED, Case, laid_out, maker, powers_of_two, source
from ..registry import Arguments, Registration, Timed, register

_MX: Any = (1, 32)
_ROW: Any = (1, 128)
_SQUARE: Any = (128, 128)
#: tails of every tile, rows with and without wide accesses, several matrices, or no elements
_SHAPES: tuple[tuple[int, ...], ...] = ((1, 1), (1, 5), (5, 1), (0, 5), (5, 0), (3, 37), (33, 640),
                                        (127, 129), (130, 257), (144, 272), (2, 3, 40, 24), (3, 0, 4),
                                        (2, 133, 144))
_TIMED_SHAPES = ((4096, 7168), (16384, 8192))
#: Ranges of exponents: all equal; different by block; so far apart that values vanish; the whole range; and
#: those that only f32 has.
_EXPONENTS = {"same": (-3, -3), "near": (-9, -5), "wide": (-30, 0), "all": (-127, 127), "tiny": (-149, -120)}
#: New blocks of MX data. A few rows, blocks larger than a tile, and whole rows take other tiles.
_BLOCKS: tuple[Any, ...] = ((1, 32), (1, 64), (1, 256), (1, 2048), (1, None), (32, 32), (64, 64), (32, 256),
                            (256, 32), (256, 256), (1024, 32), (128, 4096))


def _inputs(case: Case) -> Arguments:
    """The case's array is the data as stored, with some zeros. before: the blocks of q, of data not
    stored transposed; scales: a name of _EXPONENTS, or 'quantised', for those of a quantiser; held, layout:
    the dtype and the layout of q's scales; view: they are not contiguous."""
    options = dict(case.options)
    before, transposed = options.pop("before", _MX), options.pop("transposed", False)
    held, layout = options.pop("held", float8_e8m0fnu), options.pop("layout", "compact")
    scales, view = options.pop("scales", "near"), options.pop("view", False)
    data = source(case)
    if case.layout != "strided":
        bits(data)[..., 5::11, :] &= 0x80                   # some rows are zeros, like padding
    rng, (low, high) = np.random.default_rng(data.size), _EXPONENTS.get(scales, QUANTISED)
    grid = (1,) if before is None else scale_shape(data.shape, before, "compact")
    exponents = rng.integers(low, high, grid, endpoint=True)
    scale_inv = powers_of_two(exponents, held)
    if scales in _EXPONENTS and held == float8_e8m0fnu:
        bits(scale_inv).reshape(-1)[11::29] = 255                   # NaN
    elif scales in _EXPONENTS:
        scale_inv.reshape(-1)[7::31] = 0
    if layout != "compact":
        scale_inv = convert_scales(scale_inv, source="compact", target=layout, shape=data.shape, block=before)
    scale_inv = laid_out(scale_inv, "strided" if view else "contiguous")
    scale_inv = asarray(scale_inv, like=data)
    s = Scaled(data, scale_inv, data.shape, False, before, None if before is None else layout)
    if transposed:
        s, options["block"] = s.T, swap_last(options["block"])
        if before is None:
            s = Scaled._of(data, scale_inv, swap_last(data.shape), True)
    if "changed" in options:
        options["changed"] = np.array([options["changed"]], np.int64)
    return (s,), options


def _cases() -> Iterator[Case]:
    without_count = maker("rebase_scales")

    def case(*args: Any, **options: Any) -> Case:
        return without_count(*args, changed=5, **options)

    for block in (_ROW, _SQUARE):
        for dtype in FP8_DTYPES:
            yield case(dtype, (144, 272), "normal", block=block)
    for block, dtype in product((_ROW, _SQUARE), FP8_DTYPES):
        for scales in _EXPONENTS:
            yield case(dtype, (130, 257), block=block, scales=scales)
            yield case(dtype, (260, 272), "normal", block=block, scales=scales, held=float32,
                       scale_dtype=float32)
        yield case(dtype, (160, 136), "edges", block=block, scales="wide", scale_dtype=float32)
    for block, shape in product((_ROW, _SQUARE), _SHAPES):
        yield case(float8_e4m3fn, shape, "normal", block=block)
        yield case(float8_e5m2, shape, block=block, scales="wide", transposed=True, scale_dtype=float32)
    for block in _BLOCKS:
        yield case(float8_e4m3fn, (300, 592), "normal", block=block, scales="wide")
        yield case(float8_e5m2, (2, 65, 100), block=block)
    for block in ((1, None), (1, 65536), (1, 8192), (32, 4096)):
        yield case(float8_e4m3fn, (33, 17000), "normal", block=block)
    # larger old blocks, of other kinds, or the whole tensor
    for before, block in product((_ROW, _SQUARE, (1, None), (32, 64), None),
                                 (_MX, _ROW, (64, 32), (1, None))):
        for transposed in (False, True):
            yield case(float8_e4m3fn, (2, 130, 272), "normal", before=before, block=block, held=float32,
                       transposed=transposed, scale_dtype=float8_e8m0fnu)
    yield from _layouts(case)
    for layout in ("offset", "strided"):
        yield case(float8_e5m2, (136, 144), "bits", layout, block=_SQUARE, view=True)
    yield without_count(float8_e4m3fn, (144, 272), "normal", block=_ROW)
    yield without_count(float8_e5m2, (260, 144), "normal", block=_SQUARE)


def _layouts(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield every layout that has the scales, before and after."""
    for transposed in (False, True):
        for layout in ("swizzled", "deepgemm_sm100"):
            for block, after in ((_ROW, "gemm_ready"), (_SQUARE, "gemm_ready"), (_ROW, layout)):
                yield case(float8_e4m3fn, (133, 272), "normal", block=block, layout=layout,
                           scale_layout=after, transposed=transposed)
        for layout in ("gemm_ready", "deepgemm_sm90"):
            yield case(float8_e4m3fn, (133, 272), "normal", block=_MX, before=_ROW, held=float32,
                       layout=layout, scale_layout=layout, transposed=transposed)
        yield case(float8_e4m3fn, (133, 272), "normal", block=_ROW, before=_SQUARE, held=float32,
                   layout="gemm_ready", scale_layout="gemm_ready", transposed=transposed)
        yield case(float8_e4m3fn, (2, 133, 272), "normal", block=_SQUARE, scale_layout="deepgemm_sm100",
                   scale_dtype=int32, transposed=transposed)
        yield case(float8_e4m3fn, (2, 133, 272), "normal", block=_MX, before=_SQUARE, layout="deepgemm_sm100",
                   transposed=transposed)
        yield case(float8_e4m3fn, (2, 70, 40), block=_ROW, view=True, transposed=transposed)
        for shape in ((133, 2000), (4, 640), (5, 3, 129)):
            yield case(float8_e4m3fn, shape, "normal", block=_ROW, scale_layout="gemm_ready",
                       transposed=transposed)
            yield case(float8_e4m3fn, shape, "normal", block=_SQUARE, scale_layout="gemm_ready",
                       transposed=transposed)


def _timed() -> Iterator[Timed]:
    for shape in _TIMED_SHAPES:
        for changed in (None, 0):
            yield _timed_row(shape, _MX, _ROW, "gemm_ready", changed)
            yield _timed_row(shape, _MX, _SQUARE, changed=changed)
        yield _timed_row(shape, _ROW, _SQUARE)
    yield _timed_row(_TIMED_SHAPES[0], _MX, _ROW)
    yield _timed_row(_TIMED_SHAPES[0], _MX, (256, 256))
    for block in (_ROW, _SQUARE):
        yield _timed_row(_TIMED_SHAPES[0], _MX, block, dtype=float8_e5m2)


def _timed_row(shape: tuple[int, int], before: Any, block: Any, layout: str = "compact",
               changed: int | None = None, dtype: np.dtype[Any] = float8_e4m3fn) -> Timed:
    label = f"{FORMATS[dtype].tag} {before[0]}×{before[1]} → {block[0]}×{block[1]}, {layout}"
    options: dict[str, Any] = {"held": float8_e8m0fnu if before == _MX else float32, "scale_layout": layout}
    if changed is not None:
        label, options["changed"] = f"{label}, changed values counted", changed
    case = maker("rebase_scales", "normal")
    return Timed(label, case(dtype, shape, before=before, block=block, scales="quantised",
                             scale_dtype=float32, **options))


register(
    Registration("rebase_scales", rebase.rebase_scales, by_reference, _inputs, _cases,
                 "FP8 in other blocks, without quantising again",
                 programs=(rebase.variants, convert.variants, swizzle.variants), timed=_timed),
)
