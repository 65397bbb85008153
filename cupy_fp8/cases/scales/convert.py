"""Cases of convert_scales. A case's shape is the data's, and its dtype is the scales' before the
conversion."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from ... import reference
from ...formats import float8_e8m0fnu, float32, int32
from ...layouts import SCALE_DTYPES, Block, scale_dtype, scale_shape
from ...ops.scales import convert, swizzle
from ..base import MATRIX, TIMED_MATRICES, Case, laid_out, maker, values
from ..registry import Arguments, Registration, Timed, register

_ROW, _COLUMN, _MX, _SQUARE = (1, 128), (128, 1), (1, 32), (128, 128)
_SHAPES = ((1, 1), (5, 300), (0, 5), (5, 0), (0, 0), (31, 1000), (33, 129), (4, 640), (127, 4224),
           (300, 4100), (1, 3, 2), (3, 140, 700),
           (3, 0, 4), (0, 9, 9), (2, 2, 5, 260))


def layouts_of(block: Block) -> tuple[str, ...]:
    """Return the layouts that scales of such blocks can have."""
    return tuple(SCALE_DTYPES) if 1 in block else ("compact", "gemm_ready", "deepgemm_sm100")


def _inputs(case: Case) -> Arguments:
    """Scales and padding have arbitrary bits. f32 scales that become E8M0 are powers of two, with some NaN.
    Compact scales of a 'strided' case are a transposed view."""
    source, target, block = (case.options[name] for name in ("source", "target", "block"))
    stored = scale_shape(case.shape, block, source)
    if case.dtype == int32:
        scales = values("bits", stored, float32).view(int32)
    elif case.dtype == float32 and case.options.get("dtype", scale_dtype(case.dtype, target)) != float32:
        scales = reference.astype(values("bits", stored, float8_e8m0fnu), float32)
        if source != "compact":  # padding contains a 3, which E8M0 does not have
            used = scale_shape(case.shape, block, "compact")
            scales[..., used[-2] if block[0] == 1 else used[-1]:] = 3
    else:
        scales = values("bits", stored, case.dtype)
    return (laid_out(scales, case.layout),), {"shape": case.shape, **case.options}


def _cases() -> Iterator[Case]:
    def case(source: str, target: str, shape: tuple[int, ...], block: Any = _ROW, layout: str = "contiguous",
             /, *, held: Any = None,
             **options: Any) -> Case:
        return Case("convert_scales", held or SCALE_DTYPES[source][-1], shape, "bits", layout,
                    {"source": source, "target": target, "block": block, **options})

    # few blocks first (for callers that take only a few cases), for every variant: f32 or E8M0 to f32 or E8M0
    for source, target in (("gemm_ready", "swizzled"), ("compact", "gemm_ready"),
                           ("swizzled", "deepgemm_sm90"),
                           ("deepgemm_sm100", "swizzled")):
        yield case(source, target, (40, 900), (1, 32))
        yield case(source, target, (2, 150, 130), (32, 1))
    for block in (_ROW, _COLUMN, _SQUARE):
        for source, target in product(layouts_of(block), repeat=2):
            for held in SCALE_DTYPES[source]:
                yield case(source, target, MATRIX if block == _SQUARE else (133, 1500), block, held=held)
    for held, to in product((float32, float8_e8m0fnu), repeat=2):
        yield case("compact", "compact", (150, 700), (32, 1), held=held, dtype=to)
        yield case("compact", "compact", MATRIX, (64, 32), held=held, dtype=to)
    for shape in _SHAPES:
        yield case("compact", "deepgemm_sm100", shape)
        yield case("deepgemm_sm100", "gemm_ready", shape, _COLUMN)
        yield case("gemm_ready", "deepgemm_sm100", shape, (32, 64))
    for target in SCALE_DTYPES:
        for block in (_ROW, (32, 1)):
            for layout in ("strided", "offset"):
                yield case("compact", target, (140, 720), block, layout)
        yield case(target, "compact", (20, 500), (1, None))
        yield case(target, "compact", (20, 500), (None, 1), dtype=float32)


#: conversions (block, layouts) of a model between its quantisers and its matrix products
_CONVERSIONS: tuple[tuple[tuple[int, int], str, str], ...] = (
    (_ROW, "compact", "gemm_ready"), (_ROW, "compact", "deepgemm_sm100"),
    (_COLUMN, "compact", "deepgemm_sm100"), (_ROW, "gemm_ready", "compact"),
    (_SQUARE, "compact", "deepgemm_sm100"), (_MX, "compact", "deepgemm_sm100"),
    (_MX, "swizzled", "deepgemm_sm100"), (_MX, "deepgemm_sm100", "swizzled"))


def _timed() -> Iterator[Timed]:
    case = maker("convert_scales")
    for shape, (block, source, target) in product(TIMED_MATRICES, _CONVERSIONS):
        held = float8_e8m0fnu if (source, block) == ("compact", _MX) else SCALE_DTYPES[source][-1]
        yield Timed(f"{source} → {target}, {block[0]}×{block[1]}",
                    case(held, shape, source=source, target=target, block=block))


register(Registration("convert_scales", convert.convert_scales, reference.convert_scales, _inputs, _cases,
                      "scales of blocks in another layout",
                      programs=(convert.variants, swizzle.variants), timed=_timed))
