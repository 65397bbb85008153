"""The sums of `error` by one kernel: `losses.error_sums` in one pass. With CuPy's operations the first call
would compile for eight seconds, a program for each."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ..arrays import Array, address, empty_beside
from ..formats import FORMATS, INPUT_DTYPES
from ..kernels import Kernel, Variant
from ..layouts import cdiv
from .losses import LOCAL_SUMS, OVERFLOW, SUMS, smallest_normal

_THREADS, _MOST_BLOCKS = 256, 1024
_KERNEL = Kernel("diagnostics/error_sums", "error_sums", block=_THREADS)
_ELEMENTS = 16 * _THREADS  # elements per thread block at least, so that small arrays have few sums to copy
_FLOAT64 = np.dtype(np.float64)
_DTYPES = (*INPUT_DTYPES, _FLOAT64)


def error_sums(x: Array, values: Array, codes: Array | None, local: bool = False) -> Array:
    """Return f64 [parts, SUMS] of contiguous non-empty arrays, [parts, LOCAL_SUMS] with those of runs."""
    blocks = min(cdiv(x.size, _ELEMENTS), _MOST_BLOCKS)
    sums = empty_beside(x, (blocks, LOCAL_SUMS if local else SUMS), _FLOAT64)
    of_format: dict[str, Any] = {}
    if codes is not None:
        top, bound, maximum, tie_overflows = OVERFLOW[codes.dtype]
        of_format = {"codes": address(codes), "maximum": maximum, "bound": bound, "top": top,
                     "smallest_normal": smallest_normal(codes.dtype), "tie_overflows": tie_overflows}
    _variant(x.dtype, values.dtype, local).bind(
        x, blocks, x=address(x), values=address(values), sums=address(sums), n=x.size, **of_format).run()
    return sums


def _variant(x: np.dtype, values: np.dtype, local: bool) -> Variant:
    return _KERNEL.variant(IN=_tag(x), VALUE=_tag(values), LOCAL=int(local))


def _tag(dtype: np.dtype) -> str:
    return "f64" if dtype == _FLOAT64 else FORMATS[dtype].tag


def variants() -> list[Variant]:
    """Return every program, for tests."""
    return [_variant(*each) for each in itertools.product(_DTYPES, _DTYPES, (False, True))]
