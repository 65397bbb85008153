"""Direct stores: kernels write into the windows of the other ranks of one host."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from .. import backend
from ..arrays import Array, address, asarray, zeros
from ..kernels import Launch, error_word
from ..routing import Routing
from . import exchange
from .errors import RankError, named
from .exchange import Part, Sent
from .layout import Direction, Facts, Piece
from .memory import Late, Memory
from .routing import RankRouting, Route
from .slots import Split
from .transport import Transport
from .world import World

_HANDLE = struct.Struct("!16s64sqQ64s")     # process, host, device, address of the window, handle
#: launches kept for reuse
_MOST_KNOWN = 256
_PROCESS = secrets.token_bytes(16)
_abandoned: list[Windows] = []


class Windows(Transport):
    """Transport by kernels that write to windows; subclasses choose whose."""

    def __init__(self, world: World, facts: Facts, split: Split, device: int | None, num_sms: int | None
                 ) -> None:
        super().__init__(world, facts, split)
        self.device, self._num_sms = device, num_sms
        self.memory = Memory(self.layout.nbytes, device)
        like = np if device is None else backend.cupy()
        self._state = zeros(3 + len(Direction), np.uint32, like=like)
        self.late = Late(split.ranks, device)
        self._known: dict[tuple[Any, ...], Launch] = {}
        self.nbytes = self.memory.nbytes

    def members(self, direction: Direction) -> dict[str, int]:
        """Return the members of struct Windows."""
        raise NotImplementedError

    def launch(self, make: Callable[..., Launch], direction: Direction, *args: Any) -> None:
        """Run make(windows, *args), on the CPU together with the launches of all ranks. On the GPU the launch
        is reused for the same memory."""
        if self.device is None:
            self.world._together(make(self.members(direction), *args, num_sms=self._num_sms))
            return
        key = make, direction, *map(_place, args)
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = make(self.members(direction), *args, num_sms=self._num_sms)
            self._known[key].keep()
        self._known[key].run()

    def array(self, piece: Piece, dtype: Any = None) -> Array:
        return self.memory.array(piece, dtype)

    def _common(self, direction: Direction) -> dict[str, int]:
        return {"me": self.split.me, "ranks": self.split.ranks, "direction": int(direction)}

    # ---- what comes ----
    def came(self, data: Part, scales: Part | None, probs: Part | None
             ) -> tuple[Array, Array | None, Array | None]:
        """Return arrays of the tokens in this rank's window."""
        of_scales = None if scales is None or self.layout.scales is None else self.array(self.layout.scales)
        return (self.array(self.layout.data, data.array.dtype), of_scales,
                None if probs is None else self.array(self.layout.probs))

    def send_back(self, routing: RankRouting, rows: Array, probs: Array | None) -> None:
        layout = self.layout
        if self.facts.exact:
            self.launch(exchange.send_rows, Direction.RETURN, routing.received, routing.back, self.split,
                        routing.arrived, Sent(Part.rows(rows), layout.returned), probs, layout.gradients)
        else:
            self.launch(exchange.send_sums, Direction.RETURN, routing.received, routing.counts, self.split,
                        rows,
                        layout.returned, probs, layout.gradients)

    def check(self) -> None:
        if late := self.late.ranks():
            raise RankError(f"{named(late)} did not come to an exchange in time: this ExpertParallel is "
                            "unusable from there on", late)

    def abandon(self) -> None:
        """Keep all memory until the process ends: other ranks may still write, and exchanges still run."""
        if self.device is not None:
            _abandoned.append(self)

    def wait(self) -> None:
        if self.device is not None:             # whichever streams have exchanges
            backend.cupy().cuda.Device(self.device).synchronize()


class Direct(Windows):
    """Windows of all ranks, opened through CUDA IPC, or addressed directly within a process."""

    name = "p2p"

    def __init__(self, world: World, facts: Facts, split: Split, device: int | None, num_sms: int | None,
                 timeout: float) -> None:
        super().__init__(world, facts, split, device, num_sms)
        self._timeout = int(timeout * 1e9)
        self._at = {split.me: self.memory.at}
        self._opened: list[int] = []                # through CUDA IPC
        try:
            problems = [text.decode() for text in world.gather(self._open().encode())]
            if any(problems):
                raise backend.DeviceError("transport 'p2p': " + "; ".join(
                    f"rank {rank}: {text}" for rank, text in enumerate(problems) if text))
            table = np.array([self._at[rank] for rank in range(split.ranks)], np.uint64)
            self._table = asarray(table, like=np if device is None else "cupy")
            self.wait()
            world.barrier()
        except BaseException:
            self._close_others()
            self.memory.free()
            raise

    def _open(self) -> str:
        """Get the addresses of all windows. Returns what does not work, or ''."""
        handle, problem = b"", ""
        if self.device is not None:
            try:
                handle = backend.cupy().cuda.runtime.ipcGetMemHandle(self.memory.at)
            except Exception as error:          # any error of the driver
                problem = f"no CUDA IPC handle of its window: {error}"
        own = _HANDLE.pack(_process(), _host(), -1 if self.device is None else self.device, self.memory.at,
                           handle)
        for rank, theirs in enumerate(self.world.gather(own)):
            if rank != self.split.me and not problem:
                problem = self._open_one(rank, *_HANDLE.unpack(theirs))
        return problem

    def _open_one(self, rank: int, process: bytes, host: bytes, device: int, at: int, handle: bytes) -> str:
        if process == _process():
            self._at[rank] = at
            return self._enable(device)
        if host != _host():
            return f"rank {rank} is on another host; transport='nccl' reaches it"
        if self.device is None:
            return f"rank {rank} is another process; kernels on the CPU need local()"
        try:
            at = backend.cupy().cuda.runtime.ipcOpenMemHandle(handle)
        except Exception as error:              # any error of the driver
            return f"no access to the window of rank {rank}: {error}"
        self._at[rank] = at
        self._opened.append(at)
        return ""

    def _enable(self, device: int) -> str:
        """Enable access to another GPU of this process. Returns what does not work, or ''."""
        if self.device in (None, device):
            return ""
        runtime = backend.cupy().cuda.runtime
        if not runtime.deviceCanAccessPeer(self.device, device):
            return f"GPU {self.device} has no access to the memory of GPU {device}"
        try:
            runtime.deviceEnablePeerAccess(device)
        except runtime.CUDARuntimeError as error:
            if "AlreadyEnabled" not in str(error):
                return str(error)
        return ""

    def members(self, direction: Direction) -> dict[str, int]:
        return {**self._common(direction), "at": address(self._table), "state": address(self._state),
                "late": self.late.at, "errors": error_word(self._state), "flags": self.layout.flags.at,
                "timeout": self._timeout}

    # ---- exchanges ----
    def route(self, route: Route, counts: Array) -> tuple[Array, Array | None, Any]:
        layout = self.layout
        self.launch(exchange.send_tokens, Direction.ROUTE, route.sent, self.split, self.parts_of_route(route),
                    layout.sizes, counts)
        return self.array(layout.experts), None if layout.back is None else self.array(layout.back), None

    def dispatch(self, routing: RankRouting, data: Part, scales: Part | None, probs: Part | None
                 ) -> tuple[Array, Array | None, Array | None]:
        self.launch(exchange.send_tokens, Direction.DISPATCH, routing.sent, self.split,
                    self.parts_of_tokens(data, scales, probs))
        return self.came(data, scales, probs)

    def combine(self, routing: RankRouting, rows: Array, probs: Array | None) -> tuple[Array, Array]:
        self.send_back(routing, rows, probs)
        return self.array(self.layout.returned), self.array(self.layout.gradients)

    # ---- the end ----
    def close(self) -> None:
        with suppress(RankError):
            self.wait()
            self.world.barrier()                # no rank writes any more
            self._close_others()
            self.world.barrier()                # no rank has this memory open when it is freed
        self._close_others()
        self.memory.free()

    def _close_others(self) -> None:
        for at in self._opened:
            backend.cupy().cuda.runtime.ipcCloseMemHandle(at)
        self._opened = []


def _place(given: Any) -> Any:
    """Return what a launch depends on: addresses, shapes and dtypes of arrays."""
    if isinstance(given, (Piece, Split)) or given is None:
        return given
    if isinstance(given, Routing):
        arrays = given.row_map, given.sources, given.splits, given.offsets
        return *map(address, arrays), given.row_map.shape, given.rows
    if isinstance(given, Part):
        return address(given.array), given.array.shape, given.array.dtype, *given[1:]
    if isinstance(given, (list, tuple)):
        return tuple(map(_place, given))
    return address(given), given.shape, given.dtype


def _process() -> bytes:
    """Return an identifier of the process; processes forked after the import differ too."""
    return hashlib.blake2b(_PROCESS + b"%d" % os.getpid(), digest_size=16).digest()


def _host() -> bytes:
    """Return an identifier of the host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = boot.read_text(encoding="ascii") if boot.exists() else ""
    return f"{text.strip()}{socket.gethostname()}"[:64].encode().ljust(64, b"\0")
