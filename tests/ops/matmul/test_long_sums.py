"""How far sums over a large K are from exact ones.

The tensor core adds up 128 products, and float32 registers add up these sums. The bounds tell this from
longer sums in the tensor core, as an emulation of it shows.

On the CPU executor sums of 128 products are exact, so only a GPU can come near the bounds there.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import product_kernels
import pytest
from product_operands import RECIPES, draw, quantized
from tiers import where_kernels_run

import cupy_fp8 as fp8
from cupy_fp8 import reference, testing
from cupy_fp8.formats import float32
from cupy_fp8.ops.matmul import library
from cupy_fp8.reference.matmul.dense import magnitudes
from cupy_fp8.reference.matmul.grouped import grouped_magnitudes

#: Errors are at most this, relative to the sum of magnitudes. Truncation makes every sum of positive values
#: too small. Errors of sums of both signs partly cancel. With heavy tails a product can dwarf the 127 others.
BOUNDS = {"normal": 2.0**-14, "positive mean": 2.0**-10, "heavy tails": 2.0**-9}
KINDS = list(BOUNDS)
LENGTHS = [4096, pytest.param(32768, marks=pytest.mark.full)]
KERNELS = [product_kernels.HOPPER, pytest.param(product_kernels.PORTABLE, marks=pytest.mark.full)]
OF_ROWS = (("vector", "block"), ("vector", "vector"), ("row", "row"), ("tensor", "tensor"))
OF_COLUMNS = ("vector", "row", "tensor")
DENSE = (("tensor", "tensor"), ("row", "row"), ("vector", "block"), ("block", "vector"), ("vector", "vector"),
         ("block", "block"), ("row", "vector"))


def every_kind_of_first(scalings: Any) -> list[Any]:
    """Return the first scaling with every kind of values, the others with the kind that shows most."""
    return [(scaling, kind) for scaling, kind in product(scalings, KINDS)
            if scaling == scalings[0] or kind == "positive mean"]


def check(got: Any, want: np.ndarray, sizes: np.ndarray, kind: str) -> None:
    found = fp8.asnumpy(got)
    assert (found.dtype, found.shape) == (float32, want.shape)
    error = np.abs(found.astype(np.float64) - want)
    assert (error <= BOUNDS[kind] * sizes).all(), (
        f"the largest error is 2^{np.log2((error / sizes).max()):.1f} of the sum of magnitudes")


def extents(run: Any) -> tuple[int, int]:
    """M and N. A GPU has many elements, since the largest error is looked for. (Above 64 MB the reference
    would warn.)"""
    return (256, 200) if run.name == "cuda" else (16, 8)


# ---- products ----
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize(("scalings", "kind"), every_kind_of_first(OF_ROWS), ids=str)
@where_kernels_run
def test_rows_of_groups(scalings, kind, k, kernel, run, monkeypatch, launched):
    product_kernels.use(kernel, run, monkeypatch)
    m, n = extents(run)
    splits = np.array([m // 3, m - m // 3])
    a, b = quantized(kind, (m, k), scalings[0], 1), quantized(kind, (2, n, k), scalings[1], 2)
    got = fp8.grouped_matmul_nt(run.array(a), run.array(b), run.array(splits), dtype=float32)
    want = reference.grouped_matmul_nt(a, b, splits, dtype=float32)
    check(got, want, grouped_magnitudes(a, b, splits), kind)
    assert kernel in launched


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize(("scaling", "kind"), every_kind_of_first(OF_COLUMNS), ids=str)
@where_kernels_run
def test_columns_of_groups(scaling, kind, k, kernel, run, monkeypatch, launched):
    product_kernels.use(kernel, run, monkeypatch)
    splits = np.array([k // 2 + 16, k])
    a, b = (fp8.group_quantize(draw(kind, (int(splits.sum()), rows), seed), splits, RECIPES[scaling],
                               rowwise=False, columnwise=True) for seed, rows in enumerate(extents(run)))
    got = fp8.grouped_matmul_nt(run.array(a), run.array(b), group="k", dtype=float32)
    want = reference.grouped_matmul_nt(a, b, group="k", dtype=float32)
    check(got, want, grouped_magnitudes(a, b, group="k"), kind)
    assert kernel in launched


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize(("scalings", "kind"), every_kind_of_first(DENSE), ids=str)
@where_kernels_run
def test_dense_products(scalings, kind, k, run):
    m, n = extents(run)
    a, b = quantized(kind, (m, k), scalings[0], 1), quantized(kind, (n, k), scalings[1], 2)
    got = fp8.matmul_nt(run.array(a), run.array(b), dtype=float32)
    check(got, reference.matmul_nt(a, b, dtype=float32), magnitudes(a, b), kind)


@pytest.mark.gpu
def test_all_of_k_in_the_tensor_core_is_found(monkeypatch):
    """cuBLASLt's fast accumulation on Hopper is far beyond the bound."""
    run = testing.Executor("cuda")
    product_kernels.use(product_kernels.HOPPER, run, monkeypatch)
    if isinstance(problem := library.found(), str):
        pytest.skip(problem)
    a, b = (quantized("positive mean", (rows, 4096), "tensor", rows) for rows in extents(run))
    got = fp8.matmul_nt(run.array(a), run.array(b), dtype=float32, fast_accum=True)
    with pytest.raises(AssertionError, match="the largest error is"):
        check(got, reference.matmul_nt(a, b, dtype=float32), magnitudes(a, b), "positive mean")


# ---- what the bounds tell apart ----
def errors(kind: str, bits: int, together: int, k: int = 4096) -> np.ndarray:
    """Errors relative to the sums of magnitudes if a tensor core adds up so many products, with so many bits.

    It takes 32 products at a time. It truncates them, the sum so far and the new sum below so many bits after
    the leading one of the largest. Sums of `together` products are added in float32.
    """
    a, b = (quantized(kind, (rows, k), "vector", seed).data.astype(np.float64)
            for seed, rows in ((1, 16), (2, 8)))
    total, core = np.zeros((16, 8), np.float32), np.zeros((16, 8))
    for start in range(0, k, 32):
        products = a[:, None, start:start + 32] * b[None, :, start:start + 32]
        unit = last_bit(np.maximum(np.abs(products).max(axis=-1), np.abs(core)), bits)
        core = unit * (np.trunc(products / unit[..., None]).sum(axis=-1) + np.trunc(core / unit))
        unit = last_bit(core, bits)
        core = unit * np.trunc(core / unit)
        if (start + 32) % together == 0:
            total += core.astype(np.float32)
            core[...] = 0
    return np.asarray(np.abs(total - a @ b.T) / (np.abs(a) @ np.abs(b).T))


def last_bit(values: np.ndarray, bits: int) -> np.ndarray:
    """Return the value of the bit that is this many bits after the leading one."""
    return np.ldexp(1.0, np.frexp(values)[1] - 1 - bits)


def test_a_tensor_core_with_14_bits_loses_what_was_measured():
    """All of K = 4096 in the tensor core: 3 % (docs/numerics.md, section 10)."""
    assert np.median(errors("positive mean", 14, 4096)) == pytest.approx(0.03, rel=0.2)


@pytest.mark.parametrize("bits", [13, 14])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bounds_hold_for_sums_of_128(kind, bits):
    assert errors(kind, bits, 128).max() < BOUNDS[kind]


@pytest.mark.parametrize("bits", [13, 14])
def test_longer_sums_in_the_tensor_core_are_found(bits):
    """Sums of positive values show it in every element. Sums of other values show it where all of K is added
    up in the tensor core."""
    assert errors("positive mean", bits, 512).min() > BOUNDS["positive mean"]
    assert errors("normal", bits, 4096).max() > BOUNDS["normal"]
