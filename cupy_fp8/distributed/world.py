"""The ranks of a job, which exchange a few bytes through sockets, MPI, or threads of one process."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from types import TracebackType
from typing import Any, TypeVar

from .. import backend
from ..advice import shown, type_name
from ..formats import integer
from ..kernels import Launch
from .environment import place
from .errors import RankError, named
from .rendezvous import Rendezvous

_Made = TypeVar("_Made")
_TIMEOUT = 30.0


class World:
    """One rank's view of all ranks. Every rank makes the same calls in the same order.

    rank, size : this rank, and the number of ranks
    local_rank : this rank among those of its host: the number of its GPU
    """

    def __init__(self, rank: int, size: int, local_rank: int) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank

    def gather(self, value: bytes = b"") -> list[bytes]:
        """Return a few bytes from every rank, by rank; also a barrier of the host programs. Raises RankError,
        which names the ranks that have ended or are late."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Wait for all ranks' host programs; raises as `gather` does."""
        self.gather()

    def _together(self, launch: Launch) -> None:
        """Run a kernel on NumPy arrays of all ranks together, since their blocks wait for each other."""
        if self.size > 1:
            raise RuntimeError("kernels of several processes cannot run together on the CPU; local() can")
        launch.variant.run_ranks_on_cpu(launch.grid, launch.block, [launch.values])

    def agree(self, what: Mapping[str, Any]) -> None:
        """Raise ValueError on all ranks unless all give the same. (Values are compared as text.)"""
        own = {name: repr(value) for name, value in what.items()}
        packed = "\0".join(f"{name}={value}" for name, value in own.items()).encode()
        for rank, theirs in enumerate(self.gather(packed)):
            if theirs == packed:
                continue
            found = dict(pair.split("=", 1) for pair in theirs.decode(errors="replace").split("\0") if pair)
            for name in {**own, **found}:
                if own.get(name) != found.get(name):
                    raise ValueError(f"{name}: rank {self.rank} has {own.get(name)}, rank {rank} "
                                     f"{found.get(name)}; all ranks need the same")

    def close(self) -> None:
        """Close the connections. Later calls do nothing."""

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size})"


class _Processes(World):
    def __init__(self, rendezvous: Rendezvous, local_rank: int) -> None:
        super().__init__(rendezvous.rank, rendezvous.size, local_rank)
        self._rendezvous = rendezvous

    def gather(self, value: bytes = b"") -> list[bytes]:
        return self._rendezvous.gather(value)

    def close(self) -> None:
        self._rendezvous.close()


def init(*, timeout: float = _TIMEOUT) -> World:
    """Return the ranks started by a launcher: torchrun, `python -m cupy_fp8 launch`, mpirun or srun. Reads
    RANK, WORLD_SIZE and LOCAL_RANK, or Open MPI's or Slurm's variables, and MASTER_ADDR and MASTER_PORT. The
    current GPU becomes that of the local rank, or the only one that the process can see. A process without
    these variables is the only rank.

    timeout : seconds that ranks wait for one another, here and in later calls
    Raises ValueError for inconsistent variables, RankError for ranks that do not come.
    """
    here = place()
    if backend.gpu_problem() is None:
        backend.cupy().cuda.Device(_gpu_of(here.local_rank)).use()
    return _Processes(Rendezvous(here, timeout), here.local_rank)


def _gpu_of(local_rank: int) -> int:
    count = int(backend.cupy().cuda.runtime.getDeviceCount())
    if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES") and "LOCAL_WORLD_SIZE" not in os.environ:
        return 0                        # its own, which Slurm makes the only visible one
    if local_rank >= count and os.environ.get("CUPY_FP8_SHARE_GPUS") != "1":
        raise ValueError(f"rank {local_rank} of this host has no GPU of its own: {count} visible; start as "
                         "many ranks, or set CUPY_FP8_SHARE_GPUS=1 (launch --share-gpus) to try something "
                         "out")
    return local_rank % count


# ---- what a program already has ----
class _Mpi(World):
    def __init__(self, comm: Any) -> None:
        node = comm.Split_type(_mpi().COMM_TYPE_SHARED)
        super().__init__(comm.Get_rank(), comm.Get_size(), node.Get_rank())
        node.Free()
        self._comm = comm

    def gather(self, value: bytes = b"") -> list[bytes]:
        import numpy as np

        mpi, own = _mpi(), np.frombuffer(value, np.uint8)
        lengths = np.zeros(self.size, np.int64)
        self._comm.Allgather(np.array([len(value)], np.int64), lengths)
        ends = np.cumsum(lengths)
        got = np.zeros(int(ends[-1]), np.uint8)
        self._comm.Allgatherv(own, [got, lengths, ends - lengths, mpi.BYTE])
        return [part.tobytes() for part in np.split(got, ends[:-1])]


def _mpi() -> Any:
    return import_module("mpi4py").MPI


def from_mpi(comm: Any) -> World:
    """Return the ranks of an mpi4py communicator, which remains the caller's."""
    if not hasattr(comm, "Split_type"):
        raise TypeError("comm: expected a communicator of mpi4py, such as MPI.COMM_WORLD, got "
                        f"{type_name(comm)}")
    return _Mpi(comm)


# ---- threads of one process ----
class _Meeting:
    """State shared by the threads of `local`."""

    def __init__(self, size: int, timeout: float | None) -> None:
        self.values: list[bytes] = [b""] * size
        self.launches: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.came: set[int] = set()
        self.lock = threading.Lock()
        self.missing: tuple[int, ...] = ()
        self.left: set[int] = set()


class _Threads(World):
    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        super().__init__(rank, size, rank)
        self._meeting = meeting

    def gather(self, value: bytes = b"") -> list[bytes]:
        meeting = self._meeting
        with meeting.lock:
            meeting.values[self.rank] = bytes(value)
            meeting.came.add(self.rank)
        self._wait()
        gathered = list(meeting.values)
        with meeting.lock:
            meeting.came.discard(self.rank)
        self._wait()
        return gathered

    def _wait(self) -> None:
        meeting = self._meeting
        try:
            meeting.barrier.wait()
        except threading.BrokenBarrierError:
            with meeting.lock:
                meeting.missing = meeting.missing or tuple(sorted(meeting.left)) or tuple(
                    rank for rank in range(self.size) if rank not in meeting.came)
            raise RankError(f"ended, or late: {named(meeting.missing)}", meeting.missing) from None

    def _together(self, launch: Launch) -> None:
        meeting = self._meeting
        meeting.launches[self.rank] = launch
        self.gather()
        if self.rank == 0:
            launch.variant.run_ranks_on_cpu(launch.grid, launch.block,
                                            [each.values for each in meeting.launches])
        self.gather()

    def leave(self) -> None:
        """Note that this rank has failed, so that the others do not wait for it."""
        with self._meeting.lock:
            self._meeting.left.add(self.rank)
        self._meeting.barrier.abort()


class Local(list[World]):
    """The ranks of one process, by rank."""

    def run(self, function: Callable[[World], _Made]) -> list[_Made]:
        """Run function(rank's world) in a thread per rank, and return the results by rank. If ranks fail,
        raises the first error that is not just the loss of another rank."""
        results: list[Any] = [None] * len(self)
        errors: dict[int, BaseException] = {}

        def one(rank: int) -> None:
            try:
                results[rank] = function(self[rank])
            except BaseException as error:          # raised below, in the caller's thread
                errors[rank] = error
                leave = getattr(self[rank], "leave", None)
                if leave is not None:
                    leave()

        # threads inherit context variables, such as the chosen executor
        threads = [threading.Thread(target=contextvars.copy_context().run, args=(one, rank),
                                    name=f"rank {rank}") for rank in range(len(self))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            own = [error for error in errors.values() if not isinstance(error, RankError)]
            raise (own or list(errors.values()))[0]
        return results


def local(size: int, *, timeout: float | None = _TIMEOUT) -> Local:
    """Return this many ranks in this process, each for a thread of its own: for NumPy arrays, tests and
    notebooks.
    timeout : seconds that ranks wait for one another; None: for ever

    >>> import cupy_fp8 as fp8
    >>> fp8.distributed.local(3).run(lambda world: world.gather(bytes([world.rank])))[0]
    [b'\\x00', b'\\x01', b'\\x02']
    """
    if integer(size, "size") < 1:
        raise ValueError(f"size: expected 1 or more, got {shown(size)}")
    meeting = _Meeting(size, timeout)
    return Local(_Threads(rank, size, meeting) for rank in range(size))
