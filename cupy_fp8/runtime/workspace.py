"""Small device memory that a kernel needs between its blocks: zero when made, and left zero by every launch that uses it."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import numpy as np

from .. import backend

_of_array: dict[int, tuple[Any, Any]] = {}
_of_stream: dict[tuple[int, ...], Any] = {}
_PER_THREAD_STREAM = 2      # CUDA's handle of the per-thread default stream, the same number in every thread


def workspace(out: Any | None, x: Any, words: int) -> Any:
    """Zeroed u32 words for one launch at a time.

    With an `out` given by the caller they belong to that array, so that two captured graphs never share them; without one
    they belong to the current stream, on which launches follow one another. (A NumPy x gets fresh ones.)
    """
    if isinstance(x, np.ndarray):
        return np.zeros(words, np.uint32)
    cp = backend.cupy()
    if out is None:
        stream = cp.cuda.get_current_stream().ptr
        key = (x.data.device_id, stream, words, threading.get_ident() if stream == _PER_THREAD_STREAM else 0)
        if key not in _of_stream:
            with cp.cuda.Device(x.data.device_id):
                _of_stream[key] = cp.zeros(words, np.uint32)
        return _of_stream[key]
    entry = _of_array.get(id(out))
    if entry is None or entry[0]() is not out:
        with cp.cuda.Device(out.data.device_id):
            words_array = cp.zeros(words, np.uint32)
        entry = (weakref.ref(out, functools.partial(_forget, id(out))), words_array)
        _of_array[id(out)] = entry
    return entry[1]


def _forget(key: int, _: Any) -> None:
    _of_array.pop(key, None)
