"""Cases of offsets of groups. A case's shape is that of the sizes, [N]; its values name their range."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, asarray
from ...ops.moe import offsets
from ..base import Case, laid_out
from ..registry import Arguments, HostCalls, Registration, Timed, register

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
#: offsets that an expert layer needs: ends, starts, and element starts of three matrices
TYPICAL: dict[str, Any] = {"strides": (1, 1, 7168, 2048, 4096),
                           "include_leading_zero": (False, True, True, True, True),
                           "dtypes": ("int32", "int64", "int64", "int64", "int64")}
_TWO: dict[str, Any] = {"strides": (1, 3), "include_leading_zero": (True, False),
                        "dtypes": ("int64", "int32")}
#: sizes of warps, of tiles, and of as many tiles as each block sums itself; and one more or less of each
_NUMBERS = (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 1000, 1023, 1024, 1025, 2047, 2048, 2049, 8191, 8192, 8193,
            10007)
#: Upper bounds of sizes, a third of which are 0. Two bounds are around the limit of the kernel's 32-bit sums.
#: None: the largest sizes.
_SIZES = {"few": 300, "zeros": 0, "below 2**26": 2**26 - 1, "around 2**26": 2**26 + 5, "most": None}


def sizes(number: int, values: str, dtype: np.dtype[Any], seed: int = 0) -> np.ndarray:
    """Return sizes of `number` groups, whose sum fits int64."""
    rng = np.random.default_rng(seed)
    bound = _SIZES[values]
    high = min(np.iinfo(dtype).max, (2**63 - 1) // max(number, 1)) if bound is None else bound
    drawn = rng.integers(high // 2 if bound is None else 0, high, number, endpoint=True).astype(dtype)
    drawn[rng.random(number) < 1 / 3] = 0
    return drawn


def _inputs(case: Case) -> Arguments:
    splits = sizes(case.shape[0], case.values, case.dtype)
    return (laid_out(splits, case.layout),), dict(case.options)


def _offsets(splits: Array, *, out: Any = None, **options: Any) -> list[Array]:
    return offsets.splits_to_offsets(splits, out=out, **options)


def _reference(splits: np.ndarray, *, bulk_allocate: bool = False, **options: Any) -> list[np.ndarray]:
    return reference.splits_to_offsets(splits, **options)


def _cases() -> Iterator[Case]:
    def case(dtype: Any, number: int, values: str = "few", layout: str = "contiguous", /,
             **options: Any) -> Case:
        return Case("splits_to_offsets", dtype, (number,), values, layout, options)

    # one tile, a few and many on a few blocks of threads first, for callers that take only a few cases
    yield case(_INT32, 64, **TYPICAL)
    yield case(_INT64, 1024, "around 2**26")
    yield case(_INT64, 1500, **_TWO)
    yield case(_INT64, 4300, "most")
    yield case(_INT64, 0, **_TWO)
    yield case(_INT32, 5, bulk_allocate=True, **_TWO)
    yield case(_INT64, 40, "most")
    yield case(_INT32, 1025)
    for number in _NUMBERS:
        yield case(_INT64, number, **TYPICAL)
        yield case(_INT32, number, **_TWO)
    for values in _SIZES:
        for dtype in (_INT32, _INT64):
            for number in (33, 1024, 2500, 9000):
                yield case(dtype, number, values, include_leading_zero=False)
    for count in (1, 16, 17, 33):
        for number in (3, 1100, 8500):
            yield case(_INT64, number, strides=tuple(range(count)), bulk_allocate=True)
    yield case(_INT64, 3, "zeros", strides=(0, 2**63 - 1), dtypes=("int32", "int64"))
    yield case(_INT64, 40, strides=tuple(range(9)), dtypes="int32")
    for layout in ("offset", "strided"):
        for dtype in (_INT32, _INT64):
            yield case(dtype, 100, "few", layout, **TYPICAL)


def _timed() -> Iterator[Timed]:
    def timed(label: str, number: int, options: dict[str, Any]) -> Timed:
        return Timed(label, Case("splits_to_offsets", _INT64, (number,), "few", options=options))

    for number in (8, 64, 512, 1024, 8192, 10_000, 100_000, 1_000_000):
        yield timed("five outputs i32/i64", number, TYPICAL)
    for number in (8, 512):
        yield timed("three outputs i64", number, {"strides": (1, 7168, 2048)})


def _moves(arguments: Arguments, written: dict[str, np.ndarray]) -> int:
    """Sizes are read, and as many offsets are written. A leading zero is not counted."""
    (splits,), _ = arguments
    return splits.size * (splits.itemsize + sum(a.itemsize for a in written.values()))


def _host_calls(x: Array) -> Iterator[HostCalls]:
    """Yield calls with a leading zero."""
    five = functools.partial(offsets.splits_to_offsets, asarray([4, 12], np.int64, like=x),
                             strides=TYPICAL["strides"], dtypes=TYPICAL["dtypes"])
    yield HostCalls("five outputs", functools.partial(five, out=five()),
                    functools.partial(five, bulk_allocate=True))


register(Registration("splits_to_offsets", _offsets, _reference, _inputs, _cases,
                      "turns group sizes into offsets, on the device",
                      programs=(offsets.variants,), timed=_timed, moves=_moves,
                      host_calls=_host_calls))
