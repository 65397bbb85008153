"""Operands whose rows do not begin at multiples of 16 bytes: they are copied if that is cheap."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from product_kernels import HOPPER, PORTABLE, use
from product_operands import integers, scaled

import cupy_fp8 as fp8
from cupy_fp8 import Scaled, reference, testing
from cupy_fp8.formats import float32
from cupy_fp8.ops.matmul import cublaslt

M, N = 264, 256                                          # enough for copies to be worth their time
SPLITS = np.array([200, 0, 320])
pytestmark = pytest.mark.parametrize("run", ["host", pytest.param("cuda", marks=pytest.mark.gpu)],
                                     indirect=True)


def zeros_behind(s: Scaled, k: int) -> Scaled:
    """Return the same matrix with zeros up to column k, which share the last block's scales."""
    data = np.zeros((*s.shape[:-1], k), np.uint8)
    data[..., : s.shape[-1]] = s.data.view(np.uint8)
    return Scaled(data.view(s.dtype), s.scale_inv, data.shape, False, s.block, s.scale_layout)


def misplaced(s: Scaled, run: testing.Executor) -> Scaled:
    """Return the same with its data at an odd address."""
    there = run.array(s)
    memory: Any = run.array(np.zeros(s.data.size + 16, np.uint8))
    view = memory[1 : 1 + s.data.size].view(s.dtype).reshape(s.shape)
    view[...] = there.data
    return dataclasses.replace(there, data=view)


@pytest.fixture(autouse=True)
def _on_hopper(run: testing.Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that cuBLASLt would compute are computed by this package, too."""
    use(HOPPER, run, monkeypatch)
    monkeypatch.setattr(cublaslt, "refusal", lambda *_: "not in this test")


@pytest.mark.parametrize("k", [1, 130, 200, 511])
@pytest.mark.parametrize("scalings", [("tensor", "row"), ("vector", "block")], ids="-".join)
def test_rows_of_any_length(scalings, k, run, launched):
    """Same bytes as with rows of a multiple of 16 bytes, new and into `out`, repeatedly."""
    a, b = scaled((M, k), scalings[0], 1), scaled((N, k), scalings[1], 2)
    whole = [run.array(zeros_behind(s, -(-k // 16) * 16)) for s in (a, b)]
    want = run.numpy(fp8.matmul_nt(*whole, dtype=float32))
    assert launched == [HOPPER]
    launched.clear()
    a, b = run.array(a), run.array(b)
    out = run.array(np.full((M, N), 7, np.float32))
    for _ in range(2):
        testing.assert_bytes_equal(run.numpy(fp8.matmul_nt(a, b, dtype=float32)), want)
        testing.assert_bytes_equal(run.numpy(fp8.matmul_nt(a, b, dtype=float32, out=out)), want)
    assert launched == ["align_rows", "align_rows", HOPPER] * 4


@pytest.mark.parametrize("k", [130, 144])
def test_groups(k, run, launched):
    """Rows of tokens and of weights at an odd address."""
    a, b = scaled((int(SPLITS.sum()), k), "vector", 1), scaled((len(SPLITS), 2 * N, k), "block", 2)
    splits = run.array(SPLITS)
    whole_a, whole_b = (run.array(zeros_behind(s, 144)) for s in (a, b))
    want = run.numpy(fp8.grouped_matmul_nt(whole_a, whole_b, splits))
    launched.clear()
    got = fp8.grouped_matmul_nt(misplaced(a, run), misplaced(b, run), splits)
    testing.assert_bytes_equal(run.numpy(got), want)
    assert launched == ["align_rows", "align_rows", HOPPER]


def test_only_what_needs_it_is_copied(run, launched):
    a, b = (scaled((rows, 256), "row", seed) for rows, seed in ((M, 1), (N, 2)))
    want = run.numpy(fp8.matmul_nt(*map(run.array, (a, b)), bias=run.array(np.ones(N, np.float32))))
    got = fp8.matmul_nt(misplaced(a, run), run.array(b), bias=run.array(np.ones(N, np.float32)))
    testing.assert_bytes_equal(run.numpy(got), want)
    assert launched == [HOPPER, "align_rows", HOPPER]


def test_small_products_are_not_worth_a_copy(run, launched):
    a, b = integers((40, 130), fp8.float8_e4m3fn, 1), integers((N, 130), fp8.float8_e4m3fn, 2)
    want = reference.matmul_nt(a, b, dtype=float32)
    testing.assert_bytes_equal(run.numpy(fp8.matmul_nt(run.array(a), run.array(b), dtype=float32)), want)
    assert launched == [PORTABLE]
