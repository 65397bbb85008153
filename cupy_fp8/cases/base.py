"""The parts of cases: shapes, values and arguments; and the arrays that a call wrote."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import reference
from ..arrays import bits, contiguous, is_array
from ..formats import FORMATS, float8_e8m0fnu
from ..gate import Gate
from ..grouped import Grouped
from ..layouts import swap_last
from ..results import Quantized, Scaled
from ..routing import Routing

#: tails of every tile, primes, no elements, more than two dimensions; small enough for a CPU under sanitizers
SHAPES = ((), (1,), (7,), (0,), (1, 1), (1, 5), (5, 1), (0, 5), (5, 0), (3, 37), (16, 8), (64, 64),
          (128, 128), (127, 129), (130, 257), (256, 256), (272, 520), (2, 3, 40, 24), (3, 0, 4),
          (2, 133, 144), (8200,))
#: tails of 256-wide tiles, and many blocks; on a GPU only
LARGE_SHAPES = ((1000, 1003), (4096, 1024), (5, 1024, 1040), (2049, 4104))
MATRIX = (130, 257)
#: rows that allow wide loads and stores, with tails of every tile
ALIGNED_MATRIX = (144, 264)
#: shapes of timed matrices; TIMED_MATRIX for what is timed with one size
TIMED_MATRICES = ((4096, 4096), (8192, 8192), (16384, 8192), (16384, 16384))
TIMED_MATRIX = TIMED_MATRICES[2]
#: scales of whole tensors: usual ones, and some that overflow, underflow or are invalid
SCALES = (1.0, 0.37, 2.0**-130, 0.0, 3e38, float("inf"), float("nan"), -2.0)
#: exponents of a quantiser's scales for N(0, 1)
QUANTISED = (-8, -7)


@dataclass(frozen=True)
class Case:
    """One call of an op: its inputs and a name for it."""

    op: str
    dtype: np.dtype[Any]                # dtype of the first array
    shape: tuple[int, ...]
    values: str = "bits"                # a kind of `values`
    layout: str = "contiguous"          # or 'offset', one element into a buffer; 'strided', a transposed view
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = [f"{k}={getattr(v, 'name', v)}" for k, v in self.options.items()]
        shape = "x".join(map(str, self.shape)) or "scalar"
        return "-".join([self.op, self.dtype.name, shape, self.values, self.layout, *shown])


def maker(op: str, usual: str = "bits") -> Callable[..., Case]:
    """Return case(dtype, shape, values, layout, **options), which makes a case of the op. usual: the default
    values."""
    def case(dtype: np.dtype[Any], shape: tuple[int, ...], values: str = usual, layout: str = "contiguous",
             /, **options: Any) -> Case:
        return Case(op, dtype, shape, values, layout, options)

    return case


#: zero, FP8 maxima and their neighbours, exact ties, subnormals, Inf and NaN
_EDGES = np.array([
    0, 2.0**-149, 2.0**-133, 2.0**-126, 2.0**-25, 2.0**-24, 2.0**-17, 2.0**-16, 2.0**-10, 1.5 * 2.0**-10,
    2.0**-9, 2.0**-7, 2.0**-6, 1, 1.0625, 1.1875, 17, 19, 447, 448, 449, 464, 465, 480, 57344, 61439, 61440,
    65504, 1e30, 3.4e38, np.inf, np.nan,
], np.float32)  # fmt: skip


#: if set, makes the arrays of `values` in place of NumPy's random numbers
_other_values: ContextVar[Callable[..., np.ndarray] | None] = ContextVar("other values", default=None)


@contextmanager
def values_made_by(make: Callable[[str, tuple[int, ...], np.dtype[Any], int], Any]) -> Iterator[None]:
    """Let `values` return make(kind, shape, dtype, seed) within this context."""
    token = _other_values.set(make)
    try:
        yield
    finally:
        _other_values.reset(token)


def zeros(kind: str, shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> np.ndarray:
    """Return cheap values, for `values_made_by` where only shapes and sizes matter."""
    return np.zeros(shape, dtype)


def values(kind: str, shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 0) -> np.ndarray:
    """Return test data. 'bits': every bit pattern is equally likely (NaN, Inf, -0, subnormals). 'normal':
    N(0, 1) with outlier columns. 'edges': _EDGES with both signs."""
    if (make := _other_values.get()) is not None:
        return make(kind, shape, dtype, seed)
    if dtype.itemsize * math.prod(shape) > _MOST_KEPT:
        return draw_values(kind, shape, dtype, seed)
    return _kept_values(kind, shape, dtype, seed).copy()


def draw_values(kind: str, shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> np.ndarray:
    """Make new arrays for `values` with NumPy."""
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
        both = np.concatenate([_EDGES, -_EDGES])
        return reference.astype(np.resize(both, size).reshape(shape), dtype)
    raise ValueError(f"values: expected 'bits', 'normal' or 'edges', got {kind!r}")


#: Consecutive cases share values, and each is called several times, so arrays are made once and copied.
_MOST_KEPT = 1 << 20                # bytes of an array
_kept_values = functools.lru_cache(maxsize=64)(draw_values)


def source(case: Case, seed: int = 0) -> np.ndarray:
    """Return the case's first array in its layout."""
    if case.layout == "strided" and _other_values.get() is not None:    # no array is copied
        return values(case.values, swap_last(case.shape), case.dtype, seed).swapaxes(-1, -2)
    return laid_out(values(case.values, case.shape, case.dtype, seed), case.layout)


def laid_out(x: np.ndarray, layout: str) -> np.ndarray:
    """Return the same values in a `Case.layout`. A 'strided' vector has every second element of its
    buffer."""
    if layout == "offset":
        buffer = np.zeros(x.size + 1, x.dtype)
        bits(buffer)[1:] = bits(x).reshape(-1)
        return buffer[1:].reshape(x.shape)
    if layout == "strided" and x.ndim == 1:
        return np.repeat(x, 2)[::2]
    if layout == "strided":
        return contiguous(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    return x


def powers_of_two(exponents: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return power-of-two scales as float32 or E8M0."""
    if dtype == float8_e8m0fnu:
        return np.clip(exponents + 127, 0, 255).astype(np.uint8).view(float8_e8m0fnu)
    return np.ldexp(np.float32(1), exponents.astype(np.int32))


def array_alone(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an op that takes the case's array and its options."""
    return (source(case),), dict(case.options)


#: arguments that a call raises, and that are not part of its result
RAISED = ("amax", "changed")


def outputs(result: Any, kwargs: dict[str, Any], updated: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return every array that a call wrote, by name: those of the result, and the buffers that it raises. The
    result of an op that updates its arguments is these arguments."""
    found = dict(zip(updated, result, strict=True)) if updated else dict(_arrays(result, kwargs))
    found |= {name: kwargs[name] for name in RAISED if kwargs.get(name) is not None}
    return found


def nbytes(*given: Any) -> int:
    """Return the bytes of all arrays among arrays and results. Arrays of one element, such as a scale, are
    not counted."""
    return sum(a.nbytes for value in given for a in arrays_in(value) if a.size > 1)


def arrays_in(given: Any) -> list[Any]:
    """Return the array itself, or all arrays of a result; [] for anything else."""
    return [a for _, a in _arrays(given, {}) if is_array(a)]


def _arrays(result: Any, kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(result, Quantized):
        for name, part in result.parts.items():
            yield from ((f"{name}.{field}", a) for field, a in _arrays(part, {}))
        if result.dbias is not None:
            yield "dbias", result.dbias
    elif isinstance(result, Scaled):
        yield from zip(("data", "scale_inv"), result, strict=True)
        if result.splits is not None:
            yield "splits", result.splits
    elif isinstance(result, Grouped):
        for name in ("rowwise", "columnwise", "scale_inv", "columnwise_scale_inv", "offsets", "splits"):
            if (a := getattr(result, name)) is not None:
                yield name, a
    elif isinstance(result, (Gate, Routing)):
        yield from result._arrays().items()
    elif isinstance(result, tuple):
        for i, part in enumerate(result):
            if part is not None:
                yield from ((f"[{i}].{name}", a) for name, a in _arrays(part, {}))
    elif isinstance(result, list):
        for i, part in enumerate(result):
            if isinstance(part, Quantized):
                yield from ((f"out[{i}].{name}", a) for name, a in _arrays(part, {}))
            else:
                yield f"out[{i}]", part
    else:
        yield "result", result


DIRECTIONS = ({"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True},
              {"rowwise": True, "columnwise": True},
              {"rowwise": True, "columnwise": True, "transposed": False})


def poison(a: Any) -> None:
    """Fill an array's bytes with a pattern that no test expects."""
    words = bits(a)
    words.fill(words.dtype.type(0xAA * (0x0101010101010101 >> 8 * (8 - a.dtype.itemsize))))
