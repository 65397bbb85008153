"""What the tables of cases are made of: ops, cases, shapes and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import reference
from ..arrays import bits
from ..formats import FORMATS
from ..grouped import Grouped
from ..results import Quantized, Scaled
from ..routing import Routing

# Every tile's tail, primes, empty, more than two dimensions; all small enough for a CPU under sanitizers.
SHAPES = ((), (1,), (7,), (0,), (1, 1), (1, 5), (5, 1), (0, 5), (5, 0), (3, 37), (16, 8), (64, 64), (128, 128), (127, 129), (130, 257),
          (256, 256), (272, 520), (2, 3, 40, 24), (3, 0, 4), (2, 133, 144), (8200,))
#: Only on a GPU: tails of 256-wide tiles, many blocks.
LARGE_SHAPES = ((1000, 1003), (4096, 1024), (5, 1024, 1040), (2049, 4104))
MATRIX = (130, 257)
ALIGNED_MATRIX = (144, 264)      # rows that allow wide loads and stores, but tails of every tile


@dataclass(frozen=True)
class Case:
    """One call of an op: what goes in, and a name that says so."""

    op: str
    dtype: np.dtype[Any]                # of the first array
    shape: tuple[int, ...]
    values: str = "bits"                # see `values`
    layout: str = "contiguous"          # or 'offset' (starts one element into its buffer), 'strided' (a transposed view)
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = [f"{k}={getattr(v, 'name', v)}" for k, v in self.options.items()]
        return "-".join([self.op, self.dtype.name, "x".join(map(str, self.shape)) or "scalar", self.values, self.layout, *shown])


@dataclass(frozen=True)
class Op:
    """What the generic tests and tools need to know about an op.

    inputs   (case) -> positional and keyword arguments, as NumPy arrays
    cases    the calls to check
    summary  the README's line
    updates  names of the leading arguments that a call updates in place and returns, for an op that takes no `out=`
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[Case], tuple[tuple[Any, ...], dict[str, Any]]]
    cases: Callable[[], Iterator[Case]]
    summary: str
    updates: tuple[str, ...] = ()


def values(kind: str, shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 0) -> np.ndarray:
    """Test data. 'bits': every bit pattern equally likely (NaN, Inf, -0, subnormals). 'normal': N(0, 1) with outlier columns.
    'edges': zeros of both signs, FP8 maxima and their neighbours, exact ties, subnormals, Inf and NaN."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape, dtype=np.int64))
    storage = FORMATS[dtype].storage
    if kind == "bits":
        return rng.integers(0, np.iinfo(storage).max, size, storage, endpoint=True).view(dtype).reshape(shape)
    if kind == "normal":
        x = rng.standard_normal(size, np.float32).reshape(shape)
        if x.ndim:
            x = x * np.where(np.arange(x.shape[-1]) % 67 == 13, np.float32(60), np.float32(1))
        return reference.astype(np.asarray(x, np.float32), dtype)
    if kind == "edges":
        magnitudes = np.array([
            0, 2.0**-149, 2.0**-133, 2.0**-126, 2.0**-25, 2.0**-24, 2.0**-17, 2.0**-16, 2.0**-10, 1.5 * 2.0**-10, 2.0**-9, 2.0**-7,
            2.0**-6, 1, 1.0625, 1.1875, 17, 19, 447, 448, 449, 464, 465, 480, 57344, 61439, 61440, 65504, 1e30, 3.4e38, np.inf, np.nan,
        ], np.float32)  # fmt: skip
        return reference.astype(np.resize(np.concatenate([magnitudes, -magnitudes]), size).reshape(shape), dtype)
    raise ValueError(f"values: expected 'bits', 'normal' or 'edges', got {kind!r}")


def source(case: Case, seed: int = 0) -> np.ndarray:
    """The case's first array, laid out as it says."""
    x = values(case.values, case.shape, case.dtype, seed)
    if case.layout == "offset":
        buffer = np.zeros(x.size + 1, x.dtype)
        buffer[1:] = x.reshape(-1)
        return buffer[1:].reshape(x.shape)
    if case.layout == "strided":
        return np.ascontiguousarray(np.swapaxes(x, -1, -2)).swapaxes(-1, -2)
    return x


def outputs(result: Any, kwargs: dict[str, Any], updated: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every array that a call wrote, by name: the result's (of an op that updates its arguments, under their names), and the amax
    buffer."""
    found: dict[str, Any] = {}
    if updated:
        found.update(zip(updated, result, strict=True))
    elif isinstance(result, Quantized):
        for name in ("rowwise", "columnwise"):
            part = getattr(result, name)
            if part is not None:
                found[f"{name}.data"], found[f"{name}.scale_inv"] = part
        if result.dbias is not None:
            found["dbias"] = result.dbias
    elif isinstance(result, Scaled):
        found["data"], found["scale_inv"] = result
    elif isinstance(result, Grouped):
        parts = {name: getattr(result, name) for name in ("rowwise", "columnwise", "scale_inv", "columnwise_scale_inv", "offsets")}
        found.update((name, a) for name, a in parts.items() if a is not None)
        if kwargs.get("align", 1) > 1:
            found["splits"] = result.splits
    elif isinstance(result, Routing):
        found.update(result._arrays())
    elif isinstance(result, tuple):
        for i, part in enumerate(result):
            if part is None:
                continue
            found.update({f"[{i}].{name}": a for name, a in outputs(part, {}).items()})
    elif isinstance(result, list):
        for i, a in enumerate(result):
            found.update({f"outputs[{i}].{name}": part for name, part in outputs(a, {}).items()} if isinstance(a, Quantized)
                         else {f"outputs[{i}]": a})
    else:
        found["result"] = result
    if kwargs.get("amax") is not None:
        found["amax"] = kwargs["amax"]
    return found


DIRECTIONS = ({"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True}, {"rowwise": True, "columnwise": True},
              {"rowwise": True, "columnwise": True, "transposed": False})


def poison(a: Any) -> None:
    """Fill an array's bytes with a pattern that no test expects."""
    words = bits(a)
    words.fill(words.dtype.type(0xAA * (0x0101010101010101 >> 8 * (8 - a.dtype.itemsize))))
