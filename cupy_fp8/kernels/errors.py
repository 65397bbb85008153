"""Sticky error word of a device: kernels note wrong facts that only the device knows
(kernels_cu/include/memory/errors.cuh)."""

from __future__ import annotations

import enum
import threading
from typing import Any

import numpy as np

from .. import backend
from ..formats import flag
from .device import capturing, executor_of


class Fact(enum.IntFlag):
    """A bit of the word per kind of error. MESSAGES says what was found, and how kernels made it harmless."""

    SPLIT_NEGATIVE = 1 << 0
    SPLIT_SUM = 1 << 1
    SCALE_NOT_POWER_OF_TWO = 1 << 2
    OFFSET_OVERFLOW = 1 << 3
    ORDER = 1 << 4
    ROUTE_EXPERT = 1 << 5
    ROUTE_BOUND = 1 << 6
    SPLIT_START = 1 << 7
    SPLIT_OTHER = 1 << 8
    GATE_EXPERT = 1 << 9
    RANK_LATE = 1 << 10


MESSAGES = {
    Fact.SPLIT_NEGATIVE: "splits: a negative size; it counted as 0",
    Fact.SPLIT_SUM: "splits: sizes that do not add up: more than there is, or less where groups are to have "
                    "all of it; groups past the end were cut short, what no group covers left out",
    Fact.SCALE_NOT_POWER_OF_TWO: "scale_inv: a scale that is not a power of two, or is none that E8M0 holds; "
                                 "what depends on it became NaN",
    Fact.OFFSET_OVERFLOW: "splits: offsets that their dtype does not hold; they became its largest value",
    Fact.ORDER: "order: not a permutation of the groups; an index of no group was an empty chunk, a chunk "
                "named twice was copied twice",
    Fact.ROUTE_EXPERT: "assignment: an expert that does not exist; it counted as dropped",
    Fact.ROUTE_BOUND: "assignment: more routes than topk or rows have room for; those past the end go "
                      "nowhere",
    Fact.SPLIT_START: "splits: a group of columns that does not begin at a multiple of 128, as blocks of "
                      "scales do, or of the promised align; its product is 0",
    Fact.SPLIT_OTHER: "splits: other sizes than an operand is laid out by (a result of group_quantize, or of "
                      "scaling_aware_transpose with splits); its groups are not those that were multiplied",
    Fact.GATE_EXPERT: "indices: an expert that does not exist; it counted as -1, none",
    Fact.RANK_LATE: "distributed: a rank that did not come in time; nothing of that exchange is to be used, "
                    "and later ones send nothing",
}

_ON_HOST = -1                                # key of kernels that run on the CPU
_words: dict[int, tuple[Any, int]] = {}      # word (u32 [1]) of each device, and its address
_lock = backend.free_in_children(threading.Lock())


def error_word(x: Any) -> int:
    """Return the address of the word of x's device, or of the CPU for a NumPy x. It lives as long as the
    process. ValueError if it would have to be made while a CUDA graph is captured."""
    device = _ON_HOST if isinstance(x, np.ndarray) else x.data.device_id
    found = _words.get(device)
    return _make(device) if found is None else found[1]


def _make(device: int) -> int:
    with _lock:
        if device not in _words:
            if device == _ON_HOST:
                host = np.zeros(1, np.uint32)
                _words[device] = host, host.ctypes.data
            else:
                if capturing(device):
                    raise ValueError("this is the first call with facts on the device, and the word that "
                                     "notes what is wrong with them cannot be allocated while a CUDA graph "
                                     "is captured; call once before the capture")
                cp = backend.cupy()
                with cp.cuda.Device(device):
                    word = cp.zeros(1, np.uint32)
                    cp.cuda.get_current_stream().synchronize()      # other streams may use it next
                _words[device] = word, word.data.ptr
        return _words[device][1]


def _wait(device: int) -> None:
    if device != _ON_HOST:
        if capturing(device):
            raise ValueError("device_errors: waits for the device, which cannot be done while a CUDA graph "
                             "is captured")
        backend.cupy().cuda.runtime.deviceSynchronize()


def device_errors(*, clear: bool = False) -> tuple[str, ...]:
    """What kernels found wrong since the last clear with facts that only the device knows, such as sizes of
    groups.

    Such errors raise nothing, since no call waits for the device. Kernels treat wrong values in a harmless
    way, never access memory out of bounds, and note the error in a sticky word. (With ``check=True`` an op
    waits, examines them first, and raises ValueError.)

    clear : forget what is returned.
    Returns a tuple of sentences, empty where all was well, for the current device. Waits for the device to
    finish; raises ValueError while a CUDA graph is captured.

    >>> import cupy_fp8 as fp8
    >>> fp8.device_errors()
    ()
    """
    flag(clear, "clear")
    if executor_of(np) == "host":
        device = _ON_HOST
    elif backend.gpu_problem() is None:
        device = backend.cupy().cuda.runtime.getDevice()
    else:
        return ()
    if device not in _words:
        return ()
    word = _words[device][0]
    _wait(device)
    found = Fact(int(word[0]))
    if clear:
        word.fill(0)
        _wait(device)                                       # so that later launches on other streams see it
    return tuple(message for fact, message in MESSAGES.items() if fact in found)
