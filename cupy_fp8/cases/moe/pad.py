"""Cases of groups of rows. A case's shape is x's without padding. Its options are `groups` (their number) and
`sizes`, how x is divided (see cases.groups)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, asarray, bits, empty_like
from ...formats import FORMATS, bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float32
from ...layouts import scale_shape
from ...ops.moe import pad
from ...results import Scaled
from ..base import Case, maker, nbytes, poison, source, values
from ..groups import DIVISIONS, sizes
from ..registry import Arguments, HostCalls, Registration, Timed, register


def _source(case: Case, options: dict[str, Any]) -> Any:
    """Return the case's array, or with the option `scales` (their dtype) a Scaled with blocks (1, n) or one
    scale."""
    data, dtype, block = source(case), options.pop("scales", None), options.pop("block", None)
    if dtype is None:
        return data
    if block is None:
        return Scaled(data, asarray(np.array([0.37], np.float32), like=data), data.shape)
    scale_inv = values("bits", scale_shape(data.shape, block, "compact", False), np.dtype(dtype), 1)
    return Scaled(data, asarray(scale_inv, like=data), data.shape, False, block, "compact")


def _splits(case: Case) -> tuple[np.ndarray, dict[str, Any]]:
    options = dict(case.options)
    made = sizes(case.shape[0], options.pop("groups"), options.pop("sizes", "ragged"))
    return made.astype(np.int64 if options.pop("wide", True) else np.int32), options


def _pad_inputs(case: Case) -> Arguments:
    splits, options = _splits(case)
    return (_source(case, options), splits), options


def _unpad_inputs(case: Case) -> Arguments:
    """Padding is not 0 here, since no result may depend on it."""
    splits, options = _splits(case)
    x = _source(case, options)
    used = reference.pad_groups(np.ones(x.shape[0], np.uint8), splits, align=options["align"])
    if options.pop("exact", True):
        options["rows"] = x.shape[0]
    if not isinstance(x, Scaled):
        return (_spread(x, used), splits), options
    scale_inv = x.scale_inv if x.block is None else _spread(x.scale_inv, used)
    y = _spread(x.data, used)
    return (Scaled(y, scale_inv, y.shape, False, x.block, x.scale_layout), splits), options


def _spread(rows: Any, used: np.ndarray) -> Any:
    """Return an array with the rows where `used` is 1, and other bytes between them."""
    y = empty_like(rows, shape=(len(used), *rows.shape[1:]))
    poison(y)
    bits(y)[np.flatnonzero(used).tolist()] = bits(rows)
    return y


def _sort_inputs(case: Case) -> Arguments:
    splits, options = _splits(case)
    dtype = np.int64 if options.pop("wide_order", True) else np.int32
    order = np.random.default_rng(1).permutation(len(splits)).astype(dtype)
    return (_source(case, options), splits, order), options


#: rows from one byte to several blocks of threads, some not multiples of 4 or 16 bytes; some arrays have more
#: rows than a block handles
_SHAPES: tuple[tuple[Any, tuple[int, ...]], ...] = (
    (float8_e4m3fn, (300, 64)), (bfloat16, (77, 264)), (float32, (700,)), (float8_e5m2, (1000,)),
    (bfloat16, (130, 129)), (float32, (65, 3, 5)), (float8_e4m3fn, (9, 4, 7)), (float8_e4m3fn, (5, 40_000)),
    (bfloat16, (5, 16_500)), (float8_e5m2, (3, 32_785)), (float32, (1, 1)), (bfloat16, (3, 0)))


#: Rows are multiples of 16 bytes or not. Their scales take 16, 4, 7 or 3 bytes a row, or all rows share one.
_SCALED: tuple[tuple[tuple[int, ...], Any, Any], ...] = (
    ((300, 512), (1, 128), float32), ((77, 200), (1, 32), float8_e8m0fnu), ((40, 129), (1, None), float32),
    ((9, 3, 70), (1, 32), float8_e8m0fnu), ((65, 96), None, float32), ((5, 40_000), (1, 128), float32),
    ((0, 64), (1, 32), float8_e8m0fnu), ((3, 0), (1, 32), float8_e8m0fnu))


def _cases(op: str, options: tuple[dict[str, Any], ...]) -> Iterator[Case]:
    # few blocks of threads first (for callers that take only a few cases), for everything that the kernel
    # does
    case = maker(op)
    for shape, block, scales in (_SCALED[1], _SCALED[4]):
        yield case(float8_e4m3fn, shape, groups=4, block=block, scales=scales, **options[0])
    for i, (dtype, shape) in enumerate(_SHAPES):
        yield case(dtype, shape, groups=5, wide=i % 2 == 0, **options[i % len(options)])
    for given in options:
        for dtype, shape in _SHAPES[:4]:
            for number in (1, 3, 200):
                yield case(dtype, shape, groups=number, **given)
        for division in DIVISIONS[1:]:
            yield case(float8_e4m3fn, (300, 48), groups=7, sizes=division, **given)
        for number in (0, 1, 4):
            yield case(bfloat16, (0, 24), groups=number, **given)
    for number in (127, 128, 129, 1023, 1025, 3000):            # scans take several rounds and windows
        yield case(bfloat16, (650, 8), groups=number, **options[0])
    # rows that take four to eight loads of a thread, or are shared by blocks
    for columns in (16384, 10240, 24576, 14336, 32768, 40960):
        yield case(float8_e4m3fn, (9, columns), groups=3, **options[0])
    for layout in ("offset", "strided"):
        yield case(float8_e4m3fn, (100, 48), "bits", layout, groups=4, **options[0])
    for i, (shape, block, scales) in enumerate(_SCALED):
        for number in (1, 5, 130):
            yield case(float8_e5m2 if i % 2 else float8_e4m3fn, shape, groups=number, block=block,
                       scales=scales, **options[i % len(options)])


def _pad_cases() -> Iterator[Case]:
    yield from _cases("pad_groups", tuple({"align": align} for align in (16, 32, 128, 1)))


def _unpad_cases() -> Iterator[Case]:
    yield from _cases("unpad_groups", tuple({"align": align} for align in (16, 32, 128, 1)))
    yield Case("unpad_groups", bfloat16, (100, 40), options={"groups": 6, "align": 16, "exact": False})


def _sort_cases() -> Iterator[Case]:
    yield from _cases("sort_chunks", ({}, {"wide_order": False}))


_TIMED_SHAPE = (16384, 7168)


def _timed(op: str) -> Iterator[Timed]:
    case, align = maker(op), {} if op == "sort_chunks" else {"align": 16}
    for dtype in (bfloat16, float8_e4m3fn):
        yield Timed(f"{FORMATS[dtype].tag}, 64 groups{' to 16' if align else ''}",
                    case(dtype, _TIMED_SHAPE, groups=64, **align))


def _timed_pad() -> Iterator[Timed]:
    yield from _timed("pad_groups")
    case = functools.partial(maker("pad_groups"), align=16)
    yield Timed("bf16, 512 groups to 16", case(bfloat16, _TIMED_SHAPE, groups=512))
    yield Timed("f32, 64 groups to 16", case(float32, (1 << 20, 1), groups=64))
    yield Timed("e4m3fn, 64 groups to 16", case(float8_e4m3fn, (16384, 7161), groups=64))
    for label, block, scales in (("1×128 f32", (1, 128), float32), ("1×32 E8M0", (1, 32), float8_e8m0fnu)):
        yield Timed(f"e4m3 and {label} scales, 64 groups to 16",
                    case(float8_e4m3fn, _TIMED_SHAPE, groups=64, block=block, scales=scales))


def _moves(arguments: Arguments, written: dict[str, np.ndarray]) -> int:
    """x is read, and all rows are written."""
    return nbytes(arguments[0][0], *written.values())


def _unpad_moves(arguments: Arguments, written: dict[str, np.ndarray]) -> int:
    """Rows other than padding are read and written."""
    return 2 * nbytes(*written.values())


def _host_calls(x: Array) -> Iterator[HostCalls]:
    yield HostCalls.both("", pad.pad_groups, x, asarray([4, 12], np.int64, like=x), align=16)


register(
    Registration("pad_groups", pad.pad_groups, reference.pad_groups, _pad_inputs, _pad_cases,
                 "adds rows of zeros to each group, up to a multiple of 16, 32, 128, …",
                 programs=(pad.variants,), timed=_timed_pad, moves=_moves, host_calls=_host_calls),
    Registration("unpad_groups", pad.unpad_groups, reference.unpad_groups, _unpad_inputs, _unpad_cases,
                 "removes the rows that `pad_groups` added",
                 programs=(pad.variants,), timed=functools.partial(_timed, "unpad_groups"),
                 moves=_unpad_moves),
    Registration("sort_chunks", pad.sort_chunks, reference.sort_chunks, _sort_inputs, _sort_cases,
                 "copies chunks of rows in another order",
                 programs=(pad.variants,), timed=functools.partial(_timed, "sort_chunks"), moves=_moves),
)
