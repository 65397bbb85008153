"""The largest magnitude of a tensor. Kernel: kernels_cu/scales/amax.cu."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from ... import reference
from ...arrays import Array, is_array
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, Written
from ...formats import INPUT_DTYPES, choice, float32
from ...kernels import Kernel, Launch, Variant, multiprocessors
from ...typed_array import TypedArray
from .scale import TensorScaleRule

NanRule: TypeAlias = Literal["ignore", "propagate"]
NAN_RULES: tuple[NanRule, ...] = get_args(NanRule)

_THREADS = 512
_COMPUTE_AMAX = Kernel("scales/amax", "compute_amax", block=_THREADS)
_BLOCKS_PER_SM = 4
_CHUNKS_PER_STEP = 4
_BLOCKS_ON_CPU = 4
#: u32 words of the workspace: the amax, blocks_done, and the scale of current scaling
_WORDS = 4
_SCALE_OFFSET = 8


def compute_amax(x: Array, *, nan: NanRule = "ignore", out: Array | None = None) -> TypedArray:
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
    return run(_AMAX, (x, nan), out)


class _Inputs(NamedTuple):
    x: Input
    nan: str


class _Result(Description):
    """Description of one element in an array of any shape."""

    def __init__(self) -> None:
        super().__init__(Written("out", (1,), float32))

    def arrays_of(self, out: Any) -> tuple[Array]:
        if not is_array(out):                               # a later check raises the error
            return (out,)
        if out.size != 1:
            raise ValueError(f"out: expected one element, got shape {out.shape}")
        return (out.reshape(1),)


class _ComputeAmax(Op[_Inputs]):
    def arguments(self, call: Call, x: Any, nan: Any) -> _Inputs:
        choice(nan, "nan", NAN_RULES)
        return _Inputs(call.read("x", x, INPUT_DTYPES), nan)

    def result(self, inputs: _Inputs) -> Description:
        return _RESULT

    def reference(self, inputs: _Inputs) -> np.ndarray:
        return reference.compute_amax(inputs.x.array, nan=inputs.nan)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        yield _launch(inputs.x, call.workspace("amax", _WORDS), inputs.nan, out=written[0])


_AMAX, _RESULT = _ComputeAmax(), _Result()


def current_scale(call: Call, x: Input, rule: TensorScaleRule) -> tuple[Launch, int]:
    """Return the launch that finds the scale from x's own amax, as defined by `compute_scale`, and the
    address of the scale for later launches on this stream."""
    words = call.workspace("amax", _WORDS)
    scale_at = words + _SCALE_OFFSET
    return _launch(x, words, "ignore", out=scale_at, noop=call.noop_at, rule=rule._asdict(),
                   to_scale=1), scale_at


def _launch(x: Input, words: int, nan: str, **members: Any) -> Launch:
    a = x.array
    blocks = -(-a.nbytes // (_THREADS * 16 * _CHUNKS_PER_STEP))
    most = _BLOCKS_ON_CPU if isinstance(a, np.ndarray) else multiprocessors(a.data.device_id) * _BLOCKS_PER_SM
    return _variant(a.dtype, nan).bind(a, max(1, min(blocks, most)), x=x.at, workspace=words, n=a.size,
                                       vector=int(x.at % 16 == 0),
                                       **members)


def _variant(dtype: np.dtype[Any], nan: str) -> Variant:
    return _COMPUTE_AMAX.variant(IN=dtype, NAN_WINS=nan == "propagate")


def variants() -> Iterator[Variant]:
    """Yields every variant that this op may launch."""
    for dtype, nan in product(INPUT_DTYPES, NAN_RULES):
        yield _variant(dtype, nan)
