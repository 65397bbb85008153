"""The work of a conversion in pieces: some rows of a weight, or some bytes of an unchanged tensor. Pieces
read their source, compute, and write to their place in the result, in any order and in any thread."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from ..formats import FP8_DTYPES
from ..results import Scaled
from . import weights
from .checkpoint import Checkpoint
from .pairing import Pair
from .safetensors import DTYPES, TensorFile, nbytes
from .scale_forms import combine, held_block, values_of
from .weights import Changes, Rows, StoredWeight

__all__ = ["COPY_BYTES", "Chunk", "Compared", "Copy", "Out", "Queue", "Report", "Source", "Work", "reserve"]

COPY_BYTES = 8 << 20                            # bytes copied at a time
#: a piece of work; returns the source bytes done and what changed
Work = Callable[[], tuple[int, Changes]]


@dataclass
class Report:
    """What was done to a tensor."""

    name: str
    shape: tuple[int, ...]
    before: str
    after: str
    changes: Changes = field(default_factory=Changes)

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "shape": list(self.shape), "from": self.before, "to": self.after,
                "elements": self.changes.elements, "changed": self.changes.changed,
                "sqnr_db": self.changes.sqnr_db}


class Source:
    """A weight that is read in chunks of rows."""

    def __init__(self, checkpoint: Checkpoint, name: str, pair: Pair | None, like: Any) -> None:
        tensor = checkpoint.tensors[name]
        self.shape = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
        self.name, self.dtype, self._like, self._pair = name, DTYPES[tensor.dtype], like, pair
        self._file = checkpoint.files[checkpoint.shard[name]]
        self._scale: np.ndarray | None = None
        self._whole: Scaled | None = None       # without data: only its block and its scales are used
        if pair is not None:
            self._scale = np.array(checkpoint.read(pair.scale))
            block = held_block(self.shape, pair.form.share)
            if self.dtype in FP8_DTYPES and not isinstance(block, bool):
                whole = combine(np.empty(self.shape, self.dtype), self._scale, pair.form)
                self._whole = whole if isinstance(whole, Scaled) else None

    @property
    def unit(self) -> int:
        """Chunks begin at multiples of this many rows, so that no block is divided."""
        block = self._whole.block if self._whole else None
        return (block[0] or 1) if block else 1

    def keeps_scale(self, dtype: np.dtype[Any]) -> bool:
        """Whether data of this dtype with one scale are the source's data unchanged."""
        return self._whole is not None and self._whole.block is None and self.dtype == dtype

    def rows(self, rows: Rows) -> Any:
        """Return a chunk's values, or data with their scales, on the device that computes."""
        height, width = self.shape[-2:]
        start = (rows.matrix * height + rows.start) * width * self.dtype.itemsize
        count = (rows.stop - rows.start) * width * self.dtype.itemsize
        data = self._file.read_bytes(self.name, start, count).view(self.dtype).reshape(-1, width)
        if self._pair is None or self._scale is None:
            known = self.dtype not in map(DTYPES.get, ("F8_E4M3FNUZ", "F8_E5M2FNUZ"))
            return weights.on(self._like, data if known else data.astype(np.float32))
        whole, share = self._whole, self._pair.form.share
        if whole is None:
            scale = self._scale
            if share is not None:
                scale = scale.reshape(prod(self.shape[:-2]), -1)[rows.matrix]
            return weights.on(self._like, values_of(data, scale, share, rows.start, height))
        if whole.block is None:
            return weights.on(self._like, Scaled(data, whole.scale_inv, data.shape))
        down = whole.block[0] or height
        scales = whole.scale_inv.reshape(-1, *whole.scale_inv.shape[-2:])[rows.matrix]
        scales = scales[rows.start // down:-(-rows.stop // down)]
        return weights.on(self._like, Scaled(data, np.ascontiguousarray(scales), data.shape, False,
                                             whole.block, "compact"))


class Out:
    """A file whose header is known: any thread writes bytes of tensors to their places."""

    def __init__(self, descriptor: int, header: bytes, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
                 ) -> None:
        self._descriptor, self._start, end = descriptor, {}, len(header)
        for name, (dtype, shape) in tensors.items():
            self._start[name] = end
            end += nbytes(dtype, shape)
        self.size = end

    def put(self, name: str, at: int, a: np.ndarray) -> None:
        """Write bytes of a tensor. at: offset within the tensor."""
        left = np.ascontiguousarray(a).reshape(-1).view(np.uint8).data
        position = self._start[name] + at
        while left:
            done = os.pwrite(self._descriptor, left, position)
            left, position = left[done:], position + done


class Compared:
    """An existing file, with whose bytes the result is compared instead of being written."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file

    def put(self, name: str, at: int, a: np.ndarray) -> None:
        wanted = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
        if not np.array_equal(self._file.read_bytes(name, at, len(wanted)), wanted):
            raise ValueError(f"{self._file.path}: {name} is not what the source gives")


@dataclass(frozen=True)
class Copy:
    """Some bytes of an unchanged tensor."""

    checkpoint: Checkpoint
    name: str
    start: int
    out: Any

    def __call__(self) -> tuple[int, Changes]:
        count = min(COPY_BYTES, self.checkpoint.tensors[self.name].nbytes - self.start)
        file = self.checkpoint.files[self.checkpoint.shard[self.name]]
        self.out.put(self.name, self.start, file.read_bytes(self.name, self.start, count))
        return count, Changes()


@dataclass(frozen=True)
class Chunk:
    """Some rows of a converted weight. target: its name in the result."""

    source: Source
    rows: Rows
    stored: StoredWeight
    scale: float | None
    target: str
    out: Any

    def __call__(self) -> tuple[int, Changes]:
        values = self.source.rows(self.rows)
        data, scales, changes = weights.make_rows(values, self.stored, self.scale)
        height, width = self.source.shape[-2:]
        row = self.rows.matrix * height + self.rows.start
        self.out.put(self.target, row * width * data.dtype.itemsize, data)
        if scales is not None and self.stored.scale is not None:
            at = 0
            if self.stored.block:
                down = self.stored.block[0] or 1
                line = self.rows.matrix * -(-height // down) + self.rows.start // down
                at = line * self.stored.scale[2][-1] * scales.dtype.itemsize
            self.out.put(self.target + self.stored.scale[0], at, scales)
        return (self.rows.stop - self.rows.start) * width * self.source.dtype.itemsize, changes


class Queue:
    """Work in a pool, a few pieces at a time, so that memory stays bounded."""

    def __init__(self, pool: ThreadPoolExecutor, most: int) -> None:
        self._pool, self._most = pool, most
        self._waiting: deque[tuple[Future[tuple[int, Changes]], Report, Callable[[int], None]]] = deque()

    def put(self, work: Work, report: Report,
            progress: Callable[[int], None]) -> None:
        self._waiting.append((self._pool.submit(work), report, progress))
        if len(self._waiting) >= self._most:
            self._take()

    def drain(self) -> None:
        while self._waiting:
            self._take()

    def _take(self) -> None:
        future, report, progress = self._waiting.popleft()
        try:
            count, changes = future.result()
        except BaseException:
            for other, *_ in self._waiting:
                other.cancel()
            raise
        report.changes += changes
        progress(count)


def reserve(descriptor: int, size: int) -> None:
    """Allocate the disk space of the whole file at once, so that a full disk is found before any work is
    done."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except AttributeError:                                  # a system without this call
        os.truncate(descriptor, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.truncate(descriptor, size)
