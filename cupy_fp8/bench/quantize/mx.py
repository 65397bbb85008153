"""Benchmark rows of quantize_mx."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from ... import backend, reference
from ...arrays import asnumpy, bits
from ...formats import FORMATS, bfloat16, float16, float32
from ...layouts import scale_shape
from ...ops.quantize.mx import quantize_mx
from ...reference.scales.swizzle import unswizzle
from ...results import Quantized, Scaled
from ...testing import assert_bytes_equal
from .tensor import SIZES, Spec, _normal, _sample

_MAIN = SIZES[2]
#: Experts' weights of shape (N, K), quantised along N.
_EXPERTS = ((8192, 5120), (5120, 8192), (2048, 7168))
_ROW, _COLUMN, _BOTH = (True, False), (False, True), (True, True)


def _check(x: Any, out: Quantized, mode: str) -> None:
    """Checks sampled rows and columns of the first and the last matrix."""
    for e in (0, -1):
        matrix = bits(x)[e] if x.ndim == 3 else bits(x)
        for part, lines in ((out._row, matrix), (out._column, matrix.T)):
            if part is None:
                continue
            picked = _sample(lines.shape[0])
            want = reference.quantize_mx(asnumpy(lines[picked].copy()).view(x.dtype), mode=mode)
            data, scales = _of_matrix(part, e)
            assert_bytes_equal(data[picked], bits(want.data))
            assert_bytes_equal(scales[picked], bits(want.scale_inv))


def _of_matrix(part: Scaled, e: int) -> tuple[Any, np.ndarray]:
    """(data, scales) of one matrix as bytes, lines of blocks first."""
    columnwise = part.block == (32, 1)
    data, scales = (bits(a)[e] if len(part.shape) == 3 else bits(a) for a in part)
    lines, length = part.shape[-2:][::-1] if columnwise else part.shape[-2:]
    scales = asnumpy(scales)
    if part.scale_layout == "swizzled":
        scales = unswizzle(scales, lines, -(-length // 32))
    elif columnwise:
        scales = scales.T
    return data.T if columnwise and not part.transposed else data, scales


def _quantize(shape: tuple[int, ...], source: np.dtype[Any], directions: tuple[bool, bool], transposed: bool,
              n_fastest: bool, options: dict[str, Any]) -> Any:
    def make() -> Any:
        cp = backend.cupy()
        x = _normal(shape, source)
        if n_fastest:
            x = cp.ascontiguousarray(bits(x).swapaxes(-1, -2)).view(source).swapaxes(-1, -2)
        out = quantize_mx(x, rowwise=directions[0], columnwise=directions[1], transposed=transposed,
                          **options)

        def call() -> Any:
            return quantize_mx(x, rowwise=directions[0], columnwise=directions[1], transposed=transposed,
                               out=out, **options)

        return call, lambda: _check(x, out, options.get("mode", "rceil"))

    return make


def _all() -> Iterator[Spec]:
    def spec(label: str, shape: tuple[int, ...], directions: tuple[bool, bool],
             source: np.dtype[Any] = bfloat16, transposed: bool = False, n_fastest: bool = False,
             **options: Any) -> Spec:
        layout = options.get("scale_layout", "compact")
        scales = sum(prod(scale_shape(shape, block, layout))
                     for block, on in zip(((1, 32), (32, 1)), directions, strict=True) if on)
        traffic = prod(shape) * (source.itemsize + sum(directions)) + scales
        return Spec("quantize_mx", f"{FORMATS[source].tag}→e4m3 {label}", shape, traffic,
                    _quantize(shape, source, directions, transposed, n_fastest, options))

    for shape in SIZES:
        yield spec("row", shape, _ROW)
        yield spec("row floor", shape, _ROW, mode="floor")
        yield spec("row swizzled", shape, _ROW, scale_layout="swizzled")
        yield spec("column", shape, _COLUMN)
        yield spec("column stored transposed", shape, _COLUMN, transposed=True)
        yield spec("both", shape, _BOTH)
        yield spec("both, column stored transposed", shape, _BOTH, transposed=True)
    yield spec("column swizzled", _MAIN, _COLUMN, scale_layout="swizzled")
    yield spec("both swizzled", _MAIN, _BOTH, scale_layout="swizzled")
    yield spec("row torchao", _MAIN, _ROW, profile="torchao")
    for source in (float32, float16):
        yield spec("row", _MAIN, _ROW, source)
        yield spec("column", _MAIN, _COLUMN, source)
        yield spec("column stored transposed", _MAIN, _COLUMN, source, transposed=True)
        yield spec("both", _MAIN, _BOTH, source)
        yield spec("both, column stored transposed", _MAIN, _BOTH, source, transposed=True)
    for experts in _EXPERTS:
        for count in (1, 2, 4, 8, 16, 64):
            yield spec("column", (count, *experts), _COLUMN)
            yield spec("column stored transposed", (count, *experts), _COLUMN, transposed=True)
    for transposed, stored in ((False, ""), (True, " stored transposed")):
        yield spec(f"column{stored}, N fastest", (8, *_EXPERTS[0]), _COLUMN, transposed=transposed,
                   n_fastest=True)


SPECS: tuple[Spec, ...] = tuple(_all())
