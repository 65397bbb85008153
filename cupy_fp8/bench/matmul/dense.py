"""Benchmark rows of matmul_nt. `python -m cupy_fp8.bench.matmul.compare` has the same products beside other
libraries."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from ...arrays import asnumpy, empty
from ...formats import bfloat16
from ...ops.matmul.dense import matmul_nt
from ...reference.matmul import dense as reference
from ...reference.matmul.tolerance import assert_within
from ...results import Scaled
from ..data import part
from ..measure import Call, Check, Spec
from .compare import PAIRS, SHAPES, operand

_FIRST = slice(0, 8)                # rows of a whose products are compared
#: rows that do not begin at multiples of 16 bytes, so that cuBLASLt cannot take the product
_MISALIGNED = (4096, 4096, 4100)


def _product(shape: tuple[int, int, int], pair: tuple[str, str],
             options: dict[str, Any]) -> tuple[Call, Check]:
    m, n, k = shape
    a, b = operand(m, k, pair[0]), operand(n, k, pair[1])
    out = empty((m, n), bfloat16, like=a.data)

    def check() -> None:
        if not options.get("fast_accum"):
            first = _first_rows(a)
            whole = Scaled(asnumpy(b.data), asnumpy(b.scale_inv), b.shape, False, b.block, b.scale_layout)
            want = reference.matmul_nt(first, whole)
            assert_within(part(out, _FIRST), want, reference.magnitudes(first, whole))

    return partial(matmul_nt, a, b, out=out, **options), check


def _first_rows(s: Scaled) -> Scaled:
    data = part(s.data, _FIRST)
    if s.block is None:
        return Scaled(data, asnumpy(s.scale_inv), data.shape)
    scales = asnumpy(s.to_layout("compact").scale_inv)
    return Scaled(data, scales[_FIRST], data.shape, False, s.block, "compact")


def rows() -> Iterator[Spec]:
    for shape in (*SHAPES, _MISALIGNED):
        for pair in PAIRS:
            m, n, k = shape
            for label, options in (("", {}), (" fast", {"fast_accum": True}), (" tuned", {"autotune": True})):
                if label and shape == _MISALIGNED:
                    continue
                if label != " fast" or pair[0] in ("tensor", "row"):
                    yield Spec("matmul_nt", f"{pair[0]} × {pair[1]}{label}", shape,
                               (m + n) * k + 2 * m * n, partial(_product, shape, pair, options),
                               2 * m * n * k)
