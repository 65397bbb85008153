"""Reference of cupy_fp8.ops.matmul.grouped (docs/numerics.md, section 10)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ...formats import bfloat16, float32
from ...grouped import Grouped
from ...layouts import cdiv, round_up
from ...results import Quantized, Scaled, row_wise
from .. import numerics
from ..scales.swizzle import group_ranges
from .dense import scaled_values

_Operand = Scaled | Quantized | Grouped


def grouped_matmul_nt(a: _Operand, b: _Operand, splits: Any = None, *, group: str = "m",
                      dtype: Any = bfloat16, bias: np.ndarray | None = None,
                      bias_weights: np.ndarray | None = None,
                      accumulate: np.ndarray | None = None, align: int = 1) -> np.ndarray:
    """narrow(Σ_k a[m, k] · b[n, k] + bias_weights[m] · bias[n] + accumulate), for the rows of each expert, or
    for each expert's part of K."""
    nothing = 0.0 if accumulate is None else -0.0       # adding -0 changes no value
    total = grouped_sums(a, b, splits, group, nothing=nothing, align=align)
    with np.errstate(invalid="ignore"):
        if bias is not None:
            total += biases_of_rows(bias, bias_weights, _sizes(a, b, splits), len(total))
        if accumulate is not None:
            total += accumulate
    return numerics.narrow_f64(total, float32 if accumulate is not None else np.dtype(dtype))


def grouped_magnitudes(a: _Operand, b: _Operand, splits: Any = None, *, group: str = "m",
                       bias: np.ndarray | None = None, bias_weights: np.ndarray | None = None,
                       accumulate: np.ndarray | None = None) -> np.ndarray:
    """Σ_k |a[m, k]| · |b[n, k]| + |bias_weights[m] · bias[n]| + |accumulate|: what the error bound is
    relative to."""
    total = grouped_sums(a, b, splits, group, np.abs)
    if bias is not None:
        total += np.abs(biases_of_rows(bias, bias_weights, _sizes(a, b, splits), len(total)))
    return total if accumulate is None else total + np.abs(accumulate.astype(np.float64))


def grouped_sums(a: _Operand, b: _Operand, splits: Any, group: str,
                 of: Callable[[np.ndarray], np.ndarray] = np.asarray, nothing: float = 0.0,
                 align: int = 1) -> np.ndarray:
    """Return the sums in f64, with `of` applied to every value; `nothing` where there is no product."""
    sizes = _sizes(a, b, splits)
    with np.errstate(invalid="ignore", over="ignore"):
        if group == "k":
            ranges = list(group_ranges(sizes, _columns_total(a), 0))
            (m,), (n,) = _rows_of(a), _rows_of(b)
            total = np.full((len(ranges), m, n), nothing)
            whole_blocks = _of_whole_blocks(a) or _of_whole_blocks(b)
            for e, (left, right) in enumerate(zip(_columns(a, ranges), _columns(b, ranges), strict=True)):
                # skip groups that begin within a block of scales, or break the promise of align
                start, end = ranges[e]
                if left.size and (not whole_blocks or start % 128 == 0) and (start | end) % align == 0:
                    total[e] = of(left) @ of(right).T
            return total
        assert not isinstance(b, Grouped)
        weights = row_wise(b)
        n = weights.shape[-2]
        rows = a.shape[0]
        ranges = list(group_ranges(sizes, rows, 0))
        total = np.full((rows, n), nothing)
        for e, ((start, end), left) in enumerate(zip(ranges, _rows(a, ranges), strict=True)):
            if left.size:
                total[start:end] = of(left) @ of(scaled_values(weights, e, 0, n)).T
        return total


def biases_of_rows(bias: np.ndarray, weights: np.ndarray | None, sizes: Any, rows: int) -> np.ndarray:
    """Return each row's bias times its weight, exact in f64; 0 for rows of no group."""
    added = np.zeros((rows, bias.shape[1]))
    with np.errstate(invalid="ignore"):
        for e, (start, end) in enumerate(group_ranges(sizes, rows, 0)):
            factor = 1.0 if weights is None else weights[start:end, None].astype(np.float64)
            added[start:end] = bias[e].astype(np.float64) * factor
    return added


def _sizes(a: _Operand, b: _Operand, splits: Any) -> Any:
    return next((s for s in (splits, _own_sizes(a), _own_sizes(b)) if s is not None), None)


def _own_sizes(a: _Operand) -> np.ndarray | None:
    """Return the sizes by which an operand is laid out, or None."""
    parts = [a._row, a._column] if isinstance(a, Quantized) else [a]
    return next((part.splits for part in parts if part is not None and part.splits is not None), None)


_Ranges = list[tuple[int, int]]


def _rows(a: _Operand, ranges: _Ranges) -> Iterator[np.ndarray]:
    """Yield the rows of each group, each value times its scale."""
    if isinstance(a, Grouped):
        for member in _members(a, ranges):
            yield scaled_values(member.rowwise, 0, 0, member.shape[0])
        return
    s = row_wise(a)
    padded = 0                                          # rows of scales before the group
    for start, end in ranges:
        if s.splits is not None:
            blocks, pitch = cdiv(s.shape[1], 128), round_up(end - start, 4)
            scales = s.scale_inv[padded * blocks:(padded + pitch) * blocks].reshape(blocks, pitch)
            shape = end - start, s.shape[1]
            group = Scaled._of(s.data[start:end], scales, shape, False, s.block, "gemm_ready")
            yield scaled_values(group, 0, 0, end - start)
            padded += pitch
        else:
            yield scaled_values(s, 0, start, end)


def _members(g: Grouped, ranges: _Ranges) -> Iterator[Any]:
    """Yield the members, found from the sizes alone."""
    sizes = np.array([end - start for start, end in ranges], np.int64)
    own: dict[str, Any] = {"splits": sizes, "offsets": np.concatenate([[0], np.cumsum(sizes)]) * g.shape[1]}
    return iter(replace(g, **own))


def _columns(a: _Operand, ranges: _Ranges) -> Iterator[np.ndarray]:
    """Yield the columns of each group, [rows, columns], each value times its scale."""
    if isinstance(a, Grouped):
        for member in _members(a, ranges):
            yield scaled_values(member.columnwise.T, 0, 0, a.shape[1])
        return
    s = _flat_or_matrix(a)
    if s.splits is None:
        all_columns = scaled_values(s, 0, 0, s.shape[0])
        for start, end in ranges:
            yield all_columns[:, start:end]
        return
    rows, line = s.shape[1], 0
    for start, end in ranges:
        lines = cdiv(end - start, 128)
        data = s.data[start * rows:end * rows].reshape(rows, end - start)
        group = Scaled._of(data, s.scale_inv[line:line + lines], (end - start, rows), True, s.block,
                           s.scale_layout)
        yield scaled_values(group.T, 0, 0, rows)
        line += lines


def _flat_or_matrix(a: Scaled | Quantized) -> Scaled:
    """Return the flat column-wise data of groups if a Quantized has them, else the row-wise matrix."""
    if isinstance(a, Scaled):
        return a
    s = a._column if a._column is not None and a._column.splits is not None else a._row
    assert s is not None
    return s


def _of_whole_blocks(a: _Operand) -> bool:
    """Whether groups must begin at multiples of 128 columns: true for a matrix with scales along K."""
    if isinstance(a, Grouped):
        return False
    s = _flat_or_matrix(a)
    return s.splits is None and s.block is not None and s.block[1] is not None


def _columns_total(a: _Operand) -> int:
    """Return the number of columns of all groups."""
    if isinstance(a, Grouped):
        return a.shape[0]
    s = _flat_or_matrix(a)
    return s.shape[1] if s.splits is None else s.shape[0]


def _rows_of(a: _Operand) -> tuple[int]:
    if isinstance(a, Grouped):
        return (a.shape[1],)
    s = _flat_or_matrix(a)
    return (s.shape[0],) if s.splits is None else (s.shape[1],)
