"""Launches that send rows. Kernels: kernels_cu/distributed/exchange.cu and sums.cu."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, address
from ..formats import INPUT_DTYPES
from ..kernels import HOPPER, Kernel, Launch, Variant, compute_capability, multiprocessors
from ..layouts import cdiv
from ..ops.moe.permute_launches import routes, widest_access
from ..results import Scaled
from ..routing import Routing
from .layout import Piece
from .slots import Split

#: The most threads that a block may have on Hopper, for which registers suffice; elsewhere half as many.
_TOKENS, _ROWS = (Kernel("distributed/exchange", entry, block=1024) for entry in ("send_tokens", "send_rows"))
_SUMS = Kernel("distributed/sums", "send_sums", block=512)
#: threads of blocks, and blocks per multiprocessor, enough to keep the links busy
_THREADS, _BLOCKS, _MULTIPROCESSORS_OF_CPU = 256, 2, 1


class Part(NamedTuple):
    """An array whose rows are sent, `items` elements each; steps in bytes."""

    array: Array
    items: int
    row_step: int
    item_step: int

    @classmethod
    def rows(cls, a: Array) -> Part:
        items = prod(a.shape[1:])
        return cls(a, items, items * a.dtype.itemsize, a.dtype.itemsize)

    @classmethod
    def scales(cls, x: Scaled) -> Part:
        """Return the part for compact or gemm_ready scales."""
        if x.scale_layout == "compact":
            return cls.rows(x.scale_inv)
        size = x.scale_inv.dtype.itemsize
        return cls(x.scale_inv, x.scale_inv.shape[0], size, x.scale_inv.shape[1] * size)

    def values(self, rows: np.ndarray) -> np.ndarray:
        """Return some rows of a NumPy array."""
        whole = self.item_step == self.array.dtype.itemsize
        found: np.ndarray = self.array[rows] if whole else self.array[:, rows].T
        return found

    def members(self, to: Piece) -> dict[str, int]:
        """Return the members of struct Part."""
        size, at = self.array.dtype.itemsize, address(self.array)
        row_bytes, step, item_step = self.items * size, size, self.item_step
        if item_step == size:
            step = item_step = widest_access(at | to.at | row_bytes)
        return {"from": at, "to": to.at, "row_bytes": row_bytes, "row_step": self.row_step,
                "item_step": item_step, "step": step,
                "pieces": cdiv(row_bytes // step, _TOKENS.constant("kItems") * 32)}


class Sent(NamedTuple):
    """A part and its destination."""

    part: Part
    to: Piece

    @property
    def members(self) -> dict[str, int]:
        return self.part.members(self.to)


def send_tokens(windows: dict[str, int], sent: Routing, split: Split, parts: list[Sent],
                sizes: Piece | None = None, counts: Array | None = None, *, num_sms: int | None = None
                ) -> Launch:
    """Launch sending tokens to the ranks that `sent` gives. sizes, counts: where windows hold the number of
    tokens from each rank, and the array that receives these numbers. num_sms: the most multiprocessors that
    the launch takes, here and below."""
    members = [part.members for part in parts]
    units = sent.tokens * min(sent.topk, split.ranks) * sum(part["pieces"] for part in members)
    telling = {} if sizes is None or counts is None else {"sizes": sizes.at, "counts": address(counts)}
    given: dict[str, Any] = dict(zip(("data", "scales", "probs"), members, strict=False)) | telling
    return _bind(
        _TOKENS.variant(), sent.row_map, units, num_sms, windows=windows, routes=routes(sent, 0),
        splits=address(sent.splits), offsets=address(sent.offsets), region=split.region, **given)


def send_sums(windows: dict[str, int], received: Routing, counts: Array, split: Split, y: Array, to: Piece,
              probs: Array | None, probs_to: Piece, *, num_sms: int | None = None) -> Launch:
    """Launch sending the sum of each token's rows back to the token's rank."""
    columns = prod(y.shape[1:])
    vector = (address(y) | to.at | columns * y.dtype.itemsize) % 16 == 0
    pieces = max(1, cdiv(cdiv(columns * y.dtype.itemsize, 16), _SUMS.constant("kItems") * 32))
    return _bind(
        _SUMS.variant(IN=y.dtype), y, split.ranks * split.region * pieces, num_sms, windows=windows,
        y=address(y), to=to.at, probs=0 if probs is None else address(probs), probs_to=probs_to.at,
        routes=routes(received, 0), counts=address(counts), region=split.region, columns=columns,
        pieces=pieces, vector=int(vector))


def send_rows(windows: dict[str, int], received: Routing, back: Array, split: Split, arrived: Array,
              rows: Sent, probs: Array | None, probs_to: Piece, *, num_sms: int | None = None) -> Launch:
    """Launch sending each row back to its token's rank. arrived: this rank's experts for the slots that came,
    -1 for none."""
    data, y = rows.members, rows.part.array
    return _bind(
        _ROWS.variant(), y, received.rows * max(1, data["pieces"]), num_sms, windows=windows, data=data,
        probs=0 if probs is None else address(probs), probs_to=probs_to.at, routes=routes(received, 0),
        back=address(back), arrived=address(arrived), region=split.region)


def _bind(variant: Variant, like: Array, units: int, num_sms: int | None, **members: Any) -> Launch:
    """Return the launch for this many units of work, one warp each. Blocks that are to leave multiprocessors
    to others have one each, with as many threads as possible."""
    most, widest, on_cpu = _MULTIPROCESSORS_OF_CPU, variant.block, isinstance(like, np.ndarray)
    if not on_cpu:
        most = multiprocessors(like.data.device_id)
        widest = widest if compute_capability(like.data.device_id) == HOPPER else widest // 2
    block, blocks = (_THREADS, _BLOCKS * most) if num_sms is None else (widest, min(num_sms, most))
    if not on_cpu:                  # on the CPU the ranks' launches have one grid
        blocks = max(1, min(cdiv(units, block // 32), blocks))
    return variant.bind(like, blocks, block=block, **members)


def variants() -> Iterator[Variant]:
    """Yield every variant of these kernels."""
    yield _TOKENS.variant()
    yield _ROWS.variant()
    for dtype in INPUT_DTYPES:
        yield _SUMS.variant(IN=dtype)
