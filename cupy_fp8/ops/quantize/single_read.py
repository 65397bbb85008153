"""Current scaling from a single read: matrices wait in the GPU's multiprocessors until their scales are
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
#: single_read.cuh has these constants: threads of a block, stages of shared memory (each for a tile), words
#: of state, and bytes that the kernel's own variables may take.
THREADS, _MOST_STAGES, _STATE_WORDS, _STATIC_SHARED = 384, 6, 2, 2048
_STAGE_BYTES = TILE.rows * TILE.columns * 2
#: With fewer stages hardly any matrix fits.
_FEWEST_STAGES = 4
#: Matrices of few tiles per block get so many stages, because a sixth stage takes 32 KB from the L1.
_PREFERRED_STAGES = 5
#: One launch is faster than two from so many tiles per block on (docs/lab-notes).
_FEWEST_TILES = 8


class _Capacity(NamedTuple):
    """Says how many blocks of threads a GPU holds at a time, and how many stages each of them has.

    stages: of each block, for matrices that take at most half of the room. most_stages: for larger ones; 0 if
    the GPU has too little shared memory. fewest: from so many tiles per block on one launch is worthwhile."""

    blocks: int
    stages: int
    most_stages: int
    fewest: int

    def most(self, stages: int) -> int:
        """Returns how many tiles the largest matrix that is read once has: beside its stages a block holds
        one tile in registers."""
        return (stages + 1) * self.blocks


_CPU = _Capacity(blocks=3, stages=1, most_stages=2, fewest=0)


@functools.cache
def _gpu(device_id: int) -> _Capacity:
    fit = (kernels.shared_memory_per_block(device_id) - _STATIC_SHARED - TILE.shared) // _STAGE_BYTES
    most = min(fit, _MOST_STAGES) if fit >= _FEWEST_STAGES else 0
    return _Capacity(kernels.multiprocessors(device_id), min(most, _PREFERRED_STAGES), most, _FEWEST_TILES)


class Staging(NamedTuple):
    """Holds the stages and the blocks of threads of a launch."""

    stages: int
    blocks: int

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.stages * _STAGE_BYTES + TILE.shared


def choose(x: Array, matrices: Sequence[int], times: int = 1) -> Staging | None:
    """Returns the staging for matrices of so many tiles each, the list repeated `times` times. It is None if
    two launches are faster: for little data, and if most of it would be read twice all the same. x: one of
    the matrices, whose rows all allow chunked access."""
    capacity = _CPU if isinstance(x, np.ndarray) else _gpu(x.data.device_id)
    total = sum(matrices)
    if x.dtype.itemsize != 2 or not capacity.most_stages or times * total < capacity.fewest * capacity.blocks:
        return None
    stages = capacity.stages if 2 * max(matrices) <= capacity.most(capacity.stages) else capacity.most_stages
    if 2 * sum(count for count in matrices if count <= capacity.most(stages)) < total:
        return None
    return Staging(stages, max(1, min(capacity.blocks, times * total)))


def words(count: int) -> int:
    """Returns how many u32 words the workspace for `count` tiles has."""
    return _STATE_WORDS + 2 * count


def members(at: int, tiles: int, staging: Staging, rule: TensorScaleRule) -> dict[str, Any]:
    """Returns the struct SingleRead for so many tiles of all matrices. at: the address of the workspace, a
    multiple of 8."""
    return {"state": at, "published": at + 4 * _STATE_WORDS, "tiles": tiles, "stages": staging.stages,
            "rule": rule._asdict()}


def variants(kernel: Kernel) -> Iterator[Variant]:
    """Yields every variant of the kernel that may be launched."""
    for source, to in product(INPUT_DTYPES, FP8_DTYPES):
        if source.itemsize == 2:
            yield kernel.variant(IN=source, OUT=to)
