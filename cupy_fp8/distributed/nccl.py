"""NCCL, through CuPy: kernels gather rows in local memory, and NCCL sends them."""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from threading import Thread
from typing import Any, NamedTuple, NoReturn

import numpy as np

from .. import backend
from ..arrays import Array, address, asarray, empty
from ..kernels import capturing
from ..layouts import round_up
from . import exchange
from .direct import Windows
from .errors import RankError
from .exchange import Part
from .layout import INT32, Direction, Facts, Piece
from .memory import Memory
from .routing import RankRouting, Route
from .slots import Split
from .world import World

_INSTALL = "pip install 'cupy_fp8[distributed]' (CUDA 12: [distributed12])"
_POLLS_PER_SECOND = 20_000
#: most NCCL groups ahead of the GPU: if a GPU waits for a lost rank and its queue is full, a launch waits
#: without a limit
_MOST_AHEAD = 64
#: seconds in which NCCL ends a communicator of which no graph has operations
_ENDS_WITHIN = 2.0


def nccl_problem() -> str | None:
    """Return why NCCL cannot be used here, or None."""
    try:
        available = import_module("cupy.cuda.nccl").available
    except ImportError as error:
        return f"CuPy cannot load NCCL ({error}): {_INSTALL}"
    return None if available else f"CuPy finds no NCCL: {_INSTALL}"


def _nccl() -> Any:
    # NVLink multicast can put shared GPUs out of service
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    return import_module("cupy.cuda.nccl")


def _end(method: Callable[[], object]) -> None:
    """Call a communicator's abort or destroy. Both wait until all CUDA graphs with its operations are gone,
    so a thread of its own calls them."""
    thread = Thread(target=method, daemon=True)
    with suppress(RuntimeError):            # the interpreter is ending
        thread.start()
        thread.join(_ENDS_WITHIN)


class _Nccl(World):
    """The ranks of a communicator."""

    def __init__(self, comm: Any) -> None:
        device = backend.cupy().cuda.runtime.getDevice()
        super().__init__(comm.rank_id(), comm.size(), device)
        self.communicator, self._nccl = comm, _nccl()

    def gather(self, value: bytes = b"") -> list[bytes]:
        lengths = self._all(struct.pack("q", len(value)))
        sizes = [struct.unpack("q", each)[0] for each in lengths]
        most = max(sizes)
        if not most:
            return [b""] * self.size
        return [each[:size] for each, size in zip(self._all(value.ljust(most, b"\0")), sizes, strict=True)]

    def _all(self, value: bytes) -> list[bytes]:
        """Gather values of equal length."""
        stream = backend.cupy().cuda.get_current_stream()
        own = asarray(np.frombuffer(value, np.uint8), like="cupy")
        found = empty((self.size, len(value)), np.uint8, like=own)
        self.communicator.allGather(address(own), address(found), len(value), self._nccl.NCCL_UINT8,
                                    stream.ptr)
        return [row.tobytes() for row in found.get()]


def from_nccl(comm: Any) -> World:
    """Return the ranks of a `cupy.cuda.nccl.NcclCommunicator`, which remains the caller's, except that it is
    aborted if a rank does not come to an exchange. The current device must be that of its rank. (`gather` of
    this world waits without a limit.)"""
    return _Nccl(comm)


class _Counts(NamedTuple):
    """What the host knows of a routing. tokens[s, d]: tokens from rank s to d; firsts[s, d]: the first row of
    rank s that comes back from d, with the end last; None unless every row comes back."""

    tokens: np.ndarray
    firsts: np.ndarray | None


class Nccl(Windows):
    """Grouped sends: of as many rows as the host knows, or of whole regions while a graph is captured."""

    name = "nccl"

    def __init__(self, world: World, facts: Facts, split: Split, device: int, num_sms: int | None,
                 timeout: float) -> None:
        problems = [text.decode() for text in world.gather((nccl_problem() or "").encode())]
        if any(problems):
            raise backend.DeviceError("transport 'nccl': " + "; ".join(
                f"rank {rank}: {text}" for rank, text in enumerate(problems) if text))
        self.lib, self._timeout = _nccl(), timeout
        self._ends: deque[Any] = deque()        # events after groups
        super().__init__(world, facts, split, device, num_sms)
        self._staging: Memory | None = None
        self._rows: Memory | None = None
        try:
            self._begin(world, facts, split, device)
        except BaseException:
            self._free()
            raise

    def _begin(self, world: World, facts: Facts, split: Split, device: int) -> None:
        self._staging = Memory(self.layout.nbytes, device)
        table = asarray(np.full(split.ranks, self._staging.at, np.uint64), like="cupy")
        self._tables = [table] * len(Direction)
        if facts.exact:
            returned, gradients = self.layout.returned, self.layout.gradients
            stride = gradients.at - returned.at + round_up(gradients.nbytes, 256)
            self._stride, self._rows = stride, Memory(stride * split.ranks, device)
            ats = self._rows.at - returned.at + stride * np.arange(split.ranks)
            self._tables[Direction.RETURN] = asarray(ats.astype(np.uint64), like="cupy")
        self.nbytes += self._staging.nbytes + (0 if self._rows is None else self._rows.nbytes)
        like = self._state
        self._matrix = empty((split.ranks, split.ranks), INT32, like=like)
        self._firsts = empty((split.ranks, split.ranks + 1), np.int64, like=like)
        self._own = not isinstance(world, _Nccl)
        self._comm: Any = world.communicator if isinstance(world, _Nccl) else self._made(world, split)
        backend.cupy().cuda.get_current_stream().synchronize()  # so that any stream can read the tables

    def _made(self, world: World, split: Split) -> Any:
        own = self.lib.get_unique_id() if split.me == 0 else b""
        return self.lib.NcclCommunicator(split.ranks, world.gather(own)[0], split.me)

    def members(self, direction: Direction) -> dict[str, int]:
        return {**self._common(direction), "at": address(self._tables[direction]), "staged": 1}

    # ---- exchanges ----
    def route(self, route: Route, counts: Array) -> tuple[Array, Array | None, Any]:
        known = self._learn(route, counts)
        parts = self.parts_of_route(route)
        self.launch(exchange.send_tokens, Direction.ROUTE, route.sent, self.split, parts)
        self._regions([part.to for part in parts], self._numbers(known))
        layout = self.layout
        return self.array(layout.experts), None if layout.back is None else self.array(layout.back), known

    def dispatch(self, routing: RankRouting, data: Part, scales: Part | None, probs: Part | None
                 ) -> tuple[Array, Array | None, Array | None]:
        parts = self.parts_of_tokens(data, scales, probs)
        self.launch(exchange.send_tokens, Direction.DISPATCH, routing.sent, self.split, parts)
        self._regions([part.to for part in parts], self._numbers(routing._known))
        return self.came(data, scales, probs)

    def combine(self, routing: RankRouting, rows: Array, probs: Array | None) -> tuple[Array, Array]:
        layout = self.layout
        if self.facts.exact and (self._capturing() or routing._known is None):
            raise ValueError("reduce='exact' with NCCL sends numbers of rows that the host must know, which "
                             "a CUDA graph cannot learn; take reduce='rank', or transport='p2p'")
        self.send_back(routing, rows, probs)
        pieces = [layout.returned] + ([] if probs is None else [layout.gradients])
        if self.facts.exact:
            self._exact(pieces, routing._known)
        else:
            self._regions(pieces, self._numbers(routing._known).T)
        return self.array(layout.returned), self.array(layout.gradients)

    # ---- numbers of rows ----
    def _capturing(self) -> bool:
        assert self.device is not None
        return capturing(self.device)

    def _learn(self, route: Route, counts: Array) -> _Counts | None:
        """Get the numbers of rows between all ranks: on the device, and on the host unless a graph is
        captured."""
        lib, ranks = self.lib, self.split.ranks
        self._all(route.sent.splits, self._matrix, ranks, lib.NCCL_INT32)
        counts[...] = self._matrix[:, self.split.me]
        if self._capturing():
            return None
        firsts = None
        if route.own is not None:
            own = route.own.offsets[::self.split.local].copy()
            self._all(own, self._firsts, ranks + 1, lib.NCCL_INT64)
            self.wait()
            firsts = self._firsts.get()
        self.wait()
        return _Counts(self._matrix.get(), firsts)

    def _all(self, own: Array, every: Array, count: int, kind: int) -> None:
        with _Group(self):
            self._comm.allGather(address(own), address(every), count, kind, self._stream())

    def _numbers(self, known: _Counts | None) -> np.ndarray:
        """Return the tokens from each rank to each: those of a routing, or the upper bound."""
        if known is None or self._capturing():
            return np.full((self.split.ranks, self.split.ranks), self.split.region)
        return known.tokens

    # ---- sends ----
    def _regions(self, pieces: Sequence[Piece], numbers: np.ndarray) -> None:
        """Send the first numbers[s, d] rows of a region from rank s to rank d."""
        me, staging = self.split.me, self._staging
        assert staging is not None
        with _Group(self):
            for rank in range(self.split.ranks):
                first = rank * self.split.region
                for piece in pieces:
                    self._send(staging.at, piece, rank, first, numbers[me, rank])
                    self._receive(piece, rank, first, numbers[rank, me])

    def _exact(self, pieces: Sequence[Piece], known: _Counts) -> None:
        firsts, me = known.firsts, self.split.me
        assert firsts is not None
        assert self._rows is not None
        at = self._rows.at - self.layout.returned.at
        with _Group(self):
            for rank in range(self.split.ranks):
                for piece in pieces:
                    first, end = firsts[rank, me:me + 2]
                    self._send(at + rank * self._stride, piece, rank, first, end - first)
                    first, end = firsts[me, rank:rank + 2]
                    self._receive(piece, rank, first, end - first)

    def _send(self, base: int, piece: Piece, rank: int, first: int, count: int) -> None:
        size = piece.nbytes // piece.shape[0]
        self._comm.send(int(base + piece.at + first * size), int(count * size), self.lib.NCCL_UINT8, rank,
                        self._stream())

    def _receive(self, piece: Piece, rank: int, first: int, count: int) -> None:
        size = piece.nbytes // piece.shape[0]
        self._comm.recv(int(self.memory.at + piece.at + first * size), int(count * size), self.lib.NCCL_UINT8,
                        rank, self._stream())

    def _stream(self) -> int:
        return int(backend.cupy().cuda.get_current_stream().ptr)

    # ---- failures, and the end ----
    def wait(self) -> None:
        """Wait for the current stream, and for exchanges on any other; abort NCCL after the timeout."""
        for event in (*self._ends, _recorded()):
            self._wait_for(event)
        self._ends.clear()

    def begin_group(self) -> None:
        """Check for errors, and wait until few enough groups are ahead of the GPU."""
        self.check()
        if len(self._ends) == _MOST_AHEAD and not self._capturing():
            self._wait_for(self._ends.popleft())

    def end_group(self) -> None:
        if not self._capturing():
            self._ends.append(_recorded())

    def _wait_for(self, event: Any) -> None:
        end = time.monotonic() + self._timeout
        while not event.done:
            self.check()
            if time.monotonic() > end:
                self.abort(f"an exchange did not end in {self._timeout:g} s")
            time.sleep(1 / _POLLS_PER_SECOND)

    def check(self) -> None:
        if self._comm is None:
            raise RankError("NCCL was aborted")
        try:
            self._comm.check_async_error()
        except self.lib.NcclError as error:
            self.abort(str(error))

    def abort(self, reason: str) -> NoReturn:
        """Abort NCCL after the loss of a rank, so that pending operations end."""
        comm, self._comm = self._comm, None
        _end(comm.abort)
        raise RankError(f"NCCL: {reason}; a rank has ended or is late (NCCL does not say which): this "
                        "ExpertParallel is unusable from there on")

    def close(self) -> None:
        with suppress(RankError):
            if self._comm is not None:
                self.wait()
                self.world.barrier()
        if self._comm is not None and self._own:
            _end(self._comm.destroy)
        self._comm = None
        self._free()

    def abandon(self) -> None:
        super().abandon()
        if self._comm is not None and self._own:
            _end(self._comm.abort)
        self._comm = None

    def _free(self) -> None:
        for memory in (self.memory, self._staging, self._rows):
            if memory is not None:
                memory.free()


def _recorded() -> Any:
    event = backend.cupy().cuda.Event(disable_timing=True)
    event.record()
    return event


class _Group:
    """An NCCL group of sends and receives. NCCL's errors become RankError."""

    def __init__(self, nccl: Nccl) -> None:
        self._nccl = nccl

    def __enter__(self) -> None:
        self._nccl.begin_group()
        self._nccl.lib.groupStart()

    def __exit__(self, _: Any, error: BaseException | None, trace: Any) -> None:
        failure = self._nccl.lib.NcclError
        try:
            self._nccl.lib.groupEnd()
        except failure as of_group:
            error = error or of_group
        if isinstance(error, failure):
            self._nccl.abort(str(error))
        self._nccl.end_group()
