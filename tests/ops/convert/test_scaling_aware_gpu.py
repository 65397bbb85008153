"""scaling_aware_transpose on a GPU: captured graphs, sizes that only the device knows, many blocks, 64-bit
offsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from power_of_two_rows import assert_same, parts, random_rows

import cupy_fp8 as fp8
from cupy_fp8 import backend, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases.groups import sizes
from cupy_fp8.formats import float8_e4m3fn
from cupy_fp8.ops.convert import scaling_aware, scaling_aware_tiles
from cupy_fp8.results import Scaled

pytestmark = pytest.mark.gpu


def on_gpu(rows: int = 300, columns: int = 264) -> tuple[Scaled, Any]:
    q = random_rows(rows, columns, seed=8)
    return q, testing.Executor("cuda").array(q)


@pytest.mark.parametrize("experts", [1, 8, 200])
def test_many_blocks(experts):
    """Large tiles, uneven experts; rows of the output at every address."""
    q, given = on_gpu(5003, 4104)
    splits = sizes(5003, experts)
    assert_same(fp8.scaling_aware_transpose(given, splits=backend.cupy().asarray(splits)),
                reference.scaling_aware_transpose(q, splits=splits))


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("experts", [1, 5, 30])
@pytest.mark.parametrize("tiles", [2, 3, 4])
def test_runs_of_tiles(tiles, experts, multiple, monkeypatch):
    """As blocks of threads have them in large arrays, here where neighbours run at the same time and every
    byte can be looked at."""
    monkeypatch.setattr(scaling_aware_tiles, "_tiles_of_a_block", lambda *_: tiles)
    q, given = on_gpu(4000, 528)
    splits = sizes(4000 // multiple, experts) * multiple
    for target in scaling_aware.TARGETS:
        assert_same(fp8.scaling_aware_transpose(given, splits=backend.cupy().asarray(splits), target=target),
                    reference.scaling_aware_transpose(q, splits=splits, target=target))


@pytest.mark.full
@pytest.mark.parametrize("splits", [None, [20_003, 0, 45_661]], ids=["whole", "experts"])
@pytest.mark.parametrize("target", scaling_aware.TARGETS)
def test_more_than_two_to_the_31_elements(target, splits):
    """Whole columns at both ends and around element 2**31 of the result."""
    cp = backend.cupy()
    rows, columns, stripe = (1 << 16) + 128, (1 << 15) + 128, 128
    assert rows * columns > 1 << 31
    data = cp.empty((rows, columns), np.uint8)
    data[...] = cp.asarray(np.random.default_rng(0).integers(0, 0x40, columns, np.uint8))
    data += (cp.arange(rows, dtype=cp.uint32) % 61).astype(cp.uint8)[:, None]
    exponents = (7 * cp.arange(rows)[:, None] + cp.arange(columns // 128)) % 9
    scales = cp.ldexp(cp.ones(exponents.shape, cp.float32), exponents.astype(cp.int32) - 4)
    q = Scaled(data.view(float8_e4m3fn), scales, (rows, columns), False, (1, 128), "compact")
    row, column = parts(fp8.scaling_aware_transpose(q, splits=splits and cp.array(splits), target=target,
                                                    scale_layout="compact"))
    for first in (0, (1 << 31) // rows // stripe * stripe, columns - stripe):
        block = first // 128
        codes = data[:, first:first + stripe].get().view(float8_e4m3fn)
        part = Scaled(codes, scales[:, block:block + 1].get(), (rows, stripe), False, (1, 128), "compact")
        want_row, want = parts(reference.scaling_aware_transpose(part, splits=None if splits is None
                                                                 else np.array(splits), target=target,
                                                                 scale_layout="compact"))
        np.testing.assert_array_equal(column.scale_inv[:, first:first + stripe].get(), want.scale_inv)
        start = at = 0
        for size in splits or [rows]:
            of_expert = bits(column.data).reshape(-1)[start * columns:(start + size) * columns]
            found = of_expert.reshape(columns, size)[first:first + stripe]
            np.testing.assert_array_equal(found.get().reshape(-1),
                                          bits(want.data).reshape(-1)[start * stripe:(start + size) * stripe])
            padded = -(-size // 4) * 4
            of_expert = row.scale_inv.reshape(-1)[at * columns // 128:(at + padded) * columns // 128]
            of_rows = of_expert.reshape(columns // 128, padded)[block]
            np.testing.assert_array_equal(of_rows.get(), want_row.scale_inv.reshape(-1)[at:at + padded])
            start, at = start + size, at + padded
