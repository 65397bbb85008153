"""Benchmark rows of grouped_matmul_nt. `python -m cupy_fp8.bench.matmul.compare_grouped` has the same
products beside PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ... import backend
from ...arrays import Array, asnumpy, bits, empty
from ...formats import bfloat16, float8_e4m3fn, float32
from ...grouped import Grouped
from ...layouts import grouped_scale_shape, scale_shape
from ...ops.matmul.grouped import GroupedAxis, grouped_matmul_nt
from ...options import BlockScaleLayout
from ...reference.matmul import grouped as reference
from ...reference.matmul.tolerance import assert_within
from ...results import Scaled
from ..measure import Call, Check, Spec

_ROWS = 4                           # rows of the result that are compared


class Shape(NamedTuple):
    """A grouped product. total: rows of all groups ("m") or columns ("k"). multiple: divides all sizes.
    accumulate: in float32; otherwise the result is bfloat16. scale_layout: of rows."""

    group: GroupedAxis
    experts: int
    total: int
    n: int
    other: int                      # K of "m", M of "k"
    multiple: int = 1
    accumulate: bool = False
    scale_layout: BlockScaleLayout = "gemm_ready"

    @property
    def flops(self) -> int:
        return 2 * self.total * self.n * self.other

    @property
    def traffic(self) -> int:
        """Bytes of operands and of the result. All experts have tokens, if there are enough."""
        of_result = 8 if self.accumulate else 2
        if self.group == "k":
            return self.total * (self.n + self.other) + of_result * self.experts * self.n * self.other
        used = int((self.sizes() > 0).sum())
        return self.total * self.other + used * self.n * self.other + of_result * self.total * self.n

    @property
    def label(self) -> str:
        kind = "rows" if self.group == "m" else "gradient"
        sizes = "any size" if self.multiple == 1 else f"sizes % {self.multiple}"
        compact = "" if self.scale_layout == "gemm_ready" else f", {self.scale_layout} scales"
        return f"{kind} E={self.experts} {sizes}{' accumulate' if self.accumulate else ''}{compact}"

    def sizes(self) -> np.ndarray:
        """Return uneven sizes that add up to total."""
        share = np.random.default_rng(self.experts).dirichlet(np.full(self.experts, 4.0))
        ends = np.round(np.cumsum(share) * self.total / self.multiple).astype(np.int64) * self.multiple
        ends[-1] = self.total
        return np.diff(ends, prepend=0)


SHAPES = (
    *(Shape("m", e, 32768, n, k, multiple) for e, multiple in ((8, 1), (64, 128), (64, 1))
      for n, k in ((4096, 7168), (7168, 2048))),
    *(Shape("k", e, 32768, 7168, 4096, multiple) for e in (8, 64) for multiple in (128, 16, 1)),
    *(Shape("k", e, 32768, 7168, 4096, 128, accumulate=True) for e in (8, 64)),
    *(Shape("m", e, tokens, 4096, 7168) for e, tokens in ((64, 64), (64, 1024), (256, 64), (256, 1024))),
)

#: `permute` makes rows with such scales
_COMPACT = tuple(Shape("m", 8, 32768, n, k, scale_layout="compact") for n, k in ((4096, 7168), (7168, 2048)))


def _codes(shape: tuple[int, ...]) -> Array:
    """Return values of both signs up to 2: times their mean of squares they stay within bfloat16."""
    cp = backend.cupy()
    found: Array = (cp.random.randint(0, 64, shape, dtype=cp.uint8)
                    | cp.random.randint(0, 2, shape, dtype=cp.uint8) << cp.uint8(7)).view(float8_e4m3fn)
    return found


def _scales(shape: tuple[int, ...]) -> Array:
    cp = backend.cupy()
    return cp.random.uniform(0.5, 2, shape).astype(cp.float32)


def scaled(shape: tuple[int, ...], block: tuple[int, int], layout: BlockScaleLayout = "gemm_ready") -> Scaled:
    return Scaled(_codes(shape), _scales(scale_shape(shape, block, layout)), shape, False, block, layout)


def operands(shape: Shape) -> tuple[Any, ...]:
    """Return a, b and splits in the recipe of DeepSeek-V3."""
    cp = backend.cupy()
    sizes = cp.asarray(shape.sizes())
    if shape.group == "m":
        return (scaled((shape.total, shape.other), (1, 128), shape.scale_layout),
                scaled((shape.experts, shape.n, shape.other), (128, 128)), sizes)
    return *(_columns(shape, rows, sizes) for rows in (shape.other, shape.n)), None


def _columns(shape: Shape, rows: int, sizes: Array) -> Grouped:
    cp = backend.cupy()
    offsets = cp.concatenate([cp.zeros(1, cp.int64), cp.cumsum(sizes) * rows])
    whole = shape.total, rows
    scales = _scales(grouped_scale_shape(whole, shape.experts, (128, 1), "gemm_ready", True))
    return Grouped(sizes, offsets, whole, None, _codes((shape.total * rows,)), None, scales, (1, 128),
                   "gemm_ready")


def result(shape: Shape, like: Array) -> Array:
    extents = (shape.total, shape.n) if shape.group == "m" else (shape.experts, shape.other, shape.n)
    return empty(extents, float32 if shape.accumulate else bfloat16, like=like)


def product(shape: Shape, a: Any, b: Any, splits: Any, out: Array) -> Call:
    """Return the call that is timed."""
    into = {"accumulate" if shape.accumulate else "out": out}
    return partial(grouped_matmul_nt, a, b, splits, group=shape.group, **into)


def _product(shape: Shape) -> tuple[Call, Check]:
    a, b, splits = operands(shape)
    out = result(shape, b.data if shape.group == "m" else b.columnwise)
    call = product(shape, a, b, splits, out)

    def check() -> None:
        if shape.accumulate:
            bits(out).fill(0)
            call()
        if shape.group == "m":
            _check_rows(a, b, shape, out)
        else:
            _check_gradient(a, b, out)

    return call, check


def _check_rows(a: Scaled, b: Scaled, shape: Shape, out: Array) -> None:
    """Check the first rows, which belong to the first non-empty expert."""
    sizes = shape.sizes()
    expert = int(np.flatnonzero(sizes)[0])
    rows = min(_ROWS, int(sizes[expert]))
    compact = a.to_layout("compact").scale_inv
    part = Scaled(asnumpy(a.data[:rows]), asnumpy(compact[:rows]), (rows, a.shape[1]), False, (1, 128),
                  "compact")
    data, scales = (asnumpy(array[expert : expert + 1]) for array in (b.data, b.scale_inv))
    one = Scaled(data, scales, (1, *b.shape[1:]), False, b.block, b.scale_layout)
    want = reference.grouped_matmul_nt(part, one, [rows])
    got = np.ascontiguousarray(asnumpy(bits(out)[:rows])).view(bfloat16)
    assert_within(got, want, reference.grouped_magnitudes(part, one, [rows]))


def _check_gradient(a: Grouped, b: Grouped, out: Array) -> None:
    """Check the first rows of the first expert's gradient."""
    left, right = a[0].columnwise.T, b[0].columnwise.T
    rows = Scaled(asnumpy(left.data[:_ROWS]), np.ascontiguousarray(asnumpy(left.scale_inv)[:, :_ROWS].T),
                  (_ROWS, left.shape[1]), False, (1, 128), "compact")
    whole = Scaled(asnumpy(right.data), asnumpy(right.scale_inv), right.shape, False, right.block,
                   right.scale_layout)
    sizes = [left.shape[1]]
    want = reference.grouped_matmul_nt(rows, whole, sizes, group="k", dtype=out.dtype)
    got = np.ascontiguousarray(asnumpy(bits(out)[:1, :_ROWS])).view(out.dtype)
    assert_within(got, want, reference.grouped_magnitudes(rows, whole, sizes, group="k"))


def rows() -> Iterator[Spec]:
    for shape in (*SHAPES, *_COMPACT):
        yield Spec("grouped_matmul_nt", shape.label, (shape.total, shape.n, shape.other), shape.traffic,
                   partial(_product, shape), shape.flops)
