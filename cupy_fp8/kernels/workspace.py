"""Small device memory that the blocks of a kernel share: zero at first, and left ready for the next
launch."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from .. import backend
from .device import capturing, current_stream
from .owned import OwnedMemory

_FEWEST = 64
#: By (address of the result, use, words), and by (device, stream, thread, use, words).
_of_results: OwnedMemory[dict[tuple[int, str, int], Any]] = OwnedMemory(dict)
_of_streams: dict[tuple[int, int, int, str, int], Any] = {}
_ON_CPU = -1


def workspace(out: Any | None, x: Any, use: str, words: int) -> Any:
    """Return an array of at least `words` u32 words for one launch at a time, zero at first. Only launches of
    the same `use` and a similar size (see `room`) share it.

    With the caller's `out` it belongs to the array that owns its memory and lives as long, so two captured
    graphs never share it. Without `out` it belongs to this thread and the current stream of x's device, where
    launches run one after another. ValueError if it would have to be made during a capture.
    """
    device, words = _ON_CPU if isinstance(x, np.ndarray) else x.data.device_id, room(words)
    if out is None:
        stream = 0 if device == _ON_CPU else current_stream(device)
        shared = device, stream, threading.get_ident(), use, words
        if shared not in _of_streams:
            _of_streams[shared] = _zeros(device, words)
        return _of_streams[shared]
    kept = _of_results.of(out)
    own = out.ctypes.data if device == _ON_CPU else out.data.ptr, use, words
    if own not in kept:
        if device != _ON_CPU and capturing(device):
            raise ValueError("out: used for the first time while a CUDA graph is captured; call once before "
                             "the capture")
        kept[own] = _zeros(device, words)
    return kept[own]


def room(count: int) -> int:
    """Return the room for `count` words or other things: a power of two. Similar counts get the same room, so
    that calls of many sizes share few workspaces. A kernel that finds parts of its workspace at offsets must
    compute these from the room, not from the count."""
    return max(_FEWEST, 1 << max(0, count - 1).bit_length())


def _zeros(device: int, words: int) -> Any:
    if device == _ON_CPU:
        return np.zeros(words, np.uint32)
    cp = backend.cupy()
    with cp.cuda.Device(device):
        return cp.zeros(words, np.uint32)
