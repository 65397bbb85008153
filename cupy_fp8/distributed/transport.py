"""Transports, which move rows between ranks: the interface, and the transport of NumPy arrays."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from .. import reference
from ..arrays import Array, asnumpy
from ..arrays import bits as as_bits
from ..formats import as_dtype
from .exchange import Part, Sent
from .layout import Facts, Layout, Piece
from .routing import RankRouting, Route
from .slots import Split
from .world import World

__all__ = ["Messages", "Transport"]


class Transport:
    """Moves rows between ranks. What a method returns is overwritten by its next call."""

    name = ""
    #: bytes of windows and of staging memory
    nbytes = 0

    def __init__(self, world: World, facts: Facts, split: Split) -> None:
        self.world, self.facts, self.split, self.layout = world, facts, split, Layout(facts, split)

    def route(self, route: Route, counts: Array) -> tuple[Array, Array | None, Any]:
        """Return (experts, rows back) for the slots of all incoming tokens, and what the routing is to
        remember for this transport; write the number from each rank to `counts`."""
        raise NotImplementedError

    def dispatch(self, routing: RankRouting, data: Part, scales: Part | None, probs: Part | None
                 ) -> tuple[Array, Array | None, Array | None]:
        """Return the incoming tokens, a region of rows for each rank."""
        raise NotImplementedError

    def combine(self, routing: RankRouting, rows: Array, probs: Array | None) -> tuple[Array, Array]:
        """Return the rows that come back, and a value for each: as `Layout.returned` and `gradients`."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise RankError if a rank did not come to an exchange that has ended."""

    def wait(self) -> None:
        """Wait for the exchanges so far."""

    def close(self) -> None:
        """Free the memory, once all ranks have called it."""

    def abandon(self) -> None:
        """End without the other ranks."""

    # ---- parts ----
    def parts_of_route(self, route: Route) -> list[Sent]:
        parts = [Sent(Part.rows(route.experts), self.layout.experts)]
        if route.own is not None and self.layout.back is not None:
            parts.append(Sent(Part.rows(route.own.row_map), self.layout.back))
        return parts

    def parts_of_tokens(self, data: Part, scales: Part | None, probs: Part | None) -> list[Sent]:
        given = [(data, self.layout.data), (scales, self.layout.scales), (probs, self.layout.probs)]
        return [Sent(part, piece) for part, piece in given if part is not None and piece is not None]


class Messages(Transport):
    """Rows of NumPy arrays, through the connections of the world: each rank receives all, and takes its
    own."""

    name = "messages"

    def route(self, route: Route, counts: Array) -> tuple[Array, Array | None, Any]:
        experts, *back = self._send_tokens(route, self.parts_of_route(route), counts)
        return experts, back[0] if back else None, None

    def dispatch(self, routing: RankRouting, data: Part, scales: Part | None, probs: Part | None
                 ) -> tuple[Array, Array | None, Array | None]:
        came = iter(self._send_tokens(routing, self.parts_of_tokens(data, scales, probs)))
        return next(came), scales and next(came), probs and next(came)

    def combine(self, routing: RankRouting, rows: Array, probs: Array | None) -> tuple[Array, Array]:
        made = [_empty(self.layout.returned), _empty(self.layout.gradients)]
        sent = self._exact(routing, rows, probs) if self.facts.exact else self._sums(routing, rows, probs)
        for (places, *values), rank in zip(self._exchange(sent), range(self.split.ranks), strict=True):
            at = places if self.facts.exact else rank * self.split.region + np.arange(len(values[0]))
            for a, value in zip(made, values, strict=False):
                as_bits(a)[at] = as_bits(value)
        return made[0], made[1]

    def _sums(self, routing: RankRouting, rows: Array, probs: Array | None) -> list[list[np.ndarray]]:
        sums = [reference.unpermute(rows, routing.received)]
        if probs is not None:
            sums.append(reference.permute_backward(rows, routing.received, probs_grad=probs)[1])
        region = self.split.region
        return [[np.zeros(0, np.int32), *(a[rank * region:][:count] for a in sums)]
                for rank, count in enumerate(routing.counts.tolist())]

    def _exact(self, routing: RankRouting, rows: Array, probs: Array | None) -> list[list[np.ndarray]]:
        assert routing.back is not None
        used = np.nonzero(routing.received.sources >= 0)[0]
        slots = routing.received.sources[used]
        rank, back = slots // self.facts.topk // self.split.region, routing.back.reshape(-1)[slots]
        sent = []
        for each in range(self.split.ranks):
            own = used[rank == each]
            sent.append([back[rank == each], rows[own], *([] if probs is None else [probs[own]])])
        return sent

    def _send_tokens(self, route: Route | RankRouting, parts: list[Sent],
                     counts: Array | None = None) -> list[np.ndarray]:
        """Return the incoming rows of each part, a region for each rank."""
        sent, made = route.sent, [_empty(part.to) for part in parts]
        packets = []
        for rank in range(self.split.ranks):
            begin = int(sent.offsets[rank])
            tokens = sent.sources[begin:begin + int(sent.splits[rank])] // max(1, sent.topk)
            packets.append([part.part.values(tokens) for part in parts])
        for rank, came in enumerate(self._exchange(packets)):
            for a, rows in zip(made, came, strict=True):
                as_bits(a)[rank * self.split.region:][:len(rows)] = as_bits(rows)
            if counts is not None:
                counts[rank] = len(came[0])
        return made

    def _exchange(self, packets: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        """Exchange packets[r], arrays for rank r, for those sent to this rank, by sender."""
        packed = [_pack(arrays) for arrays in packets]
        table = struct.pack(f"!{len(packed)}Q", *map(len, packed))
        found = []
        for message in self.world.gather(table + b"".join(packed)):
            lengths = struct.unpack(f"!{len(packed)}Q", message[:len(table)])
            begin = len(table) + sum(lengths[:self.split.me])
            found.append(_unpack(message[begin:begin + lengths[self.split.me]]))
        return found


def _empty(piece: Piece) -> np.ndarray:
    made: np.ndarray = np.empty(piece.shape, piece.dtype)
    return made


# ---- arrays as bytes ----
_ARRAY = struct.Struct("!16sBQQ")               # name of the dtype, dimensions, extents


def _pack(arrays: list[np.ndarray]) -> bytes:
    return b"".join(_ARRAY.pack(a.dtype.name.encode(), a.ndim, len(a), a.shape[1] if a.ndim == 2 else 1)
                    + np.ascontiguousarray(as_bits(asnumpy(a))).tobytes() for a in arrays)


def _unpack(packed: bytes) -> list[np.ndarray]:
    found, at = [], 0
    while at < len(packed):
        name, dimensions, rows, columns = _ARRAY.unpack_from(packed, at)
        dtype = as_dtype(name.rstrip(b"\0").decode())
        at += _ARRAY.size
        a = np.frombuffer(packed, f"u{dtype.itemsize}", rows * columns, at).view(dtype)
        found.append(a.reshape(rows, columns) if dimensions == 2 else a)
        at += a.nbytes
    return found
