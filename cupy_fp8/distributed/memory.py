"""Memory outside CuPy's pool, with arrays at fixed offsets: windows, which other processes write."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import backend
from ..arrays import Array, array_at
from .layout import Piece

_ALIGNED_TO = 256


class Memory:
    """Memory, zero at first. device: of CuPy arrays; None: NumPy."""

    def __init__(self, nbytes: int, device: int | None) -> None:
        self.nbytes, self._device = max(nbytes, _ALIGNED_TO), device
        #: arrays returned so far: ops recognise a repeated call by its arrays
        self._arrays: dict[tuple[Piece, np.dtype[Any]], Array] = {}
        if device is None:
            self._buffer: Any = np.zeros(self.nbytes + _ALIGNED_TO, np.uint8)
            self.at = -(-self._buffer.ctypes.data // _ALIGNED_TO) * _ALIGNED_TO
            return
        cp = backend.cupy()
        runtime = cp.cuda.runtime
        with cp.cuda.Device(device):
            self.at = runtime.malloc(self.nbytes)
            runtime.memset(self.at, 0, self.nbytes)
            runtime.deviceSynchronize()
        self._buffer = cp.cuda.UnownedMemory(self.at, self.nbytes, self, device)

    def array(self, piece: Piece, dtype: Any = None) -> Array:
        """Return the array at a piece, optionally viewed as another dtype of the same size."""
        key = piece, dtype or piece.dtype
        if key not in self._arrays:
            self._arrays[key] = self._made(*key)
        return self._arrays[key]

    def _made(self, piece: Piece, dtype: np.dtype[Any]) -> Array:
        if self._device is None:
            begin = self.at - self._buffer.ctypes.data + piece.at
            return self._buffer[begin:begin + piece.nbytes].view(dtype).reshape(piece.shape)
        cp = backend.cupy()
        return array_at(cp)(piece.shape, dtype, cp.cuda.MemoryPointer(self._buffer, piece.at))

    def free(self) -> None:
        """Free the memory; it must no longer be in use. Later calls do nothing."""
        if self._device is not None and self.at:
            backend.cupy().cuda.runtime.free(self.at)
        self.at, self._buffer, self._arrays = 0, None, {}


class Late:
    """A word for each rank, written by kernels and read by the host without waiting: the number of the
    exchange to which the rank did not come."""

    def __init__(self, ranks: int, device: int | None) -> None:
        if device is None:
            self.words: np.ndarray = np.zeros(ranks, np.uint32)
        else:
            self._pinned = backend.cupy().cuda.alloc_pinned_memory(4 * ranks)
            self.words = np.frombuffer(self._pinned, np.uint32, ranks)
            self.words[:] = 0
        self.at = self.words.ctypes.data

    def ranks(self) -> list[int]:
        return [int(rank) for rank in np.flatnonzero(self.words)]
