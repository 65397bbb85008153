"""Worlds made from a program's communicator, with stand-ins for mpi4py."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8.distributed.nccl import nccl_problem


class Comm:
    """What from_mpi uses of a communicator, between threads."""

    def __init__(self, rank: int, shared: SimpleNamespace) -> None:
        self._rank, self._shared = rank, shared

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return len(self._shared.values)

    def Split_type(self, kind: str) -> Any:
        assert kind == "shared"
        return SimpleNamespace(Get_rank=lambda: self._rank % 2, Free=lambda: None)

    def _all(self, own: np.ndarray) -> list[np.ndarray]:
        self._shared.values[self._rank] = own.copy()
        self._shared.barrier.wait()
        values = list(self._shared.values)
        self._shared.barrier.wait()
        return values

    def Allgather(self, own: np.ndarray, every: np.ndarray) -> None:
        every[:] = np.concatenate(self._all(own))

    def Allgatherv(self, own: np.ndarray, every: list[Any]) -> None:
        got, lengths, begins, kind = every
        assert kind == "byte"
        for value, length, begin in zip(self._all(own), lengths, begins, strict=True):
            assert len(value) == length
            got[begin:begin + length] = value


def test_ranks_of_mpi(monkeypatch):
    mpi = SimpleNamespace(COMM_TYPE_SHARED="shared", BYTE="byte")
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    shared = SimpleNamespace(values=[np.zeros(0)] * 3, barrier=threading.Barrier(3, timeout=20))
    found: list[Any] = [None] * 3

    def one(rank: int) -> None:
        world = fp8.distributed.from_mpi(Comm(rank, shared))
        world.agree({"hidden": 1})
        found[rank] = world.rank, world.size, world.local_rank, world.gather(bytes([rank]) * rank)
        with fp8.distributed.ExpertParallel(world, num_experts=3, max_tokens=1, hidden=8, topk=1, recipe=None,
                                            align=1, dtype=np.float32, like=np) as ep:
            routing = ep.route(np.array([[2 - rank]]))
            rows, _ = ep.dispatch(np.full((1, 8), rank, np.float32), routing)
            assert not isinstance(rows, fp8.Scaled)
            found[rank] += (ep.combine(rows, routing)[0, 0], rows[0, 0])

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = [b"", b"\1", b"\2\2"]
    assert found == [(rank, 3, rank % 2, every, rank, 2 - rank) for rank in range(3)]


def test_without_nccl_the_message_says_what_to_install():
    problem = nccl_problem()
    if problem is None:
        pytest.skip("NCCL is here")
    assert "NCCL" in problem


@pytest.mark.gpu
def test_ranks_of_a_communicator():
    if problem := nccl_problem():
        pytest.skip(problem)
    from cupy.cuda import nccl

    comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    world = fp8.distributed.from_nccl(comm)
    assert world.gather(b"abc") == [b"abc"]
    assert world.gather() == [b""]
    with fp8.distributed.ExpertParallel(world, num_experts=4, max_tokens=2, hidden=128, topk=1,
                                        transport="nccl") as ep:
        assert ep.transport == "nccl"
        routing = ep.route(fp8.asarray(np.array([[3], [0]]), like="cupy"))
        assert routing.counts.tolist() == [2]
