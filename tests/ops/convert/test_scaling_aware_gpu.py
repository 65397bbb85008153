"""scaling_aware_transpose on a GPU: many blocks, and runs of tiles."""

from __future__ import annotations

from typing import Any

import pytest
from power_of_two_rows import random_rows

import cupy_fp8 as fp8
from cupy_fp8 import backend, reference, testing
from cupy_fp8.cases.groups import sizes
from cupy_fp8.ops.convert import scaling_aware, scaling_aware_tiles
from cupy_fp8.results import Scaled

pytestmark = pytest.mark.gpu


def on_gpu(rows: int = 300, columns: int = 264) -> tuple[Scaled, Any]:
    q = random_rows(rows, columns, seed=8)
    return q, testing.Executor("cuda").array(q)


@pytest.mark.parametrize("experts", [1, 8, 200])
def test_many_blocks(experts):
    """Large tiles, uneven experts, and rows of the output at every address."""
    q, given = on_gpu(5003, 4104)
    splits = sizes(5003, experts)
    testing.assert_bytes_equal(fp8.scaling_aware_transpose(given, splits=backend.cupy().asarray(splits)),
                reference.scaling_aware_transpose(q, splits=splits))


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("experts", [1, 5, 30])
@pytest.mark.parametrize("tiles", [2, 3, 4])
def test_runs_of_tiles(tiles, experts, multiple, monkeypatch):
    """Blocks of threads process several tiles in large arrays; here neighbours run at the same time, and
    every byte can be checked."""
    monkeypatch.setattr(scaling_aware_tiles, "_tiles_of_a_block", lambda *_: tiles)
    q, given = on_gpu(4000, 528)
    splits = sizes(4000 // multiple, experts) * multiple
    for target in scaling_aware.TARGETS:
        got = fp8.scaling_aware_transpose(given, splits=backend.cupy().asarray(splits), target=target)
        testing.assert_bytes_equal(got, reference.scaling_aware_transpose(q, splits=splits, target=target))
