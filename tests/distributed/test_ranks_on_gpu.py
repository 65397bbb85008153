"""Exchanges on GPUs, with one process per rank; ranks share a GPU if there are too few."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import backend
from cupy_fp8.cli import launch, selftest_ranks
from cupy_fp8.distributed import ExpertParallel

pytestmark = pytest.mark.gpu


def alone(**options: Any) -> ExpertParallel:
    (world,) = fp8.distributed.local(1)
    return ExpertParallel(world, like="cupy", **options)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_every_case_by_every_transport(ranks):
    assert selftest_ranks.run(ranks, "cuda") == 0


LOST = """
import os, signal, sys, time, numpy as np, cupy_fp8 as fp8
from cupy_fp8 import backend
transport, how, graphs, folder = sys.argv[1:]
os.environ["NCCL_HOSTID"] = "rank " + os.environ["RANK"]
world = fp8.distributed.init(timeout=60)
ep = fp8.distributed.ExpertParallel(world, num_experts=6, max_tokens=4, hidden=128, topk=1, like="cupy",
                                    transport=transport, timeout=3)
routing = ep.route(fp8.asarray(np.array([[0], [2], [5]]), like="cupy"))
x = fp8.BlockScaling().quantize(fp8.zeros((3, 128), fp8.bfloat16, like="cupy")).rowwise
rows = ep.dispatch(x, routing)
ep.check()
step = lambda: ep.dispatch(x, routing, out=rows)
if graphs == "graphs":
    stream = backend.cupy().cuda.Stream(non_blocking=True)
    stream.use()
    step()
    ep.check()
    stream.begin_capture()
    step()
    step = stream.end_capture().launch
world.barrier()
if world.rank == 1 and how == "killed":
    for _ in range(3):
        step()
    os.kill(os.getpid(), signal.SIGKILL)
if world.rank == 1:
    time.sleep(8)
    os._exit(0)
start = time.monotonic()
try:
    for i in range(1000):       # more than a GPU's queue holds
        step()
        if transport == "nccl" and graphs == "graphs" and i % 4 == 3:
            ep.check()          # a GPU's queue holds few of its replays
    ep.check()
except fp8.distributed.RankError as error:
    assert time.monotonic() - start < 10
    assert transport == "nccl" or error.ranks == (1,), error
else:
    sys.exit(4)
try:
    ep.route(fp8.asarray(np.array([[0]]), like="cupy"))
except fp8.distributed.RankError as error:
    assert "unusable since a rank did not come" in str(error)
    open(f"{folder}/{world.rank}", "w").close()
os._exit(0)
"""


@pytest.mark.parametrize("graphs", ["eager", "graphs"])
@pytest.mark.parametrize("how", ["late", "killed"])
@pytest.mark.parametrize("transport", ["p2p", "nccl"])
def test_a_rank_that_does_not_come(transport, how, graphs, tmp_path):
    if transport == "nccl" and (problem := fp8.distributed.nccl.nccl_problem()):
        pytest.skip(problem)
    script = tmp_path / "lost.py"
    script.write_text(LOST, encoding="utf-8")
    # a shell that succeeds in any case: the launcher would end the others
    command = ["sh", "-c", '"$@" || true', "sh", sys.executable, str(script), transport, how, graphs,
               str(tmp_path)]
    assert launch.run(command, 3, share_gpus=True) == 0
    assert sorted(path.name for path in Path(tmp_path).glob("[0-9]")) == ["0", "2"]


def test_nccl_closes_while_a_graph_has_its_exchanges():
    if problem := fp8.distributed.nccl.nccl_problem():
        pytest.skip(problem)
    cp = backend.cupy()
    x = fp8.BlockScaling().quantize(fp8.zeros((3, 128), fp8.bfloat16, like="cupy")).rowwise
    with cp.cuda.Stream(non_blocking=True) as stream:
        ep = alone(num_experts=6, max_tokens=4, hidden=128, topk=1, transport="nccl")
        routing = ep.route(fp8.asarray(np.array([[0], [2], [5]]), like="cupy"))
        rows = ep.dispatch(x, routing)
        ep.check()
        stream.begin_capture()
        ep.dispatch(x, routing, out=rows)
        graph = stream.end_capture()
        graph.launch()
        start = time.monotonic()
        ep.close()
        assert time.monotonic() - start < 10
        del graph


@pytest.mark.parametrize("reduce", ["rank", "exact"])
def test_rows_beyond_the_bound_come_back_as_zeros(reduce):
    cp, rng = backend.cupy(), np.random.default_rng(0)
    ids = fp8.asarray(rng.integers(0, 4, (200, 2)).astype(np.int32), like="cupy")
    x = fp8.asarray(rng.standard_normal((200, 64), np.float32), like="cupy")
    with alone(num_experts=4, max_tokens=200, hidden=64, topk=2, rows=256, align=1, recipe=None,
               dtype=np.float32, reduce=reduce) as ep:
        fp8.device_errors(clear=True)
        for _ in range(2):
            routing = ep.route(ids)
            assert "more routes than topk or rows have room for" in "".join(fp8.device_errors(clear=True))
            rows, _ = ep.dispatch(x, routing)
            y = ep.combine(rows, routing)
            dx, dprobs = ep.dispatch_backward(rows, cp.ones(256, np.float32), routing)
        kept = (routing.received.row_map >= 0)
    assert 0 < int(kept.sum()) <= 256
    assert fp8.bytes_equal(dprobs, kept.astype(np.float32))
    assert bool((y == x * kept.sum(1)[:, None]).all())
    assert fp8.bytes_equal(dx, y)


@pytest.mark.full
def test_more_than_two_gibibytes():
    cp = backend.cupy()
    tokens, hidden = 40_000, 57_344
    if cp.cuda.runtime.memGetInfo()[0] < 30 << 30:
        pytest.skip("too little memory")
    x = fp8.empty((tokens, hidden), fp8.bfloat16, like="cupy")
    x.view("u2")[...] = (cp.arange(tokens, dtype=np.uint16) & 0x3FFF)[:, None]
    x.view("u2")[:, ::2] ^= 1
    ids = cp.zeros((tokens, 1), np.int32)
    for reduce in ("rank", "exact"):
        with alone(num_experts=1, max_tokens=tokens, hidden=hidden, topk=1, align=1, recipe=None,
                   reduce=reduce) as ep:
            routing = ep.route(ids)
            rows, _ = ep.dispatch(x, routing)
            assert not isinstance(rows, fp8.Scaled)
            assert bool((rows.view("u2") == x.view("u2")).all())
            assert bool((ep.combine(rows, routing).view("u2") == x.view("u2")).all())
        del rows
