"""Cases of the ops that swizzle and unswizzle. A case's shape is that of the compact scales: lines x
blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, asarray, contiguous, empty, empty_like, zeros
from ...formats import float8_e8m0fnu
from ...layouts import swap_last
from ...ops.scales import swizzle
from ..base import MATRIX, TIMED_MATRICES, Case, maker, nbytes, poison, source
from ..groups import sizes
from ..registry import Arguments, HostCalls, Registration, Timed, register

_SHAPES = ((1, 1), (1, 5), (5, 1), (0, 5), (5, 0), (0, 0), (31, 3), (33, 4), (127, 6), (128, 4), (129, 5),
           (256, 32), (257, 33), (31, 130),
           (1000, 7), (272, 48), (1, 3, 2), (2, 140, 33), (3, 0, 4), (3, 128, 32), (0, 9, 9))
#: (extent of the groups' axis, groups): empty groups, one, more of them than lines, about as many as a round
#: of the search takes, and enough for several rounds
_GROUPED = ((300, 1), (700, 4), (90, 40), (5, 64), (1500, 300), (0, 3), (0, 0),
            *((700, groups) for groups in (31, 32, 127, 128, 129, 300, 1025)))


def _stored(s: np.ndarray, stored: str) -> np.ndarray:
    """Return scales as an op gets them: 'rows' are [lines, blocks]; 'columns' are a view of an array [blocks,
    lines]."""
    return s if stored == "rows" else contiguous(s.swapaxes(-1, -2))


def _swizzle(s: Array, *, stored: str = "rows", **options: Any) -> Array:
    return swizzle.swizzle_scales(s if stored == "rows" else s.swapaxes(-1, -2), **options)


def _swizzle_reference(s: np.ndarray, *, stored: str = "rows", **options: Any) -> np.ndarray:
    return reference.swizzle_scales(s if stored == "rows" else s.swapaxes(-1, -2), **options)


def _unswizzle(s: Array, *, shape: tuple[int, ...], stored: str = "rows", out: Array | None = None,
               **options: Any) -> Array:
    if stored == "columns" and out is None:
        out = empty_like(s, shape=swap_last(shape)).swapaxes(-1, -2)
    return swizzle.unswizzle_scales(s, shape=shape, out=out, **options)


def _unswizzle_reference(s: np.ndarray, *, shape: tuple[int, ...], stored: str = "rows",
                         **options: Any) -> np.ndarray:
    return reference.unswizzle_scales(s, shape=shape, **options)


def sizes_along(total: int, groups: int, axis: int, seed: int = 0) -> np.ndarray:
    """Return sizes of groups with `total` lines (axis 0) or blocks (axis 1, in elements). About a third are
    0."""
    rng = np.random.default_rng(seed)
    counts = sizes(total, groups, seed=rng)
    return counts if axis == 0 else np.where(counts, counts * 32 - rng.integers(0, 32, len(counts)), 0)


def _options(case: Case) -> dict[str, Any]:
    options = dict(case.options)
    groups, wide = options.pop("groups", None), options.pop("wide", True)
    if groups is not None:
        axis = options["axis"]
        options["splits"] = sizes_along(case.shape[axis], groups, axis).astype(np.int64 if wide else np.int32)
    return options


def _swizzle_inputs(case: Case) -> Arguments:
    options = _options(case)
    return (_stored(source(case), options.get("stored", "rows")),), options


def _unswizzle_inputs(case: Case) -> Arguments:
    """Padding is not 0 here, since no result may depend on it."""
    options = _options(case)
    groups = {name: options[name] for name in ("splits", "axis") if name in options}
    filled = np.zeros(case.shape, np.uint8)
    filled[...] = 1
    filled_scales = filled.view(float8_e8m0fnu)
    swizzled, used = (reference.swizzle_scales(s, **groups) for s in (source(case), filled_scales))
    w = empty(swizzled.shape, float8_e8m0fnu, like=swizzled)
    poison(w)
    np.copyto(w.view(np.uint8), swizzled.view(np.uint8), where=used.view(np.uint8) != 0)
    return (w,), {"shape": case.shape, **options}


def _cases(op: str) -> Iterator[Case]:
    # few blocks first, for every variant of the kernels
    case = functools.partial(maker(op), float8_e8m0fnu)
    for stored, blocks in (("rows", 37), ("columns", 37), ("rows", 36)):
        for grouping in ({}, {"groups": 3, "axis": 0}, {"groups": 3, "axis": 1}):
            yield case((150, blocks), stored=stored, **grouping)
    for stored in ("rows", "columns"):
        for shape in _SHAPES:
            yield case(shape, stored=stored)
        for total, groups in _GROUPED:
            for wide in (False, True):
                for axis, shape in enumerate(((total, 6), (130, total))):
                    yield case(shape, stored=stored, groups=groups, axis=axis, wide=wide)
        yield case((256, 64), "bits", "offset", stored=stored)
    yield case(MATRIX)


def _swizzle_cases() -> Iterator[Case]:
    yield from _cases("swizzle_scales")
    yield Case("swizzle_scales", float8_e8m0fnu, (160, 48), "bits", "strided")


def _timed(op: str) -> Iterator[Timed]:
    case = functools.partial(maker(op), float8_e8m0fnu)
    for rows, columns in TIMED_MATRICES:
        for label, stored in (("row-wise", "rows"), ("column-wise", "columns")):
            yield Timed(label, case((rows, columns // 32), stored=stored))


def _timed_swizzle() -> Iterator[Timed]:
    yield from _timed("swizzle_scales")
    case = functools.partial(maker("swizzle_scales"), float8_e8m0fnu)
    yield Timed("row-wise, 64 groups of rows", case((16384, 8192 // 32), groups=64, axis=0))
    yield Timed("column-wise, 64 K-groups", case((8192, 16384 // 32), stored="columns", groups=64, axis=1))
    yield Timed("row-wise, unaligned", case((16384, 90)))


def _moves(arguments: Arguments, written: dict[str, np.ndarray]) -> int:
    """The scales are read and written. Padding of the tiles and of groups is not counted."""
    return 2 * nbytes(arguments[0][0])


def _unswizzle_moves(arguments: Arguments, written: dict[str, np.ndarray]) -> int:
    return 2 * nbytes(written["result"])


def _host_calls(x: Array) -> Iterator[HostCalls]:
    scales = zeros((16, 4), float8_e8m0fnu, like=x)
    yield HostCalls.both("", swizzle.swizzle_scales, scales)
    yield HostCalls.both("groups", swizzle.swizzle_scales, scales, splits=asarray([4, 12], np.int64, like=x))


def _host_calls_of_unswizzle(x: Array) -> Iterator[HostCalls]:
    swizzled = swizzle.swizzle_scales(zeros((16, 4), float8_e8m0fnu, like=x))
    yield HostCalls.both("", swizzle.unswizzle_scales, swizzled, shape=(16, 4))


register(
    Registration("swizzle_scales", _swizzle, _swizzle_reference, _swizzle_inputs, _swizzle_cases,
                 "E8M0 scales in the tiles that matrix products read",
                 programs=(swizzle.variants,), timed=_timed_swizzle, moves=_moves,
                 host_calls=_host_calls),
    Registration("unswizzle_scales", _unswizzle, _unswizzle_reference, _unswizzle_inputs,
                 functools.partial(_cases, "unswizzle_scales"),
                 "swizzled scales as compact ones",
                 programs=(swizzle.variants,), timed=functools.partial(_timed, "unswizzle_scales"),
                 moves=_unswizzle_moves, host_calls=_host_calls_of_unswizzle),
)
