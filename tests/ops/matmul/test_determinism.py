"""The same call gives the same bytes, whatever the order of threads, and whichever cluster takes a tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import product_kernels
import pytest
from product_operands import scaled
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import backend, testing
from cupy_fp8.arrays import bits
from cupy_fp8.bench.matmul.grouped import Shape, operands
from cupy_fp8.calls import remembered
from cupy_fp8.cases import poison
from cupy_fp8.formats import float32
from cupy_fp8.ops.matmul import wgmma

SPLITS = np.array([0, 37, 0, 130, 8, 0], np.int64)
TOTAL = 180                                             # five rows belong to no group
N = 24


@pytest.mark.parametrize("k", [200, 208])               # with 208 rows begin at multiples of 16 bytes
def test_the_same_bytes_again(run, k):
    a, b = run.array(scaled((TOTAL, k), "vector", 1)), run.array(scaled((6, N, k), "block", 2))
    first = fp8.asnumpy(fp8.grouped_matmul_nt(a, b, run.array(SPLITS)))
    for _ in range(3):
        testing.assert_bytes_equal(fp8.asnumpy(fp8.grouped_matmul_nt(a, b, run.array(SPLITS))), first)


# ---- schedules of the CPU executor ----
#: A schedule is the number of clusters and the order of the threads of each. Clusters run one after the
#: other, and the first one takes all tiles with which no other one begins. So their number decides who takes
#: which tile.
SCHEDULES = [(2, "asc", 0), (1, "desc", 0), (5, "random", 1), (2, "random", 2), (5, "desc", 0),
             (3, "random", 12345)]


@needs_host
@pytest.mark.parametrize("kernel", product_kernels.KERNELS)
@pytest.mark.parametrize("group", ["m", "k"])
def test_any_schedule(group, kernel, monkeypatch, launched):
    """Several tiles of most groups. A group of "k" begins at no multiple of 16 bytes."""
    if group == "m":
        splits = np.array([0, 37, 0, 230, 8, 190, 0])
        a, b = scaled((470, 272), "vector", 1), scaled((len(splits), 264, 272), "block", 2)
    else:
        splits = np.array([144, 0, 43, 5, 128, 0])
        a, b = scaled((200, 320), "row", 1), scaled((264, 320), "row", 2)
    with testing.executor("host") as run:
        product_kernels.use(kernel, run, monkeypatch)
        made = []
        for clusters, order, seed in SCHEDULES:
            monkeypatch.setattr(wgmma, "_CLUSTERS_ON_CPU", clusters)
            monkeypatch.setenv("CUPY_FP8_HOST_ORDER", order)
            monkeypatch.setenv("CUPY_FP8_HOST_SEED", str(seed))
            remembered.forget()  # otherwise the launch would keep its number of clusters
            launched.clear()
            made.append(fp8.grouped_matmul_nt(a, b, splits, group=group, dtype=float32))
            assert kernel in launched
            testing.assert_bytes_equal(made[-1], made[0])


# ---- on a GPU ----
def begin_work_beside(turn: int, stream: Any, memory: Any) -> None:
    """Give another stream copies, which take bandwidth, and additions, which take multiprocessors."""
    half = memory.size // 2
    with stream:
        for i in range(turn % 4):
            n = half >> (turn + i) % 9
            part, other = memory[:n], memory[half:half + n]
            part[...] = other
            part += other


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("shape", [
    Shape("m", 64, 8192, 1024, 2048), Shape("k", 64, 8192, 1024, 2048), Shape("k", 64, 8192, 1024, 2048, 16)],
    ids=lambda shape: shape.label)
def test_200_launches_beside_other_work(shape):
    cp = backend.cupy()
    a, b, splits = operands(shape)
    extents = (shape.total, shape.n) if shape.group == "m" else (shape.experts, shape.other, shape.n)
    out = fp8.empty(extents, float32, like="cupy")
    poison(out)
    fp8.grouped_matmul_nt(a, b, splits, group=shape.group, dtype=float32, out=out)
    first, different = bits(out).copy(), cp.zeros(200, bool)
    assert bool(cp.isfinite(out).all())
    beside, memory = cp.cuda.Stream(non_blocking=True), cp.zeros(1 << 28, cp.uint8)
    cp.cuda.Device().synchronize()                      # the other stream does not wait for this one
    for turn in range(200):
        begin_work_beside(turn, beside, memory)
        poison(out)
        fp8.grouped_matmul_nt(a, b, splits, group=shape.group, dtype=float32, out=out)
        different[turn] = (bits(out) != first).any()
    assert not fp8.asnumpy(different).any()
    beside.synchronize()
