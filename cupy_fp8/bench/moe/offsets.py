"""Benchmark rows of splits_to_offsets: the groups of an expert layer, and more groups than a block takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import backend, reference
from ...cases.moe.offsets import TYPICAL, sizes
from ...ops.moe.offsets import splits_to_offsets
from ...testing import assert_bytes_equal
from ..quantize.tensor import Spec

_THREE: dict[str, Any] = {"strides": (1, 7168, 2048)}
_NUMBERS = (8, 64, 512, 1024, 8192, 10_000, 100_000, 1_000_000)


def _offsets(number: int, options: dict[str, Any]) -> Any:
    def make() -> Any:
        splits = backend.cupy().asarray(sizes(number, "few", np.dtype(np.int64)))
        outputs = splits_to_offsets(splits, **options)

        def check() -> None:
            want = reference.splits_to_offsets(splits.get(), **options)
            for actual, desired in zip(outputs, want, strict=True):
                assert_bytes_equal(actual, desired)

        return (lambda: splits_to_offsets(splits, **options, outputs=outputs)), check

    return make


def _all() -> Iterator[Spec]:
    for number in _NUMBERS:
        yield Spec("splits_to_offsets", "five outputs i32/i64", (number,), number * (8 + 4 + 4 * 8),
                   _offsets(number, TYPICAL))
    for number in (8, 512):
        yield Spec("splits_to_offsets", "three outputs i64", (number,), number * (8 + 3 * 8),
                   _offsets(number, _THREE))


SPECS: tuple[Spec, ...] = tuple(_all())
