"""Cases of groups quantised as separate tensors. A case's shape is x's. Its options say how it is divided
(see cases.groups), and how many rows belong to no group (`spare`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, asarray, full
from ...formats import INPUT_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float16, float32
from ...grouped import Grouped
from ...ops.quantize import grouped
from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling
from ..base import DIRECTIONS, Case, maker, nbytes, source
from ..groups import sizes
from ..registry import Arguments, HostCalls, Registration, Timed, register

_DIRECTIONS: tuple[dict[str, bool], ...] = ({}, {"rowwise": False, "columnwise": True}, {"columnwise": True})
_BOTH: dict[str, Any] = _DIRECTIONS[2]
#: options of timed calls
_BLOCKS: dict[str, Any] = {"family": "block"}
_MX: dict[str, Any] = {"family": "mx", "scale_layout": "swizzled"}
_WHOLE_ROWS: dict[str, Any] = {"family": "block", "block": (1, None), "scale_layout": "compact"}
_SMALL = ((1, 1), (0, 8), (5, 0), (1, 300), (300, 1))


def _inputs(case: Case) -> Arguments:
    options = dict(case.options)
    number, rows = options.pop("groups"), case.shape[0] - options.pop("spare", 0)
    splits = sizes(rows, number, options.pop("sizes", "ragged"))
    splits = splits.astype(np.int64 if options.pop("wide", True) else np.int32)
    rng = np.random.default_rng(5)
    dtype, rule = options.pop("dtype", float8_e4m3fn), options.pop("current", None)
    recipe = _in_blocks(options)
    if recipe is None and rule is None:
        options["scales"] = np.exp2(rng.uniform(-4, 6, number)).astype(np.float32)
    starts = np.array(options.pop("starts", (0, 1e-3, 1e30)), np.float32)
    if recipe is None and options.pop("with_amax", True):
        options["amax"] = rng.choice(starts, number)
    if options.pop("with_offsets", False):
        options["offsets"] = np.concatenate([[0], np.cumsum(splits, dtype=np.int64)]) * case.shape[1]
    if recipe is None:
        per_tensor = DelayedScaling(dtype) if rule is None else CurrentScaling(
            dtype, **dict(zip(("eps", "pow2_scale"), rule, strict=False)))
        return (source(case), splits, per_tensor), options
    return (source(case), splits, recipe(dtype=dtype)), options


def _in_blocks(options: dict[str, Any]) -> Any:
    """Remove from the options those that name a recipe in blocks, and return its class, or None."""
    family = options.pop("family", None)
    if family is None:
        return None
    own = {name: options.pop(name) for name in tuple(options)
           if name in ("block", "scale_layout", "profile", "mode", "pow2_scale")}
    return functools.partial({"block": BlockScaling, "mx": MXScaling}[family], **own)


def _group_quantize(x: Array, splits: Array, recipe: Any, *, amax: Array | None = None,
                    **options: Any) -> Grouped:
    return grouped.group_quantize(x, splits, recipe, amaxes=amax, **options)


def _reference(x: np.ndarray, splits: np.ndarray, recipe: Any, *, amax: np.ndarray | None = None,
               **options: Any) -> Grouped:
    return reference.group_quantize(x, splits, recipe, amaxes=amax, **options)


def _cases() -> Iterator[Case]:
    both = {"rowwise": True, "columnwise": True}
    case = maker("group_quantize", "normal")
    # few tiles first (for callers that take only a few cases), for every type and everything that the kernel
    # does
    yield case(bfloat16, (140, 136), groups=3, **both)
    yield case(bfloat16, (150, 48), groups=3, sizes="aligned", spare=10, **both)
    yield case(float32, (40, 37), groups=2, spare=7, wide=False, **both)
    yield case(float16, (20, 24), groups=4, with_amax=False, with_offsets=True, columnwise=True)
    yield case(bfloat16, (150, 129), groups=3, spare=9, current=(), **both)
    yield case(bfloat16, (150, 72), groups=3, family="block", **both)
    yield case(bfloat16, (150, 35), groups=3, spare=9, family="mx", align=32, **both)
    yield case(bfloat16, (140, 48), groups=3, spare=9, align=16, **both)
    yield case(bfloat16, (200, 136), groups=3, spare=9, align=16, current=(), **both)
    yield case(bfloat16, (90, 264), groups=3, spare=9, family="block", block=(1, None))
    yield case(bfloat16, (150, 72), groups=3, spare=9, family="block", block=(1, None), **both)
    for source_dtype, dtype in product(INPUT_DTYPES, (float8_e4m3fn, float8_e5m2)):
        for columns in (264, 133):
            yield case(source_dtype, (300, columns), "bits", groups=5, dtype=dtype, **both)
        yield case(source_dtype, (400, 272), "edges", groups=6, sizes="aligned", dtype=dtype, spare=17,
                   with_offsets=True, **both)
        for values, columns in (("bits", 133), ("edges", 264), ("normal", 528)):
            yield case(source_dtype, (300, columns), values, groups=5, spare=9, dtype=dtype, current=(),
                       **both)
        yield case(source_dtype, (200, 24), groups=6, dtype=dtype, current=(1e-3, True), with_offsets=True)
    yield from _shape_cases(case)
    yield from _block_cases(case)
    yield from _whole_row_cases(case)
    yield from _padded_cases(case)


def _small_cases(case: Callable[..., Case], shapes: Iterable[tuple[int, int]],
                 each: Iterable[dict[str, Any]]) -> Iterator[Case]:
    """Yield cases of no group, one, and three, with each of some options."""
    for shape, number, options in product(shapes, (0, 1, 3), each):
        yield case(bfloat16, shape, groups=number, spare=shape[0] if number == 0 else 0, **options)


def _edge_cases(case: Callable[..., Case], **options: Any) -> Iterator[Case]:
    """Yield cases where all rows belong to no group, offsets are given, or x has other memory orders."""
    yield case(bfloat16, (30, 40), groups=3, spare=30, **options)
    yield case(bfloat16, (130, 36), groups=3, with_offsets=True, **options)
    for layout in ("offset", "strided"):
        yield case(float16, (100, 48), "bits", layout, groups=4, **options)


def _shape_cases(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield cases of per-tensor recipes with every kind of shape, division and layout."""
    both = {"rowwise": True, "columnwise": True}
    for directions in DIRECTIONS[:2]:
        for shape in ((300, 144), (77, 130)):
            yield case(bfloat16, shape, groups=4, spare=5, **directions)
    yield from _small_cases(case, (*_SMALL, (257, 16)), (both, {"current": ()}))
    for division in ("even", "one"):
        yield case(bfloat16, (512, 128), groups=4, sizes=division, **both)
    for number in (127, 128, 129, 400):                              # the scan takes several rounds
        yield case(bfloat16, (200, 16), groups=number, spare=3, **both)
        yield case(bfloat16, (200, 16), groups=number, spare=3, current=(0.0, True),
                   with_amax=number % 2 == 0)
    for number in (256, 257):                                        # more scales than a block has threads
        yield case(float32, (200, 16), groups=number, spare=3, current=(0.0, True))
    yield case(bfloat16, (30, 40), groups=3, spare=30, **both)
    for layout in ("offset", "strided"):
        for rule in ({}, {"current": ()}):
            yield case(float32, (100, 48), "bits", layout, groups=4, **both, **rule)


def _block_cases(case: Callable[..., Case]) -> Iterator[Case]:
    layouts = {"block": ("gemm_ready", "compact", "deepgemm_sm90"), "mx": ("compact", "swizzled")}
    # every program: some rows allow wide accesses, and some groups allow them for transposed rows
    for source_dtype, dtype, options in product(INPUT_DTYPES, (float8_e4m3fn, float8_e5m2), _DIRECTIONS):
        for columns in (264, 133):
            described = {"groups": 4, "dtype": dtype, **options}
            yield case(source_dtype, (150, columns), "bits", family="block", **described)
            yield case(source_dtype, (150, columns), "normal", family="block", block=(128, 128), **described)
            yield case(source_dtype, (150, columns), "normal", family="mx", scale_layout="compact",
                       **described)
            yield case(source_dtype, (150, columns), "bits", family="mx", scale_layout="swizzled",
                       profile="torchao", **described)
            if not options:
                yield case(source_dtype, (150, columns), "bits", family="block", profile="vllm", **described)
    # A block of threads has several tiles, whose columns begin anywhere, at half sectors, or at whole ones.
    for source_dtype, division, options, block in product((bfloat16, float32), ("ragged", "aligned", "even"),
                                                          _DIRECTIONS[1:],
                                                          ((1, 128), (128, 128))):
        yield case(source_dtype, (1344, 36), "bits", groups=2, sizes=division, family="block", block=block,
                   **options)
    # options that the kernel gets at run time
    for family, options in product(layouts, _DIRECTIONS):
        for layout in layouts[family]:
            for shape in ((272, 144), (150, 40)):
                yield case(bfloat16, shape, groups=5, sizes="aligned", spare=17, family=family,
                           scale_layout=layout, **options)
    for block, options in product(((1, 32), (1, 64), (128, 1), (64, 1), (128, 128)), _DIRECTIONS):
        for layout in layouts["block"][:2]:
            yield case(bfloat16, (300, 257), "edges", groups=4, spare=9, family="block", block=block,
                       scale_layout=layout, **options)
    for layout, options in product(layouts["mx"], _DIRECTIONS):
        yield case(bfloat16, (150, 130), "edges", groups=4, spare=9, family="mx", block=(32, 32),
                   scale_layout=layout, mode="floor",
                   **options)
    yield from _block_shape_cases(case)


def _block_shape_cases(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield cases of blocks with every kind of shape and division."""
    both = {"columnwise": True}
    for family in ("block", "mx"):
        yield from _small_cases(case, _SMALL, ({"family": family, **both},))
        for number in (128, 129, 400):                               # the scan takes several rounds
            yield case(bfloat16, (200, 16), groups=number, spare=3, family=family, wide=False, **both)
        yield from _edge_cases(case, family=family, **both)


def _whole_row_cases(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield cases of whole rows and columns."""
    rows: dict[str, Any] = {"family": "block", "block": (1, None)}
    columns: dict[str, Any] = {"family": "block", "block": (None, 1)}
    for source_dtype, dtype, options in product(INPUT_DTYPES, (float8_e4m3fn, float8_e5m2), _DIRECTIONS):
        for width in (264, 133):
            yield case(source_dtype, (300, width), "bits", groups=4, spare=9, dtype=dtype, **rows, **options)
        yield case(source_dtype, (150, 136), "edges", groups=4, dtype=dtype, profile="vllm", **rows,
                   **options)
    for block, options, layout in product((rows, columns), _DIRECTIONS,
                                          ("gemm_ready", "compact", "deepgemm_sm90")):
        for shape in ((272, 144), (150, 35)):
            yield case(bfloat16, shape, groups=5, sizes="aligned", spare=17, scale_layout=layout, wide=False,
                       **block, **options)
    for profile, pow2, block in product(("deepgemm", "tilekernels", "vllm", "sglang", "torchao"),
                                        (False, True), (rows, columns)):
        yield case(bfloat16, (70, 40), "edges", groups=3, profile=profile, pow2_scale=pow2, columnwise=True,
                   **block)
    # one, two, four or eight warps hold such a row, or blocks share it
    for source_dtype, widths in ((float16, (1032, 1027, 3000, 6000, 17_000)),
                                 (float32, (520, 1500, 4100, 9001))):
        for width in widths:
            yield case(source_dtype, (45, width), groups=3, spare=2, sizes="even", **rows)
    yield case(bfloat16, (37, 10_000), groups=2, align=16, profile="vllm", **rows)
    for block in (rows, columns):
        yield from _small_cases(case, _SMALL, [{**block, **options} for options in _DIRECTIONS])
        for options in _DIRECTIONS[::2]:
            for number in (128, 129, 400):                           # scans take several rounds
                yield case(bfloat16, (200, 16), groups=number, spare=3, wide=False, **block, **options)
            yield from _edge_cases(case, **block, **options)
        for options in _DIRECTIONS:
            for width, align in ((136, 16), (35, 128)):              # lines end in padding
                yield case(bfloat16, (150, width), "edges", groups=4, spare=5, align=align, **block,
                           **options)
        yield case(bfloat16, (0, 8), groups=3, align=16, columnwise=True, **block)


def _padded_cases(case: Callable[..., Case]) -> Iterator[Case]:
    # some tiles have no padding, some end in padding, and some are padding alone
    for source_dtype, columns in product(INPUT_DTYPES, (264, 133)):
        yield case(source_dtype, (300, columns), "bits", groups=4, spare=9, align=256, columnwise=True)
    for columns in (136, 35):
        yield case(bfloat16, (150, columns), "edges", groups=4, align=32, current=(), wide=False,
                   columnwise=True)
    # some blocks, and their scales, end in padding
    for options in _DIRECTIONS:
        for columns, layout, recipe in ((136, "gemm_ready", {}), (35, "compact", {"block": (128, 128)}),
                                        (136, "deepgemm_sm90", {}),
                                        (35, "gemm_ready", {"block": (1, 32)})):
            yield case(bfloat16, (150, columns), groups=4, spare=5, family="block", scale_layout=layout,
                       align=16, **recipe, **options)
        for columns, layout, recipe in ((136, "swizzled", {}), (35, "compact", {}),
                                        (136, "swizzled", {"block": (32, 32)})):
            yield case(float32, (150, columns), "edges", groups=4, family="mx", scale_layout=layout,
                       align=128, **recipe, **options)
    yield case(float16, (150, 136), groups=4, family="block", profile="vllm", align=2)
    for block, columns in product(((1, 128), (1, None)), (136, 21)):  # divisors of any size
        values = "edges" if columns > 64 else "bits"
        yield case(bfloat16, (150, columns), values, groups=4, family="block", block=block, profile="vllm",
                   align=16, columnwise=True)
    for options in _DIRECTIONS:
        yield case(bfloat16, (150, 35), "bits", groups=4, family="block", block=(128, 128), profile="vllm",
                   align=16, **options)
    # a block of threads has several tiles that end in padding, or are padding alone
    for block, align in product(((1, 128), (128, 128)), (256, 512)):
        yield case(float32, (300, 36), groups=2, sizes="even", family="block", block=block, align=align,
                   columnwise=True)
    families: tuple[dict[str, Any], ...] = ({}, {"current": (1e-3, True)}, {"family": "block"},
                                            {"family": "mx"})
    for family in families:
        for shape, number in (((0, 8), 0), ((0, 8), 3), ((3, 20), 4)):
            yield case(bfloat16, shape, groups=number, align=16, columnwise=True, **family)
        # the kernel's scan takes more than one round
        yield case(bfloat16, (200, 16), groups=300, spare=3, align=4, columnwise=True, **family)
        # no padding is added
        yield case(bfloat16, (64, 16), groups=4, sizes="even", align=16, columnwise=True, **family)


def _timed() -> Iterator[Timed]:
    for shape in ((64 * 2048, 5120), (64 * 4096, 7168)):
        yield from _timed_per_tensor(shape)
        yield from _timed_in_blocks(shape)
    yield _timed_row("both, ragged, 64 groups padded to 128", (64 * 2048, 5120), **_BOTH, align=128,
                     with_amax=False)
    yield _timed_row("MX both, ragged, 64 groups padded to 128", (64 * 2048, 5120), **_BOTH, **_MX, align=128)


def _timed_row(label: str, shape: tuple[int, int], division: str = "ragged", **options: Any) -> Timed:
    case = maker("group_quantize", "normal")
    return Timed(f"bf16→e4m3 {label}", case(bfloat16, shape, groups=64, sizes=division, **options))


def _timed_per_tensor(shape: tuple[int, int]) -> Iterator[Timed]:
    amaxes: dict[str, Any] = {"starts": (0,)}                       # initial amaxes, which calls raise
    yield _timed_row("both, 64 groups", shape, "even", **_BOTH, **amaxes)
    yield _timed_row("both, ragged, 64 groups", shape, **_BOTH, **amaxes)
    yield _timed_row("both, ragged in multiples of 16, 64 groups", shape, "aligned", **_BOTH, **amaxes)
    yield _timed_row("row, 64 groups", shape, "even", **amaxes)
    yield _timed_row("current both, 64 groups", shape, "even", current=(), **_BOTH, **amaxes)
    yield _timed_row("current row, 64 groups", shape, "even", current=(), **amaxes)


def _timed_in_blocks(shape: tuple[int, int]) -> Iterator[Timed]:
    for name, options in (("1×128", _BLOCKS), ("MX", _MX), ("whole rows", _WHOLE_ROWS)):
        yield _timed_row(f"{name} both, ragged, 64 groups", shape, **options, **_BOTH)
        yield _timed_row(f"{name} row, ragged, 64 groups", shape, **options)
    yield _timed_row("1×128 both, ragged in multiples of 16, 64 groups", shape, "aligned", **_BLOCKS, **_BOTH)


def _moves(arguments: Arguments, written: dict[str, np.ndarray]) -> int:
    """x is read, and codes and scales are written. Scales of whole rows or groups, and the padding of other
    scales, are not counted. Whole rows and columns read x twice, of which one is counted."""
    (x, _, recipe), _ = arguments
    rows, columns = getattr(recipe, "block", (1, None))
    codes = nbytes(*(written[name] for name in ("rowwise", "columnwise") if name in written))
    bytes_of_scale = 1 if isinstance(recipe, MXScaling) else 4
    scales = bytes_of_scale * codes // (rows * columns) if rows and columns else 0
    return nbytes(x) + codes + scales


def _host_calls(x: Array) -> Iterator[HostCalls]:
    yield HostCalls.both("", grouped.group_quantize, x, asarray([4, 12], np.int64, like=x), DelayedScaling(),
                         scales=full(2, 1, float32, like=x))


register(Registration("group_quantize", _group_quantize, _reference, _inputs, _cases,
                      "quantises each group of rows as a tensor of its own",
                      programs=(grouped.variants,), timed=_timed, moves=_moves,
                      host_calls=_host_calls))
