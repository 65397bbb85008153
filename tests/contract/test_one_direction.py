"""Results with one direction: every call that reads a result names the direction that is missing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import testing

X = np.linspace(-3, 3, 64 * 256, dtype=np.float32).reshape(64, 256)

#: calls that read one direction of a result
READERS: dict[str, Callable[[Any], Any]] = {
    "dequantize": fp8.dequantize, "T": lambda q: q.T, "repr": repr,
    "error": partial(fp8.diagnostics.error, X),
    "scale_span": fp8.diagnostics.scale_span, "scales": fp8.diagnostics.scales,
    "matmul_nt": lambda q: fp8.matmul_nt(q, q),
    "grouped by rows": lambda q: fp8.grouped_matmul_nt(q, q, [64], group="m"),
    "grouped by columns": lambda q: fp8.grouped_matmul_nt(q, q, [100, 156], group="k"),
    "scaling_aware_transpose": fp8.scaling_aware_transpose,
    "rebase_scales": lambda q: fp8.rebase_scales(q, block=(1, 128)),
    "permute": lambda q: fp8.permute(q, fp8.route(np.zeros((64, 1), np.int64), num_experts=1)),
    "pad_groups": lambda q: fp8.pad_groups(q, [64], align=16),
    "unpad_groups": lambda q: fp8.unpad_groups(q, [64], align=16),
    "sort_chunks": lambda q: fp8.sort_chunks(q, [32, 32], [1, 0]),
    "to_block": lambda q: q.to_block((1, 64)), "save": lambda q: fp8.save("q.npz", q=q),
    "save_safetensors": lambda q: fp8.io.save_safetensors("q.safetensors", {"q": q}),
    "block_ranges": lambda q: fp8.plot.block_ranges(X, q)}


@pytest.mark.parametrize("make", [fp8.quantize_tensor, partial(fp8.quantize_block, scale_layout="compact")])
@pytest.mark.parametrize("name", READERS)
def test_results_with_one_direction(name, make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for rowwise in (True, False):
        q = make(X, rowwise=rowwise, columnwise=not rowwise)
        with suppress(ValueError, ImportError):  # AttributeError would come from the library's own code
            READERS[name](q)


def test_a_product_of_row_wise_results_by_columns():
    """Also if only the row-wise direction exists."""
    both = fp8.quantize_tensor(X, columnwise=True)
    got, want = (fp8.grouped_matmul_nt(q, q, [100, 156], group="k") for q in (fp8.quantize_tensor(X), both))
    testing.assert_bytes_equal(got, want)
