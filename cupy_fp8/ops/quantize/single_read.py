"""Current scaling from a single read: matrices stay in shared memory and registers until their scales are
known.

Kernels: kernels_cu/include/tile/single_read.cuh, for a list (tensor_list.cu) and for groups of rows
(grouped_tensor.cu)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ... import kernels
from ...arrays import Array
from ...formats import FP8_DTYPES, INPUT_DTYPES
from ...kernels import Kernel, Variant, shapes
from ..scales.scale import TensorScaleRule

TILE = shapes.SMALL
#: Constants of single_read.cuh: threads per block, most stages (a tile each), words of state, and bytes for
#: the kernel's own variables.
THREADS, _MOST_STAGES, _STATE_WORDS, _STATIC_SHARED = 384, 6, 2, 2048
_STAGE_BYTES = TILE.rows * TILE.columns * 2
#: with fewer stages hardly any matrix fits
_FEWEST_STAGES = 4
#: Stages for matrices of few tiles per thread block: a sixth stage takes 32 KB from the L1.
_PREFERRED_STAGES = 5
#: Tiles per thread block from which on one launch is faster than two (docs/lab-notes).
_FEWEST_TILES = 8


class _Capacity(NamedTuple):
    """Resident thread blocks on a GPU, and the stages of each.

    stages: per block, for matrices that take at most half of the room. most_stages: for larger ones; 0 if the
    GPU has too little shared memory. fewest: tiles per block from which on one launch is worthwhile."""

    blocks: int
    stages: int
    most_stages: int
    fewest: int

    def most(self, stages: int) -> int:
        """Return the tiles of the largest matrix that is read once: besides its stages a thread block holds
        one tile in registers."""
        return (stages + 1) * self.blocks


_CPU = _Capacity(blocks=3, stages=1, most_stages=2, fewest=0)


@functools.cache
def _gpu(device_id: int) -> _Capacity:
    fit = (kernels.shared_memory_per_block(device_id) - _STATIC_SHARED - TILE.shared) // _STAGE_BYTES
    most = min(fit, _MOST_STAGES) if fit >= _FEWEST_STAGES else 0
    return _Capacity(kernels.multiprocessors(device_id), min(most, _PREFERRED_STAGES), most, _FEWEST_TILES)


class Staging(NamedTuple):
    """The stages and the thread blocks of a launch."""

    stages: int
    blocks: int

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.stages * _STAGE_BYTES + TILE.shared


def choose(x: Array, matrices: Sequence[int], times: int = 1) -> Staging | None:
    """Return the staging for `matrices`, the tiles of each, the list repeated `times` times. None if two
    launches are faster: for little data, and if most of it would be read twice anyway. x: one of the
    matrices, whose rows all allow chunked access."""
    capacity = _CPU if isinstance(x, np.ndarray) else _gpu(x.data.device_id)
    total = sum(matrices)
    if x.dtype.itemsize != 2 or not capacity.most_stages or times * total < capacity.fewest * capacity.blocks:
        return None
    stages = capacity.stages if 2 * max(matrices) <= capacity.most(capacity.stages) else capacity.most_stages
    if 2 * sum(count for count in matrices if count <= capacity.most(stages)) < total:
        return None
    return Staging(stages, max(1, min(capacity.blocks, times * total)))


def words(count: int) -> int:
    """Return the u32 words of the workspace for `count` tiles."""
    return _STATE_WORDS + 2 * count


def members(at: int, tiles: int, staging: Staging, rule: TensorScaleRule) -> dict[str, Any]:
    """Return the struct SingleRead for `tiles` tiles of all matrices. at: address of the workspace, a
    multiple of 8."""
    return {"state": at, "published": at + 4 * _STATE_WORDS, "tiles": tiles, "stages": staging.stages,
            "rule": rule._asdict()}


def variants(kernel: Kernel) -> Iterator[Variant]:
    """Yields every variant of the kernel that may be launched."""
    for source, to in product(INPUT_DTYPES, FP8_DTYPES):
        if source.itemsize == 2:
            yield kernel.variant(IN=source, OUT=to)
