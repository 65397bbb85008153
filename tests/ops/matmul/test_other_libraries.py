"""Products of other libraries, on a GPU, of values without outlier columns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from product_operands import quantized

import cupy_fp8 as fp8
from cupy_fp8 import Scaled, testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import bfloat16, float32
from cupy_fp8.reference.matmul.dense import magnitudes
from cupy_fp8.reference.matmul.grouped import grouped_magnitudes
from cupy_fp8.reference.matmul.tolerance import ulp

pytestmark = pytest.mark.gpu
M, N, K = 256, 512, 1024
#: allowed error of sums of either library, relative to the sum of magnitudes
BOUND = 2.0**-13


def check(ours: Any, theirs: Any, sizes: np.ndarray) -> None:
    """Compare a result with theirs, a tensor of PyTorch."""
    got, want = fp8.asnumpy(ours), theirs.float().cpu().numpy()
    assert got.shape == want.shape
    error = np.abs(got.astype(np.float64) - want)
    assert (error <= 2 * (BOUND * sizes + ulp(want.astype(np.float64), got.dtype))).all()


def tensor(a: np.ndarray) -> Any:
    """Return an FP8 or f32 array as a tensor of PyTorch."""
    import torch

    if a.dtype == float32:
        return torch.from_numpy(a).cuda()
    return torch.from_numpy(bits(a)).cuda().view(torch.float8_e4m3fn)


@contextmanager
def skipped_if_not_supported() -> Iterator[None]:
    """Skip the test if PyTorch says that it, or its cuBLASLt, does not support the product."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if re.search(r"not[ _]supported|only supported", str(error), re.IGNORECASE) is None:
            raise
        pytest.skip(str(error).splitlines()[0])


# ---- dense ----
@pytest.mark.parametrize(("scalings", "to"), [
    (("tensor", "tensor"), bfloat16), (("tensor", "tensor"), float32), (("row", "row"), bfloat16),
    (("vector", "block"), bfloat16), (("block", "vector"), bfloat16), (("vector", "vector"), bfloat16)],
    ids=str)
def test_pytorch_agrees(scalings, to):
    torch = pytest.importorskip("torch")
    a, b = quantized("normal", (M, K), scalings[0], 1), quantized("normal", (N, K), scalings[1], 2)
    with skipped_if_not_supported():
        theirs = torch._scaled_mm(
            tensor(a.data), tensor(b.data).t(), scales(a), scales(b) if b.block is None else scales(b).t(),
            out_dtype=torch.float32 if to == float32 else torch.bfloat16)
    run = testing.Executor("cuda")
    check(fp8.matmul_nt(run.array(a), run.array(b), dtype=to), theirs, magnitudes(a, b))


def scales(s: Scaled) -> Any:
    """Return the scales in PyTorch's layout: those of blocks 1×128 have adjacent rows."""
    if s.block is None:
        return tensor(s.scale_inv).reshape(())
    compact = tensor(s.to_layout("compact").scale_inv)
    return compact.t().contiguous().t() if s.block == (1, 128) else compact


def test_nvmath_agrees():
    nvmath = pytest.importorskip("nvmath")
    advanced = pytest.importorskip("nvmath.linalg.advanced")
    pytest.importorskip("torch")
    a, b = (quantized("normal", (rows, K), "tensor", seed) for seed, rows in enumerate((M, N)))
    factors = {"a": float(a.scale_inv[0]), "b": float(b.scale_inv[0])}
    options = {"result_type": nvmath.CudaDataType.CUDA_R_16BF}
    theirs = advanced.matmul(tensor(a.data), tensor(b.data).t(), quantization_scales=factors, options=options)
    run = testing.Executor("cuda")
    check(fp8.matmul_nt(run.array(a), run.array(b)), theirs, magnitudes(a, b))


# ---- grouped ----
@pytest.fixture
def scaled_grouped_mm() -> Any:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "_scaled_grouped_mm"):
        pytest.skip(f"torch {torch.__version__} has no _scaled_grouped_mm")

    def product(a: Any, b: Any, scales_a: Any, scales_b: Any, splits: np.ndarray) -> Any:
        ends = torch.from_numpy(np.cumsum(splits)).to(torch.int32).cuda()
        with skipped_if_not_supported():
            return torch._scaled_grouped_mm(a, b, scales_a, scales_b, offs=ends, out_dtype=torch.bfloat16,
                                            use_fast_accum=False)

    return product


def row_scales(s: Scaled, *shape: int) -> Any:
    """Return scales of rows [rows], or [experts, rows]."""
    return tensor(s.to_layout("compact").scale_inv.reshape(shape))


def test_pytorch_agrees_on_rows_of_groups(scaled_grouped_mm):
    splits = np.array([37, 0, 130, 8, 300, 1, 192])
    m, experts = int(splits.sum()), len(splits)
    a, b = quantized("normal", (m, K), "row", 1), quantized("normal", (experts, N, K), "row", 2)
    theirs = scaled_grouped_mm(tensor(a.data), tensor(b.data).transpose(1, 2), row_scales(a, m),
                               row_scales(b, experts, N), splits)
    run = testing.Executor("cuda")
    ours = fp8.grouped_matmul_nt(run.array(a), run.array(b), run.array(splits))
    check(ours, theirs, grouped_magnitudes(a, b, splits))


def test_pytorch_agrees_on_columns_of_groups(scaled_grouped_mm):
    """PyTorch needs sizes in multiples of 16, and scales of rows for each group."""
    splits = np.array([16, 144, 1024, 48, 512])
    total, groups = int(splits.sum()), len(splits)
    a, b = quantized("normal", (M, total), "row", 1), quantized("normal", (N, total), "row", 2)
    theirs = scaled_grouped_mm(tensor(a.data), tensor(b.data).t(), row_scales(a, M).repeat(groups),
                               row_scales(b, N).repeat(groups), splits)
    run = testing.Executor("cuda")
    ours = fp8.grouped_matmul_nt(run.array(a), run.array(b), run.array(splits), group="k")
    check(ours, theirs, grouped_magnitudes(a, b, splits, group="k"))
