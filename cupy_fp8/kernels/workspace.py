"""Small device memory that the blocks of a kernel share. It is zero at first, and a kernel leaves it ready
for its next launch."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import numpy as np

from .. import backend
from .device import capturing, current_stream

_of_array: dict[tuple[int, int, str, int], tuple[Any, Any]] = {}
_of_stream: dict[tuple[int, int, str, int, int], Any] = {}
_of_thread: dict[tuple[int, str, int], Any] = {}


def workspace(out: Any | None, x: Any, use: str, words: int) -> Any:
    """u32 words for one launch at a time, zero at first. Only launches of the same `use` and size share them.

    With the caller's `out` they belong to the array that owns its memory and live as long, so two captured
    graphs never share them. Without `out` they belong to this thread and the current stream of x's device,
    where the launches of one call follow those of another. ValueError if they would have to be made during a
    capture.
    """
    if isinstance(x, np.ndarray):
        if out is not None:
            return np.zeros(words, np.uint32)              # the call that is remembered with `out` keeps them
        own = threading.get_ident(), use, words
        if own not in _of_thread:
            _of_thread[own] = np.zeros(words, np.uint32)
        return _of_thread[own]
    device = x.data.device_id
    if out is None:
        stream = current_stream(device)
        key = (device, stream, use, words, threading.get_ident())
        if key not in _of_stream:
            _of_stream[key] = _zeros(device, words)
        return _of_stream[key]
    owner = owner_of(out)
    place = (id(owner), out.data.ptr, use, words)
    entry = _of_array.get(place)
    if entry is None or entry[0]() is not owner:
        if capturing(device):
            raise ValueError("out: used for the first time while a CUDA graph is captured; call once before "
                             "the capture")
        entry = (weakref.ref(owner, functools.partial(_forget, place)), _zeros(device, words))
        _of_array[place] = entry
    return entry[1]


def owner_of(out: Any) -> Any:
    """The CuPy array that owns out's memory and lives as long, unlike its views."""
    return out if out.base is None else out.base


def _zeros(device: int, words: int) -> Any:
    cp = backend.cupy()
    with cp.cuda.Device(device):
        return cp.zeros(words, np.uint32)


def _forget(place: tuple[int, int, str, int], _: Any) -> None:
    _of_array.pop(place, None)
