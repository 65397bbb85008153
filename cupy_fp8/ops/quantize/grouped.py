"""Groups of rows, each quantised as a tensor of its own.

Kernels: kernels_cu/quantize/grouped_tensor.cu; current scaling of large groups also takes grouped_amax.cu, and groups of
many tiles take groups/row_segments.cu first."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, cast

import numpy as np

from ... import backend, reference
from ...arrays import Array, is_contiguous
from ...calls import splits as sizes
from ...calls import validate
from ...calls.row_segments import GroupRuns
from ...calls.row_segments import variants as run_variants
from ...formats import FORMATS, FP8_DTYPES, INPUT_DTYPES, flag, float32
from ...grouped import Grouped
from ...kernels import Kernel, Variant, executor_of, tiles, workspace
from ...layouts import cdiv, padded_rows, round_up
from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, check_directions, checked_eps
from ..scales.scale import scale_target
from . import grouped_blocks, grouped_results, grouped_rows_columns, single_read
from .grouped_amax import RUN_ROWS, GroupScales, Rule
from .grouped_amax import variants as amax_variants
from .grouped_results import Arrays, GroupForm, addresses, divided

Recipe = DelayedScaling | CurrentScaling | BlockScaling | MXScaling

_KERNEL = Kernel("quantize/grouped_tensor", "group_cast_transpose")
_CURRENT = Kernel("quantize/grouped_tensor", "group_cast_current", cooperative=True)
_MOST_INT32 = 0x7FFFFFFF
_TALL = 4096                    # rows of groups for which wide tiles are faster


def group_quantize(x: Array, splits: Any, recipe: Recipe, *, rowwise: bool = True, columnwise: bool = False, scales: Any = None,
                   amaxes: Array | None = None, noop: Array | None = None, offsets: Array | None = None, align: int = 1,
                   out: Grouped | None = None, check: bool = False) -> Grouped:
    """Each group of rows quantised as a tensor of its own: the bytes of ``recipe.quantize`` of each. Per-tensor recipes give each a scale:

        data[g] = cast(x[g] * scales[g])      scale_inv[g] = 1 / scales[g]      amaxes[g] = max(amaxes[g], max |x[g]|)

    DelayedScaling, BlockScaling and MXScaling take one launch. So does CurrentScaling of large 16-bit arrays (from 17 M elements on, on an
    H200) whose rows are multiples of 8 elements if groups, were they of one size, fit into the GPU's multiprocessors (15 M elements), where
    they wait for their scales; x is then read once, but of groups that are too large. Otherwise it takes two: the first finds the scales
    that the groups' own maxima call for, as `compute_scale` does (of an empty group that is 0). Of large arrays a small launch goes before
    each, and before that one, to find where the groups are. No block has rows of two groups.

    BlockScaling of whole rows, block (1, None), gives every row a scale, in one launch that reads x once. Column-wise it gives every column
    of each group one, as (None, 1) does row-wise: three launches then, for both directions together, of which the first finds the groups,
    the second all maxima, and the third quantises; x is read twice.

    With `align` the same launches pad: groups are those of ``group_quantize(pad_groups(x, splits, align), aligned sizes, recipe)``, every
    one followed by what the recipe makes of rows of zeros, up to a multiple of `align` rows.

    Parameters
    ----------
    x : bfloat16, float16 or float32 array [M, K]
    splits : rows of each of N consecutive groups, any of them 0: an int32 or int64 array [N] of x's kind, or a list. Rows of x that
        they leave over (memory allocated for the worst case) belong to no group
    recipe : DelayedScaling, which needs `scales`, CurrentScaling, BlockScaling or MXScaling
    rowwise, columnwise : which directions to return; column-wise data are stored transposed, each group's [K, m], but for MX
    scales : f32 array [N]
    amaxes : of per-tensor recipes, f32 array [N], raised to each group's largest magnitude before scaling; not zeroed first
    noop : one-element f32 array on the device; where it holds 1.0 nothing at all is written. Needs `out`. Must not change while the
        launches run
    offsets : int64 [N + 1], where each group begins and the last one ends, in elements, where they are known already: these are used,
        none are computed. Without, the same launch computes them. Not with `align`
    align : rows that every group of the result is a multiple of, a power of two from 1 to 65536; 1: groups as they are
    out : an earlier result for the same splits (that very memory, in which sizes may change) and offsets; written in place and returned;
        can be captured into a CUDA graph, once it has been used before. With `align` one for as many splits: its own are the aligned
        sizes, and written too (in int32 only where M rounded up fits)
    check : wait for the device and raise ValueError if sizes there are wrong. (NumPy arrays and lists are always looked at)

    Returns
    -------
    Grouped, flat arrays of M * K elements; what follows the last group is 0. The scales of blocks are those of each group, as
    ``recipe.quantize`` stores them, one after the other (`Grouped`); of whole columns [N, K], K rounded up to 4 but in compact scales: a
    line for each group, without rows that of zeros. With `align` of M + (align - 1) * min(N, M) rows, as `pad_groups`,
    whatever the sizes; its splits are the aligned sizes, of splits' dtype, and its offsets theirs.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Sizes on the device raise nothing: a negative one counts as 0, a group
    that goes past the last row of x ends there, one whose offset is not that of a row, or leads out of the arrays, is left out;
    `device_errors` tells.

    Source: TransformerEngine's grouped quantisation; with `align` also its fused_multi_row_padding. Bytes moved per element: x + 1 per
    direction, and the scales of blocks; CurrentScaling in two launches reads x twice (what the L2 still holds of it, from there).

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.float32([[1, 2], [3, 4], [5, 6]])
    >>> g = fp8.group_quantize(x, [1, 2], fp8.DelayedScaling(), columnwise=True, scales=np.float32([1, 2]))
    >>> g[1].columnwise.data.astype(np.float32).tolist(), g.scale_inv.tolist()
    ([[6.0, 10.0], [8.0, 12.0]], [1.0, 0.5])
    >>> fp8.group_quantize(x, [1, 2], fp8.CurrentScaling(pow2_scale=True)).scale_inv.tolist()
    [0.0078125, 0.015625]
    >>> g = fp8.group_quantize(np.ones((300, 256), np.float32), [130, 170], fp8.BlockScaling(scale_layout="compact"), columnwise=True)
    >>> [member.columnwise.scale_inv.shape for member in g]
    [(2, 256), (2, 256)]
    >>> g = fp8.group_quantize(x, [1, 0, 2], fp8.BlockScaling((1, None), scale_layout="compact"), columnwise=True)
    >>> g.scale_inv.tolist(), (g.columnwise_scale_inv * 256).tolist()
    ([[0.0078125], [0.015625], [0.015625]], [[1.0, 2.0], [256.0, 256.0], [4.0, 4.0]])
    >>> g = fp8.group_quantize(x, [1, 0, 2], fp8.DelayedScaling(), scales=np.ones(3, np.float32), align=2)
    >>> g.splits.tolist(), [member.data.astype(np.float32).tolist() for member in g]
    ([2, 0, 2], [[[1.0, 2.0], [0.0, 0.0]], [], [[3.0, 4.0], [5.0, 6.0]]])
    """
    x, xp, at = validate.source(x, INPUT_DTYPES)
    if x.ndim != 2:
        raise ValueError(f"x: expected shape [M, K], got {x.shape}")
    check_directions(x.shape, rowwise, columnwise)
    groups = sizes.read(splits, x, xp, check)
    if groups.host is not None:
        sizes.check_at_most(groups.host, len(x))
    number, align = len(groups.array), sizes.check_align(align)
    _check_recipe(recipe, scales, amaxes)
    scales, scales_at = (None, 0) if scales is None else _one_each(scales, number, x, xp, "scales")
    amaxes, amaxes_at = (None, 0) if amaxes is None else _one_each(amaxes, number, x, xp, "amaxes", written=True)
    noop_at = 0 if noop is None else validate.one_f32(noop, x, xp, "noop")
    offsets_at = 0 if offsets is None else _given_offsets(offsets, align, groups, x, xp, check)
    key = (at, x.shape, x.dtype, groups.at, number, groups.wide, scales_at, amaxes_at, noop_at, offsets_at, align, recipe, rowwise,
           columnwise)
    kept = out.__dict__.get("_launch") if isinstance(out, Grouped) else None
    if kept is not None and kept[0] == key:
        kept[1].run(x)
        return cast(Grouped, out)
    read = [(at, x.nbytes, "x"), (groups.at, groups.nbytes, "splits"), (scales_at, 4 * number if scales is not None else 0, "scales"),
            (offsets_at, 8 * (number + 1) if offsets is not None else 0, "offsets"), (noop_at, 4 if noop is not None else 0, "noop")]
    if amaxes is not None:
        for other_at, nbytes, name in read:
            validate.separate(amaxes_at, 4 * number, other_at, nbytes, "amaxes", name)
    shape = _result_rows(groups, len(x), align), x.shape[1]
    plan, described = None, grouped_results.describing(groups, offsets is not None, align)
    if isinstance(recipe, (BlockScaling, MXScaling)):
        plan = grouped_blocks.plan(shape, x.dtype, recipe, flag(rowwise, "rowwise"), flag(columnwise, "columnwise"))
        form = grouped_blocks.form(plan, described, number)
    else:
        form = _form(shape, described, number, recipe.dtype, rowwise, columnwise)
    given = out
    if out is None:
        if noop is not None:
            raise ValueError("noop: needs out=, since nothing may be written")
        validate.may_allocate(x)
        out = form.empty(x, groups.array, offsets)
    else:
        form.check(out, x, xp, at, groups, offsets, [*read, (amaxes_at, 4 * number if amaxes is not None else 0, "amaxes")])
    if executor_of(xp) == "reference":
        if noop is None or noop.reshape(()) != 1:
            form.store(out, reference.group_quantize(x, groups.host, recipe, rowwise=rowwise, columnwise=columnwise, scales=scales,
                                                     amaxes=amaxes, offsets=offsets, align=align))
        return out
    launch: _Launch | _CurrentLaunch | grouped_blocks.Launch | grouped_rows_columns.Launch
    owner = None if given is None else out.scale_inv if out.columnwise_scale_inv is None else out.columnwise_scale_inv
    if plan is not None:
        whole_lines = isinstance(recipe, BlockScaling) and None in recipe.block
        launch = (grouped_rows_columns.Launch if whole_lines else grouped_blocks.Launch)(
            plan, out, x, at, noop_at, offsets_at, groups, align, owner)
    else:
        own, choice = None, None
        if isinstance(recipe, CurrentScaling):
            rule = Rule(scale_target(recipe.dtype, 0), checked_eps(recipe.eps), bool(recipe.pow2_scale))
            choice = _resident(out, x, at, number)
            if choice is None:
                own = GroupScales(x, at, owner, amaxes_at, noop_at, offsets_at, groups, rule)
                scales_at, amaxes_at = own.at, 0
        if choice is not None:
            launch = _CurrentLaunch(out, x, at, recipe.dtype, amaxes_at, noop_at, offsets_at, groups, align, choice, rule, owner)
        else:
            launch = _Launch(out, x, at, recipe.dtype, scales_at, amaxes_at, noop_at, offsets_at, groups, align, own, owner)
    if given is not None and xp is not np:
        out.__dict__["_launch"] = key, launch
    launch.run(x)
    return out


def _check_recipe(recipe: Recipe, scales: Any, amaxes: Any) -> None:
    if isinstance(recipe, DelayedScaling):
        if scales is None:
            raise ValueError("scales: delayed scaling needs the scales that earlier steps determined, got None")
    elif isinstance(recipe, CurrentScaling):
        if scales is not None:
            raise ValueError("scales: current scaling takes them from the groups themselves; DelayedScaling quantises with given scales")
    elif not isinstance(recipe, (BlockScaling, MXScaling)):
        raise TypeError("recipe: expected a DelayedScaling, CurrentScaling, BlockScaling or MXScaling, got "
                        f"{type(recipe).__name__}")
    elif scales is not None or amaxes is not None:
        raise ValueError("scales, amaxes: belong to per-tensor recipes; blocks take their scales from their own elements")


def _one_each(a: Any, number: int, x: Array, xp: Any, name: str, written: bool = False) -> tuple[Array, int]:
    """(a ready for a kernel, its address): an f32 array [number] of x's kind and device. One that is written is not copied."""
    if not isinstance(a, xp.ndarray):
        backend.require_module(a, xp, name)
    if a.shape != (number,) or (written and not is_contiguous(a)):
        raise ValueError(f"{name}: expected {'a contiguous' if written else 'an'} array of shape ({number},), one for each group, got "
                         f"shape {a.shape}, strides {a.strides}")
    if written and xp is np and not a.flags.writeable:
        raise ValueError(f"{name}: the array is read-only")
    a, _, at = validate.source(a, (float32,), name)
    if xp is not np:
        validate.same_device(a, x, name)
    return a, at


def _given_offsets(offsets: Any, align: int, groups: sizes.Groups, x: Array, xp: Any, check: bool) -> int:
    """Their address."""
    if align > 1:
        raise ValueError(f"offsets: expected none with align={align}, got {type(offsets).__name__}; the call finds those of the padded "
                         "groups (the result's offsets)")
    at = sizes.check_offsets(offsets, groups, x, xp)
    if groups.host is not None and (xp is np or check):
        sizes.compare_offsets(offsets, groups.host, x.shape[1])
    return at


def _result_rows(groups: sizes.Groups, rows: int, align: int) -> int:
    """Rows of the result for so many of x."""
    if align == 1:
        return rows
    if not groups.wide and round_up(rows, align) > _MOST_INT32:
        raise ValueError(f"splits: expected int64, since {rows} rows rounded up to {align} are more than int32 holds, got int32")
    return padded_rows(rows, len(groups.array), align)


def _form(shape: tuple[int, int], described: Arrays, number: int, dtype: np.dtype[Any], rowwise: bool, columnwise: bool) -> GroupForm:
    data = {name: ((prod(shape),), dtype) for name, wanted in (("rowwise", rowwise), ("columnwise", columnwise)) if wanted}
    return GroupForm(shape, {**described, **data, "scale_inv": ((number,), float32)})


class _Launch:
    """The kernel's variant, its grid, and the members of its struct. Kept with a result on a GPU that was given as `out=`: what is the same
    in every address needs no second validation."""

    def __init__(self, out: Grouped, x: Array, at: int, dtype: np.dtype[Any], scales_at: int, amaxes_at: int, noop_at: int, offsets_at: int,
                 groups: sizes.Groups, align: int, own: GroupScales | None, owner: Array | None) -> None:
        aligned = _is_aligned(out, x, at)
        tile = tiles.choose(x, _large(out, x, len(groups.array))) if aligned else tiles.SMALL
        division = divided(out, x, groups, offsets_at, align, tile.rows, tile.columns)
        self.own = own                                       # what finds the scales, before
        # What finds the runs; the program of large tiles wants them found. Its blocks take more tiles than one, where there are.
        self.runs = None if tile is tiles.SMALL else GroupRuns(x, owner, *division.to_find)
        self.variant, self.grid = _variant(x.dtype, dtype, tile), division.grid if tile is tiles.SMALL else division.fewest
        _, data_at, scale_inv_at, data_t_at, _ = addresses(out)
        self.members = (at, data_at, data_t_at, scales_at, scale_inv_at, amaxes_at, noop_at, *division.members,
                        0 if self.runs is None else self.runs.at, int(aligned), int(own is not None), division.grid)

    def run(self, x: Array) -> None:
        if self.own is not None:
            self.own.run(x)
        if self.runs is not None:
            self.runs.run(x)
        self.variant.launch(x, self.grid, *self.members)


def _large(out: Grouped, x: Array, number: int) -> tiles.Tile:
    """The tile for large arrays."""
    wide = x.dtype.itemsize == 2 and out.rowwise is not None and out.columnwise is not None and len(x) >= _TALL * number
    return tiles.BOTH if wide and tiles.fills_wide([x.shape[1]]) else tiles.BOTH_NARROW


def _resident(out: Grouped, x: Array, at: int, number: int) -> single_read.Choice | None:
    """How to quantise groups from one read, if they are of about the same size, which only the device knows."""
    if not (number and _is_aligned(out, x, at)):
        return None
    across, tile = max(1, cdiv(out.shape[1], single_read.TILE.columns)), single_read.TILE
    return single_read.choose(x, [cdiv(cdiv(len(x), number), tile.rows) * across], number)


def _is_aligned(out: Grouped, x: Array, at: int) -> bool:
    """Whether every row of x and data allows chunked access."""
    return x.shape[1] % 8 == 0 and at % 16 == 0 and (out.rowwise is None or validate.address(out.rowwise) % 8 == 0)


class _CurrentLaunch:
    """As _Launch, of the kernel that finds the scales too."""

    def __init__(self, out: Grouped, x: Array, at: int, dtype: np.dtype[Any], amaxes_at: int, noop_at: int, offsets_at: int,
                 groups: sizes.Groups, align: int, choice: single_read.Choice, rule: Rule, owner: Array | None) -> None:
        tile = single_read.TILE
        division = divided(out, x, groups, offsets_at, align, tile.rows, tile.columns)
        count = division.grid
        self.runs = GroupRuns(x, owner, *division.to_find)
        words = single_read.words(count) + 2 * len(groups.array)
        self._words = workspace(owner, x, "group_current", 1 << (words - 1).bit_length())
        words_at = validate.address(self._words)
        self.variant = single_read.variant(_CURRENT, x.dtype, dtype, choice.shared)
        self.grid = choice.blocks
        _, data_at, scale_inv_at, data_t_at, _ = addresses(out)
        self.members = (at, data_at, data_t_at, scale_inv_at, amaxes_at, noop_at, words_at + 4 * single_read.words(count),
                        *division.members,
                        self.runs.at, *single_read.members(words_at, count, choice, rule))

    def run(self, x: Array) -> None:
        self.runs.run(x)
        self.variant.launch(x, self.grid, *self.members)


@functools.cache
def _variant(source: np.dtype[Any], to: np.dtype[Any], tile: tiles.Tile) -> Variant:
    return _KERNEL.variant(block=tile.block, shared=tile.shared, IN=FORMATS[source].tag, OUT=FORMATS[to].tag, TILE_ROWS=tile.rows,
                           TILE_COLUMNS=tile.columns, DBIAS=0, LARGE=int(tile is not tiles.SMALL))


def variants() -> Iterator[Variant]:
    """Every variant that this op may launch."""
    yield from amax_variants()
    yield from grouped_blocks.variants()
    yield from grouped_rows_columns.variants()
    yield from run_variants(iter((RUN_ROWS, tiles.BOTH.rows, single_read.TILE.rows, *grouped_rows_columns.RUN_ROWS,
                                  *grouped_blocks.run_rows())))
    yield from single_read.variants(_CURRENT)
    for source, to, tile in product(INPUT_DTYPES, FP8_DTYPES, (tiles.SMALL, tiles.BOTH_NARROW, tiles.BOTH)):
        if tile != tiles.BOTH or source.itemsize == 2:
            yield _variant(source, to, tile)
