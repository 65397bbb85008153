"""Grouped products with more than 2^31 elements in a, in b or in the result, on a GPU. Parts are compared
with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import product_kernels
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import Scaled, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases import poison, values
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float32
from cupy_fp8.reference.matmul.dense import magnitudes
from cupy_fp8.reference.matmul.tolerance import assert_within

pytestmark = [pytest.mark.gpu, pytest.mark.full]
every_kernel = pytest.mark.parametrize("kernel", product_kernels.KERNELS)

#: period of the values; a prime, so that values 2^31 or 2^32 apart differ
PERIOD = 1_000_003
ADDED = 3                           # value of every element before products are added to it


@pytest.fixture(autouse=True)
def _kernel(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    product_kernels.use(kernel, testing.Executor("cuda"), monkeypatch)


def filled(shape: tuple[int, ...], seed: int) -> Scaled:
    """Return FP8 values on the GPU that repeat after PERIOD."""
    period = fp8.asarray(bits(values("normal", (PERIOD,), float8_e4m3fn, seed)), like="cupy")
    data = fp8.empty(shape, float8_e4m3fn, like="cupy")
    flat = bits(data).reshape(-1)
    for start in range(0, flat.size, PERIOD):
        flat[start:start + PERIOD] = period[:flat.size - start]
    return Scaled(data, fp8.asarray(np.array([0.37], np.float32), like="cupy"), shape)


def part(s: Scaled, *at: Any) -> Scaled:
    """Return a part of the data, in host memory."""
    data = fp8.asnumpy(s.data[at])
    return Scaled(data, fp8.asnumpy(s.scale_inv), data.shape)


def poisoned(shape: tuple[int, ...]) -> Any:
    out = fp8.empty(shape, bfloat16, like="cupy")
    poison(out)
    return out


def check_all_written(out: Any) -> None:
    """Check that no element still has the value of `poison`. Comparisons take memory, so each is of some
    lines."""
    lines, step = bits(out).reshape(-1, out.shape[-1]), 1 << 16
    assert not any(bool((lines[at:at + step] == 0xAAAA).any()) for at in range(0, len(lines), step))


def check(got: Any, a: Scaled, b: Scaled, added: int = 0) -> None:
    """Check the product of parts of a and b."""
    before = np.full((a.shape[0], b.shape[0]), added, np.float32) if added else None
    want = reference.matmul_nt(a, b, accumulate=before)
    assert_within(fp8.asnumpy(got), want, magnitudes(a, b, accumulate=before))


# ---- sizes of groups are rows ----
@every_kernel
@pytest.mark.parametrize(("m", "n", "k"), [
    pytest.param((1 << 17) + 64, (1 << 14) + 8, 128, id="result"),
    pytest.param((1 << 18) + 1024, 72, (1 << 13) + 16, id="a"),
    pytest.param((1 << 18) + 1024, 264, (1 << 13) + 8, id="copied a")])
def test_rows(m, n, k, kernel, launched):
    """Rows of a, or of the result, the last four of which belong to no group."""
    splits, ends = np.array([m - 74, 0, 70]), (m - 74, m - 4)
    a, b, out = filled((m, k), 1), filled((3, n, k), 2), poisoned((m, n))
    assert max(a.data.size, out.size) > 2**31
    assert fp8.grouped_matmul_nt(a, b, fp8.asarray(splits, like="cupy"), out=out) is out
    boundary = 2**31 // max(n, k)                       # element 2^31 is in this row
    for group, start in ((0, 0), (0, boundary - 2), (0, ends[0] - 4), (2, ends[0]), (2, ends[1] - 4)):
        rows = slice(start, start + 4)
        check(out[rows], part(a, rows), part(b, group))
    assert not bits(fp8.asnumpy(out[ends[1]:])).any()
    check_all_written(out)
    assert kernel in launched
    assert ("align_rows" in launched) == (k % 16 != 0 and kernel == product_kernels.HOPPER)


@every_kernel
def test_weights(kernel, launched):
    """b of 72 groups, most of them with few rows."""
    groups, n, k = 72, 4096, 7424
    splits = np.random.default_rng(0).integers(1, 40, groups)
    splits[[3, groups - 2]] = 0, 200
    starts = np.cumsum(splits) - splits
    m = int(splits.sum())
    a, b, out = filled((m, k), 1), filled((groups, n, k), 2), poisoned((m, n))
    assert b.data.size > 2**31
    fp8.grouped_matmul_nt(a, b, fp8.asarray(splits, like="cupy"), out=out)
    for group in (0, 35, groups - 2, groups - 1):
        rows = slice(int(starts[group]), int(starts[group] + splits[group]))
        for columns in (slice(64), slice(n - 64, n)):
            check(out[rows, columns], part(a, rows), part(b, group, columns))
    check_all_written(out)
    assert kernel in launched


# ---- sizes of groups are columns ----
def check_columns(out: Any, a: Scaled, b: Scaled, splits: np.ndarray, groups: tuple[int, ...],
                  added: int = 0) -> None:
    """Check the first and last rows of the products of some groups."""
    ends = np.cumsum(splits)
    for group in groups:
        columns = slice(int(ends[group] - splits[group]), int(ends[group]))
        for rows in (slice(4), slice(a.shape[0] - 4, a.shape[0])):
            check(out[group, rows], part(a, rows, columns), part(b, slice(None), columns), added)


@every_kernel
@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients(accumulate, kernel, launched):
    """Results of 80 groups of few columns, one of which has none. Another one begins at no multiple of 16."""
    m, n, splits = 4096, 7168, np.full(80, 32)
    splits[-4:] = 41, 0, 23, 32
    total = int(splits.sum())
    a, b, sizes = filled((m, total), 1), filled((n, total), 2), fp8.asarray(splits, like="cupy")
    if accumulate:
        out = fp8.full((80, m, n), ADDED, float32, like="cupy")
        fp8.grouped_matmul_nt(a, b, sizes, group="k", accumulate=out)
    else:
        out = poisoned((80, m, n))
        fp8.grouped_matmul_nt(a, b, sizes, group="k", out=out)
        check_all_written(out)
    assert out.size > 2**31
    check_columns(out, a, b, splits, (0, 40, 73, 76, 77, 78, 79), ADDED if accumulate else 0)
    assert kernel in launched


@every_kernel
def test_columns(kernel, launched):
    """Columns of a. A group begins at no multiple of 16, and the last 32 columns are no group's."""
    m, n, splits = 4104, 72, np.full(65, 8192)
    splits[-3:] = 8197, 8187, 1008
    total = int(splits.sum()) + 32
    a, b, out = filled((m, total), 1), filled((n, total), 2), poisoned((len(splits), m, n))
    assert a.data.size > 2**31
    fp8.grouped_matmul_nt(a, b, fp8.asarray(splits, like="cupy"), group="k", out=out)
    check_columns(out, a, b, splits, (0, 62, 63, 64))
    check_all_written(out)
    assert kernel in launched
