"""Tokens permuted to their rows in both directions, or quantised while being permuted."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from moe_arrays import noted

import cupy_fp8 as fp8
from cupy_fp8 import testing
from cupy_fp8.cases.moe.route import routing
from cupy_fp8.kernels import errors
from cupy_fp8.ops.moe.permute_transpose import division


def tokens(run: testing.Executor, number: int = 70, columns: int = 272) -> Any:
    x = np.random.default_rng(number).standard_normal((number, columns)).astype(np.float32)
    return fp8.quantize_block(run.array(x), pow2_scale=True).rowwise


def routed(align: int) -> fp8.Routing:
    """Return the routing of 70 tokens of two slots each to three experts."""
    return routing(70, topk=2, experts=3, align=align)


def test_slots_are_divided():
    for topk in (0, 1, 2, 3, 5, 6, 7, 8, 9, 40, 127, 129, 1000, 2**20 - 1):
        multiplier, shift = division(topk)
        assert multiplier < 2**32
        divisor = max(1, topk)
        for n in {0, 1, divisor - 1, divisor, 2**31 - 1, (2**31 - 1) // divisor * divisor,
                  (2**31 - 1) // divisor * divisor - 1}:
            if 0 <= n < 2**31:
                assert n * multiplier >> shift == n // divisor, (topk, n)


@pytest.mark.parametrize("align", [1, 16, 128])
def test_the_same_as_separate_calls(align, run):
    q, host = tokens(run), routed(align)
    routes, probs = run.array(host), run.array(np.random.default_rng(1).random((70, 2), dtype=np.float32))
    both, row_probs = fp8.permute_transpose(q, routes, probs=probs)
    rows, wanted = fp8.permute(q, routes, probs=probs)
    columns = fp8.scaling_aware_transpose(rows, splits=routes.aligned_splits).columnwise
    for got, want in ((both.rowwise, rows), (both.columnwise, columns), (row_probs, wanted)):
        assert fp8.bytes_equal(got, want)
    assert both.columnwise.splits.tolist() == host.aligned_splits.tolist()
    again = fp8.permute_transpose(q, routes, probs=probs, out=(both, row_probs))
    assert again[0] is both
    assert again[1] is row_probs


def test_both_are_operands_of_products(run):
    """The gradient of a weight sums over the rows of each expert, and has them as columns."""
    q, routes = tokens(run), run.array(routed(128))
    both = fp8.permute_transpose(q, routes)
    rows, splits = fp8.permute(q, routes), routes.aligned_splits
    columns = fp8.scaling_aware_transpose(rows, splits=splits)
    wanted = fp8.grouped_matmul_nt(columns, columns, splits, group="k")
    assert fp8.bytes_equal(fp8.grouped_matmul_nt(both, both, splits, group="k"), wanted)


def test_scales_that_are_no_powers_of_two(run):
    """Noted on a device, and refused on the host."""
    q, routes = tokens(run), run.array(routed(1))
    scales = fp8.asnumpy(q.scale_inv).copy()
    scales[0, 3] = 3
    wrong = dataclasses.replace(q, scale_inv=run.array(scales))
    if run.name != "cuda":
        with pytest.raises(ValueError, match=r"^x.scale_inv: expected powers of two, got 3"):
            fp8.permute_transpose(wrong, routes)
        return
    fp8.permute_transpose(wrong, routes)
    noted(run, [errors.MESSAGES[errors.Fact.SCALE_NOT_POWER_OF_TWO]])
