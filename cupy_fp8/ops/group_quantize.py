"""Groups of rows quantised as tensors of their own. Kernel: kernels_cu/group_cast.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any, cast

import numpy as np

from .. import backend, reference
from ..arrays import Array, bits, empty_beside, is_contiguous
from ..formats import FORMATS, FP8_DTYPES, INPUT_DTYPES, float32
from ..grouped import Grouped
from ..layouts import cdiv, padded_rows
from ..recipes import DelayedScaling, check_directions
from ..runtime import Kernel, Variant, error_word, executor_of
from . import checks, tiles
from . import splits as sizes

_KERNEL = Kernel("group_cast", "group_cast_transpose", "9PPqPI2qI4xI")
_INT64 = np.dtype(np.int64)
_LARGE = tiles.Tile(256, 128, down_first=False)


def group_quantize(x: Array, splits: Any, recipe: DelayedScaling, *, rowwise: bool = True, columnwise: bool = False, scales: Any = None,
                   amaxes: Array | None = None, noop: Array | None = None, offsets: Array | None = None, out: Grouped | None = None,
                   check: bool = False) -> Grouped:
    """Each group of rows quantised as a tensor of its own, with its own scale, in one launch: the bytes of `quantize_tensor` of each.

        data[g] = cast(x[g] * scales[g])      scale_inv[g] = 1 / scales[g]      amaxes[g] = max(amaxes[g], max |x[g]|)

    Parameters
    ----------
    x : bfloat16, float16 or float32 array [M, K]
    splits : rows of each of N consecutive groups, any of them 0: an int32 or int64 array [N] of x's kind, or a list. Rows of x that
        they leave over (memory allocated for the worst case) belong to no group
    recipe : DelayedScaling, which needs `scales`
    rowwise, columnwise : which directions to return; column-wise data are stored transposed, each group's [K, m]
    scales : f32 array [N]
    amaxes : f32 array [N], raised to each group's largest magnitude before scaling; not zeroed first
    noop : one-element f32 array on the device; where it holds 1.0 nothing at all is written. Needs `out`
    offsets : int64 [N + 1], where each group begins and the last one ends, in elements, where they are known already: these are used,
        none are computed. Without, the same launch computes them
    out : an earlier result for the same splits (that very memory, in which sizes may change) and offsets; written in place and returned
    check : wait for the device and raise ValueError if sizes there are wrong. (NumPy arrays and lists are always looked at)

    Returns
    -------
    Grouped, flat arrays of M * K elements; what follows the last group is 0.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Sizes on the device raise nothing: a negative one counts as 0, a group
    that goes past the last row ends there, one whose offset is not that of a row, or leads out of the arrays, is left out;
    `device_errors` tells.

    Source: TransformerEngine's grouped quantisation. Bytes moved per element: x + 1 per direction.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.float32([[1, 2], [3, 4], [5, 6]])
    >>> g = fp8.group_quantize(x, [1, 2], fp8.DelayedScaling(), columnwise=True, scales=np.float32([1, 2]))
    >>> g[1].columnwise.data.astype(np.float32).tolist(), g.scale_inv.tolist()
    ([[6.0, 10.0], [8.0, 12.0]], [1.0, 0.5])
    """
    if not isinstance(recipe, DelayedScaling):
        raise TypeError(f"recipe: expected a DelayedScaling (others do not have a form for groups), got {type(recipe).__name__}")
    x, xp, at = checks.source(x, INPUT_DTYPES)
    if x.ndim != 2:
        raise ValueError(f"x: expected shape [M, K], got {x.shape}")
    check_directions(x.shape, rowwise, columnwise)
    groups = sizes.read(splits, x, xp, check)
    if groups.host is not None:
        sizes.check_at_most(groups.host, len(x))
    number = len(groups.array)
    if scales is None:
        raise ValueError("scales: delayed scaling needs the scales that earlier steps determined, got None")
    scales_at = _one_each(scales, number, x, xp, "scales")
    amaxes_at = 0 if amaxes is None else _one_each(amaxes, number, x, xp, "amaxes")
    if amaxes is not None and xp is np and not amaxes.flags.writeable:
        raise ValueError("amaxes: the array is read-only")
    noop_at = 0 if noop is None else checks.one_f32(noop, x, xp, "noop")
    offsets_at = 0 if offsets is None else sizes.check_offsets(offsets, groups, x, xp)
    if offsets is not None and groups.host is not None and (xp is np or check):
        _check_offsets(offsets, groups.host, x.shape[1])
    key = (at, x.shape, x.dtype, groups.at, number, groups.wide, scales_at, amaxes_at, noop_at, offsets_at, recipe.dtype, rowwise,
           columnwise)
    kept = out.__dict__.get("_launch") if isinstance(out, Grouped) else None
    if kept is not None and kept[0] == key:
        kept[1].run(x)
        return cast(Grouped, out)
    read = [(at, x.nbytes, "x"), (groups.at, groups.nbytes, "splits"), (scales_at, 4 * number, "scales"),
            (offsets_at, 8 * (number + 1) if offsets is not None else 0, "offsets"), (noop_at, 4 if noop is not None else 0, "noop")]
    if amaxes is not None:
        for other_at, nbytes, name in read:
            checks.separate(amaxes_at, 4 * number, other_at, nbytes, "amaxes", name)
    given = out
    if out is None:
        if noop is not None:
            raise ValueError("noop: needs out=, since nothing may be written")
        checks.may_allocate(x)
        out = _empty(x, groups.array, offsets, recipe.dtype, rowwise, columnwise)
    else:
        _check_out(out, x, xp, at, groups, offsets, recipe.dtype, rowwise, columnwise,
                   [*read, (amaxes_at, 4 * number if amaxes is not None else 0, "amaxes")])
    if executor_of(xp) == "reference":
        if noop is None or noop.reshape(()) != 1:
            _store(out, reference.group_quantize(x, groups.host, recipe, rowwise=rowwise, columnwise=columnwise, scales=scales,
                                                 amaxes=amaxes, offsets=offsets))
        return out
    launch = _Launch(out, x, at, recipe.dtype, scales_at, amaxes_at, noop_at, offsets_at, groups)
    if given is not None and xp is not np:
        out.__dict__["_launch"] = key, launch
    launch.run(x)
    return out


def _one_each(a: Any, number: int, x: Array, xp: Any, name: str) -> int:
    """The address of an f32 array [number] of x's kind and device."""
    if not isinstance(a, xp.ndarray):
        backend.require_module(a, xp, name)
    if a.dtype != float32:
        raise TypeError(f"{name}: expected dtype float32, got {a.dtype}")
    if a.shape != (number,) or not is_contiguous(a):
        raise ValueError(f"{name}: expected a contiguous array of shape ({number},), one for each group, got shape {a.shape}, "
                         f"strides {a.strides}")
    if xp is not np:
        checks.same_device(a, x, name)
    return checks.address(a)


def _check_offsets(offsets: Array, given: np.ndarray, columns: int) -> None:
    host = offsets if isinstance(offsets, np.ndarray) else offsets.get()
    want = np.concatenate([[0], np.cumsum(given)]) * columns
    if not np.array_equal(host, want):
        wrong = int(np.argmax(host != want))
        raise ValueError(f"offsets: expected {want[wrong]} at {wrong} (rows before it, times {columns} columns), got {host[wrong]}")


def _empty(x: Array, splits: Array, offsets: Array | None, dtype: np.dtype[Any], rowwise: bool, columnwise: bool) -> Grouped:
    number = len(splits)
    made = empty_beside(x, (number + 1,), _INT64) if offsets is None else offsets
    row, column = (empty_beside(x, (x.size,), dtype) if wanted else None for wanted in (rowwise, columnwise))
    return Grouped(splits, made, x.shape, row, column, empty_beside(x, (number,), float32))


def _check_out(out: Grouped, x: Array, xp: Any, at: int, groups: sizes.Groups, offsets: Array | None, dtype: np.dtype[Any], rowwise: bool,
               columnwise: bool, read: list[tuple[int, int, str]]) -> None:
    if not isinstance(out, Grouped):
        raise TypeError(f"out: expected a Grouped (an earlier result), got {type(out).__name__}")
    if out.shape != x.shape or out.scale_inv is None:
        raise ValueError(f"out: expected quantised groups of shape {x.shape}, got {out!r}")
    own = out.splits
    if type(own) is not type(groups.array) or checks.address(own) != groups.at or (own.shape, own.dtype) != (
            groups.array.shape, groups.array.dtype):
        raise ValueError("out: expected splits to be out.splits, that very memory; a result belongs to the sizes that it was made for, "
                         "which may change in place")
    if offsets is not None and checks.address(out.offsets) != checks.address(offsets):
        raise ValueError("out: expected offsets to be out.offsets, that very memory")
    written: list[tuple[int, int, str]] = []
    for name, wanted, part in (("rowwise", rowwise, out.rowwise), ("columnwise", columnwise, out.columnwise)):
        if wanted != (part is not None):
            raise ValueError(f"out: {'no' if wanted else 'has a'} {name} part, but {name}={wanted} was asked for")
        if part is not None:
            written.append((checks.destination(part, (x.size,), dtype, x, xp, at, f"out.{name}"), part.nbytes, f"out.{name}"))
    number = len(groups.array)
    outputs: list[tuple[str, Any, tuple[int, ...], np.dtype[Any]]] = [("scale_inv", out.scale_inv, (number,), float32)]
    if offsets is None:
        outputs.append(("offsets", out.offsets, (number + 1,), _INT64))
    for name, a, shape, of in outputs:
        written.append((checks.destination(a, shape, of, x, xp, at, f"out.{name}"), a.nbytes, f"out.{name}"))
    for i, (a_at, nbytes, name) in enumerate(written):
        for other_at, other_nbytes, other in [*written[:i], *read]:
            checks.separate(a_at, nbytes, other_at, other_nbytes, name, other)


def _store(out: Grouped, result: Grouped) -> None:
    for mine, fresh in ((out.rowwise, result.rowwise), (out.columnwise, result.columnwise), (out.scale_inv, result.scale_inv),
                        (out.offsets, result.offsets)):
        if mine is not None and mine is not fresh:
            bits(mine)[...] = bits(fresh)


class _Launch:
    """The kernel's variant, its grid, and the members of its struct. Kept with a result on a GPU that was given as `out=`: what is the same
    in every address needs no second validation."""

    def __init__(self, out: Grouped, x: Array, at: int, dtype: np.dtype[Any], scales_at: int, amaxes_at: int, noop_at: int, offsets_at: int,
                 groups: sizes.Groups) -> None:
        (rows, columns), number = x.shape, len(groups.array)
        data_at = 0 if out.rowwise is None else checks.address(out.rowwise)
        data_t_at = 0 if out.columnwise is None else checks.address(out.columnwise)
        aligned = columns % 8 == 0 and at % 16 == 0 and data_at % 8 == 0
        tile = tiles.choose(x, _LARGE) if aligned else tiles.SMALL
        across = max(1, cdiv(columns, tile.columns))
        # What follows the last group is one more, to be cleared.
        down = max(1, padded_rows(rows, number + 1, tile.rows) // tile.rows)
        self.variant = _variant(x.dtype, dtype, tile)
        self.grid = checks.grid_size(down * across, x.shape)
        self.members = (
            at, data_at, data_t_at, scales_at, checks.address(out.scale_inv), amaxes_at, noop_at, offsets_at,
            0 if offsets_at else checks.address(out.offsets), groups.at, number, error_word(x), groups.wide, rows, columns, across,
            int(aligned))

    def run(self, x: Array) -> None:
        self.variant.launch(x, self.grid, *self.members)


@functools.cache
def _variant(source: np.dtype[Any], to: np.dtype[Any], tile: tiles.Tile) -> Variant:
    return _KERNEL.variant(block=tile.block, shared=tile.shared, IN=FORMATS[source].tag, OUT=FORMATS[to].tag, TILE_ROWS=tile.rows,
                           TILE_COLUMNS=tile.columns, DBIAS=0, LARGE=int(tile is not tiles.SMALL))


def variants() -> Iterator[Variant]:
    """Every variant that this op may launch."""
    for source, to, tile in product(INPUT_DTYPES, FP8_DTYPES, (tiles.SMALL, _LARGE)):
        yield _variant(source, to, tile)
