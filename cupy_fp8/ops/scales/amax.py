"""The largest magnitude of a tensor. Kernel: kernels_cu/scales/amax.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, empty_beside
from ...calls import validate
from ...formats import FORMATS, INPUT_DTYPES, float32
from ...kernels import Kernel, Variant, executor_of, multiprocessors, workspace

NAN_RULES = ("ignore", "propagate")

_COMPUTE_AMAX = Kernel("scales/amax", "compute_amax")
_THREADS = 512
_BLOCKS_PER_SM = 4
_CHUNKS_PER_STEP = 4
_BLOCKS_ON_CPU = 4
_WORDS = 4                  # of workspace: top, blocks_done, and the scale of current scaling
_SCALE_OFFSET = 8


def compute_amax(x: Array, *, nan: str = "ignore", out: Array | None = None) -> Array:
    """max |x| as one f32, starting from 0.

    x : bfloat16, float16 or float32 array of any shape (empty: 0).
    nan : 'ignore' (NaN skipped, Inf kept) or 'propagate' (one NaN makes the result NaN).
    out : one-element f32 array, written (not raised) and returned; needed while a CUDA graph is captured.
    Returns f32 [1]. Raises TypeError, ValueError, DeviceError; nothing is written then.
    One launch, exact in any order; bytes moved: x once. Source: docs/numerics.md rule 6.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.compute_amax(np.array([1.0, -3.5, np.nan], np.float32)).tolist()
    [3.5]
    """
    if not isinstance(nan, str) or nan not in NAN_RULES:
        raise ValueError(f"nan: expected one of {NAN_RULES}, got {nan!r}")
    x, xp, at = validate.source(x, INPUT_DTYPES)
    given, out_at = out, 0
    if out is not None:
        out_at = validate.destination(out, getattr(out, "shape", (1,)), float32, x, xp, at)
        if out.size != 1:
            raise ValueError(f"out: expected one element, got shape {out.shape}")
    if executor_of(xp) == "reference":
        result = reference.compute_amax(x, nan=nan)
        if out is None:
            return result
        out[...] = result.reshape(out.shape)
        return out
    if out is None:
        validate.may_allocate(x)
        out = empty_beside(x, (1,), float32)
        out_at = validate.address(out)
    words = workspace(given, x, "amax", _WORDS)
    _launch(x, at, out_at, words, nan)
    return out


def current_scale(x: Array, at: int, owner: Array | None, noop_at: int, target: float, eps: float, pow2: bool) -> int:
    """Launches the scale that x's own amax calls for, as `compute_scale` defines it, and returns its address, which is good for
    the launches that follow on this stream. owner: the array that the workspace belongs to (see `workspace`)."""
    words = workspace(owner, x, "amax", _WORDS)
    scale_at = validate.address(words) + _SCALE_OFFSET
    _launch(x, at, scale_at, words, "ignore", noop_at, target, eps, 1, int(pow2))
    return scale_at


def _launch(x: Array, at: int, out_at: int, words: Array, nan: str, noop_at: int = 0, target: float = 0.0, eps: float = 0.0,
            to_scale: int = 0, pow2: int = 0) -> None:
    blocks = -(-x.nbytes // (_THREADS * 16 * _CHUNKS_PER_STEP))
    most = _BLOCKS_ON_CPU if isinstance(x, np.ndarray) else multiprocessors(x.data.device_id) * _BLOCKS_PER_SM
    _variant(x.dtype, nan).launch(x, max(1, min(blocks, most)), at, out_at, validate.address(words), noop_at, x.size, target, eps,
                                  to_scale, pow2, int(at % 16 == 0))


@functools.cache
def _variant(dtype: np.dtype[Any], nan: str) -> Variant:
    return _COMPUTE_AMAX.variant(block=_THREADS, IN=FORMATS[dtype].tag, NAN_WINS=int(nan == "propagate"))


def variants() -> Iterator[Variant]:
    """Every variant that this op may launch."""
    for dtype, nan in product(INPUT_DTYPES, NAN_RULES):
        yield _variant(dtype, nan)
