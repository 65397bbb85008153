"""Cases of grouped_matmul_nt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from ...formats import INPUT_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float32
from ...grouped import Grouped
from ...layouts import ScaleLayout, cdiv, grouped_scale_shape, round_up, row_scale_rows, target_rows
from ...ops.matmul import grouped, tiles
from ...ops.scales import convert
from ...reference.matmul import grouped as reference
from ...reference.matmul.tolerance import assert_within
from ...results import Quantized, Scaled
from ..base import Case, laid_out, values
from ..groups import sizes
from ..registry import Arguments, Registration, register
from .dense import BLOCKS, operand

#: scalings of a and b for "m"
_ROWS = (("vector", "block"), ("tensor", "tensor"), ("row", "row"), ("vector", "vector"), ("row", "block"),
         ("tensor", "vector"))
_OF_GROUPS = ("tensor", "row", "vector", "block")
_COLUMNS = (("vector", "vector"), ("tensor", "tensor"), ("row", "row"), ("vector", "row"))
#: [all rows or columns, N, K or M]: tails of tiles and blocks, and some rows at odd addresses
_SHAPES = ((300, 72, 272), (260, 136, 144), (137, 9, 131), (40, 5, 3))


# ---- operands ----
def _scales(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    scales: np.ndarray = rng.uniform(1, 2, shape) * np.exp2(rng.integers(-6, 0, shape))
    return scales.astype(np.float32)


def _group(shape: tuple[int, int], splits: np.ndarray, dtype: np.dtype[Any], scaling: str,
           layout: ScaleLayout, kind: str, seed: int, columnwise: bool) -> Grouped:
    """Return a Grouped with data in one direction."""
    rng, block, n = np.random.default_rng(seed + 55), BLOCKS[scaling], len(splits)
    splits = splits.copy()                              # every result has its own
    data = values(kind, (shape[0] * shape[1],), dtype, seed)
    offsets = np.concatenate([[0], np.cumsum(splits.astype(np.int64))]) * shape[1]
    row = None if columnwise else data
    column = data if columnwise else None
    if block is None:
        return Grouped(splits, offsets, shape, row, column, _scales((n,), rng))
    across = (block[1], block[0]) if columnwise else block
    scales = _scales(grouped_scale_shape(shape, n, across, layout, columnwise), rng)
    row_scales, column_scales = (None, scales) if columnwise else (scales, None)
    return Grouped(splits, offsets, shape, row, column, row_scales, column_scales, block, layout)


def _flat(shape: tuple[int, int], splits: np.ndarray, dtype: np.dtype[Any], layout: str, kind: str, seed: int,
          columnwise: bool) -> Quantized:
    """Return the result of scaling_aware_transpose for groups of rows of a matrix [rows, columns]."""
    rng, (rows, columns), groups = np.random.default_rng(seed + 66), shape, len(splits)
    splits = splits.copy()
    if columnwise:
        pitch = round_up(columns, 4) if layout == "gemm_ready" else columns
        scales = _scales((target_rows(rows, groups, 128), pitch), rng)
        data = values(kind, (rows * columns,), dtype, seed)
        column = Scaled._of(data, scales, shape, True, (128, 1), layout, splits)
        return Quantized(operand(shape, dtype, "vector", "compact", float32, kind, seed), column)
    scales = _scales((cdiv(columns, 128) * row_scale_rows(rows, groups),), rng)
    data = values(kind, shape, dtype, seed)
    return Quantized(Scaled._of(data, scales, shape, False, (1, 128), "gemm_ready", splits))


def _placed(scales: np.ndarray, where: str) -> np.ndarray:
    """Return the same scales at an address that is an odd multiple of 4 bytes, or with adjacent columns."""
    return laid_out(scales, "offset" if where == "offset" else "strided")


def _misplaced(operand: Any) -> Any:
    """Return the same operand with data at an odd address."""
    if isinstance(operand, Grouped):
        assert isinstance(operand.columnwise, np.ndarray)
        moved: Any = laid_out(operand.columnwise, "offset")
        return dataclasses.replace(operand, columnwise=moved)
    if isinstance(operand, Quantized):
        return Quantized(operand.rowwise, _misplaced(operand.columnwise))
    return Scaled._of(laid_out(operand.data, "offset"), operand.scale_inv, operand.shape, operand.transposed,
                      operand.block, operand.scale_layout, operand.splits)


def _splits(total: int, groups: int, division: str, spare: int) -> np.ndarray:
    """Return sizes of groups that leave `spare` rows unused."""
    used = max(total - spare, 0)
    if division == "blocks":                                        # all but the last are multiples of 128
        found = np.diff(np.round(np.linspace(0, used // 128, groups + 1)).astype(np.int64) * 128)
        found[-1:] += used % 128
        return found
    if division == "ascending":                                     # 1, 2, … for this many groups
        return np.arange(1, groups + 1)
    if division == "mixed":                                         # every other one is a multiple of 16
        found = sizes(used // 16, groups, seed=used) * 16
        found[1::2] -= np.minimum(found[1::2], 1 + np.arange(groups // 2) % 15)
        return found
    if division == "even":
        return np.full(groups, used // max(groups, 1), np.int64)
    found = sizes(used, groups, seed=used)
    if division == "empty" and groups > 2:                          # three groups become empty
        found[groups // 2 - 1] += found[0] + found[-1] + found[groups // 2]
        found[0] = found[groups // 2] = found[-1] = 0
    return found


def _inputs(case: Case) -> Arguments:
    """The case's shape is (all rows, N, K) of "m", or (all columns, N, M) of "k"; its dtype is that of
    a."""
    options = dict(case.options)
    total, n, other = case.shape
    first, second = options.pop("scaling")
    given, layout = options.pop("given", "Scaled"), options.pop("scale_layout", "gemm_ready")
    count, division = options.pop("groups", 4), options.pop("division", "uneven")
    spare, wide = options.pop("spare", 0), options.pop("wide", True)
    of_b, scale = options.pop("other", float8_e4m3fn), options.pop("scale", float32)
    scales_at, data_at = options.pop("scales_at", None), options.pop("data_at", "")
    splits = _splits(total, count, division, spare).astype(np.int64 if wide else np.int32)
    of_rows, kind = options.get("group", "m") == "m", case.values
    a_shape, b_shape = (total, other), (count, n, other) if of_rows else (total, n)
    a: Any
    b: Any
    if given == "Grouped":
        a = _group(a_shape, splits, case.dtype, first, layout, kind, 1, not of_rows)
    elif given == "flat":
        a = _flat(a_shape, splits, case.dtype, layout, kind, 1, not of_rows)
    else:
        a = operand(a_shape if of_rows else a_shape[::-1], case.dtype, first, layout, scale, kind, 1)
    if of_rows:
        b = operand(b_shape, of_b, second, "compact" if second == "row" else layout, scale, kind, 2)
    elif given == "Grouped":
        b = _group((total, n), splits, of_b, second, layout, kind, 2, True)
    elif given == "flat":
        b = _flat((total, n), splits, of_b, layout, kind, 2, True)
    else:
        b = operand((n, total), of_b, second, layout, scale, kind, 2)
    if scales_at is not None:
        a, b = (Scaled._of(s.data, _placed(s.scale_inv, scales_at), s.shape, False, s.block, s.scale_layout)
                for s in (a, b))
    a, b = (_misplaced(s) if name in data_at else s for name, s in (("a", a), ("b", b)))
    if options.pop("accumulate", False):
        shape = (total, n) if of_rows else (count, other, n)
        options["accumulate"] = values("normal", shape, float32, 4)
    if (dtype := options.pop("biased", None)) is not None:
        options["bias"] = values(kind, (count, n), dtype, 5)
    if options.pop("weighted", False):
        options["bias_weights"] = values("normal", (total,), float32, 6)
    return ((a, b) if given == "Grouped" else (a, b, splits)), options


# ---- cases ----
def _cases() -> Iterator[Case]:
    # few blocks of threads first (for callers that take only a few cases), with more of K than there are
    # stages
    for given in ("Scaled", "Grouped"):
        yield _case((16, 4, 432), ("vector", "block"), groups=3, given=given)
        yield _case((13, 4, 421), ("vector", "block"), groups=3, given=given)
        pair = "row" if given == "Scaled" else "vector", "row"
        yield _case((432, 4, 16), pair, groups=2, division="even", given=given, group="k")
        yield _case((421, 4, 13), pair, groups=3, given=given, group="k")
    yield from _row_cases()
    yield from _bias_cases()
    yield from _column_cases()
    yield from _added_column_cases()
    yield from _copied_column_cases()
    yield from _cases_past_constants()


def _case(shape: tuple[int, ...], pair: tuple[str, str], kind: str = "normal",
          of: np.dtype[Any] = float8_e4m3fn, **options: Any) -> Case:
    return Case("grouped_matmul_nt", of, shape, kind, options={"scaling": pair, **options})


def _row_cases() -> Iterator[Case]:
    for pair, shape in product(_ROWS, _SHAPES):
        yield _case(shape, pair, division="empty" if shape[0] > 200 else "uneven")
    for scaling in _OF_GROUPS:
        yield _case((137, 9, 131), (scaling, "block"), "bits", float8_e5m2, other=float8_e5m2,
                    given="Grouped", wide=False)
    for scaling, layout, shape in product(_OF_GROUPS, ("gemm_ready", "compact"), _SHAPES[:3]):
        yield _case(shape, (scaling, "block"), given="Grouped", scale_layout=layout, spare=11)
    for shape in _SHAPES:
        yield _case(shape, ("vector", "block"), given="flat", spare=7, wide=False)
    for pair in (("vector", "block"), ("row", "row")):
        for of, other in product((float8_e4m3fn, float8_e5m2), repeat=2):
            for to in INPUT_DTYPES:
                yield _case((260, 136, 144), pair, "normal", of, other=other, dtype=to)
            yield _case((137, 9, 131), pair, "bits", of, other=other, dtype=float32)
        yield _case((300, 72, 272), pair, accumulate=True, spare=20)
        for total, groups in ((300, 1), (90, 40), (5, 64), (33, 32), (0, 3), (0, 0), (40, 0), (130, 33)):
            yield _case((total, 40, 144), pair, groups=groups)
            yield _case((total, 40, 144), pair, groups=groups, spare=3, wide=False)
        # A last tile of 833 rows has more than 64. That of 400 would have 16, so another tile gives it rows.
        for total, n, groups in ((2500, 24, 3), (1200, 24, 3), (400, 264, 1)):
            yield _case((total, n, 32), pair, division="even", groups=groups)
        for shape in ((20, 0, 16), (20, 8, 0)):
            yield _case(shape, pair)
    for of, other in product((float8_e4m3fn, float8_e5m2), repeat=2):
        yield _case((130, 200, 144), ("vector", "vector"), "normal", of, other=other)
    for layout in ("compact", "deepgemm_sm90"):
        yield _case((300, 72, 272), ("vector", "vector"), scale_layout=layout)
    for shape in ((300, 72, 272), (137, 9, 131)):
        yield _case(shape, ("vector", "block"), scale=float8_e8m0fnu, scale_layout="compact")


def _bias_cases() -> Iterator[Case]:
    """Rows of no group get no bias, and without K there is nothing but a bias."""
    for i, (pair, shape) in enumerate(product((("vector", "block"), ("row", "row"), ("vector", "vector")),
                                              (*_SHAPES, (20, 8, 0), (500, 300, 48)))):
        for j, dtype in enumerate(INPUT_DTYPES):
            yield _case(shape, pair, biased=dtype, weighted=(i + j) % 2 == 0, spare=i % 3 * 5,
                        dtype=INPUT_DTYPES[(i + j) // 2 % 3], division="empty" if j else "uneven")
    for given, scaling in (("flat", "vector"), ("Grouped", "row")):
        yield _case((260, 136, 144), (scaling, "block"), given=given, biased=bfloat16, weighted=True, spare=9)
    yield _case((137, 9, 131), ("vector", "block"), "bits", biased=float32, weighted=True, dtype=float32)
    for groups, total in ((40, 90), (64, 5), (33, 130), (3, 0), (0, 40)):
        yield _case((total, 40, 144), ("vector", "block"), groups=groups, biased=float32, weighted=True)
    yield _case((400, 264, 32), ("row", "row"), groups=1, biased=bfloat16, weighted=True)


def _added_column_cases() -> Iterator[Case]:
    """Groups of few columns that are accumulated: the old values are loaded into shared memory by separate
    programs."""
    for pair, (of, other) in product((("vector", "vector"), ("row", "row")),
                                     product((float8_e4m3fn, float8_e5m2), repeat=2)):
        yield _case((240, 72, 200), pair, "normal", of, other=other, groups=5, division="even",
                    accumulate=True, given="Grouped" if pair[0] == "vector" else "Scaled", group="k")


def _column_cases() -> Iterator[Case]:
    of_k: dict[str, Any] = {"group": "k"}
    for pair, layout, shape in product(_COLUMNS, ("gemm_ready", "compact"), _SHAPES):
        yield _case(shape, pair, given="Grouped", scale_layout=layout, spare=11, division="empty", **of_k)
    for layout, shape in product(("gemm_ready", "compact"), _SHAPES):
        yield _case(shape, ("vector", "vector"), given="flat", scale_layout=layout, spare=5, wide=False,
                    **of_k)
    # all groups begin at multiples of 16 bytes, as tensor copies need
    for pair, (of, other) in product((("vector", "vector"), ("tensor", "row")),
                                     product((float8_e4m3fn, float8_e5m2), repeat=2)):
        yield _case((288, 208, 144), pair, "normal", of, other=other, groups=3, division="even",
                    given="Grouped" if pair[0] == "vector" else "Scaled", **of_k)
    for given in ("flat", "Grouped"):               # lines of scales do not begin at multiples of 16 bytes
        yield _case((288, 22, 26), ("vector", "vector"), given=given, groups=3, division="even",
                    scale_layout="compact", **of_k)
    for shape in ((288, 24, 208), (288, 264, 272)):                # M exceeds a tile, then N does too
        yield _case(shape, ("vector", "vector"), groups=3, division="even", given="Grouped", **of_k)
        yield _case(shape, ("vector", "vector"), groups=3, division="even", given="Grouped", accumulate=True,
                    **of_k)
    for pair in (("tensor", "tensor"), ("row", "row"), ("tensor", "row")):
        for shape in _SHAPES:
            yield _case(shape, pair, **of_k)
        yield _case((137, 9, 13), pair, "bits", float8_e5m2, other=float8_e5m2, **of_k)
    for pair in (("vector", "vector"), ("vector", "row"), ("block", "vector")):
        for total in (300, 1284):
            yield _case((total, 40, 24), pair, division="blocks", **of_k)
    for shape in ((1284, 40, 24), (260, 9, 13)):
        yield _case(shape, ("vector", "vector"), division="blocks", scale=float8_e8m0fnu,
                    scale_layout="compact", **of_k)
    for given in ("Grouped", "flat"):
        pair = "vector", "vector"
        for of, other in product((float8_e4m3fn, float8_e5m2), repeat=2):
            for to in INPUT_DTYPES:
                yield _case((272, 40, 24), pair, "normal", of, other=other, dtype=to, given=given, **of_k)
            yield _case((137, 9, 13), pair, "bits", of, other=other, dtype=float32, given=given, **of_k)
        yield _case((300, 72, 40), pair, given=given, accumulate=True, division="empty", **of_k)
        for total, groups in ((300, 1), (90, 40), (5, 64), (0, 3), (0, 0), (40, 0), (130, 33)):
            yield _case((total, 40, 24), pair, groups=groups, given=given, wide=groups < 40, **of_k)
        for shape in ((20, 0, 16), (20, 8, 0)):
            yield _case(shape, pair, given=given, **of_k)


def _copied_column_cases() -> Iterator[Case]:
    """Groups that begin anywhere, in products large enough to copy them first (ops/matmul/align_rows.py)."""
    for given, pair in (("flat", ("vector", "vector")), ("Grouped", ("vector", "row")),
                        ("Grouped", ("tensor", "tensor")), ("Scaled", ("row", "tensor"))):
        of_k: dict[str, Any] = {"group": "k", "given": given}
        for total, groups, division in (
                (170, 17, "ascending"), (200, 4, "mixed"), (900, 6, "mixed"),
                (700, 40, "uneven"), (640, 70, "mixed"), (300, 9, "empty"), (2100, 1, "uneven")):
            yield _case((total, 72, 130), pair, groups=groups, division=division, spare=3, **of_k)
        for at in ("a", "b", "ab"):                     # of no group, or of all
            yield _case((288, 64, 80), pair, groups=3, division="even", data_at=at, **of_k)
            yield _case((231, 65, 67), pair, groups=4, division="mixed", data_at=at, **of_k)
        yield _case((450, 130, 64), pair, groups=5, accumulate=True, spare=9, **of_k)
    for total in (384, 397):                            # rows begin anywhere, and groups at blocks of 128
        yield _case((total, 72, 130), ("vector", "vector"), division="blocks", group="k")
        yield _case((total, 72, 130), ("vector", "row"), division="blocks", data_at="b", group="k")


def _cases_past_constants() -> Iterator[Case]:
    """One more than a kernel handles at once: a round of 32 groups, a band of row tiles, a scale's alignment;
    for the kernels for rows at multiples of 16 bytes and for all others."""
    pair = "vector", "block"
    for k in (144, 100):
        for groups, total in ((1, 2), (31, 40), (32, 40), (33, 40), (64, 70), (70, 90)):
            yield _case((total, 24, k), pair, groups=groups, spare=1)
        for given, scaling in (("flat", "vector"), ("Grouped", "vector"), ("Grouped", "row"),
                               ("Grouped", "block"), ("Grouped", "tensor")):
            yield _case((190, 24, k), (scaling, "block"), given=given, groups=70, spare=1)
        yield _case((190, 24, k), ("row", "row"), groups=70, spare=1)
        for second in ("block", "vector"):
            yield _case((70, 24, k), ("vector", second), groups=2, scales_at="offset")
            yield _case((70, 22, k), ("vector", second), groups=2, scales_at="by columns",
                        scale_layout="compact")
    for rows in (64, 192):                          # exactly a tile, and a part of one
        yield _case((rows, 128, 48), pair, groups=1)
    yield _case((2120, 264, 16), pair, groups=1)
    yield _case((2100, 132, 20), pair, groups=1)
    for given in ("flat", "Grouped"):
        for layout in ("gemm_ready", "compact"):
            yield _case((1180, 24, 22), ("vector", "vector"), given=given, groups=70, spare=4,
                        scale_layout=layout, group="k")
    yield _case((40, 132, 2100), ("row", "row"), groups=2, group="k")
    for pair in (("vector", "vector"), ("tensor", "row")):
        yield _case((384, 72, 130), pair, division="blocks", group="k", align=128)


def _agrees(actual: dict[str, Any], desired: dict[str, Any], arguments: Arguments) -> None:
    operands, options = arguments
    added = {name: options[name] for name in ("group", "bias", "bias_weights", "accumulate")
             if options.get(name) is not None}
    assert_within(actual["result"], desired["result"], reference.grouped_magnitudes(*operands, **added))


register(Registration(
    "grouped_matmul_nt", grouped.grouped_matmul_nt, reference.grouped_matmul_nt, _inputs, _cases,
    "multiplies FP8 matrices expert by expert; also weight gradients",
    programs=(tiles.variants, convert.variants), agrees=_agrees))
