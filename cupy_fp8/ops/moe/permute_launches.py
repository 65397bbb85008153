"""How launches of permute.cu, unpermute.cu and unpermute_backward.cu share tokens among thread blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import numpy as np

from ...arrays import Array, address
from ...calls.call import Input
from ...formats import INPUT_DTYPES
from ...kernels import Kernel, Launch, Variant, grid_size
from ...layouts import PADDED_TO, cdiv, round_up
from ...routing import Routing
from ..scales.convert import row_scale_strides

_THREADS = 256
PERMUTE = Kernel("moe/permute", "permute", block=_THREADS)
#: define TOPK: routes of a token, one of TOPKS, or 0 for any number
UNPERMUTE = Kernel("moe/unpermute", "unpermute", block=_THREADS)
BACKWARD = Kernel("moe/unpermute_backward", "unpermute_backward", block=_THREADS)
_BYTES = 8 << 10            # most bytes that a thread block of permute copies
_UNITS = 4                  # loads in flight per thread of permute
TOPKS = (1, 2, 4, 6, 8)     # routes per token with their own programs of unpermute
#: most chunks of the result per thread block of these programs, and of the other one
_CHUNKS, _OTHER_CHUNKS = 4096, 2048
_MOST_ROUTES = 1024         # most routes that a thread block of unpermute sorts
_MOST_TOKENS = 256
_BLOCKS = 528               # thread blocks that share few tokens: four per SM of an H200
_LANES = 32                 # most rows that a thread block examines to clear unused ones
_LEAST_ON_CPU = 32          # and fewest, since ThreadSanitizer has few threads
_PIECE_ROWS = 32            # rows whose gemm_ready scales a warp gathers
_ALL_CLEAR = {"clearing": 0, "examined": 0}
#: Separate thread blocks clear the unused rows if these exceed this fraction of the used ones.
_FEW_UNUSED = 4


class Probs(NamedTuple):
    """The probs of a call. columns: number of experts if probs are by expert; 0 if they are by slot."""

    array: np.ndarray | None = None
    at: int = 0
    columns: int = 0


def routes(routing: Routing, columns: int, clearing: dict[str, int] | None = None) -> dict[str, int]:
    """Returns the struct Routes. columns: experts, if probs are by expert; clearing: as `grid` returns it, of
    a kernel that clears rows."""
    experts = 0 if routing.experts is None else address(routing.experts)
    return {"row_map": address(routing.row_map), "sources": address(routing.sources), "experts": experts,
            "tokens": routing.tokens, "rows": routing.rows, "topk": routing.topk, "columns": columns,
            **(clearing or _ALL_CLEAR)}


def grid(routing: Routing, blocks: int, shape: tuple[int, ...]) -> tuple[int, dict[str, int]]:
    """Return (the grid of a launch in which `blocks` thread blocks move tokens, the members for clearing
    rows)."""
    used = routing.tokens * routing.topk
    if blocks and routing.rows - used > used // _FEW_UNUSED:
        least = _LEAST_ON_CPU if isinstance(routing.row_map, np.ndarray) else 1
        examined = min(_LANES, max(least, cdiv(routing.rows, _BLOCKS)))
        return (grid_size(blocks + cdiv(routing.rows, examined), shape),
                {"clearing": blocks, "examined": examined})
    return grid_size(max(blocks, cdiv(routing.rows, _LANES)), shape), _ALL_CLEAR


def widest_access(low_bits: int) -> int:
    """Return the widest access of 16, 4, 2 or 1 bytes that addresses and lengths with these low bits allow.
    """
    return 16 if low_bits % 16 == 0 else 4 if low_bits % 4 == 0 else 2 if low_bits % 2 == 0 else 1


class RowSplit(NamedTuple):
    """How thread blocks share rows: members of the struct Rows or UnpermuteParams, and their number.
    """

    tokens_per_block: int
    across: int
    row_share: int
    blocks: int

    def members(self) -> dict[str, int]:
        return {"tokens_per_block": self.tokens_per_block, "across": self.across, "row_share": self.row_share}


def _across(tokens: int, length: int, most: int, least: int) -> int:
    """Return how many thread blocks share a row; none takes more than `most` of its length. With few tokens,
    each takes about `least`, so that there are many thread blocks."""
    return max(1, cdiv(length, most), min(cdiv(length, least), _BLOCKS // max(1, tokens)))


#: the struct Rows without scales
NO_ROWS = {"step": 1, "tokens_per_block": 1, "across": 1, "blocks": 0}


def rows(given: Input, to: int, tokens: int) -> dict[str, int]:
    """Return the struct Rows for rows that move to this address."""
    row_bytes = prod(given.shape[1:]) * given.dtype.itemsize
    common = widest_access(given.at | to | row_bytes)
    lanes_log2, split = _permute_split(tokens, row_bytes, common)
    return {"from": given.at, "to": to, "row_bytes": row_bytes, "step": common, "lanes_log2": lanes_log2,
            **split.members(), "blocks": split.blocks}


def spread(data_blocks: int, scale_blocks: int) -> dict[str, int]:
    """Return the members that select the thread blocks that move scales."""
    every = data_blocks // scale_blocks + 1 if scale_blocks else 1
    return {"scale_blocks": scale_blocks, "every_log2": every.bit_length() - 1}


class TokenScales(NamedTuple):
    """f32 scales of tokens: `columns` each, at these strides in elements."""

    at: int
    columns: int
    token_step: int
    column_step: int

    @classmethod
    def of(cls, scales: Input, layout: str) -> TokenScales:
        columns = scales.shape[1 if layout == "compact" else 0]
        return cls(scales.at, columns, *row_scale_strides(scales.array, layout))


def gemm_ready(scales: TokenScales, to: int, number: int) -> tuple[dict[str, int], int]:
    """Return (the struct GemmReadyScales for scales that become gemm_ready ones of `number` rows, the thread
    blocks that move them)."""
    at, columns, token_step, column_step = scales
    pitch = round_up(number, PADDED_TO)
    vector = column_step == 1 and columns % 4 == 0 and token_step % 4 == 0 and at % 16 == 0
    pieces = cdiv(pitch, _PIECE_ROWS) * cdiv(columns, PERMUTE.constant("kPieceColumns"))
    members = {"from": at, "to": to, "token_step": token_step, "column_step": column_step,
               "pitch": pitch, "columns": columns, "vector": int(vector)}
    return members, cdiv(pieces, _THREADS // 32)


def without_data(x: Array, scales: TokenScales, routing: Routing, probs: Probs, scales_to: int, probs_to: int
                 ) -> Launch:
    """Return a launch of permute that moves only probs and f32 scales, which become gemm_ready ones. x: an
    array of the call."""
    lanes_log2, split = _permute_split(routing.tokens, 0, 1)
    rows = {"step": 1, "lanes_log2": lanes_log2, **split.members(), "blocks": split.blocks}
    moved, scale_blocks = gemm_ready(scales, scales_to, routing.rows)
    all_blocks, clearing = grid(routing, split.blocks + scale_blocks, (routing.tokens, scales.columns))
    return PERMUTE.variant().bind(
        x, all_blocks, data=rows, scales=NO_ROWS, gemm_ready=moved, **spread(split.blocks, scale_blocks),
        probs=probs.at, rows_probs=probs_to, routes=routes(routing, probs.columns, clearing))


@functools.lru_cache(maxsize=1024)
def _permute_split(tokens: int, row_bytes: int, step: int) -> tuple[int, RowSplit]:
    """Return (log2 of the threads that share a token, the split)."""
    across = _across(tokens, row_bytes, _BYTES, 16 * _THREADS)
    row_share = row_bytes if across == 1 else round_up(cdiv(row_bytes, across), 16)
    taken = max(1, min(_MOST_TOKENS, _BYTES // max(1, row_bytes), cdiv(tokens, _BLOCKS)))
    # If pieces are few, each has its own thread, so that neighbouring threads store neighbouring pieces.
    # Every thread has a token.
    pieces = row_share // step
    lanes = min(_THREADS, max(pieces if pieces <= 64 else cdiv(pieces, _UNITS), cdiv(_THREADS, taken)))
    return (lanes - 1).bit_length(), RowSplit(taken, across, row_share, cdiv(tokens, taken) * across)


@functools.lru_cache(maxsize=1024)
def unpermute_split(tokens: int, topk: int, chunks: int, own_program: bool) -> RowSplit:
    """chunks: 16-byte chunks of a row; own_program: whether topk has its own program."""
    most_chunks = _CHUNKS if own_program else _OTHER_CHUNKS
    across = _across(tokens, chunks, most_chunks, _THREADS)
    row_share = cdiv(chunks, across)
    most = min(_MOST_TOKENS, most_chunks // max(1, chunks), _MOST_ROUTES // max(1, topk),
               cdiv(tokens, _BLOCKS))
    taken = max(1, most)
    return RowSplit(taken, across, row_share, grid_size(cdiv(tokens, taken) * across, (tokens, chunks)))


# ---- programs ----
def variants() -> Iterator[Variant]:
    """Yields every variant that permute, unpermute and their gradients may launch."""
    yield PERMUTE.variant()
    for dtype in INPUT_DTYPES:
        for topk in (0, *TOPKS):
            yield UNPERMUTE.variant(IN=dtype, TOPK=topk)
        yield BACKWARD.variant(IN=dtype)
