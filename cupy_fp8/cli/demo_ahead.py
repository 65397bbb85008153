"""Compiles the kernels of a comparison on a GPU before its rows need them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import backend
from ..arrays import asarray, empty
from ..diagnostics.comparison import launched
from ..kernels import recording
from .compilers import Compilers, compilers


class Ahead:
    """Finds what comparisons launch, and starts compilers; on the CPU, where nothing is compiled, it does
    neither."""

    def __init__(self, xp: Any, compilers: Compilers | None) -> None:
        self._xp, self._compilers = xp, compilers
        self._expected: set[tuple[tuple[int, ...], np.dtype[Any]]] = set()

    def expect(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Announce a comparison of a tensor of this shape and dtype."""
        if self._compilers is None or (shape, dtype) in self._expected or 0 in shape:
            return
        if not self._expected:
            self._compilers.start(self._of_times_and_conversions(dtype))
        self._expected.add((shape, dtype))
        self._compilers.start(launched(empty(shape, dtype, like=self._xp)))

    def _of_times_and_conversions(self, dtype: np.dtype[Any]) -> Any:
        from ..bench.measure import DELAY

        with recording() as variants:
            asarray(empty((1,), np.float32, like=self._xp), dtype)
        return [*variants, DELAY]


@contextmanager
def compiling(xp: Any) -> Iterator[Ahead]:
    if xp is np:
        yield Ahead(xp, None)
        return
    with compilers(backend.cupy().cuda.runtime.getDevice()) as threads:
        yield Ahead(xp, threads)
